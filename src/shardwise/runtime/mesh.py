"""What a DeviceMesh means here: which ranks share a parameter, through which process group.

Knows nothing of parameters. So far a mesh has one dimension, over which parameters are sharded.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwise.runtime import compat


@dataclass(frozen=True)
class ShardMesh:
    """A one-dimensional mesh over which parameters are sharded, as seen by this rank."""

    mesh: DeviceMesh
    pg: dist.ProcessGroup
    world: int
    rank: int
    device: torch.device

    def placements(self, shape: torch.Size) -> tuple[Placement, ...]:
        """``Shard(0)``; a scalar has no dim 0 and is replicated."""
        return (Shard(0),) if shape else (Replicate(),)


def resolve_mesh(mesh: DeviceMesh | None) -> ShardMesh:
    """Check ``mesh``, or make the default one over all ranks, and read this rank's place in it.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        RuntimeError: there is no process group, or no device of the mesh's type.
        ValueError: this rank is not in the mesh, or its back end does not serve its device.
        NotImplementedError: the mesh has more than one dimension.
    """
    if mesh is None:
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard: mesh is a {type(mesh).__name__}, not a DeviceMesh. Make one with "
            "torch.distributed.init_device_mesh(device_type, (world_size,))."
        )
    if mesh.ndim != 1:
        raise NotImplementedError(
            f"fully_shard: the mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}; so far a mesh of "
            "one dimension is supported (hybrid sharding and tensor parallelism are not yet). Pass "
            "one dimension of it: mesh['name']."
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"fully_shard: rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}, so it "
            "would have no shard. Call fully_shard only on the ranks of the mesh."
        )
    pg = _group_of(mesh)
    served = compat.group_devices(pg)
    if served and mesh.device_type not in served:
        raise ValueError(
            f"fully_shard: the mesh is of device type '{mesh.device_type}', but its process group "
            f"has back ends only for {sorted(served)}; its collectives would fail or crash. Pass "
            f"init_process_group a back end for '{mesh.device_type}', or make the mesh for another device."
        )
    return ShardMesh(mesh, pg, mesh.size(), coordinate[0], _device_of(mesh))


def _default_mesh() -> DeviceMesh:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "fully_shard: there is no process group, so nobody to shard with. Call "
            "torch.distributed.init_process_group() first (torchrun sets what it reads), or pass mesh=."
        )
    assert dist.group.WORLD is not None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu"
    if accelerator is not None and accelerator.type in compat.group_devices(dist.group.WORLD):
        kind = accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    try:
        return mesh.get_group()
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"fully_shard: the process group of the mesh of shape {tuple(mesh.shape)} is gone ({error}). Was "
            "destroy_process_group() called since? Make the mesh again after init_process_group()."
        ) from None


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type in ("cpu", "meta"):
        return torch.device(mesh.device_type)
    module = torch.get_device_module(mesh.device_type)
    if not module.is_available():
        raise RuntimeError(
            f"fully_shard: the mesh is of device type '{mesh.device_type}', but this process has no such "
            "device, or torch was built without it. Make the mesh for 'cpu', or run where the device is."
        )
    return torch.device(mesh.device_type, module.current_device())
