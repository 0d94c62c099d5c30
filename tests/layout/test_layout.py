"""slots.py: pure arithmetic, compared with torch's own chunking and checked on random shapes."""

from dataclasses import replace
from itertools import pairwise

import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.slots import ALIGNMENT, Layout, Slot, plan_layout

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def entry(
    shape: tuple[int, ...], itemsize: int, kind: str, dim: int = 0, smallest: int | None = None
) -> Slot:
    return Slot(shape, kind, itemsize, kind, ALIGNMENT // (smallest or itemsize), dim % max(1, len(shape)))


def planned(some: list[Slot], world: int, limit: int) -> Layout:
    return plan_layout(some, world, [replace(e, world=world).chunk_bytes >= limit for e in some])


entries = st.builds(
    lambda shape, size, dim: entry(shape, size, f"{size}-byte", dim),
    shapes,
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 2),
)
layouts = st.builds(
    planned, st.lists(entries, max_size=6), st.integers(1, 9), st.sampled_from([0, 32, 1 << 30])
)


@given(shape=shapes.filter(bool), world=st.integers(1, 9), dim=st.integers(0, 2))
def test_what_a_rank_keeps_is_what_torch_chunk_gives_it(shape: tuple[int, ...], world: int, dim: int) -> None:
    dim %= len(shape)
    (slot,) = planned([entry(shape, 4, "f", dim)], world, 0).slots
    rows = torch.arange(shape[dim])
    chunks = [list(c) for c in rows.chunk(world)] if shape[dim] else []
    chunks += [[]] * (world - len(chunks))
    assert [list(rows[slice(*slot.index_range(rank))]) for rank in range(world)] == chunks
    shapes = [(*shape[:dim], len(c), *shape[dim + 1 :]) for c in chunks]
    assert [slot.local_shape(rank) for rank in range(world)] == shapes


@given(layouts)
def test_no_two_parameters_overlap_and_all_lie_inside(layout: Layout) -> None:
    for offset, size, end in (
        ("shard_offset", "chunk_bytes", layout.shard_bytes),
        ("slot_offset", "slot_bytes", layout.unsharded_bytes),
    ):
        stretches = sorted((getattr(s, offset), getattr(s, offset) + getattr(s, size)) for s in layout.slots)
        for (_, before), (after, _) in pairwise(stretches):
            assert before <= after
        assert all(stop <= end for _, stop in stretches)


@given(layouts)
def test_shards_and_slots_are_aligned(layout: Layout) -> None:
    assert all(s.shard_offset % ALIGNMENT == s.slot_offset % ALIGNMENT == 0 for s in layout.slots)


@given(layouts)
def test_chunks_laid_in_a_slot_are_the_full_parameter(layout: Layout) -> None:
    for slot in layout.slots:
        if slot.is_replicated or slot.is_strided or not slot.numel_across:
            continue
        dim = slot.dim
        in_slot = [
            rank * slot.chunk_size + i
            for rank in range(layout.world)
            for i in range(slot.local_shape(rank)[dim])
        ]
        assert in_slot == list(range(slot.shape[dim]))  # padding falls at the end only


@given(layouts)
def test_packed_parameters_lie_together_by_dtype(layout: Layout) -> None:
    packed = layout.packed + layout.strided
    for runs, indices in ((layout.packed_segments, packed), (layout.segments, layout.direct + packed)):
        assert [i for run in runs for i in run.slots] == list(indices)
        assert sum(run.end - run.start for run in runs) == sum(layout.slots[i].padded_bytes for i in indices)
        for run in runs:
            assert {layout.slots[i].kind for i in run.slots} == {run.dtype}
        for before, after in pairwise(runs):
            assert (before.end, True) == (after.start, before.dtype != after.dtype)


@given(layouts, st.sampled_from([2, 4]))
def test_layouts_of_two_sizes_of_element_hold_the_same_elements_at_the_same_places(
    layout: Layout, times: int
) -> None:
    small = [entry(s.shape, 4, "small", s.dim) for s in layout.slots]
    large = [entry(s.shape, 4 * times, "large", s.dim, smallest=4) for s in layout.slots]
    is_direct = [index in layout.direct for index in range(len(layout.slots))]
    one = plan_layout(small, layout.world, is_direct)
    other = plan_layout(large, layout.world, is_direct)
    for a, b in zip(one.slots, other.slots, strict=True):
        assert (a.shard_offset * times, a.slot_offset * times) == (b.shard_offset, b.slot_offset)
    assert [r.slots for r in one.segments] == [r.slots for r in other.segments]


@given(st.lists(entries, max_size=6), st.sampled_from([(4, 2), (6, 3), (8, 2)]))
def test_slots_can_serve_two_worlds(some: list[Slot], worlds: tuple[int, int]) -> None:
    large, small = worlds
    for_large = plan_layout(some, large, [True] * len(some), slots_serve=small)
    for_small = plan_layout(some, small, [True] * len(some), slots_serve=large)
    assert [s.slot_offset for s in for_large.slots] == [s.slot_offset for s in for_small.slots]
    assert for_large.unsharded_bytes == for_small.unsharded_bytes
    for s in (*for_large.slots, *for_small.slots):
        assert s.slot_offset + s.slot_bytes <= for_large.unsharded_bytes


@given(st.lists(entries, max_size=6))
def test_in_a_world_of_one_the_unsharded_buffer_is_the_shard_buffer(some: list[Slot]) -> None:
    layout = plan_layout(some, 1, [False] * len(some))
    assert layout.unsharded_bytes == layout.shard_bytes
    assert all(s.slot_offset == s.shard_offset for s in layout.slots)
    assert set(layout.direct) == set(range(len(some)))


def test_a_layout_reads_like_its_picture() -> None:
    some = [
        entry((10, 3), 4, "f32"),
        entry((10,), 4, "f32"),
        entry((), 4, "f32"),
        entry((4,), 2, "bf16"),
        entry((3, 8), 4, "f32", dim=1),
    ]
    layout = planned(some, 4, 32)
    lines = [
        f"{'x'.join(map(str, s.shape)) or 'scalar':>6} {s.kind:>4}"
        f" {'direct' if index in layout.direct else 'strided' if s.is_strided else 'packed':>7}"
        f" shard {s.shard_offset:>3} +{s.chunk_bytes:<3} slot {s.slot_offset:>3} +{s.slot_bytes}"
        for index, s in enumerate(layout.slots)
    ]
    lines.append(f"shard {layout.shard_bytes} bytes, unsharded {layout.unsharded_bytes}")
    assert_expected_inline(
        "\n".join(lines),
        """\
  10x3  f32  direct shard   0 +36  slot   0 +144
    10  f32  packed shard  64 +12  slot 160 +48
scalar  f32  packed shard  48 +4   slot 144 +16
     4 bf16  packed shard  80 +2   slot 208 +8
   3x8  f32 strided shard  96 +24  slot 224 +96
shard 128 bytes, unsharded 320""",
    )
