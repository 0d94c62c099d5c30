"""Meshes that are equal, over the same ranks, but have process groups of their own."""

import copy

import torch.distributed as dist
from harness import World
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import fully_shard


def names_of_process_groups() -> dict[str, list[str]]:
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]  # type: ignore[arg-type]
    assert meshes[0] == meshes[1]
    found = {}
    for name, mesh in zip(("first", "second"), meshes, strict=True):
        model = fully_shard(nn.Linear(4, 3), mesh=mesh)
        of_copy = copy.deepcopy(model)
        params = [*model.parameters(), *of_copy.parameters()]
        pgs = [param.device_mesh.get_group() for param in params if isinstance(param, DTensor)]
        found[name] = sorted({"its own" if pg is mesh.get_group() else "another" for pg in pgs})
    return found


def test_parameters_are_on_the_mesh_that_was_given(world2: World) -> None:
    for found in world2.run(names_of_process_groups):
        assert found == {"first": ["its own"], "second": ["its own"]}
