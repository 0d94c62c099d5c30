"""Strategies by name, and their meshes."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.arguments import check_type
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import default_device_type, dim_names, mesh_text, resolve_mesh
from shardwise.policies import DataParallelMeshDims

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "zero3_hpz", "hybrid", "hybrid_zero2"]


@dataclass(frozen=True)
class StrategySettings:
    """``roles``: those of its mesh dimensions. The rest are settings of each group.

    ``shards_over_both``: over both dimensions as if they were one. The ranks along the last dimension, those
    of a host, keep the parameters together from forward to backward: see ``reshard_after_forward=n``.
    """

    name: str
    roles: tuple[str, ...]
    reshard_after_forward: bool | None
    reshard_after_backward: bool = True
    shards_over_both: bool = False


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        StrategySettings("ddp", ("replicate",), None),
        StrategySettings("zero1", ("shard",), False, reshard_after_backward=False),
        StrategySettings("zero2", ("shard",), False),
        StrategySettings("zero3", ("shard",), None),
        StrategySettings("zero3_hpz", ("replicate", "shard"), None, shards_over_both=True),
        StrategySettings("hybrid", ("replicate", "shard"), None),
        StrategySettings("hybrid_zero2", ("replicate", "shard"), False),
    )
}

_OF_FSDP1 = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "HYBRID_SHARD": "hybrid",
    "_HYBRID_SHARD_ZERO2": "hybrid_zero2",
    "NO_SHARD": "ddp",
}
"""What members of FSDP1's ``ShardingStrategy`` are called here."""


def strategy_named(name: Any, where: str = "") -> StrategySettings:
    """The strategy with this name."""
    known = list(STRATEGIES if where else [*STRATEGIES, "auto"])
    name = getattr(name, "name", name)  # of a member of an enum
    check_type("shard_model", f"strategy{where}", name, f"a name: {', '.join(known)}", str)
    if name not in STRATEGIES:
        raise ValueError(f"shard_model: {no_strategy(name, known, where)}")
    return STRATEGIES[name]


def no_strategy(name: str, known: Iterable[str], where: str = "") -> str:
    """The error text for ``name``, which is none of ``known``."""
    ours = _OF_FSDP1.get(name.upper())
    advice = f"FSDP1's {name.upper()} is called '{ours}'." if ours else f"Pass one of {', '.join(known)}."
    return f"there is no strategy '{name}'{where}. {advice}"


# --- meshes ---------------------------------------------------------------------------------------


def mesh_arguments(strategy: StrategySettings, mesh: DeviceMesh | None, dims: Any) -> dict[str, Any]:
    """The mesh of a strategy, as arguments of ``fully_shard``."""
    if dims is not None:
        resolve_mesh(mesh, dims)
        named = tuple(role for role in ("replicate", "shard") if getattr(dims, role))
        if named != strategy.roles:
            raise ValueError(
                f"shard_model: strategy '{strategy.name}' needs dp_mesh_dims to name dimensions to "
                f"{' and to '.join(strategy.roles)} over; it names those to {' and to '.join(named)} over."
            )
        return _over_both(mesh, dims) if strategy.shards_over_both else {"mesh": mesh, "dp_mesh_dims": dims}
    if mesh is None:
        return _arguments_for(strategy, _own_mesh(strategy))
    resolve_mesh(mesh)  # refuses what is no mesh, or has more than two dimensions
    if mesh.ndim != len(strategy.roles):
        what = "of two dimensions, (replicate, shard)" if len(strategy.roles) == 2 else "of one dimension"
        others = [s.name for s in STRATEGIES.values() if len(s.roles) == mesh.ndim]
        raise ValueError(
            f"shard_model: strategy '{strategy.name}' needs a mesh {what}, but this one has {mesh.ndim}. "
            f"Pass a mesh {what}, name the dimensions with dp_mesh_dims, or choose one of "
            f"{', '.join(others)}."
        )
    return _arguments_for(strategy, mesh)


def _over_both(mesh: Any, dims: Any) -> dict[str, Any]:
    """Shards over the dimensions of both roles, and a copy along those of the second until backward."""
    hosts, ranks = (dim_names(dims, role) for role in ("replicate", "shard"))
    known = mesh.mesh_dim_names or ()
    if max(map(known.index, hosts)) > min(map(known.index, ranks)):
        raise ValueError(
            f"shard_model: strategy 'zero3_hpz' needs the dimension of hosts, {listed(hosts)}, before that "
            f"of the ranks of a host, {listed(ranks)}; the mesh has {mesh_text(mesh)}. Exchange the roles in "
            "dp_mesh_dims, or make the mesh in that order."
        )
    return {
        "mesh": mesh,
        "dp_mesh_dims": DataParallelMeshDims(shard=(*hosts, *ranks)),
        "reshard_after_forward": prod(mesh[name].size() for name in ranks),
    }


def _arguments_for(strategy: StrategySettings, mesh: DeviceMesh) -> dict[str, Any]:
    if strategy.shards_over_both:
        if mesh.mesh_dim_names is None:
            pgs = mesh.get_all_groups()
            mesh = DeviceMesh.from_group(pgs, mesh.device_type, mesh.mesh, mesh_dim_names=strategy.roles)
        hosts, ranks = mesh.mesh_dim_names or ()
        return _over_both(mesh, DataParallelMeshDims(replicate=hosts, shard=ranks))
    if "shard" in strategy.roles:
        return {"mesh": mesh}
    if mesh.mesh_dim_names is None:  # roles go by names
        pg = mesh.get_group()
        mesh = DeviceMesh.from_group(pg, mesh.device_type, mesh.mesh, mesh_dim_names=strategy.roles)
    assert mesh.mesh_dim_names is not None
    return {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(replicate=mesh.mesh_dim_names[0])}


def _own_mesh(strategy: StrategySettings) -> DeviceMesh:
    """A mesh of all ranks."""
    kind = default_device_type("shard_model")
    world = dist.get_world_size()
    if len(strategy.roles) == 1:
        # PEFT makes adapters for layers that are sharded already; by "fsdp" it knows that they compute whole.
        names = ("fsdp",) if strategy.roles == ("shard",) else strategy.roles
        return init_device_mesh(kind, (world,), mesh_dim_names=names)
    per_host, found = ranks_per_host(kind, world)
    if per_host is None:
        raise ValueError(
            f"shard_model: strategy '{strategy.name}' needs to know which ranks are on one host, but "
            f"{found}, with {world} ranks in all, so they cannot be arranged. Start the job with "
            "torchrun, which sets LOCAL_WORLD_SIZE, or pass mesh=init_device_mesh(device_type, (hosts, "
            'ranks_per_host), mesh_dim_names=("replicate", "shard")).'
        )
    return init_device_mesh(kind, (world // per_host, per_host), mesh_dim_names=strategy.roles)


def ranks_per_host(kind: str, world: int) -> tuple[int | None, str]:
    """By what torchrun sets, how many of ``world`` ranks a host has; None if that is unknown, and why.

    Collective.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_host = int(told) if told.isdecimal() else 0
    # All ranks must find the same: they meet here, so that none waits for another in the mesh.
    sizes = torch.tensor([per_host, -per_host], device=kind)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    most, least = int(sizes[0].item()), -int(sizes[1].item())
    if most != least:
        return None, f"LOCAL_WORLD_SIZE is between {least} and {most} on the ranks"
    if per_host and world % per_host == 0:
        return per_host, ""
    return None, f"LOCAL_WORLD_SIZE is '{told}'" if told else "LOCAL_WORLD_SIZE is not set"
