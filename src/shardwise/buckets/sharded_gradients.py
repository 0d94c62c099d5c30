"""The sharded gradients of a bucket: the DTensors that become ``.grad``, all in one flat tensor; and their
reduction.

A reduction leaves its sums in one buffer, laid out as the flat shard. Each ``.grad`` is a DTensor over its
range of that buffer. While all are where the bucket has put them, code that reads or changes all of them may
use the flat tensor instead:

    buffer   | w1 . . . . | b1 | w2 . . | b2 |        w1.grad is the DTensor over the first range, ...
    flat     |-------------------------------|        for adding to it, norms and clipping
    ranges   |---------|                              for optimizers: see ``GradientRange``

The caller may set ``.grad`` to another tensor, or to None, at any time. So each query checks the local
tensors that the bucket has made, by weak references: ``zero_grad()`` frees them.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter, call, is_, itemgetter, or_, sub
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.buffers import LocalViews, ShardStorage, typed_range
from shardwise.comm.communicators import Communication
from shardwise.comm.reduction import Hook, ReduceScatter, Reduction, SecondStage
from shardwise.comm.streams import CommStreams
from shardwise.layout.nested import is_not_none
from shardwise.layout.slots import Layout
from shardwise.params.parameter import Param
from shardwise.ranks.activity import Wait
from shardwise.torch_compat import dtensor, tensor_impl

_sharded, _gradient = attrgetter("sharded"), attrgetter("grad")
_gradient_spec = attrgetter("gradient_spec")
_ONLY_DTENSORS = {DTensor}


class ShardedGradients:
    """The sharded gradients of a bucket, laid out as its flat shard."""

    def __init__(self, params: Sequence[Param], layout: Layout, rank: int) -> None:
        self.params = params
        self.layout = layout
        self._views = LocalViews(layout, rank)
        # Whether all gradients form one tensor: one dtype, equal placements, no padding in between.
        dtypes = {run.dtype for run in layout.segments}
        places = {(spec.mesh, spec.placements) for spec in map(_gradient_spec, params)}
        self._is_one = len(dtypes) == len(places) == 1 and not layout.has_padding
        self._offsets = [slot.shard_offset for slot in layout.slots]
        self._end = layout.segments[-1].end if layout.segments else 0
        # The local tensors made last, and the address of each one's buffer. Not the gradients: torch cannot
        # swap tensors (``module.to()``) that have weak references.
        self._made: list[Callable[[], Tensor | None]] = [lambda: None] * len(params)
        self._buffers = [0] * len(params)

    @property
    def shards(self) -> list[nn.Parameter]:
        """The sharded parameters, in order."""
        return list(map(_sharded, self.params))

    # --- accumulation -----------------------------------------------------------------------------

    def accumulate(self, buffer: Tensor, present: Sequence[bool]) -> None:
        """Add ``buffer`` to ``.grad`` of the sharded parameters one by one, running their hooks."""
        for index, (param, local) in enumerate(zip(self.params, self._views.of(buffer), strict=True)):
            if present[index]:
                param.add_gradient(local)
                gradient = param.sharded.grad
                if type(gradient) is DTensor and dtensor.local_tensor(gradient) is local:
                    self._made[index], self._buffers[index] = weakref.ref(local), buffer.data_ptr()

    def accumulate_all(self, buffer: Tensor) -> bool:
        """Add ``buffer`` to all ``.grad`` at once; False, and nothing done, if some are None or foreign.

        For parameters without hooks, all of which have gradients in ``buffer``.
        """
        shards = list(map(_sharded, self.params))
        with tensor_impl.plain_access():
            stand = any(map(is_not_none, map(_gradient, shards)))
        if stand:
            flat = self.flat_gradient()
            if flat is None:
                return False
            flat.add_(typed_range(buffer, 0, self._end, flat.dtype))
            return True
        locals_ = self._views.of(buffer)
        gradients = map(dtensor.make_dtensor, locals_, map(_gradient_spec, self.params))
        with tensor_impl.plain_access():
            for shard, gradient in zip(shards, gradients, strict=True):
                shard.grad = gradient
        self._made = list(map(weakref.ref, locals_))
        self._buffers = [buffer.data_ptr()] * len(locals_)
        return True

    # --- the flat tensor --------------------------------------------------------------------------

    def flat_gradient(self) -> Tensor | None:
        """``.grad`` of all parameters as one flat tensor.

        None if they do not form one: set by others, of several dtypes or placements, or with padding in
        between.
        """
        if not self._is_one:
            return None
        with tensor_impl.plain_access():
            gradients = list(map(_gradient, self.shards))
        if set(map(type, gradients)) != _ONLY_DTENSORS:
            return None
        locals_ = list(map(dtensor.local_tensor, gradients))
        if not _are_in_place(locals_, self._made, self._buffers, self._offsets):
            return None
        return locals_[0].as_strided((self._end // locals_[0].itemsize,), (1,), 0)

    def buffer_of(self, index: int, local: Tensor) -> int | None:
        """The address of the buffer in which the bucket has put ``local``; None if it is elsewhere."""
        buffer = self._buffers[index]
        is_in_place = self._made[index]() is local and local.data_ptr() == buffer + self._offsets[index]
        return buffer if is_in_place else None

    def gradient_offset(self, index: int) -> int:
        """The start of a parameter's gradient in the buffer, in its elements."""
        slot = self.layout.slots[index]
        return slot.shard_offset // slot.itemsize


class GradientRange:
    """Some gradients of a bucket, for an optimizer that checks whether they have moved."""

    def __init__(self, gradients: ShardedGradients, indices: Sequence[int]) -> None:
        self._gradients = weakref.ref(gradients)
        self._choose: Callable[[Sequence[Any]], Sequence[Any]] = (
            itemgetter(*indices) if len(indices) > 1 else lambda values: (values[indices[0]],)
        )

    def is_in_place(self, locals_: Sequence[Tensor]) -> bool:
        """Whether ``locals_``, the local gradients of these parameters, are in one buffer of the bucket."""
        own, choose = self._gradients(), self._choose
        return own is not None and _are_in_place(
            locals_, choose(own._made), choose(own._buffers), choose(own._offsets)
        )


def _are_in_place(
    locals_: Sequence[Tensor],
    made: Sequence[Callable[[], Tensor | None]],
    buffers: Sequence[int],
    offsets: Sequence[int],
) -> bool:
    """Whether they are the tensors that were made, in one buffer, and still over its memory.

    Setting ``.data`` of one moves it.
    """
    if not all(map(is_, locals_, map(call, made))) or len(set(buffers)) != 1:
        return False
    start = buffers[0]
    return all_start_at(locals_, offsets, start) or all(
        local.data_ptr() == start + offset
        for local, offset in zip(locals_, offsets, strict=True)
        if local.numel()
    )


def all_start_at(tensors: Sequence[Tensor], offsets: Sequence[int], start: int) -> bool:
    """True if tensor i begins ``offsets[i]`` bytes after the address ``start``."""
    return set(map(sub, map(Tensor.data_ptr, tensors), offsets)) <= {start}


# --- reductions -----------------------------------------------------------------------------------


class BucketReduction:
    """The reductions of a bucket's gradients, one after another: over its ranks, and over the replicas.

    ``layout``: of the sums. Results go to ``storage``, where the shards are. Sums that are not yet to be
    reduced over replicas stay here, and are added to the next ones.
    """

    def __init__(
        self,
        communication: Communication,
        layout: Layout,
        part_bytes: float | None,
        gradients: ShardedGradients,
        storage: ShardStorage,
    ) -> None:
        self._params = gradients.params
        self._communication = communication
        self._mesh = mesh = communication.mesh
        self._layout = layout
        self._reduce_scatter = ReduceScatter(communication.reduce_scatter, layout, mesh.device, part_bytes)
        self.parts = self._reduce_scatter.parts
        """The gradients that are reduced together, by indices of parameters."""
        for each in (communication.reduce_scatter, communication.over_replicas):
            if each is not None:
                each.plan_for(layout)
        self._gradients = gradients
        # Copies are made equal after the last sum: over the shards, or over replicas.
        can_differ, has_replicas = self._can_copies_differ(), not mesh.replicate_axis.is_alone
        self._differ_over_shards = can_differ and not has_replicas
        self._differ_over_replicas = can_differ and has_replicas
        self._averages_itself = communication.averages_itself
        self._own_divisor = 1.0 if self._averages_itself else float(mesh.num_ranks)
        self._to_gradients = SecondStage(gradients.layout, storage.device, storage.is_pinned)
        self.earlier: Tensor | None = None
        """Sums that have yet to be summed over replicas."""
        # Set by close for accumulate: which parameters have a gradient in the reduction or in the earlier
        # sums, and whether the reduction continues over the replicas.
        self._no_sums = [False] * len(gradients.params)
        self._has_sum = self._no_sums[:]
        self._covers_replicas = True

    def open(
        self, streams: CommStreams, divisor: float | None, awaited: Wait, *, is_filled: bool
    ) -> Reduction:
        """A reduction with nothing sent yet.

        ``divisor``: of the sums over all ranks; None: their number. ``is_filled``: every parameter will have
        a gradient.
        """
        if divisor is None or self._averages_itself:
            divisor = self._own_divisor
        return Reduction(
            self._reduce_scatter,
            divisor,
            streams,
            is_filled=is_filled,
            agree=self._broadcast_copies if self._differ_over_shards else None,
            awaited=awaited,
        )

    def reuse_nothing(self) -> None:
        """Allocate new memory for the gradients of each step, as on a device."""
        self._reduce_scatter.reuse_nothing()

    def close(self, reduction: Reduction, all_reduces: bool, hook: Hook | None) -> None:
        """All gradients are sent: continue with the replicas, if ``all_reduces``."""
        self._covers_replicas = all_reduces or self._mesh.replicate_axis.is_alone
        self._has_sum = list(map(or_, self._has_sum, reduction.present))
        earlier, self.earlier = self.earlier, None
        replicas, stage = None, self._to_gradients
        if self._covers_replicas:
            replicas = self._communication.over_replicas
        else:
            stage = SecondStage(self._layout, self._mesh.device)
        agree = self._broadcast_copies if self._differ_over_replicas else None
        if replicas is not None or earlier is not None or hook is not None or agree is not None:
            summed = [
                index
                for index, (param, has_sum) in enumerate(zip(self._params, self._has_sum, strict=True))
                if has_sum or param.sharded.requires_grad
            ]
            stage = replace(
                stage,
                summed=frozenset(summed),
                all_reduce=None if replicas is None else replicas.all_reduce,
                earlier=earlier,
                hook=hook if self._covers_replicas else None,
                agree=agree,
            )
        reduction.close(stage)

    def _can_copies_differ(self) -> bool:
        """True if ranks keep the same scalar, but may get different bits for its gradient."""
        if self._mesh.shard_axis.is_alone or not any(slot.is_replicated for slot in self._layout.slots):
            return False
        comm, options = self._communication.reduce_scatter, self._communication.options
        return not comm.sums_are_bitwise_equal or options.make_all_reduce is not None

    def _broadcast_copies(self, output: Tensor, indices: Sequence[int]) -> None:
        """Broadcast the first rank's gradients of the scalars among these parameters."""
        slots = [self._layout.slots[index] for index in indices]
        copies = [
            output[slot.shard_offset : slot.shard_offset + slot.itemsize]
            for slot in slots
            if slot.is_replicated
        ]
        if not copies:
            return
        flat = torch.cat(copies)
        pg = self._communication.options.reduce_pg or self._mesh.shard_axis.pg
        dist.broadcast(flat, group=pg, group_src=0)
        for copy, agreed in zip(copies, flat.split([len(copy) for copy in copies]), strict=True):
            copy.copy_(agreed)

    def accumulate(self, reduction: Reduction, *, without_hooks: bool) -> bool:
        """Wait for the result and add it to ``.grad`` of the shards; True if it still waits for replicas.

        ``without_hooks``: no sharded parameter has gradient hooks or a deferred gradient.
        """
        output = reduction.finish()
        if not self._covers_replicas:
            self.earlier = output
            return True
        has_sum, self._has_sum = self._has_sum, self._no_sums[:]
        if not (without_hooks and all(has_sum) and self._gradients.accumulate_all(output)):
            self._gradients.accumulate(output, has_sum)
        return False

    # --- sums that wait for the replicas ----------------------------------------------------------

    def carry_earlier(self, before: "BucketReduction") -> None:
        """Take over the waiting sums of ``before``, made for the same parameters and perhaps other dtypes."""
        if before.earlier is None:
            return
        self.earlier = torch.zeros(self._layout.shard_bytes, dtype=torch.uint8, device=self._mesh.device)
        self._has_sum = before._has_sum
        rank = self._mesh.shard_axis.rank
        views = LocalViews(self._layout, rank).of(self.earlier)
        old = LocalViews(before._layout, rank).of(before.earlier)
        for view, sums in zip(views, old, strict=True):
            view.copy_(sums)

    def has_earlier_for(self, index: int) -> bool:
        """True while the sum of this parameter waits to be summed over replicas."""
        return self.earlier is not None and self._has_sum[index]

    def drop_earlier(self, index: int) -> None:
        """Drop the waiting sums of one parameter."""
        assert self.earlier is not None
        self._has_sum[index] = False
        slot = self._layout.slots[index]
        self.earlier[slot.shard_offset : slot.shard_offset + slot.padded_bytes].zero_()
        if not any(self._has_sum):
            self.earlier = None

    def drop_all_earlier(self) -> None:
        """Drop all waiting sums, and those in flight."""
        self.earlier = None
        self._has_sum = self._no_sums[:]
