"""The sharded gradients of a bucket: the DTensors that become ``.grad``, all in one flat tensor.

A reduction leaves its sums in one buffer, laid out as the flat shard. Each ``.grad`` is a DTensor over its
range of that buffer. As long as they are where the bucket has put them, whoever has to read or change all of
them may take the flat tensor instead:

    buffer   | w1 . . . . | b1 | w2 . . | b2 |        w1.grad is the DTensor over the first range, ...
    flat     |-------------------------------|        for adding to it, norms and clipping
    ranges   |---------|                              for optimizers: see ``range_of``

Someone may set ``.grad`` to something else, or to None, at any time. So each question is answered anew, from
the local tensors that the bucket has made, which it knows by weak references: ``zero_grad()`` frees them.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, call, is_, is_not, itemgetter, sub
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.buffers import LocalViews, typed_range
from shardwise.layout.slots import Layout
from shardwise.params.parameter import Param
from shardwise.torch_compat import dtensor, tensor_impl

_sharded, _gradient = attrgetter("sharded"), attrgetter("grad")
_gradient_spec = attrgetter("gradient_spec")
_ONLY_DTENSORS = {DTensor}
is_not_none = partial(is_not, None)
"""True for anything but None; a map over tensors with it runs in C, where ``in`` would compare them."""


def _nowhere() -> Tensor | None:
    return None


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
        # The local tensors that were made last, and where the buffer of each begins. Not the gradients: torch
        # cannot swap tensors (``module.to()``) that have weak references.
        self._made: list[Callable[[], Tensor | None]] = [_nowhere] * len(params)
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
        """Add ``buffer`` to all ``.grad`` at once; False, and nothing done, where some are None or foreign.

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

        None where they do not form one: set by others, of several dtypes or placements, or with padding in
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
        """The address of the buffer in which the bucket has put ``local``; None if that is somewhere else."""
        buffer = self._buffers[index]
        is_in_place = self._made[index]() is local and local.data_ptr() == buffer + self._offsets[index]
        return buffer if is_in_place else None

    def range_of(self, indices: Sequence[int]) -> "GradientRange":
        """The gradients of some parameters, to be asked at each step."""
        return GradientRange(self, indices)

    def gradient_offset(self, index: int) -> int:
        """Where the gradient of a parameter starts in the buffer, counted in its elements."""
        slot = self.layout.slots[index]
        return slot.shard_offset // slot.itemsize


class GradientRange:
    """Some gradients of a bucket, of which an optimizer wants to know whether they are where they were."""

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

    They may not be: ``.data`` of one may have been set.
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
    """True if tensor i lies ``offsets[i]`` bytes behind the address ``start``."""
    return set(map(sub, map(Tensor.data_ptr, tensors), offsets)) <= {start}
