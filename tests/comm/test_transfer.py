"""Full tensors out of DTensors and back: every mesh, placement and owner, against torch's own answers."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import peak_bytes
from harness import World
from hypothesis import given
from hypothesis import strategies as st
from meshed import device_mesh
from on_ranks import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torchs_box
from torch.distributed.tensor.placement_types import Partial, Placement, _StridedShard

from shardwise.comm import full_tensors
from shardwise.comm.full_tensors import gather_full, own_region, sharding_of, write_rows
from shardwise.layout.regions import Split, cuts_in_order

# --- arithmetic -----------------------------------------------------------------------------------


@st.composite
def splits(draw: Any) -> tuple[Split, tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Placement] = []
    for _ in sizes:
        dim = draw(st.integers(-1, len(shape) - 1))
        placements.append(Replicate() if dim < 0 else Shard(dim))
    shards = [(m, p.dim, 1) for m, p in enumerate(placements) if isinstance(p, Shard)]
    return Split(shape, sizes, cuts_in_order(shards, sizes)), tuple(placements)


@given(splits(), st.data())
def test_a_part_is_where_torch_says(drawn: tuple[Split, tuple[Placement, ...]], data: Any) -> None:
    split, placements = drawn
    coordinate = [data.draw(st.integers(0, size - 1)) for size in split.sizes]
    sizes, offsets = torchs_box(split.shape, split.sizes, coordinate, placements)
    box = split.region(coordinate)
    assert box.sizes == sizes
    if box.numel:
        assert box.offsets == offsets


@given(splits())
def test_parts_cover_the_tensor_once(drawn: tuple[Split, tuple[Placement, ...]]) -> None:
    split, _ = drawn
    count = torch.zeros(split.shape)
    for coordinate in split.coordinates():
        box = split.region(coordinate)
        count[box.slices] += 1
        assert all(n <= most for n, most in zip(box.sizes, split.largest, strict=True))
    assert (count == 1).all()


def test_a_cut_with_a_factor_comes_after_those_it_counts() -> None:
    # Tensor parallelism over mesh dim 1 first, then shards over mesh dim 0.
    cuts = cuts_in_order([(0, 0, 2), (1, 0, 1)], (2, 2))
    boxes = [Split((7, 4), (2, 2), cuts).region(at) for at in [(0, 0), (1, 0), (0, 1), (1, 1)]]
    assert [(box.offsets[0], box.sizes[0]) for box in boxes] == [(0, 2), (2, 2), (4, 2), (6, 1)]


# --- out of DTensors ------------------------------------------------------------------------------

PLACED: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]] = {
    # name: mesh, placements, shape
    "even rows": ((4,), (Shard(0),), (8, 3)),
    "uneven rows": ((4,), (Shard(0),), (6, 3)),
    "fewer rows than ranks": ((4,), (Shard(0),), (2, 5)),
    "columns": ((4,), (Shard(1),), (3, 9)),
    "nothing": ((4,), (Shard(0),), (0, 3)),
    "a scalar": ((4,), (Replicate(),), ()),
    "hybrid": ((2, 2), (Replicate(), Shard(0)), (5, 3)),
    "rows twice": ((2, 2), (Shard(0), Shard(0)), (8, 3)),
    "rows twice, uneven": ((2, 2), (Shard(0), Shard(0)), (7, 3)),
    "rows and columns": ((2, 2), (Shard(0), Shard(1)), (5, 7)),
    "columns and copies": ((2, 2), (Shard(1), Replicate()), (3, 4)),
    "strided": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (8, 3)),
}


def placed(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    shape, placements, size = PLACED[name]
    mesh = device_mesh(shape, tuple(f"{name} {i}" for i in range(len(shape))))
    full = torch.arange(torch.Size(size).numel()).reshape(size).to(dtype)
    if any(isinstance(p, _StridedShard) for p in placements):
        # distribute_tensor refuses some of these: cut as sharding_of says, of which torch's word is asked below.
        shards = [(m, p.dim, getattr(p, "split_factor", 1)) for m, p in enumerate(placements)]
        box = Split(size, shape, cuts_in_order(shards, shape)).region(mesh.get_coordinate())
        local = full[box.slices].clone()
        made = DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.stride())
        assert torch.equal(made.full_tensor(), full)
        return full, made
    return full, distribute_tensor(full, mesh, placements)


def gathered_at(owner: int | None, staging_bytes: int, dtype: torch.dtype) -> list[str]:
    fulls, tensors = zip(*(placed(name, dtype) for name in PLACED), strict=True)
    found = gather_full(tensors, owner, staging_bytes=staging_bytes)
    wrong = []
    for name, got, want, tensor in zip(PLACED, found, fulls, tensors, strict=True):
        wants_it = owner is None or owner == dist.get_rank()
        if (got is not None) != wants_it:
            wrong.append(f"{name}: {got}")
        elif got is not None:
            if not torch.equal(got, want) or got.dtype != want.dtype:
                wrong.append(f"{name}: {got} where {want} is expected")
            local = tensor.to_local()
            if local.numel() and got.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
                wrong.append(f"{name}: shares its memory with the shard")
    return wrong


@pytest.mark.parametrize(("owner", "dtype"), [(None, torch.bfloat16), (2, torch.bool)], ids=str)
def test_all_are_gathered_to_all_or_to_their_owner(
    world4: World, owner: int | None, dtype: torch.dtype
) -> None:
    assert world4.run(gathered_at, owner, 1 << 20, dtype) == [[]] * 4


@pytest.mark.parametrize(("owner", "dtype"), [(None, torch.complex64), (1, torch.float64)], ids=str)
def test_a_small_staging_buffer_takes_a_few_rows_at_a_time(
    world4: World, owner: int | None, dtype: torch.dtype
) -> None:
    assert world4.run(gathered_at, owner, 1, dtype) == [[]] * 4


@pytest.mark.parametrize(("owner", "dtype"), [(None, torch.int64), (1, torch.float32)], ids=str)
@on_ranks(4)
def test_large_tensors_are_gathered_into_their_place(owner: int | None, dtype: torch.dtype) -> None:
    with mock.patch.object(full_tensors, "PACKED_BELOW", 0):
        assert gathered_at(owner, 1 << 20, dtype) == []


@on_ranks(4)
def test_only_the_replica_of_the_owner_takes_part() -> None:
    _, tensor = placed("hybrid")
    with mock.patch.object(full_tensors, "gather_to", wraps=full_tensors.gather_to) as gathered:
        gather_full([tensor], 3)
    assert gathered.called == [False, False, True, True][dist.get_rank()]


def gathered_with_all_allocations(name: str, owner: int | None, staging_bytes: int) -> int:
    """The most bytes alive at once beside the local part, by torch's own count of what it hands out."""
    shape, placements, _ = PLACED[name]
    mesh = device_mesh(shape, tuple(f"{name} {i}" for i in range(len(shape))))
    tensor = distribute_tensor(torch.zeros(512, 512), mesh, placements)
    return peak_bytes(lambda: gather_full([tensor], owner, staging_bytes=staging_bytes))


FULL, STAGING = 512 * 512 * 4, 128 << 10


@pytest.mark.parametrize("name", ["even rows", "rows and columns", "columns"])
def test_memory_is_the_full_tensor_and_the_staging_buffer_and_the_owners_alone(
    world4: World, name: str
) -> None:
    owner, *others = world4.run(gathered_with_all_allocations, name, 0, STAGING)
    everyone = world4.run(gathered_with_all_allocations, name, None, STAGING)
    assert max(others) <= 2 * STAGING  # what is sent lies beside what is received
    for most in (owner, *everyone):
        assert FULL <= most <= FULL + 2 * STAGING


@on_ranks(2)
def test_many_small_tensors_travel_together() -> None:
    mesh = device_mesh((2,), ("many",))
    tensors = [distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)]) for _ in range(100)]
    with mock.patch.object(full_tensors, "make_communicator", wraps=full_tensors.make_communicator) as made:
        gather_full(tensors)
    assert made.call_count == 1


@on_ranks(2)
def test_parts_of_a_sum_are_refused() -> None:
    told = (
        "a DTensor with placement P(sum) holds parts of a sum, which have no place in the full tensor. "
        "Redistribute it to Shard(...) or Replicate() first."
    )
    mesh = device_mesh((2,), ("partial",))
    with pytest.raises(ValueError, match="parts of a sum") as caught:
        gather_full([DTensor.from_local(torch.ones(2), mesh, [Partial()])])
    assert str(caught.value) == told


# --- into DTensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("stretch", [2, 100])
@on_ranks(4)
def test_rows_come_to_the_ranks_that_hold_them(stretch: int) -> None:
    wrong = []
    for name in PLACED:
        full, tensor = placed(name)
        with torch.no_grad():
            tensor.to_local().fill_(-1)
        rows = full.reshape(1) if not full.dim() else full
        for start in range(0, len(rows), stretch):
            write_rows(tensor, start, rows[start : start + stretch])
        box = own_region(tensor)
        if not torch.equal(tensor.to_local(), full[box.slices]):
            wrong.append(f"{name}: {tensor.to_local()}")
        if sharding_of(tensor).shape != tuple(full.shape):
            wrong.append(f"{name}: shape")
    assert wrong == []
