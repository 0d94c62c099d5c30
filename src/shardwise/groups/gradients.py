"""The gradients of a group: counted as they arrive, reduced, deferred, dropped.

Owns the state of the gradients (states.py). It tells the listener what has arrived; the root decides *when*
to reduce.
"""

import weakref
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.reduction import PartReduction
from shardwise.groups.gradient_parts import PartQueue
from shardwise.groups.reductions import without_graph
from shardwise.groups.states import (
    DEFERRED,
    EMPTY,
    GRADIENT_STATES,
    PENDING,
    REDUCING,
    GradientState,
    next_state,
)
from shardwise.layout.mesh import Axis
from shardwise.ranks.failures import relay_of_job
from shardwise.torch_compat import dtensor, dynamo
from shardwise.torch_compat.functorch import is_in_transform, without_transforms

if TYPE_CHECKING:
    from shardwise.groups.group import ParameterGroup


class Gradients:
    """The unsharded gradients of ``group`` and those deferred to a later backward."""

    def __init__(self, group: "ParameterGroup") -> None:
        self._group = group
        self.state = EMPTY
        # What earlier backwards have shown: whether gradients were reduced, and arrived in nested backwards.
        self.were_reduced = False
        self.come_nested = False
        self.forget()

    def forget(self) -> None:
        """Start over, as the parameters were replaced."""
        self._has_deferred = self._stands_for_any()
        self._part_queue: PartQueue | None = None  # None: all gradients are reduced together
        self._hooked: set[int] = set()
        self._trainable: frozenset[int] = frozenset()
        self._awaited: set[int] = set()
        self._made_on: dict[Hashable, Any] = {}

    # --- arrival ----------------------------------------------------------------------------------

    def attach_hooks(self) -> None:
        """Hook the trainable unsharded parameters, to be told when their gradients arrive."""
        own, fulls = weakref.ref(self), self._group.unsharded.params
        trainable = [i for i, full in enumerate(fulls) if full.requires_grad]
        for index in trainable:
            if index not in self._hooked:
                self._group.shards.params[index].original.attach_hooks(fulls[index])
                fulls[index].register_post_accumulate_grad_hook(partial(_tell_arrival, own, index))
                self._hooked.add(index)
        self._trainable = frozenset(trainable)
        self._awaited = set(self._trainable)
        self._part_queue = self._plan_parts()

    def _plan_parts(self) -> PartQueue | None:
        """The parts in which gradients are reduced; None if they are reduced together."""
        buckets = self._group.buckets
        if all(len(bucket.reduction.parts) == 1 for bucket in buckets):
            return None
        firsts = accumulate([len(bucket.params) for bucket in buckets], initial=0)
        parts = [bucket.reduction.parts for bucket in buckets]
        return PartQueue(list(zip(firsts, parts, strict=False)), self._trainable)

    def _raise_replaced(self, index: int) -> NoReturn:
        param = self._group.shards.params[index]
        raise RuntimeError(
            f"{param.fqn}: the group '{self._group.name}' was changed between the forward that used it "
            "and this backward (its dtype, or how it communicates), so that its gradient would be lost. "
            "Change it between steps."
        )

    def arrived(self, index: int, full: Tensor) -> None:
        """Autograd has accumulated the gradient of ``full``, an unsharded parameter; not in a transform.

        Raises:
            RuntimeError: Forward has used it, and it was made anew since.
        """
        fulls = self._group.unsharded.params
        if not fulls or fulls[index] is not full:
            self._raise_replaced(index)
        queue, listener, streams = self._part_queue, self._group.listener, self._group.streams
        if streams.are_device_streams:
            if self.state in (EMPTY, REDUCING):
                self._made_on.clear()
            streams.note_current(self._made_on)
        if self.state is not PENDING:
            if self._group.unsharded.are_shards:
                self._group.unsharded.refuse_changed_shards()  # no hook before backward has
            listener.gradient_arrived()
            if self.state is REDUCING:
                self.finish()
            self._step("accumulate")
            self._awaited = set(self._trainable)
            if queue is not None:
                queue.begin()
        elif queue is not None and index in queue.sent:
            self._finish_sent()  # this gradient is of another nested backward, and part of another sum
        elif self._group.policy.backward_prefetch == "after":
            listener.gradient_arrived()  # if of a nested backward, the group is resharded later
        self._awaited.discard(index)
        if not self._awaited:
            self._awaited = set(self._trainable)  # for another call, which a nested backward may reach
            listener.gradients_complete()
        elif queue is not None and queue.arrive(index):
            listener.part_complete()

    # --- reduction --------------------------------------------------------------------------------

    @property
    def are_reduced_in_parts(self) -> bool:
        """True if some gradients may be reduced before all have arrived."""
        return self._part_queue is not None

    def send_ready(self) -> list[PartReduction]:
        """Begin to reduce the parts that are complete and need not wait for the others."""
        assert self._part_queue is not None
        return self._group.reductions.send(self._part_queue.take_ready())

    def reduce(self) -> list[PartReduction]:
        """Begin to reduce the unsharded gradients that are left; return the reductions begun."""
        joins = self._group.settings.ranks_may_differ and self.state is EMPTY
        state = self._next("join" if joins else "reduce")
        if not self._group.unsharded.params:  # it has not run on this rank
            self._part_queue = self._plan_parts()
        queue = self._part_queue
        if queue is not None and self.state is not PENDING:
            queue.begin()
        part_reductions = self._group.reductions.send_rest(None if queue is None else queue.take_rest())
        self.state = state
        if self._group.observer is not None:
            self._group.observer("reduce", self._group.name)
        return part_reductions

    @torch.no_grad()
    def _finish_sent(self) -> None:
        """Finish the reductions of parts that began before the group's other gradients arrived."""
        self._group.reductions.close()
        self._group.reductions.finish(without_hooks=self._are_added_plainly())
        there = [i for i in self._trainable if self._group.unsharded.params[i].grad is not None]
        self._awaited = set(self._trainable.difference(there))
        if self._part_queue is not None:
            self._part_queue.begin(there)

    def finish(self) -> None:
        """Wait for the reduction and add its result to ``.grad`` of the shards."""
        finished = self._next("finish")
        with without_graph():
            are_left = self._group.reductions.finish(without_hooks=self._are_added_plainly())
            self.state = self._next("defer") if are_left else finished
            if self._group.observer is not None:
                self._group.observer("reduced", self._group.name)
            params = self._group.shards.params
            self._has_deferred = self._has_deferred and any(p.gradient.is_deferred for p in params)
            if are_left:
                self._mark_deferred()

    def _are_added_plainly(self) -> bool:
        """True if the shards have no hooks on gradients, and no ``.grad`` that stands for deferred ones."""
        return not self._has_deferred and self._group.shards.snapshot().has_no_gradient_hooks()

    # --- deferred ---------------------------------------------------------------------------------

    def defer(self) -> None:
        """Leave the unsharded gradients unreduced until a later backward."""
        if self._group.reductions.in_flight():
            self._finish_sent()  # synchronisation was switched off during this backward
        self._step("defer")
        with without_graph():
            self._mark_deferred()

    def defer_written(self) -> None:
        """Defer gradients that the root has itself added to ``.grad`` of unsharded parameters.

        No hook has told of them, since ``torch.autograd.grad`` returns gradients and accumulates none.
        """
        if all(full.grad is None for full in self._group.unsharded.params):
            return
        streams = self._group.streams
        if streams.are_device_streams:
            if self.state is EMPTY:
                self._made_on.clear()
            streams.note_current(self._made_on)
        if self.state is not PENDING:
            self._step("accumulate")
        self.defer()

    def _mark_deferred(self) -> None:
        self._has_deferred = True
        for param, is_left_for_later in zip(self._group.shards.params, self._left_for_later(), strict=True):
            if is_left_for_later:
                param.gradient.defer()

    def _left_for_later(self) -> list[bool]:
        """For each parameter, whether it has a deferred gradient, unsharded or reduce-scattered."""
        fulls = self._group.unsharded.params
        sums = [
            bucket.reduction.has_earlier_for(i)
            for bucket in self._group.buckets
            for i in range(len(bucket.params))
        ]
        if not fulls:
            return sums
        return [s or full.grad is not None for s, full in zip(sums, fulls, strict=True)]

    @property
    def have_sums_to_reduce(self) -> bool:
        """True if a reduction now would reduce deferred gradients."""
        if self.state is not DEFERRED:
            return False
        if any(full.grad is not None for full in self._group.unsharded.params):
            return True
        settings = self._group.settings
        return settings.requires_all_reduce and any(
            bucket.reduction.earlier is not None for bucket in self._group.buckets
        )

    def _stands_for_any(self) -> bool:
        """True if ``.grad`` of some shards may stand for unreduced gradients."""
        return any(param.gradient.is_deferred for param in self._group.shards.params)

    def drop_cleared(self) -> None:
        """Drop deferred gradients of parameters whose ``.grad`` the caller has cleared since."""
        if self.state is not DEFERRED:
            return
        fulls, index = self._group.unsharded.params, 0
        for bucket in self._group.buckets:
            for own, param in enumerate(bucket.params):
                if param.gradient.was_cleared():
                    if fulls:
                        fulls[index].grad = None
                    if bucket.reduction.has_earlier_for(own):
                        bucket.reduction.drop_earlier(own)
                index += 1
        if not self._stands_for_any():
            self._step("drop")

    def drop(self) -> None:
        """Forget unsharded gradients, in flight or not."""
        self._free()
        for param in self._group.shards.params:
            param.gradient.show_reduced()
        if self.state is not EMPTY:
            self._step("drop")

    def drop_of_backward(self) -> None:
        """Forget the gradients of a backward that failed, and those of earlier ones to which it has added.

        ``.grad`` goes on to stand for the latter, until the caller clears it.
        """
        if self.state in (PENDING, REDUCING):
            self._free()
            self._step("defer" if self._stands_for_any() else "drop")

    def _free(self) -> None:
        self._group.reductions.drop()
        for full in self._group.unsharded.params:
            full.grad = None
        for bucket in self._group.buckets:
            bucket.reduction.drop_all_earlier()

    # --- questions --------------------------------------------------------------------------------

    @property
    def made_on(self) -> Sequence[Any]:
        """The streams on which they were made, which are those of forward: a module may run a branch beside
        the rest, on a stream of its own. Such a stream has to be waited for, and memory goes back to it.
        """
        return tuple(self._made_on.values())

    @property
    def are_wanted(self) -> bool:
        """True if any parameter of the group is trainable."""
        if self._group.unsharded.params:
            return bool(self._trainable)
        return any(param.sharded.requires_grad for param in self._group.shards.params)

    @property
    def are_all_wanted(self) -> bool:
        """True if all parameters of the group are trainable."""
        return len(self._trainable) == len(self._group.shards.params)

    def _next(self, event: str) -> GradientState:
        return next_state(GRADIENT_STATES, self.state, event, self._group.name)

    def _step(self, event: str) -> None:
        self.state = next_state(GRADIENT_STATES, self.state, event, self._group.name)


@torch.no_grad()
def average_ignored(groups: "Sequence[ParameterGroup]") -> None:
    """Average the gradients of parameters that ``groups`` ignore over all ranks, where the caller wants that.

    Every trainable one takes part on every rank, with zeros if it has no gradient, so all ranks send the same
    number of bytes.
    """
    for group in groups:
        trainable = [param for param in group.ignored if param.requires_grad]
        if not (group.settings.averages_ignored and group.settings.requires_gradient_sync and trainable):
            continue
        for param in trainable:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        gradients = [dtensor.plain(param.grad) for param in trainable if param.grad is not None]
        with relay_of_job().collective(group.waits.for_ignored):
            for axis in group.mesh.axes():
                _average(gradients, axis)


def _average(gradients: list[Tensor], axis: Axis) -> None:
    """Average tensors over the ranks of ``axis``, in place, with one all-reduce for each dtype."""
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        same = [g for g in gradients if g.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in same]).div_(axis.world)
        dist.all_reduce(flat, group=axis.pg)
        for gradient, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _tell_arrival(gradients: "weakref.ref[Gradients]", index: int, full: Tensor) -> None:
    """A hook on an unsharded parameter. The reference is weak: Python's collector cannot see hooks in C++."""
    if (alive := gradients()) is None:
        return
    if is_in_transform():
        with without_transforms():
            alive.arrived(index, full)
    else:
        alive.arrived(index, full)


dynamo.break_graphs(_tell_arrival)  # of compiled autograd
