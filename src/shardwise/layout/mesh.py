"""Meshes: which ranks share a parameter, and which ranks hold copies of it.

Knows no modules. A parameter is sharded over one axis of ranks and replicated over another; either may be
missing. If it is already a DTensor, over a tensor-parallel or expert-parallel mesh, its shard becomes a
DTensor on the joint mesh.

    mesh (replicate=2, shard=4), weight with Shard(0) over tp=2:
        joint mesh       (replicate=2, shard=4, tp=2)
        placements       (Replicate(), _StridedShard(0, split_factor=2), Shard(0))

The tensor-parallel split came first and is the coarser one, but its dimension is last in the mesh: the split
factor expresses that. In a root mesh (tp, shard) it is first, and no factor is needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwise.torch_compat import c10d, dtensor


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks of one process group, seen by one of them. ``pg`` is None for a single rank."""

    pg: dist.ProcessGroup | None
    world: int
    rank: int

    @property
    def is_alone(self) -> bool:
        """True for a single rank."""
        return self.world == 1


ALONE = Axis(None, 1, 0)


def all_reduce_max(values: torch.Tensor, axes: Sequence[Axis]) -> None:
    """The elementwise maximum over all ranks that ``axes``, in one order, connect; in place, the same on
    all.
    """
    # From the first to the last and back, so that ranks of overlapping axes agree.
    for axis in [*axes, *axes[-2::-1]]:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=axis.pg)


def ranks_along(axis: Axis) -> tuple[int, ...]:
    """The global ranks of ``axis``, which has a process group."""
    assert axis.pg is not None
    return tuple(c10d.ranks_of(axis.pg))


def axes_of(tensors: Iterable[torch.Tensor]) -> list[Axis]:
    """The mesh dimensions along which DTensors among ``tensors`` are sharded or replicated, in order.

    Each set of ranks appears once, even if equal meshes have separate process groups; dimensions of one rank
    are left out.
    """
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor)}
    axes: dict[tuple[int, ...], Axis] = {}
    for mesh in meshes.values():
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                pg = mesh.get_group(dim)
                axis = Axis(pg, mesh.size(dim), mesh.get_local_rank(dim))
                axes.setdefault(ranks_along(axis), axis)
    return list(axes.values())


@dataclass(frozen=True, eq=False)
class ShardMesh:
    """Over which ranks parameters are sharded and replicated.

    ``mesh`` is the data-parallel mesh: its dims are the requested ones of replicate and shard, in this order.
    ``full_mesh`` is the mesh of all dims if the caller named the data-parallel ones in it (``dp_mesh_dims``);
    parameters may be DTensors on the whole of it.
    """

    mesh: DeviceMesh
    shard_axis: Axis
    replicate_axis: Axis
    device: torch.device
    roles: tuple[str, ...]
    full_mesh: "FullMesh | None" = None
    parts: tuple[DeviceMesh, ...] = ()  # from which ``mesh`` was composed, if it was
    _joint: dict[int, tuple[DeviceMesh, list[int]]] = field(default_factory=dict)
    _plain: dict[tuple[Placement, ...], tuple[Placement, ...]] = field(default_factory=dict)

    @cached_property
    def shard_dim_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of the ranks that share a parameter."""
        if self.roles == ("shard",):
            return self.mesh
        if "shard" in self.roles and self.parts:
            return self.parts[self.roles.index("shard")]
        if "shard" in self.roles and self.mesh.mesh_dim_names is not None:
            return self.mesh[self.mesh.mesh_dim_names[self.roles.index("shard")]]
        pg = self.shard_axis.pg
        if "shard" not in self.roles:
            assert self.replicate_axis.pg is not None
            pg = c10d.subgroup(self.replicate_axis.pg, [self.replicate_axis.rank], self.device, "alone")
        assert pg is not None
        return DeviceMesh.from_group(pg, self.mesh.device_type)

    @property
    def num_ranks(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return self.shard_axis.world * self.replicate_axis.world

    def axes(self) -> list[Axis]:
        """The axes with more than one rank."""
        return [axis for axis in (self.shard_axis, self.replicate_axis) if not axis.is_alone]

    def placements_of(
        self, tensor: torch.Tensor, dim: int, where: str
    ) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Mesh and placements of the shard of ``tensor``, sharded on ``dim``; refuses a mesh that does not
        fit.
        """
        shard: Placement = Shard(dim) if tensor.dim() else Replicate()
        placed: list[Placement] = [shard if role == "shard" else Replicate() for role in self.roles]
        if not isinstance(tensor, DTensor):
            # One object for all equal ones, so that loops over parameters can compare by identity.
            return self.mesh, self._plain.setdefault(tuple(placed), tuple(placed))
        if partial := next((each for each in tensor.placements if each.is_partial()), None):
            raise ValueError(
                f"{where} is a DTensor with the placement {partial}, a part of a sum, which cannot be "
                "trained. Redistribute it to Shard(...) or Replicate() first."
            )
        if self.full_mesh is not None and tensor.device_mesh == self.full_mesh.mesh:
            return self.full_mesh.mesh_of_shards, self.full_mesh.placements(tensor, shard, where)
        inner = tensor.device_mesh
        if id(inner) not in self._joint:
            self._joint[id(inner)] = self._join(self._slice_like(inner, where))
        joint, order = self._joint[id(inner)]
        placed += tensor.placements
        placed = [placed[index] for index in order]
        is_split = "shard" in self.roles and isinstance(shard, Shard)
        return joint, _strided(
            placed, joint.shape, order.index(self.roles.index("shard")) if is_split else None, where
        )

    def _join(self, inner: DeviceMesh) -> tuple[DeviceMesh, list[int]]:
        """The mesh of our dims and those of ``inner``, and the index among these of each of its dims.

        In the order of the root if that makes it a slice of the root: torch's clipping and DTensor's warnings
        look for such slices.
        """
        names = [*(self.mesh.mesh_dim_names or ()), *(inner.mesh_dim_names or ())]
        known = self._root.mesh_dim_names or ()
        order = list(range(len(names)))
        if set(names) <= set(known):
            order.sort(key=lambda index: known.index(names[index]))
            return self._root[tuple(names[index] for index in order)], order
        return dtensor.concatenate_meshes([*(self.parts or [self.mesh]), inner]), order

    @property
    def _root(self) -> DeviceMesh:
        return dtensor.root_mesh(self.mesh if self.full_mesh is None else self.full_mesh.mesh)

    def _slice_like(self, inner: DeviceMesh, where: str) -> DeviceMesh:
        """``inner`` as a slice of our root, from which a joint mesh can be made."""
        ours, theirs = self.mesh.mesh_dim_names or (), inner.mesh_dim_names or ()
        if common := [name for name in theirs if name in ours]:
            raise ValueError(
                f"{where} is a DTensor on the mesh {mesh_text(inner)}, whose dimension '{common[0]}' is "
                f"also one of the mesh {mesh_text(self.mesh)} of fully_shard: a dimension can be used once "
                "only. Pass another dimension of the root mesh, or name the data-parallel ones with "
                "dp_mesh_dims."
            )
        root = self._root
        if ours and theirs and root == dtensor.root_mesh(inner):
            return inner
        # DTensor's caches may return a mesh that is equal to ours but was sliced from another root.
        if theirs and set(theirs) <= set(root.mesh_dim_names or ()) and root[theirs] == inner:
            return root[theirs]
        raise ValueError(
            f"{where} is a DTensor on the mesh {mesh_text(inner)}, and fully_shard was given the mesh "
            f"{mesh_text(self.mesh)}: the two do not share a root with names, so their ranks cannot be "
            "related. Make both slices of one init_device_mesh(..., mesh_dim_names=...)."
        )


@dataclass(frozen=True, eq=False)
class FullMesh:
    """A mesh of all dims, some of which were named as data-parallel.

    ``mesh_of_shards`` is the same except for tuples of dims that were flattened into one; ``sources`` has
    for each of its dims the role, or the index of the dim of ``mesh``.
    """

    mesh: DeviceMesh
    mesh_of_shards: DeviceMesh
    sources: tuple[str | int, ...]

    @property
    def data_parallel_dims(self) -> list[int]:
        """Indices of the named dims of ``mesh``."""
        return [index for index in range(self.mesh.ndim) if index not in self.sources]

    def placements(self, tensor: DTensor, shard: Placement, where: str) -> tuple[Placement, ...]:
        """Placements of a shard on ``mesh_of_shards``."""
        for index in self.data_parallel_dims:
            placement = tensor.placements[index]
            if not placement.is_replicate():
                assert self.mesh.mesh_dim_names is not None
                raise ValueError(
                    f"{where} is a DTensor with {placement} on the mesh dimension "
                    f"'{self.mesh.mesh_dim_names[index]}', which dp_mesh_dims names as data-parallel. It "
                    "must be Replicate() there: fully_shard shards it."
                )
        placed = [
            tensor.placements[source] if isinstance(source, int)
            else shard if source == "shard" else Replicate()
            for source in self.sources
        ]  # fmt: skip
        at = self.sources.index("shard") if "shard" in self.sources and shard != Replicate() else None
        return _strided(placed, list(self.mesh_of_shards.shape), at, where)


def _strided(
    placed: list[Placement], sizes: Sequence[int], at: int | None, where: str
) -> tuple[Placement, ...]:
    """Set the split factor at index ``at``: into how many parts later dims had split the same tensor dim."""
    if at is None:
        return tuple(placed)
    shard = placed[at]
    assert isinstance(shard, Shard)
    for placement in placed[:at] + placed[at + 1 :]:
        if dtensor.is_strided_shard(placement):
            raise ValueError(
                f"{where} is a DTensor with the placement {placement}: it was sharded over data-parallel "
                "ranks before. Call fully_shard once a parameter."
            )
    factor = prod(size for p, size in zip(placed[at + 1 :], sizes[at + 1 :], strict=True) if p == shard)
    placed[at] = dtensor.strided_shard(shard.dim, factor) if factor > 1 else shard
    return tuple(placed)


def resolve_mesh(mesh: DeviceMesh | None, dims: Any = None) -> ShardMesh:
    """Check ``mesh``, or make the default one over all ranks, and find this rank's place in it.

    ``dims`` has ``shard`` and ``replicate``: names of dimensions, tuples of them, or None. Without it a mesh
    of one dimension shards; one of two replicates over the first and shards over the second.
    """
    if mesh is None:
        if dims is not None:
            raise ValueError("fully_shard: dp_mesh_dims names dimensions of a mesh, which is None. Pass it.")
        mesh = init_device_mesh(default_device_type("fully_shard"), (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard: mesh is a {type(mesh).__name__}, not a DeviceMesh. Make one with "
            "torch.distributed.init_device_mesh(device_type, (world_size,))."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}. Call fully_shard "
            "only on the ranks of the mesh."
        )
    device = device_of(mesh)
    if dims is not None:
        return _resolve_named(mesh, dims, device)
    if mesh.ndim > 2:
        raise ValueError(
            f"fully_shard: the mesh has {mesh.ndim} dimensions {mesh_text(mesh)}. Pass one (shard) or two "
            "(replicate, shard) of them, as mesh['name'] or mesh['name', 'name'], or say with dp_mesh_dims "
            "which are data-parallel."
        )
    if mesh.ndim == 1:
        return ShardMesh(mesh, _axis(mesh, 0), ALONE, device, ("shard",))
    return ShardMesh(mesh, _axis(mesh, 1), _axis(mesh, 0), device, ("replicate", "shard"))


def _resolve_named(mesh: DeviceMesh, dims: Any, device: torch.device) -> ShardMesh:
    named = {role: dim_names(dims, role) for role in ("replicate", "shard")}
    known = mesh.mesh_dim_names or ()
    chosen = [name for names in named.values() for name in names]
    if not chosen:
        raise ValueError(
            "fully_shard: dp_mesh_dims names no dimension. Pass DataParallelMeshDims(shard=..., "
            "replicate=...) with names in one or both."
        )
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"fully_shard: dp_mesh_dims names '{name}', which the mesh {mesh_text(mesh)} does not "
                "have. Give the mesh names with init_device_mesh(..., mesh_dim_names=...), and use those."
            )
        if chosen.count(name) > 1:
            raise ValueError(
                f"fully_shard: dp_mesh_dims names '{name}' twice. A dimension either shards or replicates."
            )
    parts = {
        role: mesh[names[0]] if len(names) == 1 else dtensor.flatten_mesh(mesh[names])
        for role, names in named.items()
        if names
    }
    sources: list[str | int] = []
    for index, name in enumerate(known):
        role = next((role for role, names in named.items() if name in names), None)
        if role is None:
            sources.append(index)
        elif role not in sources:
            sources.append(role)
    dp_mesh = dtensor.concatenate_meshes(list(parts.values()))
    shard_dim_mesh = mesh
    if len(sources) < mesh.ndim:
        shard_dim_mesh = dtensor.concatenate_meshes(
            [parts[s] if isinstance(s, str) else mesh[known[s]] for s in sources]
        )
    return ShardMesh(
        dp_mesh,
        _axis(parts["shard"], 0) if "shard" in parts else ALONE,
        _axis(parts["replicate"], 0) if "replicate" in parts else ALONE,
        device,
        tuple(parts),
        FullMesh(mesh, shard_dim_mesh, tuple(sources)),
        tuple(parts.values()),
    )


def dim_names(dims: Any, role: str) -> tuple[str, ...]:
    """The names of the mesh dimensions that ``dp_mesh_dims`` gives this role."""
    if not hasattr(dims, role):
        raise TypeError(
            f"fully_shard: dp_mesh_dims is a {type(dims).__name__}; pass DataParallelMeshDims(shard=..., "
            "replicate=...)."
        )
    value = getattr(dims, role)
    names: tuple[Any, ...] = tuple(value or ()) if isinstance(value, (tuple, list, type(None))) else (value,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"fully_shard: dp_mesh_dims.{role} is {value!r}; pass names of mesh dimensions.")
    return names


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    pg = _group_of(mesh, dim)
    served = c10d.group_devices(pg)
    if served and mesh.device_type not in served:
        raise ValueError(
            f"fully_shard: the mesh is of device type '{mesh.device_type}', but its process group has back "
            f"ends only for {sorted(served)}. Pass init_process_group a back end for '{mesh.device_type}', "
            "or make the mesh for another device."
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    if coordinate[dim] != mesh.get_local_rank(dim):
        raise ValueError(
            f"fully_shard: the mesh {mesh.mesh.tolist()} does not list its ranks in ascending order, as "
            "process groups do, so rows of a parameter would lie on the wrong ranks. Make the mesh with "
            "ascending ranks along each dimension."
        )
    return Axis(pg, mesh.size(dim), mesh.get_local_rank(dim))


def default_device_type(caller: str) -> str:
    """The device type to train on: the accelerator if the default process group is made for it, or "cpu".

    A group that was asked for as "gloo" is one of the host: gloo first copies what is on an accelerator.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{caller}: there is no process group, and so no ranks to shard over. Call "
            "torch.distributed.init_process_group() first (torchrun sets what it reads), or pass mesh=."
        )
    pg = dist.group.WORLD
    assert pg is not None
    accelerator, served = torch.accelerator.current_accelerator(check_available=True), c10d.group_devices(pg)
    if accelerator is None or accelerator.type not in served:
        return "cpu"
    return "cpu" if "cpu" in served and dist.get_backend(pg) == "gloo" else accelerator.type


def _group_of(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
    try:
        return mesh.get_group(dim)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"fully_shard: the process group of the mesh of shape {tuple(mesh.shape)} is gone ({error}). Was "
            "destroy_process_group() called since? Make the mesh again after init_process_group()."
        ) from None


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the type of ``mesh``."""
    if mesh.device_type in ("cpu", "meta"):
        return torch.device(mesh.device_type)
    module = torch.get_device_module(mesh.device_type)
    if not module.is_available():
        raise RuntimeError(
            f"fully_shard: the mesh is of device type '{mesh.device_type}', which this process does not "
            "have, or torch was built without it. Make the mesh for 'cpu', or run where the device is."
        )
    return torch.device(mesh.device_type, module.current_device())


def device_of_group(pg: dist.ProcessGroup) -> torch.device:
    """The device for tensors that ``pg`` communicates: the host if it supports that."""
    served = c10d.group_devices(pg)
    if not served or "cpu" in served:
        return torch.device("cpu")
    kind = sorted(served)[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def mesh_text(mesh: DeviceMesh) -> str:
    """The dimensions of ``mesh`` and their sizes, for messages."""
    names = mesh.mesh_dim_names or [f"dim {i}" for i in range(mesh.ndim)]
    return "(" + ", ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True)) + ")"
