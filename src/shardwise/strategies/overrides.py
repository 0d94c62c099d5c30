"""For each module that becomes a group: its strategy, and the arguments of its ``fully_shard``."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardwise.arguments import check_type, describe
from shardwise.layout.fqns import listed, names_in, uncompiled
from shardwise.layout.mesh import ShardMesh, resolve_mesh
from shardwise.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from shardwise.setup.validation import check_offload, check_precision, check_reshard
from shardwise.strategies.meshes import Strategy, StrategySettings, mesh_arguments, strategy_named

_OVERRIDABLE = (
    *("strategy", "mesh", "dp_mesh_dims", "mp_policy", "offload_policy", "comm_policy"),
    *("reshard_after_forward", "shard_placement_fn"),
)

_Override = Strategy | Mapping[str, Any]
Overrides = Mapping[str | type[nn.Module], _Override]


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """How some modules are sharded. One object for all that are treated alike, which may share a group."""

    strategy: StrategySettings
    arguments: dict[str, Any]  # of fully_shard
    mesh: ShardMesh  # what they come to


def plan_groups(
    options: dict[str, Any], overrides: Overrides | None, model: nn.Module, blocks: list[nn.Module]
) -> dict[nn.Module, GroupPlan]:
    """The plan for each block and for the model, resolved and checked before the first module is touched."""
    changes = _matched(overrides, [*blocks, model], names_in(model))
    meshes: dict[tuple[Any, ...], dict[str, Any]] = {}
    known: dict[tuple[Any, ...], GroupPlan] = {}
    plans = {}
    for module in [*blocks, model]:
        asked = {**options, **changes.get(module, {})}
        key = (*asked, *(value if isinstance(value, str) else id(value) for value in asked.values()))
        if key not in known:
            known[key] = _resolved(asked, meshes)
        plans[module] = known[key]
    return plans


def _resolved(asked: dict[str, Any], meshes: dict[tuple[Any, ...], dict[str, Any]]) -> GroupPlan:
    strategy = strategy_named(asked.pop("strategy"))
    mesh, dims = asked.pop("mesh"), asked.pop("dp_mesh_dims")
    key = (strategy.roles, strategy.shards_over_both, id(mesh), id(dims))
    if key not in meshes:
        meshes[key] = mesh_arguments(strategy, mesh, dims)
    arguments = {"reshard_after_forward": strategy.reshard_after_forward, **meshes[key], **asked}
    check_precision(arguments["mp_policy"])
    check_offload(arguments["offload_policy"])
    resolved = resolve_mesh(arguments["mesh"], arguments.get("dp_mesh_dims"))
    check_reshard(arguments["reshard_after_forward"], resolved)
    return GroupPlan(strategy, arguments, resolved)


def _matched(
    overrides: Overrides | None, candidates: list[nn.Module], names: dict[nn.Module, str]
) -> dict[nn.Module, dict[str, Any]]:
    """The changes of ``overrides`` for each module that becomes a group."""
    if overrides is not None:
        wanted = "a dict from module names or classes to a strategy or a dict of arguments"
        check_type("shard_model", "overrides", overrides, wanted, Mapping)
    changes: dict[nn.Module, dict[str, Any]] = {}
    for key, change in (overrides or {}).items():
        if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
            raise TypeError(
                f"shard_model: overrides has {describe(key)} as a key; pass module names, patterns or "
                "classes."
            )
        which = f"the override for '{key}'" if isinstance(key, str) else f"the override for {key.__name__}"
        checked = _check_change(which, change)
        if isinstance(key, str):
            found = [module for module in candidates if fnmatchcase(names[module], key)]
        else:
            found = [module for module in candidates if isinstance(uncompiled(module), key)]
        if not found:
            known = listed((f"'{names[module]}'" for module in candidates), 4)
            raise ValueError(
                f"shard_model: {which} matches no module that becomes a group. Those are {known}; the model "
                "itself is ''. Have wrap= choose the module, or name one of these."
            )
        for module in found:
            changes[module] = {**changes.get(module, {}), **checked}
    return changes


def _check_change(which: str, change: Any) -> dict[str, Any]:
    if isinstance(change, str):
        change = {"strategy": change}
    check_type("shard_model", which, change, "the name of a strategy or a dict of arguments", Mapping)
    for name in change:
        if name not in _OVERRIDABLE:
            raise ValueError(
                f"shard_model: {which} sets '{name}'. A single group can have its own "
                f"{', '.join(_OVERRIDABLE)}."
            )
    if "strategy" in change:
        strategy_named(change["strategy"], f", in {which}")
    named = {"mp_policy": precision_named, "offload_policy": offload_named}
    return {
        name: named[name](f"shard_model: {which}", value) if name in named else value
        for name, value in change.items()
    }


# --- policies by name -----------------------------------------------------------------------------

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def precision_named(caller: str, mp_policy: Any) -> Any:
    """A policy that computes in the dtype of this name and reduces in float32; what is no text, as it is."""
    if not isinstance(mp_policy, str):
        return mp_policy
    if mp_policy.lower() not in _PRECISIONS:
        raise ValueError(
            f"{caller}: there is no mp_policy '{mp_policy}'. Pass 'bf16' or 'fp16' (compute in it, reduce in "
            "float32), 'fp32' (compute in what the model has), or a MixedPrecisionPolicy."
        )
    dtype = _PRECISIONS[mp_policy.lower()]
    return None if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def offload_named(caller: str, offload_policy: Any) -> Any:
    """``CPUOffloadPolicy`` for "cpu"; what is no text, as it is."""
    if not isinstance(offload_policy, str):
        return offload_policy
    if offload_policy.lower() != "cpu":
        raise ValueError(
            f"{caller}: there is no offload_policy '{offload_policy}'. Pass 'cpu', a CPUOffloadPolicy, or "
            "None to keep shards on the device."
        )
    return CPUOffloadPolicy()
