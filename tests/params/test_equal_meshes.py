"""Meshes that are equal, over the same ranks, but have process groups of their own."""

import copy

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import fully_shard
from shardwise.init.loads import give_memory


@on_ranks(2)
def test_parameters_are_on_the_mesh_that_was_given() -> None:
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]  # type: ignore[arg-type]
    assert meshes[0] == meshes[1]
    for mesh in meshes:
        model = fully_shard(nn.Linear(4, 3), mesh=mesh)
        assert_on(mesh, model, copy.deepcopy(model))


def assert_on(mesh: DeviceMesh, *models: nn.Module) -> None:
    """Not on a mesh that is equal."""
    for model in models:
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.device_mesh.get_group() is mesh.get_group()


@on_ranks(2)
def test_they_stay_on_it_when_they_are_converted() -> None:
    """Also on the second of two equal meshes, while DTensor's caches hold the first."""
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]  # type: ignore[arg-type]
    for mesh in meshes:
        model = fully_shard(nn.Linear(4, 3), mesh=mesh).double()
        model(torch.ones(2, 4).double())
        with torch.device("meta"):
            emptied, given = nn.Linear(4, 3), nn.Linear(4, 3)
        emptied = fully_shard(emptied, mesh=mesh).to_empty(device="cpu")
        emptied(torch.ones(2, 4))
        give_memory(fully_shard(given, mesh=mesh))
        assert_on(mesh, model, emptied, given)
