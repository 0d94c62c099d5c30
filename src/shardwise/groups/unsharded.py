"""The unsharded parameters of a group: all-gathered, shown to the modules, freed.

Owns the state of the parameters (states.py). The root decides *when*.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.buckets.bucket import UnshardedBucket
from shardwise.comm.streams import CommStream, CommStreams, CommWork, Finish, all_of
from shardwise.groups.shards import Shards
from shardwise.groups.states import (
    PARTLY,
    SHARDED,
    SUMMONED,
    UNSHARD_STATES,
    UNSHARDED,
    UNSHARDING,
    UnshardState,
    refuse_step,
)
from shardwise.layout.fqns import listed
from shardwise.params.parameter import FREED, Param
from shardwise.ranks.activity import Wait
from shardwise.torch_compat import autograd, dtensor, tensor_impl
from shardwise.torch_compat.autograd import innermost
from shardwise.torch_compat.nn_modules import refresh_flat_weights

Observer = Callable[[str, str], None]
"""Called with every event and the name of its group."""


class StreamUsers:
    """The streams of a device on which unsharded parameters have been used since a forward unsharded them.

    A group of several modules may run some of them concurrently, on a stream that began before the first
    module ran. So every such stream must wait for the all-gather, and memory is freed only behind all::

        all-gather   [AG]                            [free]    waits for both
        computing       [ one ]           [ one' ]             both wait for the all-gather, in forward
        branch          [   other  ]     [ other' ]            and in backward
    """

    def __init__(self) -> None:
        self._streams: dict[Hashable, Any] = {}
        self._ready: Any = None  # the event behind the all-gather, while the parameters are in memory

    def note_current(self, streams: CommStreams) -> None:
        """The current stream is about to use them; if it is new, it waits for them."""
        known = len(self._streams)
        streams.note_current(self._streams)
        if self._ready is not None and len(self._streams) > known:
            streams.make_compute_wait_for(self._ready)

    def gathered(self, event: Any) -> None:
        """The current stream has waited for ``event``, behind the all-gather; make the others wait too.

        In backward, modules run on the streams of their forward, and not every one is announced.
        """
        self._ready = event
        if len(self._streams) > 1:
            for stream in self._streams.values():
                event.wait(stream)

    def freed(self) -> None:
        """They are no longer in memory."""
        self._ready = None

    @property
    def streams(self) -> tuple[Any, ...]:
        """The streams to wait for before they are freed."""
        return tuple(self._streams.values())


class Unsharded:
    """The unsharded parameters of a group: the same objects from the first unshard on.

    ``prepare`` is called before the first unshard, which must ``make`` them, and before one that finds
    ``shards`` changed by the caller; ``adopt_freezing`` if ``requires_grad`` of some has changed.
    """

    streams: CommStreams

    def __init__(
        self, shards: Shards, prepare: Callable[[], None], adopt_freezing: Callable[[], None]
    ) -> None:
        self._shards = shards
        self._prepare = prepare
        self._adopt_freezing = adopt_freezing
        self.state = SHARDED
        self.is_shown = False
        self.observer: Observer | None = None
        self.awaited = Wait("all-gather", shards.name, list)
        self.keeps_storage = False
        self.work: CommWork | None = None
        """The all-gather that has not been waited for."""
        self._users = StreamUsers()
        self._keeps_parts = False  # which a few ranks keep together
        self.keeps_until_changed = False
        """Whether they keep them not for backward, but until the next forward finds other shards."""
        self.drop()

    def drop(self) -> None:
        """Drop them; the next unshard makes new ones."""
        self.buckets: list[UnshardedBucket] = []
        self.full_params: tuple[nn.Parameter, ...] = ()
        self.is_made = False
        """Whether they exist."""
        self._freed: tuple[nn.Parameter, ...] = ()  # those whose memory a reshard frees
        self._versions_of_freed: tuple[int, ...] = ()
        self.are_shards = False
        """Whether they are the shards, as on a rank that is alone."""
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []  # where modules see them
        self.versions: list[int] = [0] * len(self._shards.params)
        """Of the shards that were all-gathered last."""
        for param in self._shards.params:
            param.unsharded = None

    def drop_streams(self) -> None:
        """Forget streams and events, so that nothing waits for earlier ones."""
        self._users = StreamUsers()

    def make(self) -> None:
        """Create them as views of the buffers that all-gathers fill."""
        shards = self._shards
        shards.refuse_meta()
        with self.streams.all_gather.allocation_scope(), torch.inference_mode(False), torch.no_grad():
            self.buckets = [bucket.make_unsharded() for bucket in shards.buckets]
        for bucket in self.buckets:
            bucket.buffer.keep_memory(self.keeps_storage)
        self.full_params = tuple(full for bucket in self.buckets for full in bucket.full_params)
        self._freed = tuple(full for b in self.buckets if not b.buffer.is_alias for full in b.full_params)
        self._versions_of_freed = (FREED,) * len(self._freed)
        self.are_shards = bool(self.full_params) and not self._freed
        self.is_made = True
        self._places = [
            (site.module.__dict__, site.name, full)
            for param, full in zip(shards.params, self.full_params, strict=True)
            for site in param.sites
        ]

    # --- unshard ----------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to unshard, unless that is done or in progress."""
        if self.state is UNSHARDED or self.state is UNSHARDING:
            return
        if self.state is SHARDED:
            if self.streams.are_device_streams:
                self._users = StreamUsers()
            if not self.is_made or not self._shards.are_untouched(self.full_params):
                self._prepare()
        self._start()

    def unshard_again(self) -> None:
        """Like ``unshard``, for backward after a forward has used them.

        Uses the shards that forward used, even if others were assigned to the modules since. Autograd detects
        in-place changes by their versions. Changes of ``requires_grad`` are adopted.
        """
        if not self.full_params:
            self.unshard()
            return
        if not self._shards.are_as_trainable():
            self._adopt_freezing()
        self._start()

    def unshard_ahead(self) -> None:
        """Like ``unshard_again``, for a prefetch in backward: ``requires_grad`` is adopted at its use."""
        if not self.full_params:
            self.unshard()
        else:
            self._start()

    def _start(self) -> None:
        if self.state is UNSHARDED or self.state is UNSHARDING:
            return
        state = UNSHARD_STATES.get((self.state, "unshard")) or self._refuse("unshard")
        if self.state is SHARDED:  # from PARTLY, contents and versions are those of the all-gather before
            versions = self._shards.versions()
            if self.streams.are_device_streams and versions != self.versions and self._shards.are_frozen:
                self.streams.all_gather.wait_for_compute()  # no optimizer has changed them: forward may have
            self.versions = versions
        if self.observer is not None:
            self.observer("unshard", self._shards.name)
        stream, buckets = self.streams.all_gather, self.buckets
        start: Callable[[], Finish]
        if len(buckets) == 1:
            start = partial(buckets[0].start_all_gather, stream)
        else:
            start = partial(_start_all_gathers, stream, buckets)
        if self.streams.are_labelled:
            start = autograd.labelled(f"shardwise.all-gather {self._shards.name}", start)
        self.work = stream.submit(start, awaited=self.awaited)
        self.state = state

    def wait(self) -> None:
        """Wait for the all-gather and let the modules see the unsharded parameters."""
        if self.state is UNSHARDED:
            if self.streams.are_device_streams:
                self._users.note_current(self.streams)
            self.show()
            return
        state = UNSHARD_STATES.get((self.state, "wait")) or self._refuse("wait")
        if self.streams.are_device_streams:
            self._users.note_current(self.streams)
        self._finish_all_gather()
        if self._keeps_parts:
            self._free_parts()
        autograd.set_versions(self.full_params, self.versions)  # their contents are those of the shards
        self.show()
        self.state = state

    def _finish_all_gather(self) -> None:
        assert self.work is not None
        self.work.wait()
        if self.streams.are_device_streams:
            self._users.gathered(self.work.end)
        # Only now: after a failure the next wait for it does nothing, and the state proceeds.
        self.work = None

    def wait_if_on_the_way(self) -> None:
        """Like ``wait``, unless they were resharded meanwhile."""
        if self.state in (UNSHARDING, UNSHARDED):
            self.wait()

    # --- the view of modules ----------------------------------------------------------------------

    def show(self) -> None:
        """Let the modules see the full parameters."""
        if not self.is_shown:
            self.is_shown = True
            for attributes, name, full in self._places:
                attributes[name] = full
            if self._shards.rnns:
                refresh_flat_weights(self._shards.rnns)

    def hide(self) -> None:
        """Let the modules see the shards, even if the unsharded parameters stay in memory.

        Between passes, the caller's edits of ``module.weight`` are meant for the shard.
        """
        if self.is_shown:
            self.is_shown = False
            try:
                for attributes, name, _ in self._places:
                    del attributes[name]
            except KeyError:  # the caller has deleted one
                for attributes, name, _ in self._places:
                    attributes.pop(name, None)
            if self._shards.rnns:
                refresh_flat_weights(self._shards.rnns)

    # --- reshard ----------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Free the full parameters, or the parts that a few ranks keep.

        Raises:
            RuntimeError: one was changed in place, and the change would be lost.
        """
        if self.state is PARTLY:
            self._drop_parts()
            return
        state = UNSHARD_STATES.get((self.state, "reshard")) or self._refuse("reshard")
        changed = self.changed_in_place()
        self._free(state)
        if changed:
            _refuse_changes(self._shards, changed)

    def keep_part(self, *, until_changed: bool = False) -> None:
        """Free them, except for this rank's part, which a few ranks keep together until backward.

        ``until_changed``: or until the next forward, which compares the shards with those of now.
        """
        state = UNSHARD_STATES.get((self.state, "keep_part")) or self._refuse("keep_part")
        changed = self.changed_in_place()
        stream = self.streams.all_gather
        if until_changed:  # on the computing stream, on which the forward compares
            for bucket in self.buckets:
                bucket.note_own_parts()
        stream.wait_for_compute()
        with stream.allocation_scope(), torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                bucket.keep_post_forward_shard()
        self._keeps_parts, self.keeps_until_changed = True, until_changed
        self._free(state)
        if changed:
            _refuse_changes(self._shards, changed)

    def reshard_after_failure(self) -> None:
        """Return to SHARDED from any state, except SUMMONED, which ends with the caller's context."""
        if self.state is UNSHARDING:
            self._finish_all_gather()
        if self.state is PARTLY:
            self._drop_parts()
        elif self.state is not SHARDED and self.state is not SUMMONED:
            self._free(SHARDED)

    def _drop_parts(self) -> None:
        self.step("reshard")
        with self.streams.all_gather.allocation_scope():
            self._free_parts()

    def _free_parts(self) -> None:
        self._keeps_parts = self.keeps_until_changed = False
        for bucket in self.buckets:
            bucket.drop_post_forward_shard()

    # ``wait``, ``reshard`` and ``keep_part`` look up the next state first and set it last: a refused event
    # does nothing, and after a failure ``reshard_after_failure`` finds the state from before.

    def _free(self, state: UnshardState) -> None:
        self.hide()
        autograd.set_versions(self._freed, self._versions_of_freed)
        if self.streams.are_device_streams:
            self._free_buffers()
        else:  # like _free_buffers, without calls that do nothing on the host
            for bucket in self.buckets:
                if not bucket.buffer.keeps_memory:
                    bucket.buffer.free()
        if self.observer is not None:
            self.observer("free", self._shards.name)
        self.state = state

    def _free_buffers(self) -> None:
        stream = self.streams.all_gather
        stream.wait_for_compute(users=self._users.streams)
        self._users.freed()
        with stream.allocation_scope():
            for bucket in self.buckets:
                bucket.buffer.free()

    def keep_storage(self, keep: bool) -> None:
        """Choose whether they keep their memory while resharded."""
        self.keeps_storage = keep
        if not self.full_params:
            return
        for bucket in self.buckets:
            bucket.buffer.keep_memory(keep)
        if self.state is not UNSHARDED and self.state is not UNSHARDING:
            self._free_buffers()

    # --- changes ----------------------------------------------------------------------------------
    #
    # PyTorch's version counters detect changes: an unsharded parameter carries the version of its shard.

    def sync_versions(self) -> None:
        """Adopt the versions of the shards, whose contents are equal."""
        self.versions = [param.version() for param in self._shards.params]
        if self.state is UNSHARDED:
            autograd.set_versions(self.full_params, self.versions)

    def shards_changed(self) -> list[str]:
        """Names of parameters whose shards have changed since the all-gather."""
        if self._shards.versions() == self.versions:
            return []
        rows = zip(self._shards.params, self.versions, strict=True)
        return [param.fqn for param, version in rows if param.version() != version]

    def follow_frozen(self, full: Tensor) -> None:
        """A module is about to use ``full``, which is frozen: refuse it if forward has changed its shard, or
        adopt the change if it is the shard."""
        index = next((i for i, each in enumerate(self.full_params) if each is full), None)
        if index is None:  # of another group, to which it is tied
            return
        param = self._shards.params[index]
        if (version := param.version()) == self.versions[index]:
            return
        if not self.are_shards:
            raise RuntimeError(
                f"{param.fqn}: changed after '{self._shards.name}' was unsharded, so that its module would "
                "compute with the old values. Call fully_shard on the module that forward changes, before "
                "the module around it; or change weights between forwards."
            )
        self.versions[index] = version
        autograd.set_versions((self.full_params[index],), (version,))

    def refuse_changed_shards(self) -> None:
        """Refuse a backward of weights that were changed after forward used them."""
        if changed := self.shards_changed():
            raise RuntimeError(
                f"{listed(changed, 4)}: changed in place between the forward that used it and this backward "
                f"(group '{self._shards.name}'), so that the gradient would be that of other weights. Run "
                "backward before the weights are changed, as by an optimizer's step."
            )

    def changed_in_place(self) -> list[str]:
        """Names of full parameters changed since the all-gather: changes that ``reshard`` refuses to lose."""
        changed: list[str] = []
        for bucket in self.buckets:
            changed += bucket.relocated_params()
        versions = list(map(tensor_impl.version, self.full_params))
        if versions == self.versions:
            return changed
        for param, now, before in zip(self._shards.params, versions, self.versions, strict=True):
            # Each forward renormalises a frozen embedding, always with the same result.
            if now != before and (param.sharded.requires_grad or not _is_renormalised(param)):
                changed.append(param.fqn)
        return changed

    @property
    def can_be_compared(self) -> bool:
        """False if they must be unsharded again, even if the contents of the shards are unchanged."""
        return self._shards.are_untouched(self.full_params) and all(b.can_be_compared for b in self.buckets)

    def differ(self) -> Tensor:
        """Whether this rank's shards changed since the all-gather, as a bool on the device."""
        if not self.can_be_compared:
            return torch.ones((), dtype=torch.bool, device=self._shards.device)
        found = [bucket.differs() for bucket in self.buckets]
        if not found:  # a group without parameters
            return torch.zeros((), dtype=torch.bool, device=self._shards.device)
        return torch.stack(found).any()

    # --- questions --------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """The memory of all full parameters, in their compute dtype."""
        return sum(bucket.computed.unsharded_bytes for bucket in self._shards.buckets)

    def owns(self, tensor: Tensor) -> bool:
        """True if they are in memory, and ``tensor`` is one of them or shares memory with one.

        Also on a rank that is alone, where nothing is freed: there, too, callers get copies.
        """
        if self.state is not UNSHARDED:
            return False
        if any(map(partial(is_, tensor), self.full_params)):
            return True
        if isinstance(tensor, DTensor):
            tensor = dtensor.local_tensor(tensor)
        if not tensor_impl.is_plain(tensor):
            return False
        address = innermost(tensor).data_ptr()
        return any(bucket.buffer.holds(address) for bucket in self.buckets)

    def step(self, event: str) -> None:
        """Go to the next state; callers use only ``summon`` and ``end_summon``."""
        self.state = UNSHARD_STATES.get((self.state, event)) or self._refuse(event)

    def _refuse(self, event: str) -> NoReturn:
        if self.state is SUMMONED and event == "unshard":
            refuse_summoned(
                self._shards.name,
                "unsharding for a forward, a backward or unshard()",
                "Leave the context first. To run forwards with parameters that stay unsharded, as generation "
                "does, use inference().",
            )
        refuse_step(UNSHARD_STATES, self.state, event, self._shards.name)


def refuse_summoned(name: str, what: str, instead: str = "Leave the context first.") -> NoReturn:
    """Refuse ``what`` inside ``unsharded()``, which lends the parameters of the group ``name``."""
    raise RuntimeError(
        f"{name}: {what} is not possible inside unsharded(), which has put full parameters in place of the "
        f"shards that its group works with. {instead}"
    )


def _start_all_gathers(stream: CommStream, buckets: Sequence[UnshardedBucket]) -> Finish:
    finishes: list[Finish] = []
    try:
        for bucket in buckets:
            finishes.append(bucket.start_all_gather(stream))
    except BaseException:
        all_of(finishes)()  # all ranks issued these; dropped, they would block later collectives
        raise
    return all_of(finishes)


def _is_renormalised(param: Param) -> bool:
    """True if an embedding with ``max_norm`` writes to the weight in forward."""
    return any(
        isinstance(site.module, (nn.Embedding, nn.EmbeddingBag)) and site.module.max_norm is not None
        for site in param.sites
    )


def _refuse_changes(shards: Shards, changed: list[str]) -> NoReturn:
    what_to_do = "Change the sharded parameter outside of forward, under torch.no_grad()."
    if any(param.fqn in changed and _is_renormalised(param) for param in shards.params):
        what_to_do = (
            "nn.Embedding(max_norm=...) renormalises rows of its weight in each forward: set max_norm to "
            "None and renormalise the shard after each optimizer step, under torch.no_grad(); or freeze it."
        )
    raise RuntimeError(
        f"{', '.join(changed)}: changed in place while unsharded (group '{shards.name}'). Inside forward a "
        f"module sees an unsharded copy, which is now freed, so the change would be lost. {what_to_do}"
    )
