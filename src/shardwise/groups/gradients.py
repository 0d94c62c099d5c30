"""The gradients of a group: counted as they arrive, reduced, deferred, dropped.

Owns the state of the gradients (states.py) and the reductions in flight, one for each bucket. It notifies the
listener of arrivals; the root decides *when* to reduce.

Large gradients are reduced in parts, before all have arrived. Back ends match collectives by the order of
their calls, but gradients may arrive in different orders on different ranks. So a part is sent (its reduction
begins) when all of its gradients have arrived *and* every part before it has been sent:

    parts               [ down ]  [ up ]  [ proj, qkv ]  [ biases and norms ]
    gradients arrive    down: sent.  proj: waits.  up: sent.  qkv: proj and qkv are sent.
                        The rest: at the end.

Gradients that arrive in a different order are sent later, at the latest at the end, like all gradients of
small groups.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwise.comm.reduction import GradientPart, Reduction
from shardwise.comm.streams import CommStreams, nothing
from shardwise.groups.shards import Shards
from shardwise.groups.states import (
    DEFERRED,
    EMPTY,
    GRADIENT_STATES,
    PENDING,
    REDUCING,
    Settings,
    refuse_step,
)
from shardwise.groups.unsharded import Observer, Unsharded
from shardwise.layout.nested import is_not_none
from shardwise.params.parameter import Param
from shardwise.ranks.activity import Wait
from shardwise.torch_compat import autograd, dynamo, tensor_impl
from shardwise.torch_compat.autograd import outside_transforms

# --- parts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueuedPart:
    """A part of the gradients of bucket number ``bucket``; ``indices`` count the parameters of the group."""

    bucket: int
    part: GradientPart
    indices: tuple[int, ...]


class PartQueue:
    """The parts of one group's gradients, in order, and which the running backward has sent."""

    def __init__(
        self, parts_of_buckets: Sequence[tuple[int, Sequence[GradientPart]]], trainable: Iterable[int]
    ) -> None:
        """``parts_of_buckets``: for each bucket, the index of its first parameter and its parts."""
        parts = [
            QueuedPart(number, part, tuple(first + index for index in part.indices))
            for number, (first, own) in enumerate(parts_of_buckets)
            for part in own
        ]
        # Parameters registered last come first, in whichever bucket; packed parts come last.
        self._all = sorted(parts, key=lambda p: (bool(p.part.packed_segments), -max(p.indices, default=0)))
        self._trainable = frozenset(trainable)
        self._place_of = {index: place for place, part in enumerate(self._all) for index in part.indices}
        self.begin()

    def begin(self, arrived: Iterable[int] = ()) -> None:
        """Start a backward: nothing has been sent, and only the gradients at ``arrived`` exist."""
        there = set(arrived)
        self._missing = [set(part.indices) & self._trainable - there for part in self._all]
        self._next = 0
        self.sent: set[int] = set()
        """Indices of parameters whose gradients have been sent."""

    def arrive(self, index: int) -> bool:
        """The gradient of one parameter has arrived. True if a part may be sent."""
        place = self._place_of[index]
        self._missing[place].discard(index)
        return self._next < len(self._all) and not self._missing[self._next]

    def take_ready(self) -> Iterator[QueuedPart]:
        """The parts that may be sent now. They count as sent."""
        while self._next < len(self._all) and not self._missing[self._next]:
            yield self._take()

    def take_rest(self) -> Iterator[QueuedPart]:
        """All parts that have not been sent, complete or not. They count as sent."""
        while self._next < len(self._all):
            yield self._take()

    def _take(self) -> QueuedPart:
        part = self._all[self._next]
        self._next += 1
        self.sent.update(part.indices)
        return part


_arrives_on_host = attrgetter("arrives_on_host")
_gradient = attrgetter("grad")
_layout = attrgetter("layout")
_DENSE = {torch.strided}
_MOST_LEFT_OUT = 16  # sets of parameters that ranks compare: ever new ones would cost every step


class Listener:
    """Hears of the gradients of one group, and decides when to act: see engine/backward.py."""

    def arrived(self) -> None:
        """The first gradient of a backward has arrived, or another one, if requested."""

    def part_complete(self) -> None:
        """The gradients of a part have arrived: they may be reduced before the others."""

    def complete(self) -> None:
        """The gradients of all trainable parameters have arrived."""


class Gradients:
    """The unsharded gradients of a group, those deferred to a later backward, and their reductions.

    ``tells_each``: notify the listener of each arrival.
    """

    streams: CommStreams
    settings: Settings

    def __init__(self, shards: Shards, unsharded: Unsharded, *, tells_each: bool) -> None:
        self._shards = shards
        self._unsharded = unsharded
        self._tells_each = tells_each
        self.state = EMPTY
        self.listener = Listener()
        self.observer: Observer | None = None
        self.awaited = Wait("reduction", shards.name, list)
        # Whether, in earlier backwards, gradients were reduced, and arrived in nested backwards.
        self.were_reduced = False
        self.come_nested = False
        self.left_out_changed = nothing
        self.start_over()

    def start_over(self) -> None:
        """Start over, because the parameters were replaced."""
        self._has_deferred = self._stands_for_any()
        self.part_queue: PartQueue | None = None
        """Parts that may be reduced before all gradients have arrived; None: all are reduced together."""
        self._hooked: set[int] = set()
        self._trainable: frozenset[int] = frozenset()
        self._missing = 0  # a bit for each parameter whose gradient is yet to come
        self._all_missing = 0
        self._made_on: dict[Hashable, Any] = {}
        self.left_out: set[tuple[str, ...]] = set()
        """Names of trainable parameters that had no gradient when those of their bucket were reduced: ranks
        whose reductions leave out different ones would add up what does not belong together."""
        self._reductions: list[Reduction | None] = [None] * len(self._shards.buckets)

    # --- arrival ----------------------------------------------------------------------------------

    def attach_hooks(self) -> None:
        """Hook the trainable unsharded parameters, to learn when their gradients arrive."""
        own, fulls = weakref.ref(self), self._unsharded.full_params
        trainable = [i for i, full in enumerate(fulls) if full.requires_grad]
        for index in trainable:
            if index not in self._hooked:
                self._shards.params[index].attach_original_hooks(fulls[index])
                fulls[index].register_post_accumulate_grad_hook(partial(_arrived, own, index, ~(1 << index)))
                self._hooked.add(index)
        self._trainable = frozenset(trainable)
        self._missing = self._all_missing = sum(1 << index for index in trainable)
        self.part_queue = self._plan_parts()

    def _plan_parts(self) -> PartQueue | None:
        """The parts in which gradients are reduced; None if they are reduced together."""
        buckets = self._shards.buckets
        if all(len(bucket.reduction.parts) == 1 for bucket in buckets):
            return None
        firsts = accumulate([len(bucket.params) for bucket in buckets], initial=0)
        parts = [bucket.reduction.parts for bucket in buckets]
        return PartQueue(list(zip(firsts, parts, strict=False)), self._trainable)

    def _raise_replaced(self, index: int) -> NoReturn:
        param = self._shards.params[index]
        raise RuntimeError(
            f"{param.fqn}: the group '{self._shards.name}' was changed between the forward that used it "
            "and this backward (its dtype, or how it communicates), so that its gradient would be lost. "
            "Change it between steps."
        )

    @outside_transforms
    def _tell(self) -> None:
        self.listener.arrived()

    @outside_transforms
    def _first_arrived(self) -> None:
        """The first gradient of a backward has arrived: begin to count."""
        if self._unsharded.are_shards:
            self._unsharded.refuse_changed_shards()  # no hook before backward has done so
        self.listener.arrived()
        if self.state is REDUCING:
            self.finish()
        self._step("accumulate")
        self._missing = self._all_missing
        if self.part_queue is not None:
            self.part_queue.begin()

    @outside_transforms
    def _part_arrived(self) -> None:
        """The last gradient of a part has arrived, and all parts before it were sent."""
        if self.settings.requires_gradient_sync and not self.settings.ranks_may_differ:
            self.listener.part_complete()

    # --- reduction --------------------------------------------------------------------------------

    def send_ready(self) -> None:
        """Begin to reduce the parts that are ready."""
        assert self.part_queue is not None
        with without_graph():
            self._send(self.part_queue.take_ready())

    def reduce(self) -> None:
        """Begin to reduce the remaining unsharded gradients."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with _neither_graph_nor_inference():
                return self.reduce()
        event = "join" if self.state is EMPTY and self.settings.ranks_may_differ else "reduce"
        state = GRADIENT_STATES.get((self.state, event)) or self._refuse(event)
        if not self._unsharded.full_params:  # it has not run on this rank
            self.part_queue = self._plan_parts()
        queue = self.part_queue
        if queue is not None:
            if self.state is not PENDING:
                queue.begin()
            self._send(queue.take_rest())
        else:
            gradients = self._take(self._shards.params, self._unsharded.full_params)
            for number, bucket in enumerate(self._shards.buckets):
                own = gradients
                if bucket is not self._shards.buckets[-1]:
                    own, gradients = gradients[: len(bucket.params)], gradients[len(bucket.params) :]
                if not (is_filled := all(map(is_not_none, own))):
                    self._note_left_out(bucket.params, own)
                reduction = self._open(number, is_filled=is_filled)
                reduction.send(bucket.reduction.parts[0], own, self.made_on if self._made_on else ())
        self._close()
        self.state = state
        if self.observer is not None:
            self.observer("reduce", self._shards.name)

    def _send(self, parts: Iterable[QueuedPart]) -> None:
        all_params, all_fulls = self._shards.params, self._unsharded.full_params
        for queued in parts:
            reduction = self._reductions[queued.bucket] or self._open(queued.bucket, is_filled=False)
            params = [all_params[index] for index in queued.indices]
            fulls = [all_fulls[index] for index in queued.indices] if all_fulls else ()
            gradients: list[Tensor | None] = [None] * len(self._shards.buckets[queued.bucket].params)
            taken = self._take(params, fulls)
            if not all(map(is_not_none, taken)):
                self._note_left_out(params, taken)
            for index, gradient in zip(queued.part.indices, taken, strict=True):
                gradients[index] = gradient
            reduction.send(queued.part, gradients, self.made_on)

    def _open(self, number: int, *, is_filled: bool) -> Reduction:
        made = self._shards.buckets[number].reduction.open(
            self.streams, self.settings.divide_factor, self.awaited, is_filled=is_filled
        )
        self._reductions[number] = made
        return made

    def _note_left_out(self, params: Sequence[Param], gradients: Sequence[Tensor | None]) -> None:
        """Some ``gradients`` are missing: the ranks compare which, if these were not the same before."""
        rows = zip(params, gradients, strict=True)
        names = tuple(p.fqn for p, gradient in rows if gradient is None and _is_trained(p))
        if names and names not in self.left_out and len(self.left_out) < _MOST_LEFT_OUT:
            self.left_out.add(names)
            self.left_out_changed()

    def _close(self) -> None:
        """Everything to reduce is sent: let the sums proceed to the replicas."""
        settings = self.settings
        for bucket, reduction in zip(self._shards.buckets, self._reductions, strict=True):
            if reduction is not None:
                bucket.reduction.close(reduction, settings.requires_all_reduce, settings.all_reduce_hook)

    # --- the gradients to send --------------------------------------------------------------------

    def _take(self, params: Sequence[Param], fulls: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
        """Take the unsharded gradients of ``params``; the reduction owns them from now on."""
        if not fulls:
            return [self._zeros_for(param) if param.sharded.requires_grad else None for param in params]
        if not (self.settings.ranks_may_differ or self._shards.is_tensor_parallel):
            plain = _take_dense(fulls)
            if plain is not None:
                return plain
        gradients: list[Tensor | None] = []
        for param, full in zip(params, fulls, strict=True):
            gradient = full.grad
            if gradient is not None:
                full.grad = None
                if gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"{param.fqn}: its gradient has layout {gradient.layout}; only dense gradients "
                        "can be reduce-scattered. Build the module without sparse gradients "
                        "(nn.Embedding(sparse=False))."
                    )
                gradient = param.gradient_to_reduce(gradient)
            elif full.requires_grad:
                gradient = self._zeros_for(param)
            gradients.append(gradient)
        return gradients

    def _zeros_for(self, param: Param) -> Tensor | None:
        """Zeros for a gradient that has not arrived; None unless unused parameters take part."""
        if not self.settings.ranks_may_differ:
            return None
        return torch.zeros(param.shape, dtype=param.precision.reduced, device=self._shards.device)

    @property
    def made_on(self) -> Sequence[Any]:
        """The streams on which they were made, which are those of forward: a module may run a branch on
        another stream. Reductions must wait for such a stream, and memory goes back to it.
        """
        return tuple(self._made_on.values())

    # --- in flight --------------------------------------------------------------------------------

    def in_flight(self) -> list[Reduction]:
        """The reductions that have not been waited for."""
        return [reduction for reduction in self._reductions if reduction is not None]

    def advance(self) -> None:
        """Let the reductions proceed to the all-reduce over replicas."""
        for reduction in self._reductions:
            if reduction is not None:
                reduction.advance()

    @property
    def arrive_on_host(self) -> bool:
        """True if a reduction copies its result to host memory: wait for it as late as possible."""
        return self._shards.are_offloaded and any(map(_arrives_on_host, self.in_flight()))

    def release_unsharded(self) -> None:
        """Wait for the sums over the shard axis, and free the unsharded gradients; replicas may follow."""
        for reduction in self.in_flight():
            reduction.release_parts()

    def release(self) -> None:
        """Wait for the results, and free the memory on the device that they were made from."""
        for reduction in self.in_flight():
            reduction.release()

    def finish(self) -> None:
        """Wait for the reductions and add their results to ``.grad`` of the shards."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with _neither_graph_nor_inference():
                return self.finish()
        finished = GRADIENT_STATES.get((self.state, "finish")) or self._refuse("finish")
        are_left = self._accumulate()
        if are_left:
            self._step("defer")
        else:
            self.state = finished
        if self.observer is not None:
            self.observer("reduced", self._shards.name)
        if self._has_deferred:
            self._has_deferred = self._stands_for_any()
        if are_left:
            self._mark_deferred()

    def _accumulate(self) -> bool:
        """Add all results to ``.grad``; True if some wait for a sum over replicas."""
        is_some_left = False
        # The fast path: shards have no gradient hooks, and no ``.grad`` stands for deferred gradients.
        without_hooks = not self._has_deferred and self._shards.have_no_gradient_hooks()
        for number, reduction in enumerate(self._reductions):
            if reduction is not None:
                bucket = self._shards.buckets[number]
                is_some_left |= bucket.reduction.accumulate(reduction, without_hooks=without_hooks)
                self._reductions[number] = None
        if self.streams.are_device_streams:
            self.streams.reduce_scatter.note_reader()
        return is_some_left

    @outside_transforms
    @torch.no_grad()
    def _finish_sent(self) -> None:
        """Finish the reductions of parts that began before the group's other gradients arrived."""
        self._close()
        self._accumulate()
        there = [i for i in self._trainable if self._unsharded.full_params[i].grad is not None]
        self._missing = self._all_missing - sum(1 << index for index in there)
        if self.part_queue is not None:
            self.part_queue.begin(there)

    # --- deferred ---------------------------------------------------------------------------------

    def defer(self) -> None:
        """Leave the unsharded gradients unreduced until a later backward."""
        if self.in_flight():
            self._finish_sent()  # synchronisation was switched off during this backward
        self._step("defer")
        with without_graph():
            self._mark_deferred()

    def defer_written(self) -> None:
        """Defer gradients that the root has added to ``.grad`` of unsharded parameters.

        No hook has run for them, since ``torch.autograd.grad`` returns gradients without accumulating.
        """
        if all(full.grad is None for full in self._unsharded.full_params):
            return
        if self.streams.are_device_streams:
            if self.state is EMPTY:
                self._made_on.clear()
            self.streams.note_current(self._made_on)
        if self.state is not PENDING:
            self._step("accumulate")
        self.defer()

    def _mark_deferred(self) -> None:
        self._has_deferred = True
        for param, is_left_for_later in zip(self._shards.params, self._left_for_later(), strict=True):
            if is_left_for_later:
                param.defer_gradient()

    def _left_for_later(self) -> list[bool]:
        """For each parameter, whether it has a deferred gradient, unsharded or reduce-scattered."""
        fulls = self._unsharded.full_params
        sums = [
            bucket.reduction.has_earlier_for(i)
            for bucket in self._shards.buckets
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
        if any(full.grad is not None for full in self._unsharded.full_params):
            return True
        return self.settings.requires_all_reduce and any(
            bucket.reduction.earlier is not None for bucket in self._shards.buckets
        )

    def _stands_for_any(self) -> bool:
        """True if ``.grad`` of some shards may stand for unreduced gradients."""
        return any(param.is_deferred for param in self._shards.params)

    def drop_cleared(self) -> None:
        """Drop deferred gradients of parameters whose ``.grad`` the caller has cleared."""
        if self.state is not DEFERRED:
            return
        fulls, index = self._unsharded.full_params, 0
        for bucket in self._shards.buckets:
            for own, param in enumerate(bucket.params):
                if param.gradient_was_cleared():
                    if fulls:
                        fulls[index].grad = None
                    if bucket.reduction.has_earlier_for(own):
                        bucket.reduction.drop_earlier(own)
                index += 1
        if not self._stands_for_any():
            self._step("drop")

    def drop(self) -> None:
        """Drop unsharded gradients, in flight or not."""
        self._free()
        for param in self._shards.params:
            param.show_reduced_gradient()
        if self.state is not EMPTY:
            self._step("drop")

    def drop_of_backward(self) -> None:
        """Drop the gradients of a failed backward, and the deferred ones to which it has added.

        ``.grad`` still stands for the latter, until the caller clears it.
        """
        if self.state in (PENDING, REDUCING):
            self._free()
            self._step("defer" if self._stands_for_any() else "drop")

    def _free(self) -> None:
        """Free the gradients, after waiting for communication with other ranks."""
        for reduction in self.in_flight():
            reduction.drop()
        self._reductions = [None] * len(self._shards.buckets)
        for full in self._unsharded.full_params:
            full.grad = None
        for bucket in self._shards.buckets:
            bucket.reduction.drop_all_earlier()

    # --- questions --------------------------------------------------------------------------------

    @property
    def are_wanted(self) -> bool:
        """True if any parameter of the group is trainable."""
        if self._unsharded.full_params:
            return bool(self._trainable)
        return any(param.sharded.requires_grad for param in self._shards.params)

    @property
    def are_all_wanted(self) -> bool:
        """True if all parameters of the group are trainable."""
        return len(self._trainable) == len(self._shards.params)

    def _step(self, event: str) -> None:
        self.state = GRADIENT_STATES.get((self.state, event)) or self._refuse(event)

    def _refuse(self, event: str) -> NoReturn:
        refuse_step(GRADIENT_STATES, self.state, event, self._shards.name)


def _is_trained(param: Param) -> bool:
    full = param.unsharded  # asking a DTensor takes ten times as long
    return full is not None and full.requires_grad


def _take_dense(fulls: Sequence[nn.Parameter]) -> list[Tensor | None] | None:
    """Take ``.grad`` of ``fulls``; None, and nothing taken, if one is sparse."""
    with tensor_impl.plain_access():
        gradients = list(map(_gradient, fulls))
        layouts = set(map(_layout, filter(is_not_none, gradients)))
        if not layouts <= _DENSE:
            return None
        for full in fulls:
            full.grad = None
    return gradients


def _arrived(own: "weakref.ref[Gradients]", index: int, others: int, full: Tensor) -> None:
    """A hook on an unsharded parameter: autograd has accumulated its gradient.

    The reference is weak: Python's collector cannot see hooks in C++. ``others``: the bits of all the others.

    Raises:
        RuntimeError: the parameter has been replaced since forward used it.
    """
    gradients = own()
    if gradients is None:
        return
    fulls = gradients._unsharded.full_params
    if not fulls or fulls[index] is not full:
        gradients._raise_replaced(index)
    queue, streams = gradients.part_queue, gradients.streams
    if streams.are_device_streams:
        if gradients.state is not PENDING and gradients.state is not DEFERRED:
            gradients._made_on.clear()
        if streams.current_number() not in gradients._made_on:
            streams.note_current(gradients._made_on)
    if gradients.state is not PENDING:
        gradients._first_arrived()
    elif queue is not None and index in queue.sent:
        gradients._finish_sent()  # this gradient is from another nested backward, and part of another sum
    elif gradients._tells_each:
        gradients._tell()  # a gradient from a nested backward keeps the group unsharded longer
    gradients._missing &= others
    if not gradients._missing:
        gradients._missing = gradients._all_missing  # for another call, which a nested backward may reach
        # Not by outside_transforms, to save a call before the reduction.
        if autograd.is_in_transform():
            with autograd.without_transforms():
                gradients.listener.complete()
        else:
            gradients.listener.complete()
    elif queue is not None and queue.arrive(index):
        gradients._part_arrived()


dynamo.break_graphs(_arrived)  # of compiled autograd

_NO_CONTEXT = nullcontext()


@contextmanager
def _neither_graph_nor_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def without_graph() -> AbstractContextManager[Any]:
    """A context without grad mode or inference mode; most backwards run without both already."""
    is_needed = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    return _neither_graph_nor_inference() if is_needed else _NO_CONTEXT
