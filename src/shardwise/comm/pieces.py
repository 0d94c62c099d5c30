"""Pieces of buffers that collectives send and receive."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.buffers import dtype_of
from shardwise.layout.slots import Layout, Slot

_dtype = attrgetter("dtype")


def are_dense_of(dtype: torch.dtype, tensors: Sequence[Any]) -> bool:
    """True if none is None, and all are contiguous and of ``dtype``; in loops that run in C."""
    there = all(map(is_not, tensors, repeat(None)))
    return there and set(map(_dtype, tensors)) == {dtype} and all(map(Tensor.is_contiguous, tensors))


def typed_rows(key: tuple[str, int, int, torch.dtype], buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The first bytes of a buffer as numbers: flat, and by rank."""
    _, world, num_bytes, dtype = key
    flat = buffer[:num_bytes].view(dtype)
    return flat, flat.view(world, -1)


def whole_slot(gradient: Tensor, slot: Slot) -> Tensor:
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


def strided_pieces(slot: Slot, rows: Tensor, origin: int, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank's shard of a strided parameter, twice: in ``rows`` and in ``full``.

    Row r of ``rows`` holds what rank r keeps, in bytes, from the offset ``origin`` of the shard buffer on.
    """
    if not slot.chunk_bytes:
        return
    start = slot.shard_offset - origin
    dtype, dim = dtype_of(slot), slot.dim
    columns = rows[:, start : start + slot.chunk_bytes].view(dtype)
    if slot.is_even:
        parts = full.unflatten(dim, (slot.world, slot.chunk_size)).movedim(dim, 0)
        yield columns.unflatten(1, slot.local_shape(0)), parts
        return
    for rank in range(slot.world):
        first, end = slot.index_range(rank)
        if end > first:
            shape = slot.local_shape(rank)
            yield columns[rank, : torch.Size(shape).numel()].view(shape), full.narrow(dim, first, end - first)


class Staging(NamedTuple):
    """A buffer that a packed all-gather fills: as one, by rank, what is not strided of that, by ranges."""

    flat: Tensor
    rows: Tensor
    packed: Tensor
    ranges: list[Tensor]


class PackedRange(NamedTuple):
    """``length`` packed parameters of one size, side by side.

    Of each rank ``num_bytes``, ``pitch`` bytes apart from ``start`` on in the rank's row, for slots
    ``slot_pitch`` bytes apart from ``slot_start`` on.
    """

    length: int
    num_bytes: int
    pitch: int
    start: int
    slot_pitch: int
    slot_start: int

    def takes(self, slot: Slot, start: int) -> bool:
        """True if ``slot``, at ``start`` in the row, is one more of them."""
        sizes = (slot.chunk_bytes, slot.padded_bytes)
        slot_pitch = self.slot_pitch if self.length > 1 else slot.slot_offset - self.slot_start
        return (*sizes, start, slot.slot_offset) == (
            self.num_bytes,
            self.pitch,
            self.start + self.length * self.pitch,
            self.slot_start + self.length * slot_pitch,
        )


def packed_ranges(layout: Layout) -> list[PackedRange]:
    """The ranges of packed parameters, with equal neighbours joined."""
    found: list[PackedRange] = []
    for slot in [layout.slots[index] for index in layout.packed]:
        start = slot.shard_offset - layout.packed_start
        if not slot.chunk_bytes:
            continue
        if found and found[-1].takes(slot, start):
            last = found[-1]
            slot_pitch = (slot.slot_offset - last.slot_start) // last.length
            found[-1] = last._replace(length=last.length + 1, slot_pitch=slot_pitch)
        else:
            found.append(PackedRange(1, slot.chunk_bytes, slot.padded_bytes, start, 0, slot.slot_offset))
    return found
