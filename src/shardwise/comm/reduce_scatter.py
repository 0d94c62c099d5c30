"""The reduce-scatter of a layout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.buffers import dtype_of, typed_range
from shardwise.comm.communicators import BufferPool, Communicator
from shardwise.comm.pieces import are_dense_of, strided_pieces, typed_rows, whole_slot
from shardwise.comm.streams import CommStream, Finish, Scratch
from shardwise.layout.slots import BufferSegment, Layout
from shardwise.torch_compat import tensor_impl


@dataclass(frozen=True)
class GradientPart:
    """Parameters whose gradients are reduced together: ``direct`` ones, and those of ``packed_segments``."""

    direct: tuple[int, ...]
    packed_segments: Sequence[BufferSegment]
    num_bytes: int  # of their full gradients

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """All of them."""
        return self.direct + tuple(index for segment in self.packed_segments for index in segment.slots)


_MOST_PARTS = 4
"""Parts of a bucket, at most. Of three equal parts, two in flight and one being computed make a whole."""


class ReduceScatter:
    """The reduce-scatter of one bucket's gradients, planned once and issued many times.

    Large gradients do not wait for each other: ``parts`` says which are reduced together. The parameters
    registered last come first, which is the order of most backwards; packed ones come with the last part.
    """

    def __init__(
        self, comm: Communicator, layout: Layout, device: torch.device, part_bytes: float | None = None
    ) -> None:
        """``part_bytes``: the smallest part; None: the default of the communicator."""
        self._comm = comm
        self._layout = layout
        self._device = device
        least = comm.smallest_part_bytes
        if part_bytes is not None and least < math.inf:
            least = part_bytes
        self.parts = self._plan_parts(least)
        self._chunked = {segment.start for segment in layout.packed_segments if self._is_chunked(segment)}
        self._padded = {
            segment.start
            for segment in layout.packed_segments
            if any(layout.slots[i].padded_numel > layout.slots[i].chunk_numel for i in segment.slots)
        }
        self._paddings: dict[tuple[torch.dtype, int], Tensor] = {}

    def _is_chunked(self, segment: BufferSegment) -> bool:
        """True if ``segment`` holds only chunks of rows, and padding."""
        slots = [self._layout.slots[index] for index in segment.slots]
        return all(
            slot.spec.dim == 0 and not slot.is_strided and not slot.is_replicated and slot.chunk_numel > 0
            for slot in slots
        )

    def _padding(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Zeros behind each chunk of a parameter, one row for each rank; made once."""
        found = self._paddings.get((dtype, numel))
        if found is None:
            with torch.inference_mode(False):
                found = torch.zeros(self._layout.world, numel, dtype=dtype, device=self._device)
            self._paddings[dtype, numel] = found
        return found

    @property
    def reduce_memory_factor(self) -> float:
        """The memory that a part holds until it is waited for, in units of its gradients."""
        return self._comm.reduce_memory_factor

    def _plan_parts(self, least: float) -> list[GradientPart]:
        slots, packed_segments = self._layout.slots, self._layout.packed_segments
        least = max(least, sum(slot.slot_bytes for slot in slots) / _MOST_PARTS)
        parts: list[GradientPart] = []
        direct: tuple[int, ...] = ()
        num_bytes = 0
        for index in reversed(self._layout.direct):
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
        output: Tensor,
        divisor: float,
    ) -> Finish:
        """Issue the reduction of ``part`` into ``output``; a gradient of None is None on all ranks.

        ``gradients`` has one item for every parameter; ``output`` is laid out as the flat shard. Gradients
        must stay untouched until the returned function has waited.
        """
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        borrowed: list[Scratch] = []
        pool: BufferPool = self._comm.pool or stream
        for index in part.direct:
            gradient = gradients[index]
            if gradient is not None:
                slot = self._layout.slots[index]
                dtype = dtype_of(slot)
                inputs.append(whole_slot(gradient.to(dtype), slot).view(-1))
                end = slot.shard_offset + slot.chunk_bytes
                outputs.append(typed_range(output, slot.shard_offset, end, dtype))
        for segment in part.packed_segments:
            if segment.end > segment.start and any(gradients[index] is not None for index in segment.slots):
                assert isinstance(segment.dtype, torch.dtype)
                num_bytes = self._layout.world * (segment.end - segment.start)
                scratch = pool.acquire(num_bytes, self._device, segment.dtype)
                key = ("reduce", self._layout.world, num_bytes, segment.dtype)
                flat, rows = scratch.view(key, partial(typed_rows, key))
                self._pack(segment, gradients, rows)
                borrowed.append(scratch)
                inputs.append(flat)
                outputs.append(typed_range(output, segment.start, segment.end, segment.dtype))
        wait = stream.issue(self._comm.reduce_scatter, outputs, inputs, divisor)

        def finish() -> None:
            wait()
            for scratch in borrowed:
                pool.release(scratch)

        return finish

    def _pack(self, segment: BufferSegment, gradients: Sequence[Tensor | None], target: Tensor) -> None:
        """Pack small gradients: row r of ``target`` holds the shards of rank r."""
        world, dtype = self._layout.world, target.dtype
        if segment.start in self._chunked:
            own: list[Any] = [gradients[index] for index in segment.slots]
            if are_dense_of(dtype, own):
                tensor_impl.chunk_cat(self._with_paddings(segment, own, dtype), world, target)
                return
        columns: list[Tensor] = []
        packed_numel = 0
        for index in segment.slots:
            slot, gradient = self._layout.slots[index], gradients[index]
            if slot.is_strided:
                continue
            if gradient is None:
                gradient = torch.zeros(slot.spec.shape, dtype=dtype, device=self._device)
            if slot.chunk_bytes:
                columns.append(whole_slot(gradient, slot).view(world, -1))
            if padding := slot.padded_numel - slot.chunk_numel:
                columns.append(gradient.new_zeros(world, padding))
            packed_numel += slot.padded_numel
        if packed_numel == target.shape[1]:
            torch.cat(columns, dim=1, out=target)
            return
        if columns:
            torch.cat(columns, dim=1, out=target[:, :packed_numel])
        self._pack_strided(segment, gradients, target, packed_numel)

    def _with_paddings(
        self, segment: BufferSegment, gradients: list[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        if segment.start not in self._padded:
            return gradients
        columns = []
        for index, gradient in zip(segment.slots, gradients, strict=True):
            columns.append(gradient)
            slot = self._layout.slots[index]
            if padding := slot.padded_numel - slot.chunk_numel:
                columns.append(self._padding(dtype, padding))
        return columns

    def _pack_strided(
        self, segment: BufferSegment, gradients: Sequence[Tensor | None], target: Tensor, packed_numel: int
    ) -> None:
        target[:, packed_numel:].zero_()
        for index in segment.slots:
            slot, gradient = self._layout.slots[index], gradients[index]
            if slot.is_strided and gradient is not None:
                for piece, part in strided_pieces(slot, target.view(torch.uint8), segment.start, gradient):
                    piece.copy_(part)
