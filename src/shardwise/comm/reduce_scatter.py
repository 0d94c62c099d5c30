"""The reduce-scatter of a layout."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.buffers import strided_pieces, typed_range
from shardwise.comm.communicators import Communicator
from shardwise.comm.streams import BufferPool, CommStream, Finish, Scratch, wait_and_release
from shardwise.layout.slots import BufferSegment, Layout, Slot
from shardwise.torch_compat import tensor_impl


@dataclass(frozen=True)
class GradientPart:
    """Parameters whose gradients are reduced together: ``direct`` ones, and those of ``packed_segments``."""

    direct: tuple[int, ...]
    packed_segments: Sequence[BufferSegment]
    num_bytes: int  # of their full gradients

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The indices of all its parameters."""
        return self.direct + tuple(index for segment in self.packed_segments for index in segment.slots)


_MOST_PARTS = 4
"""The most parts of a bucket. Of three equal parts, two are in flight while one is computed."""


class ReduceScatter:
    """The reduce-scatter of one bucket's gradients, planned once and issued many times.

    Large gradients do not wait for each other: those in one of ``parts`` are reduced together. The parameters
    registered last come first, which is the order of most backwards; packed ones are in the last part.
    """

    def __init__(
        self, comm: Communicator, layout: Layout, device: torch.device, part_bytes: float | None = None
    ) -> None:
        """``part_bytes``: the smallest part; None: the default of the communicator."""
        self._comm = comm
        self.layout = layout
        self.is_alone = comm.is_alone
        self.device = device
        least = comm.smallest_part_bytes if part_bytes is None else part_bytes
        # A communicator that packs everything gets one call, even on a single rank, where all are direct.
        self.parts = self._plan_parts(math.inf if comm.packs_everything else least)
        self._chunked: set[int] = set()  # starts of segments that contain only chunks of rows and padding
        self._plain: set[int] = set()  # those of them without padding
        for segment in layout.packed_segments:
            slots = [layout.slots[index] for index in segment.slots]
            if all(s.dim == 0 and s.chunk_numel and not (s.is_strided or s.is_replicated) for s in slots):
                self._chunked.add(segment.start)
                if all(slot.padded_numel == slot.chunk_numel for slot in slots):
                    self._plain.add(segment.start)
        self._paddings: dict[tuple[torch.dtype, int], Tensor] = {}
        self.reduce_memory_factor = comm.reduce_memory_factor
        """The memory that a part holds until it is waited for, in units of its gradients."""

    def _padding(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Zeros behind each chunk of a parameter, one row per rank; made once."""
        found = self._paddings.get((dtype, numel))
        if found is None:
            with torch.inference_mode(False):
                found = torch.zeros(self.layout.world, numel, dtype=dtype, device=self.device)
            self._paddings[dtype, numel] = found
        return found

    def _plan_parts(self, least: float) -> list[GradientPart]:
        slots, packed_segments = self.layout.slots, self.layout.packed_segments
        least = max(least, sum(slot.slot_bytes for slot in slots) / _MOST_PARTS)
        parts: list[GradientPart] = []
        direct: tuple[int, ...] = ()
        num_bytes = 0
        for index in reversed(self.layout.direct):
            direct = (*direct, index)
            num_bytes += slots[index].slot_bytes
            if num_bytes >= least:
                parts.append(GradientPart(direct, (), num_bytes))
                direct, num_bytes = (), 0
        num_bytes += sum(slots[index].slot_bytes for segment in packed_segments for index in segment.slots)
        if direct or packed_segments or not parts:
            parts.append(GradientPart(direct, packed_segments, num_bytes))
        return parts

    def start(
        self,
        stream: CommStream,
        part: GradientPart,
        gradients: Sequence[Tensor | None],
        sums: Callable[[], Tensor],
        divisor: float,
    ) -> Finish:
        """Issue the reduction of ``part``; a gradient of None is None on all ranks.

        ``gradients`` has one item per parameter. ``sums`` returns the output, laid out as the flat shard.
        Gradients must stay untouched until the returned function has waited.
        """
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        borrowed: list[Scratch] = []
        pool: BufferPool = self._comm.pool or stream
        output = sums()
        for index in part.direct:
            gradient = gradients[index]
            if gradient is not None:
                slot = self.layout.slots[index]
                inputs.append(_whole_slot(gradient.to(slot.dtype), slot).view(-1))
                end = slot.shard_offset + slot.chunk_bytes
                outputs.append(typed_range(output, slot.shard_offset, end, slot.dtype))
        for segment in part.packed_segments:
            own = list(map(gradients.__getitem__, segment.slots))
            if segment.end > segment.start and not all(map(is_, own, repeat(None))):
                num_bytes = self.layout.world * (segment.end - segment.start)
                scratch = pool.acquire(num_bytes, self.device, segment.dtype)
                key = ("reduce", self.layout.world, num_bytes, segment.dtype)
                flat, rows = scratch.views.get(key) or scratch.make_view(key, partial(_typed_rows, key))
                self._pack(segment, own, rows)
                borrowed.append(scratch)
                inputs.append(flat)
                outputs.append(typed_range(output, segment.start, segment.end, segment.dtype))
        wait = self._comm.reduce_scatter(outputs, inputs, divisor)
        return partial(wait_and_release, wait, pool, borrowed) if borrowed else wait

    def _pack(self, segment: BufferSegment, own: Sequence[Tensor | None], target: Tensor) -> None:
        """Pack the small gradients ``own``: row r of ``target`` holds the shards of rank r."""
        world, dtype = self.layout.world, target.dtype
        found: Any = _dtype_if_dense(own) if segment.start in self._chunked else None
        is_chunked = found is dtype or (found, dtype) in _CAST_BY_CHUNK_CAT
        if is_chunked and segment.start in self._plain:
            tensor_impl.chunk_cat(own, 0, world, out=target)
            return
        columns: list[Any] = []
        packed_numel = 0
        for index, gradient in zip(segment.slots, own, strict=True):
            slot = self.layout.slots[index]
            if slot.is_strided:
                continue
            if is_chunked:
                columns.append(gradient)
            elif slot.chunk_bytes:
                if gradient is None:
                    gradient = torch.zeros(slot.shape, dtype=dtype, device=self.device)
                columns.append(_whole_slot(gradient, slot).view(world, -1))
            if padding := slot.padded_numel - slot.chunk_numel:
                columns.append(self._padding(found if is_chunked else dtype, padding))
            packed_numel += slot.padded_numel
        if is_chunked:
            tensor_impl.chunk_cat(columns, 0, world, out=target)
            return
        if columns:
            torch.cat(columns, dim=1, out=target[:, :packed_numel])
        if packed_numel < target.shape[1]:
            self._pack_strided(segment, own, target, packed_numel)

    def _pack_strided(
        self, segment: BufferSegment, own: Sequence[Tensor | None], target: Tensor, packed_numel: int
    ) -> None:
        target[:, packed_numel:].zero_()
        for index, gradient in zip(segment.slots, own, strict=True):
            slot = self.layout.slots[index]
            if slot.is_strided and gradient is not None:
                for piece, part in strided_pieces(slot, target.view(torch.uint8), segment.start, gradient):
                    piece.copy_(part)


_dtype = attrgetter("dtype")
_CAST_BY_CHUNK_CAT = {(torch.bfloat16, torch.float32)}
"""Gradients of the first dtype, reduced in the second, are cast by the kernel that packs them."""


def _dtype_if_dense(tensors: Sequence[Any]) -> Any:
    """The dtype of all ``tensors``; None if one is None or not contiguous, or they differ. In C loops."""
    if not all(map(is_not, tensors, repeat(None))) or not all(map(Tensor.is_contiguous, tensors)):
        return None
    dtypes = set(map(_dtype, tensors))
    return dtypes.pop() if len(dtypes) == 1 else None


def _typed_rows(key: tuple[str, int, int, torch.dtype], buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The first bytes of a buffer as numbers: flat, and by rank."""
    _, world, num_bytes, dtype = key
    flat = buffer[:num_bytes].view(dtype)
    return flat, flat.view(world, -1)


def _whole_slot(gradient: Tensor, slot: Slot) -> Tensor:
    """``gradient`` padded to the world * chunk rows of its slot; itself if it is even and contiguous."""
    if slot.is_replicated:
        return gradient.expand(slot.world).contiguous()
    if slot.is_even:
        return gradient.contiguous()
    dim = slot.dim
    shape = list(gradient.shape)
    shape[dim] = slot.world * slot.chunk_size
    padded = gradient.new_zeros(shape)
    padded.narrow(dim, 0, gradient.shape[dim]).copy_(gradient)
    return padded
