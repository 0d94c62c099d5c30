"""The unsharded parameters of a group: all-gathered, shown to the modules, freed.

Owns the state of the parameters (states.py). The root decides *when*.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.buckets.unsharded_bucket import UnshardedBucket
from shardwise.comm.streams import CommStream, CommStreams, CommWork, Finish
from shardwise.groups.states import (
    PARTLY,
    PENDING,
    SHARDED,
    UNSHARD_STATES,
    UNSHARDED,
    UNSHARDING,
    UnshardState,
    next_state,
)
from shardwise.layout.fqns import listed
from shardwise.params.changes import UnshardedView, Versions
from shardwise.params.parameter import FREED, Param
from shardwise.torch_compat import autograd, dtensor, tensor_impl
from shardwise.torch_compat.functorch import innermost
from shardwise.torch_compat.nn_modules import refresh_flat_weights

if TYPE_CHECKING:
    from shardwise.groups.group import ParameterGroup


_FOR_FORWARDS = (
    "Leave the context first. To run forwards with parameters that stay unsharded, as generation does, use "
    "inference()."
)


class StreamUsers:
    """The streams of a device on which unsharded parameters are used, since a forward unsharded them.

    A group of several modules may run some of them beside the others, on a stream that began before the first
    did. So it is not enough that one stream waits for the all-gather, nor that the memory is freed behind one
    stream::

        all-gather   [AG]                            [free]    waits for both
        computing       [ one ]           [ one' ]             both wait for the all-gather, in forward
        branch          [   other  ]     [ other' ]            and in backward
    """

    def __init__(self) -> None:
        self._streams: dict[Hashable, Any] = {}
        self._ready: Any = None  # the event behind the all-gather, while the parameters are in memory

    def note_current(self, streams: CommStreams) -> None:
        """The current stream is about to use them: it waits for them if it is new."""
        if not streams.are_device_streams:
            return
        known = len(self._streams)
        streams.note_current(self._streams)
        if self._ready is not None and len(self._streams) > known:
            streams.make_compute_wait_for(self._ready)

    def gathered(self, event: Any) -> None:
        """The current stream has waited for ``event``, behind the all-gather; so do the others now.

        In backward, modules run on the streams of their forward, and not each of them is announced.
        """
        self._ready = event
        if len(self._streams) > 1:
            for stream in self._streams.values():
                stream.wait_event(event)

    def freed(self) -> None:
        """They are no longer in memory."""
        self._ready = None

    def forget(self) -> None:
        """A forward begins anew."""
        self._streams.clear()

    @property
    def streams(self) -> tuple[Any, ...]:
        """What must be finished before they are freed."""
        return tuple(self._streams.values())


class Unsharded:
    """The unsharded parameters of ``group``: the same objects from the first unshard on."""

    def __init__(self, group: "ParameterGroup") -> None:
        self._group = group
        self.state = SHARDED
        self.is_shown = False
        self._work: CommWork | None = None
        self._users = StreamUsers()
        self.forget()

    def forget(self) -> None:
        """Drop them; the next unshard makes new ones."""
        self.buckets: list[UnshardedBucket] = []
        self.params: tuple[nn.Parameter, ...] = ()
        self._freed: tuple[nn.Parameter, ...] = ()  # those whose memory is freed by a reshard
        self._view = UnshardedView((), ())
        self.versions = Versions(self._group.shards.params, ())
        for param in self._group.shards.params:
            param.unsharded = None

    def forget_streams(self) -> None:
        """Let no wait be for streams and events from before now."""
        self._users = StreamUsers()

    def make(self) -> None:
        """Create them as views of the buffers that all-gathers fill."""
        group = self._group
        group.shards.refuse_meta()
        with group.streams.all_gather.allocation_scope(), torch.inference_mode(False), torch.no_grad():
            self.buckets = [bucket.make_unsharded() for bucket in group.buckets]
        for bucket in self.buckets:
            bucket.buffer.keep_memory(group.settings.keeps_unsharded_storage)
        self.params = tuple(full for bucket in self.buckets for full in bucket.params)
        self._freed = tuple(full for b in self.buckets if not b.buffer.is_alias for full in b.params)
        self._view = UnshardedView(group.shards.params, self.params)
        self.versions = Versions(group.shards.params, self.params)
        group.gradients.attach_hooks()

    # --- unshard ----------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to unshard, unless that is done or in progress."""
        group = self._group
        if self.state is SHARDED:
            self._users.forget()
            if group.shards.follow():
                group.listener.changes_followed()
                group.streams.all_gather.wait_for_compute()  # the compute stream has just moved the shards
            if len(self.params) != len(group.shards.params):
                self.make()
        self._begin()

    def unshard_again(self) -> None:
        """As ``unshard``, for the backward of a forward that has used them.

        Uses the shards that forward used, even if others were assigned to the modules since. Autograd detects
        changes in place by their versions. Changes of ``requires_grad`` are followed.
        """
        group = self._group
        if not group.shards.were_looked_at or not self.params:
            self.unshard()
            return
        if not group.shards.snapshot().is_as_trainable() and group.gradients.state is not PENDING:
            group.shards.follow_freezing()
            group.listener.changes_followed()
        self._begin()

    def unshard_ahead(self) -> None:
        """As ``unshard_again``, for a prefetch in backward: ``requires_grad`` is followed when it is used."""
        if not self._group.shards.were_looked_at or not self.params:
            self.unshard()
        else:
            self._begin()

    def _begin(self) -> None:
        if self.state is UNSHARDED or self.state is UNSHARDING:
            return
        group = self._group
        group.refuse_if_summoned("unsharding for a forward, a backward or unshard()", _FOR_FORWARDS)
        if self.state is SHARDED:  # from PARTLY, contents and versions are those of the all-gather before
            self.versions.note(group.shards.snapshot())
        if group.observer is not None:
            group.observer("unshard", group.name)
        stream, waits = group.streams.all_gather, group.waits
        start: Callable[[], CommWork] = partial(
            stream.submit, partial(_start_all_gathers, stream, self.buckets)
        )
        if autograd.profiler_is_on():
            start = group.labelled("all-gather", start)
        self._work = waits.issue(start, waits.for_all_gather)
        self.state = next_state(UNSHARD_STATES, self.state, "unshard", group.name)

    def wait(self) -> None:
        """Wait for the all-gather and let the modules see the unsharded parameters."""
        if self.state is UNSHARDED:
            self._users.note_current(self._group.streams)
            self.show()
            return
        state = self._next("wait")
        self._users.note_current(self._group.streams)
        self._finish_all_gather()
        for bucket in self.buckets:
            bucket.drop_post_forward_shard()
        self.versions.restore()
        self.show()
        self.state = state

    def _finish_all_gather(self) -> None:
        assert self._work is not None
        self._group.waits.finish(self._work.wait, self._group.waits.for_all_gather)
        self._users.gathered(self._work.end)
        self._work = None

    def wait_if_on_the_way(self) -> None:
        """As ``wait``, unless they were resharded meanwhile."""
        if self.state in (UNSHARDING, UNSHARDED):
            self.wait()

    @property
    def in_flight(self) -> CommWork | None:
        """The all-gather that nobody has waited for, if there is one."""
        return self._work

    # --- what modules see -------------------------------------------------------------------------

    def show(self) -> None:
        """Let the modules see the full parameters."""
        if not self.is_shown:
            self.is_shown = True
            self._view.shadow()
            if self._group.shards.rnns:
                refresh_flat_weights(self._group.shards.rnns)

    def hide(self) -> None:
        """Let the modules see the shards, even if the unsharded parameters stay in memory.

        Between passes, the caller's edits of ``module.weight`` are meant for the shard.
        """
        if self.is_shown:
            self.is_shown = False
            self._view.unshadow()
            if self._group.shards.rnns:
                refresh_flat_weights(self._group.shards.rnns)

    def summon(self) -> None:
        """Enter SUMMONED: the caller replaces the registered shards with full parameters."""
        self._group.shards.follow()
        self._step("summon")

    def end_summon(self) -> None:
        """Leave SUMMONED: the shards are registered again."""
        self._step("end_summon")

    # --- reshard ----------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Free the full parameters, or the parts that a few ranks keep.

        Raises:
            RuntimeError: one was changed in place, and the change would be lost.
        """
        if self.state is PARTLY:
            self._drop_parts()
            return
        state = self._next("reshard")
        changed = self.changed_in_place()
        self._free(state)
        if changed:
            _refuse_changes(self._group, changed)

    def keep_part(self) -> None:
        """Free them, except this rank's part of what a few ranks keep together until backward."""
        state = self._next("keep_part")
        changed = self.changed_in_place()
        stream = self._group.streams.all_gather
        stream.wait_for_compute()
        with stream.allocation_scope(), torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                bucket.keep_post_forward_shard()
        self._free(state)
        if changed:
            _refuse_changes(self._group, changed)

    def abandon(self) -> None:
        """Return to SHARDED from any state, after a failed iteration."""
        if self.state is UNSHARDING:
            self._finish_all_gather()
        if self.state is PARTLY:
            self._drop_parts()
        elif self.state is not SHARDED:
            self._free(SHARDED)

    def _drop_parts(self) -> None:
        self._step("reshard")
        with self._group.streams.all_gather.allocation_scope():
            for bucket in self.buckets:
                bucket.drop_post_forward_shard()

    def _free(self, state: UnshardState) -> None:
        self.hide()
        autograd.set_versions(self._freed, (FREED,) * len(self._freed))
        self._free_memory()
        if self._group.observer is not None:
            self._group.observer("free", self._group.name)
        self.state = state

    def _free_memory(self) -> None:
        stream = self._group.streams.all_gather
        stream.wait_for_compute(users=self._users.streams)
        self._users.freed()
        with stream.allocation_scope():
            for bucket in self.buckets:
                bucket.buffer.free()

    def keep_storage(self, keep: bool) -> None:
        """Choose whether they keep their memory while they are resharded."""
        if not self.params:
            return
        for bucket in self.buckets:
            bucket.buffer.keep_memory(keep)
        if self.state is not UNSHARDED and self.state is not UNSHARDING:
            self._free_memory()

    # --- changes ----------------------------------------------------------------------------------

    def refuse_changed_shards(self) -> None:
        """Refuse a backward of weights that were changed since a forward has used them."""
        if changed := self.versions.shards_changed():
            raise RuntimeError(
                f"{listed(changed, 4)}: changed in place between the forward that used it and this backward "
                f"(group '{self._group.name}'), so that the gradient would be that of other weights. Run "
                "backward before the weights are changed, as by an optimizer's step."
            )

    def changed_in_place(self) -> list[str]:
        """Names of full parameters changed since the all-gather: changes that ``reshard`` refuses to lose."""
        changed: list[str] = []
        for bucket in self.buckets:
            changed += bucket.relocated_params()
        for param in self.versions.unsharded_changed():
            # Each forward renormalises a frozen embedding again, with the same result as doing it once.
            if param.sharded.requires_grad or not _is_renormalised(param):
                changed.append(param.fqn)
        return changed

    # --- questions --------------------------------------------------------------------------------

    @property
    def are_shards(self) -> bool:
        """True if they are the shards themselves, as on a rank that is alone."""
        return bool(self.params) and not self._freed

    @property
    def num_bytes(self) -> int:
        """The memory of all of them, in their compute dtype."""
        return sum(bucket.computed.unsharded_bytes for bucket in self._group.buckets)

    def owns(self, tensor: Tensor) -> bool:
        """True if they are in memory, and ``tensor`` is one of them or shares memory with one.

        Also on a rank that is alone, where nothing is freed: callers get copies there as everywhere else.
        """
        if self.state is not UNSHARDED:
            return False
        if any(map(partial(is_, tensor), self.params)):
            return True
        if isinstance(tensor, DTensor):
            tensor = dtensor.local_tensor(tensor)
        if not tensor_impl.is_plain(tensor):
            return False
        address = innermost(tensor).data_ptr()
        return any(bucket.buffer.holds(address) for bucket in self.buckets)

    # ``wait``, ``reshard`` and ``keep_part`` ask for the next state first and set it last: an event that is
    # refused does nothing, and if the work fails, ``abandon`` finds the state in which it began.

    def _next(self, event: str) -> UnshardState:
        return next_state(UNSHARD_STATES, self.state, event, self._group.name)

    def _step(self, event: str) -> None:
        self.state = next_state(UNSHARD_STATES, self.state, event, self._group.name)


def _start_all_gathers(stream: CommStream, buckets: Sequence[UnshardedBucket]) -> Finish:
    if len(buckets) == 1:
        return buckets[0].start_all_gather(stream)
    finishes: list[Finish] = []

    def finish() -> None:
        for each in finishes:
            each()

    try:
        for bucket in buckets:
            finishes.append(bucket.start_all_gather(stream))
    except BaseException:
        finish()  # all ranks issued these; if they were dropped, they would block later collectives
        raise
    return finish


def _is_renormalised(param: Param) -> bool:
    """True if an embedding with ``max_norm`` writes to the weight in forward."""
    return any(
        isinstance(site.module, (nn.Embedding, nn.EmbeddingBag)) and site.module.max_norm is not None
        for site in param.sites
    )


def _refuse_changes(group: "ParameterGroup", changed: list[str]) -> NoReturn:
    name, params = group.name, group.shards.params
    renormalised = [p.fqn for p in params if p.fqn in changed and _is_renormalised(p)]
    if renormalised:
        raise RuntimeError(
            f"{', '.join(renormalised)}: nn.Embedding(max_norm=...) renormalises rows of its weight in "
            f"place in each forward, here those of an unsharded copy (group '{name}'). The shard "
            "would keep the rows as they were, and training would go another way than in plain PyTorch. "
            "Set max_norm to None and renormalise the shard after each optimizer step, under "
            "torch.no_grad(). A frozen weight is allowed: requires_grad_(False)."
        )
    raise RuntimeError(
        f"{', '.join(changed)}: changed in place while unsharded (group '{name}'). Inside "
        "forward a module sees an unsharded copy, which is now freed, so the change would be "
        "lost. Change the sharded parameter outside of forward, under torch.no_grad()."
    )
