"""The slots of a bucket's buffers: where each parameter lies.

Arithmetic on shapes only: no tensors, no process groups. Offsets and sizes are in bytes.

World 4, weight (10, 3) and bias (10,), chunk = ceil(10 / 4) = 3 rows::

    shard on rank 1   | w rows 3-5 | b 3-5 |
    unsharded         | w 0-2 | w 3-5 | w 6-8 | w 9 pad pad | b 0-2 | b 3-5 | ...
                      ^ slot of w: its first 10 rows are the weight, in place

``Shard(0)`` gives rank r the rows [r * chunk, min((r + 1) * chunk, rows)), and in a slot of
world * chunk rows, chunk r begins at row r * chunk: only the end of a slot is padded.

On another dim, a shard is not contiguous in the unsharded parameter. Such a parameter is "strided": its
shards, each contiguous, are sent packed, and a copy puts them in place.

A scalar has no dim to shard. Every rank keeps it; it is laid out as a column of ``world`` equal rows, one per
rank, so that the same all-gather and reduce-scatter work for it.

The flat shard holds first the parameters that have their own collective ("direct"), then those that share
one ("packed"), then the strided ones, which share it as well. Within each of the three, parameters of one
kind are adjacent, and so are packed ones of one shape.

A bucket has several layouts: of stored parameters, of computed ones, of gradients. They differ only in the
sizes of elements: chunks are padded to whole granules of elements, so that casting the buffer from one layout
to another takes one operation per kind.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from shardwise.layout.chunks import chunk_range, chunk_size, round_up

ALIGNMENT = 16
"""Shards and slots start on multiples of this; unaligned copies and collectives are slow."""

LARGEST_PACKED_BYTES = 16 << 20
"""Packing an unsharded parameter above this size would take much memory."""

_SMALLEST_OF_LIMIT = 4
"""Chunks of such parameters may be smaller than the limit by up to this factor."""


@dataclass(frozen=True)
class Slot:
    """One parameter's slot in the flat shard and in the unsharded buffer.

    ``kind`` is equal for parameters that may be adjacent; ``dtype`` is only a key here. Chunks are padded to
    multiples of ``granule`` elements. ``dim`` is the sharded one. ``plan_layout`` sets the fields after
    ``world``.
    """

    shape: tuple[int, ...]
    dtype: Any
    itemsize: int
    kind: Hashable
    granule: int
    dim: int = 0
    world: int = 1
    shard_offset: int = 0
    slot_offset: int = 0

    @cached_property
    def is_replicated(self) -> bool:
        """True for a scalar, which every rank keeps whole."""
        return not self.shape

    @cached_property
    def is_strided(self) -> bool:
        """True if a shard is not contiguous in the unsharded parameter."""
        return self.world > 1 and bool(self.shape) and prod(self.shape[: self.dim]) != 1

    @cached_property
    def chunk_size(self) -> int:
        """The size of a chunk along the sharded dim; the last ones may be smaller."""
        return chunk_size(self.shape[self.dim], self.world) if self.shape else 1

    @property
    def numel_across(self) -> int:
        """Elements at one index of the sharded dim."""
        return prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])

    @cached_property
    def chunk_numel(self) -> int:
        """Elements that one rank contributes to the all-gather, padding rows included."""
        return self.chunk_size * self.numel_across

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes that one rank contributes to the all-gather, padding rows included."""
        return self.chunk_numel * self.itemsize

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the chunk in the flat shard, padding included."""
        return round_up(self.chunk_numel, self.granule)

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes of the chunk in the flat shard, padding included."""
        return self.padded_numel * self.itemsize

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of all chunks in the unsharded buffer."""
        return self.world * self.chunk_bytes

    @cached_property
    def is_even(self) -> bool:
        """True if no rank's chunk holds padding."""
        return not self.is_replicated and self.shape[self.dim] == self.world * self.chunk_size

    def index_range(self, rank: int) -> tuple[int, int]:
        """The rows of ``rank`` along the sharded dim: [start, end), empty past the end."""
        return chunk_range(self.shape[self.dim], self.world, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``."""
        if self.is_replicated:
            return ()
        start, end = self.index_range(rank)
        return (*self.shape[: self.dim], end - start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class BufferSegment:
    """The bytes [start, end) of the flat shard, with parameters of one kind."""

    dtype: Any
    start: int
    end: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The slots of all parameters of a bucket.

    ``slots`` is in the order of the parameters; ``direct``, ``packed`` and ``strided`` list indices
    in the order of the buffers.
    """

    world: int
    slots: tuple[Slot, ...]
    direct: tuple[int, ...]
    packed: tuple[int, ...]
    strided: tuple[int, ...]
    shard_bytes: int
    unsharded_bytes: int
    packed_start: int

    @property
    def packed_bytes(self) -> int:
        """Bytes that one rank contributes to the packed all-gather."""
        return self.shard_bytes - self.packed_start

    @cached_property
    def content_bytes(self) -> int:
        """Bytes of the parameters without padding, which may be several times as much in large worlds."""
        return sum(prod(slot.shape) * slot.itemsize for slot in self.slots)

    @cached_property
    def has_gaps(self) -> bool:
        """True if some elements of the flat shard lie between the chunks of parameters."""
        return any(slot.chunk_numel != slot.padded_numel for slot in self.slots)

    @cached_property
    def has_padding(self) -> bool:
        """True if some elements of the flat shard belong to no parameter."""
        return self.has_gaps or not all(slot.is_even for slot in self.slots)

    @cached_property
    def segments(self) -> list[BufferSegment]:
        """The flat shard, cut where the kind changes."""
        return self._segments(self.direct + self.packed + self.strided)

    @cached_property
    def packed_segments(self) -> list[BufferSegment]:
        """The packed part, cut the same way, since a reduction adds numbers of one dtype."""
        return self._segments(self.packed + self.strided)

    def _segments(self, indices: tuple[int, ...]) -> list[BufferSegment]:
        segments: list[BufferSegment] = []
        kind: Hashable = None
        for index in indices:
            slot = self.slots[index]
            start, end = slot.shard_offset, slot.shard_offset + slot.padded_bytes
            if segments and kind == slot.kind:
                last = segments.pop()
                segments.append(BufferSegment(last.dtype, last.start, end, (*last.slots, index)))
            else:
                segments.append(BufferSegment(slot.dtype, start, end, (index,)))
            kind = slot.kind
        return segments


def plan_layout(
    slots: Sequence[Slot], world: int, is_direct: Sequence[bool], slots_serve: int | None = None
) -> Layout:
    """Lay out ``slots`` for ``world`` ranks.

    ``is_direct``: which have their own collective, unless they are strided. In a world of one there is
    nothing to pack, and the unsharded buffer equals the flat shard byte for byte.
    ``slots_serve``: another number of ranks for which the slots are also large enough.
    """
    slots = [replace(slot, world=world) for slot in slots]
    kinds = {slot.kind: order for order, slot in reversed(list(enumerate(slots)))}
    in_order = sorted(range(len(slots)), key=lambda i: (kinds[slots[i].kind], i))
    strided = tuple(i for i in in_order if slots[i].is_strided)
    direct = tuple(
        i for i in in_order
        if not slots[i].is_strided and (world == 1 or (is_direct[i] and slots[i].chunk_numel > 0))
    )  # fmt: skip
    has_place = {*direct, *strided}
    # Equal ones are adjacent, so that one copy unpacks them all. Sorted by shape, since the order of chunks
    # depends on the world size.
    packed = tuple(
        sorted(
            (i for i in in_order if i not in has_place),
            key=lambda i: (kinds[slots[i].kind], prod(slots[i].shape), slots[i].shape),
        )
    )
    placed: dict[int, Slot] = {}
    shard_offset = slot_offset = packed_start = 0
    for position, index in enumerate(direct + packed + strided):
        slot = slots[index]
        placed[index] = replace(slot, shard_offset=shard_offset, slot_offset=slot_offset)
        shard_offset += slot.padded_bytes
        other = slot if slots_serve is None else replace(slot, world=slots_serve)
        room = max(slot.slot_bytes, other.slot_bytes)
        slot_offset += round_up(room, slot.granule * slot.itemsize)
        if position < len(direct):
            packed_start = shard_offset
    return Layout(
        world,
        tuple(placed[i] for i in range(len(slots))),
        direct,
        packed,
        strided,
        shard_offset,
        slot_offset,
        packed_start,
    )


def choose_direct(
    chunk_bytes: Sequence[int], world: int, limit_bytes: float, max_direct: float
) -> list[bool]:
    """For each parameter, whether it is direct, by the bytes of its chunk.

    A direct parameter avoids the copies through a packed buffer, and the memory of that buffer. It costs one
    more collective, whose latency grows with the number of ranks, while each rank sends a smaller part of the
    parameter. So the size of the chunk, the part of one rank, decides. With a limit of 256 KiB::

        unsharded        chunk at 8 ranks    at 64       at 512
        2 MiB            256 KiB  direct     packed      packed
        24 MiB           direct              direct      48 KiB   packed: below a quarter of the limit
        64 MiB           direct              direct      128 KiB  direct, since it is large

    ``limit_bytes``: chunks from this size on are worth their own collective. ``max_direct``: at most this
    many are direct, the largest first; a bucket of many experts would issue hundreds of collectives at once.
    """
    smallest = limit_bytes / _SMALLEST_OF_LIMIT
    direct = [
        index
        for index, size in enumerate(chunk_bytes)
        if size >= limit_bytes or (size >= smallest and size * world > LARGEST_PACKED_BYTES)
    ]
    if len(direct) > max_direct:
        direct = sorted(direct, key=lambda index: -chunk_bytes[index])[: int(max_direct)]
    chosen = set(direct)
    return [index in chosen for index in range(len(chunk_bytes))]
