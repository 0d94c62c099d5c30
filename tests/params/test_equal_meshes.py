"""Meshes that are equal, over the same ranks, but have process groups of their own."""

import copy

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import fully_shard
from shardwise.init.initialise import give_memory


@on_ranks(2)
def test_parameters_are_on_the_mesh_that_was_given() -> None:
    """Not on one that is equal, which DTensor's caches hold; also once they are copied or converted."""
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]  # type: ignore[arg-type]
    assert meshes[0] == meshes[1]
    for mesh in meshes:
        model = fully_shard(nn.Linear(4, 3), mesh=mesh)
        converted = copy.deepcopy(model).double()
        converted(torch.ones(2, 4).double())
        with torch.device("meta"):
            emptied, given = nn.Linear(4, 3), nn.Linear(4, 3)
        emptied = fully_shard(emptied, mesh=mesh).to_empty(device="cpu")
        emptied(torch.ones(2, 4))
        give_memory(fully_shard(given, mesh=mesh))
        for each in (model, copy.deepcopy(model), converted, emptied, given):
            for param in each.parameters():
                assert isinstance(param, DTensor)
                assert param.device_mesh.get_group() is mesh.get_group()
