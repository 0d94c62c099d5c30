"""Planning at any world size, in one process, on torch's fake process group."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from events import events_of
from new_process import in_a_new_process
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.comm.communicators import BackendCollectives
from shardwise.comm.reduction import ReduceScatter
from shardwise.layout.slots import Slot, plan_layout


def mesh_of_a_fake_world(rank: int, world: int) -> DeviceMesh:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    return init_device_mesh("cpu", (world,))


def assert_a_step_is_planned(world: int, local: list[list[int]]) -> None:
    mesh = mesh_of_a_fake_world(world - 1, world)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    events = events_of(model)
    model(torch.ones(2, 256)).sum().backward()
    assert events
    assert [list(p.to_local().shape) for p in model[0].parameters()] == local
    assert [list(p.shape) for p in model[0].parameters()] == [[512, 256], [512], [256, 512], [256]]


@pytest.mark.processes
def test_a_step_is_planned_for_a_rank_of_any_world() -> None:
    """Here with what is left for the last of 86 ranks."""
    in_a_new_process(assert_a_step_is_planned, 86, [[2, 256], [2], [1, 512], [1]])


@pytest.mark.slow
@pytest.mark.processes
def test_a_step_is_planned_for_a_rank_that_has_nothing() -> None:
    in_a_new_process(assert_a_step_is_planned, 4096, [[0, 256], [0], [0, 512], [0]])


def collectives_of(block: nn.Module, mesh: DeviceMesh) -> tuple[int, int, int]:
    """All-gathers of a group, its reductions, and KiB of a rank in the smallest of those."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    (bucket,) = fully_shard(block, mesh=mesh, mp_policy=policy)._shardwise_state.group.buckets
    parts = bucket.reduction.parts
    gathers = len(bucket.computed.direct) + bool(bucket.computed.packed_bytes)
    return gathers, len(parts), min(part.num_bytes for part in parts) // mesh.size() >> 10


def collectives_in(world: int) -> tuple[tuple[int, int, int], ...]:
    """For 8 matrices of 24 MiB and their biases, and for 384 experts of 3 MiB."""
    mesh = mesh_of_a_fake_world(0, world)
    with torch.device("meta"):
        wide = nn.Sequential(*(nn.Linear(4096, 3072) for _ in range(8)))
        experts = nn.Sequential(*(nn.Linear(2048, 768, bias=False) for _ in range(384)))
    return collectives_of(wide, mesh), collectives_of(experts, mesh)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "block", "experts"),
    [
        (8, (9, 3, 12300), (65, 1, 294912)),
        (64, (9, 3, 1537), (1, 1, 36864)),
        (512, (1, 1, 768), (1, 1, 6144)),
    ],
)
def test_collectives_stay_few_and_large_in_any_world(
    world: int, block: tuple[int, int, int], experts: tuple[int, int, int]
) -> None:
    assert in_a_new_process(collectives_in, world) == (block, experts)


def parts_of(mib: int) -> dict[str, int]:
    """In how many parts four matrices that make so many MiB are reduced, by the kind of device."""
    pg = mesh_of_a_fake_world(0, 8).get_group()
    slots = [Slot((mib << 16,), torch.float32, 4, "alike", 4) for _ in range(4)]
    found = {}
    for kind in ("cpu", "cuda"):
        comm = BackendCollectives(pg, torch.device(kind))
        layout = plan_layout(slots, 8, [True] * 4)
        found[kind] = len(ReduceScatter(comm, layout, torch.device("meta")).parts)
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("mib", "on_a_device"), [(100, 1), (256, 2), (1024, 4)])
def test_a_device_holds_small_groups_whole_to_spare_the_host_calls(mib: int, on_a_device: int) -> None:
    assert in_a_new_process(parts_of, mib) == {"cpu": 4, "cuda": on_a_device}
