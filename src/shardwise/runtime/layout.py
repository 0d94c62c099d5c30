"""Where each parameter of a group lies in the group's buffers.

Arithmetic on shapes only: no tensors, no process groups. All offsets and sizes are in bytes, so that
one gather serves a group of mixed dtypes.

World 4, weight (10, 3) and bias (10,), chunk = ceil(10 / 4) = 3 rows::

    shard on rank 1   | w rows 3-5 | b 3-5 |
    gathered          | w 0-2 | w 3-5 | w 6-8 | w 9 pad pad | b 0-2 | b 3-5 | ...
                      ^ slot of w: its first 10 rows are the weight, in place

``Shard(0)`` gives rank r the rows [r * chunk, min((r + 1) * chunk, rows)), and in a slot of
world * chunk rows, chunk r begins at row r * chunk: padding falls only at the end of a slot.

A scalar has no dim 0 to shard. Every rank keeps it; it is laid out as a column of ``world`` equal
rows, one a rank, so that the same gather and the same reduce-scatter serve it.

The shard buffer holds first the parameters that have a collective of their own ("direct"), then
those that share one ("packed"); within each part, parameters of one dtype lie together.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

ALIGNMENT = 16
"""Shards and slots start on multiples of this: off it, copies and collectives are slow."""


def align(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Entry:
    """What the layout needs to know of a parameter. ``kind`` is its dtype, here only a key."""

    shape: tuple[int, ...]
    itemsize: int
    kind: Hashable


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the shard buffer and in the gathered buffer."""

    entry: Entry
    world: int
    rows: int
    row_bytes: int
    chunk_rows: int
    is_direct: bool
    shard_offset: int
    slot_offset: int

    @cached_property
    def is_replicated(self) -> bool:
        """True for a scalar, which every rank keeps whole."""
        return not self.entry.shape

    @cached_property
    def chunk_bytes(self) -> int:
        """What one rank contributes to a gather, padding rows included."""
        return self.chunk_rows * self.row_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """Size of the slot in the gathered buffer."""
        return self.world * self.chunk_bytes

    @cached_property
    def is_even(self) -> bool:
        """True if no rank's chunk holds padding."""
        return self.rows == self.world * self.chunk_rows and not self.is_replicated

    def row_range(self, rank: int) -> tuple[int, int]:
        """The rows [start, end) of the full parameter that ``rank`` keeps (empty past the end)."""
        start = min(rank * self.chunk_rows, self.rows)
        return start, min(start + self.chunk_rows, self.rows)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``."""
        if self.is_replicated:
            return ()
        start, end = self.row_range(rank)
        return (end - start, *self.entry.shape[1:])


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch [start, end) of the shard buffer in which all parameters have one dtype."""

    kind: Hashable
    start: int
    end: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Places of all parameters of a group.

    ``slots`` is in the order of the parameters; ``direct`` and ``packed`` list indices in the
    order of the buffers.
    """

    world: int
    slots: tuple[Slot, ...]
    direct: tuple[int, ...]
    packed: tuple[int, ...]
    shard_bytes: int
    gathered_bytes: int
    packed_start: int

    @property
    def packed_bytes(self) -> int:
        """What one rank contributes to the packed gather."""
        return self.shard_bytes - self.packed_start

    @cached_property
    def has_padding(self) -> bool:
        """True if some bytes of a shard buffer belong to no parameter."""
        return any(not s.is_even or s.chunk_bytes % ALIGNMENT for s in self.slots)

    def packed_runs(self) -> list[Run]:
        """The packed part, cut where the dtype changes: a reduction adds numbers of one dtype."""
        runs: list[Run] = []
        for index in self.packed:
            slot = self.slots[index]
            start, end = slot.shard_offset, slot.shard_offset + align(slot.chunk_bytes)
            if runs and runs[-1].kind == slot.entry.kind:
                last = runs.pop()
                runs.append(Run(last.kind, last.start, end, (*last.slots, index)))
            else:
                runs.append(Run(slot.entry.kind, start, end, (index,)))
        return runs


def plan_layout(entries: Sequence[Entry], world: int, is_direct: Callable[[int], bool]) -> Layout:
    """Lay out ``entries`` for ``world`` ranks.

    ``is_direct(chunk_bytes)`` decides whether a parameter has a collective of its own. In a world
    of one there is nothing to pack, and the gathered buffer equals the shard buffer byte for byte.
    """
    chunks = [_rows_and_chunk(entry, world) for entry in entries]

    def wants_own_collective(index: int) -> bool:
        _, row_bytes, chunk_rows = chunks[index]
        num_bytes = row_bytes * chunk_rows
        return world == 1 or (num_bytes > 0 and is_direct(num_bytes))

    kinds = {entry.kind: order for order, entry in reversed(list(enumerate(entries)))}
    in_order = sorted(range(len(entries)), key=lambda i: (kinds[entries[i].kind], i))
    direct = tuple(i for i in in_order if wants_own_collective(i))
    packed = tuple(i for i in in_order if i not in set(direct))

    slots: dict[int, Slot] = {}
    shard_offset = slot_offset = packed_start = 0
    for index in direct + packed:
        rows, row_bytes, chunk_rows = chunks[index]
        slot = Slot(
            entries[index], world, rows, row_bytes, chunk_rows, index in direct, shard_offset, slot_offset
        )  # fmt: skip
        slots[index] = slot
        shard_offset += align(slot.chunk_bytes)
        slot_offset += align(slot.slot_bytes)
        if slot.is_direct:
            packed_start = shard_offset
    return Layout(
        world,
        tuple(slots[i] for i in range(len(entries))),
        direct,
        packed,
        shard_offset,
        slot_offset,
        packed_start,
    )


def _rows_and_chunk(entry: Entry, world: int) -> tuple[int, int, int]:
    """(rows, bytes a row, rows a chunk) of one parameter."""
    if not entry.shape:
        return world, entry.itemsize, 1
    rows = entry.shape[0]
    return rows, prod(entry.shape[1:]) * entry.itemsize, -(-rows // world)
