"""Meshes that are equal, over the same ranks, but have process groups of their own."""

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from harness import World
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import fully_shard
from shardwise.init.meta_memory import give_memory


def names_of_process_groups() -> dict[str, list[str]]:
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]  # type: ignore[arg-type]
    assert meshes[0] == meshes[1]
    found = {}
    for name, mesh in zip(("first", "second"), meshes, strict=True):
        model = fully_shard(nn.Linear(4, 3), mesh=mesh)
        of_copy = copy.deepcopy(model)
        params = [*model.parameters(), *of_copy.parameters()]
        found[name] = process_groups_of(params, mesh)
    return found


def process_groups_of(params: Iterable[Tensor], mesh: DeviceMesh) -> list[str]:
    pgs = [param.device_mesh.get_group() for param in params if isinstance(param, DTensor)]
    return sorted({"its own" if pg is mesh.get_group() else "another" for pg in pgs})


def after_conversions() -> dict[str, list[str]]:
    """On the second of two equal meshes, while DTensor's caches hold the first."""
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]  # type: ignore[arg-type]
    found = {}
    for mesh in meshes:
        model = fully_shard(nn.Linear(4, 3), mesh=mesh).double()
        model(torch.ones(2, 4).double())
        found["converted"] = process_groups_of(model.parameters(), mesh)
        with torch.device("meta"):
            emptied, given = nn.Linear(4, 3), nn.Linear(4, 3)
        emptied = fully_shard(emptied, mesh=mesh).to_empty(device="cpu")
        emptied(torch.ones(2, 4))
        found["emptied"] = process_groups_of(emptied.parameters(), mesh)
        give_memory(fully_shard(given, mesh=mesh))
        found["given memory"] = process_groups_of(given.parameters(), mesh)
    return found


def test_parameters_are_on_the_mesh_that_was_given(world2: World) -> None:
    for found in world2.run(names_of_process_groups):
        assert found == {"first": ["its own"], "second": ["its own"]}


def test_they_stay_on_it_when_they_are_converted(world2: World) -> None:
    for found in world2.run(after_conversions):
        assert found == {key: ["its own"] for key in ["converted", "emptied", "given memory"]}
