"""layout.py: pure arithmetic, compared with torch's own chunking and checked on random shapes."""

from itertools import pairwise

import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from shardwise.runtime.layout import ALIGNMENT, Entry, Layout, align, plan_layout

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
entries = st.builds(
    lambda shape, size: Entry(shape, size, f"{size}-byte"), shapes, st.sampled_from([1, 2, 4, 8, 16])
)
layouts = st.builds(
    lambda some, world, limit: plan_layout(some, world, lambda num_bytes: num_bytes >= limit),
    st.lists(entries, max_size=6),
    st.integers(1, 9),
    st.sampled_from([0, 32, 1 << 30]),
)


@given(shape=shapes.filter(bool), world=st.integers(1, 9))
def test_rows_of_a_rank_are_those_of_torch_chunk(shape: tuple[int, ...], world: int) -> None:
    (slot,) = plan_layout([Entry(shape, 4, "f")], world, lambda _: True).slots
    rows = torch.arange(shape[0])
    chunks = [list(c) for c in rows.chunk(world)] if shape[0] else []
    chunks += [[]] * (world - len(chunks))
    assert [list(rows[slice(*slot.row_range(rank))]) for rank in range(world)] == chunks
    assert [slot.local_shape(rank) for rank in range(world)] == [(len(c), *shape[1:]) for c in chunks]


@given(layouts)
def test_no_two_parameters_overlap_and_all_lie_inside(layout: Layout) -> None:
    for offset, size, end in (
        ("shard_offset", "chunk_bytes", layout.shard_bytes),
        ("slot_offset", "slot_bytes", layout.gathered_bytes),
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
        if slot.is_replicated:
            continue
        in_slot = [
            rank * slot.chunk_rows + i
            for rank in range(layout.world)
            for i in range(slot.local_shape(rank)[0])
        ]
        assert in_slot == list(range(slot.rows))  # padding falls at the end only


@given(layouts)
def test_packed_parameters_lie_together_by_dtype(layout: Layout) -> None:
    runs = layout.packed_runs()
    assert [i for run in runs for i in run.slots] == list(layout.packed)
    assert sum(run.end - run.start for run in runs) == layout.packed_bytes
    assert sum(align(layout.slots[i].chunk_bytes) for i in layout.packed) == layout.packed_bytes
    for run in runs:
        assert {layout.slots[i].entry.kind for i in run.slots} == {run.kind}
    for before, after in pairwise(runs):
        assert (before.end, True) == (after.start, before.kind != after.kind)


@given(st.lists(entries, max_size=6))
def test_in_a_world_of_one_the_gathered_buffer_is_the_shard_buffer(some: list[Entry]) -> None:
    layout = plan_layout(some, 1, lambda _: False)
    assert layout.gathered_bytes == layout.shard_bytes
    assert all(s.slot_offset == s.shard_offset and s.is_direct for s in layout.slots)


def test_a_layout_reads_like_its_picture() -> None:
    some = [Entry((10, 3), 4, "f32"), Entry((10,), 4, "f32"), Entry((), 4, "f32"), Entry((4,), 2, "bf16")]
    layout = plan_layout(some, 4, lambda num_bytes: num_bytes >= 32)
    lines = [
        f"{'x'.join(map(str, s.entry.shape)) or 'scalar':>6} {s.entry.kind:>4}"
        f" {'direct' if s.is_direct else 'packed'}"
        f" shard {s.shard_offset:>3} +{s.chunk_bytes:<3} slot {s.slot_offset:>3} +{s.slot_bytes}"
        for s in layout.slots
    ]
    lines.append(f"shard {layout.shard_bytes} bytes, gathered {layout.gathered_bytes}")
    assert_expected_inline(
        "\n".join(lines),
        """\
  10x3  f32 direct shard   0 +36  slot   0 +144
    10  f32 packed shard  48 +12  slot 144 +48
scalar  f32 packed shard  64 +4   slot 192 +16
     4 bf16 packed shard  80 +2   slot 208 +8
shard 96 bytes, gathered 224""",
    )
