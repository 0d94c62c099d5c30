"""The plan of a module tree: facts, as text, that must be equal on all ranks that communicate.

    ("blocks.0.up.weight", "shape")          "(16, 8)"
    ("blocks.0.up.weight", "requires_grad")  "True"
    ("blocks.0", "reshard_after_forward")    "None"
    ("blocks.0", "a backward without gradients of blocks.0.scale (...)")   "seen"

Facts belong to the ranks of one mesh. So experts, whose names may differ between ranks, are compared only
among the ranks that share them, and pipeline stages not at all. Settings that may change from one microbatch
to the next (gradient synchronisation, resharding after backward) count in the first comparison only.
"""

from collections.abc import Mapping, Sequence
from zlib import crc32

from torch.distributed.device_mesh import DeviceMesh

from shardwise.buckets.bucket import Bucket
from shardwise.groups.group import ParameterGroup
from shardwise.groups.settings import shared_settings
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import mesh_text
from shardwise.params.parameter import Param

FULL_LOAD = "the checksum of the full value that load_state_dict was given"

_MOST_SHOWN = 8  # parameters of one reduction
_REMEDY = "set_reduce_scatter_unused_params(True) lets ranks differ"

Plan = dict[tuple[int, ...], dict[tuple[str, str], str]]
"""Facts by (where, what) for each set of ranks; the largest sets first, in the same order on all ranks."""


def plan_of(groups: Sequence[ParameterGroup], trained: Mapping[Param, bool], *, is_first: bool) -> Plan:
    """The plan of ``groups``.

    Args:
        groups: all groups of a module tree.
        trained: whether each parameter is trained; for a missing one, ``requires_grad`` decides.
        is_first: include settings that may change from one microbatch to the next.
    """
    plan: Plan = {}
    ranks_of: dict[int, tuple[int, ...]] = {}

    def facts_on(mesh: DeviceMesh) -> dict[tuple[str, str], str]:
        ranks = ranks_of.get(id(mesh))
        if ranks is None:
            ranks = ranks_of[id(mesh)] = tuple(sorted(mesh.mesh.flatten().tolist()))
        return plan.setdefault(ranks, {})

    for group in groups:
        facts_on(group.mesh.mesh)
        for bucket in group.buckets:
            for param in bucket.params:
                facts = facts_on(param.joint_mesh)
                for what, value in _facts_of(param, bucket, group).items():
                    facts[param.fqn, what] = value
                facts[param.fqn, "requires_grad"] = str(trained.get(param, param.sharded.requires_grad))
    for group in groups:
        facts = facts_on(group.mesh.mesh)
        for what, value in _settings_of(group, is_first).items():
            facts[group.name, what] = value
        for bucket in [] if group.settings.ranks_may_differ else group.buckets:
            own, facts = {param.fqn for param in bucket.params}, facts_on(bucket.mesh.mesh)
            for left_out in sorted(group.gradients.left_out):
                if left_out[0] in own:
                    facts[group.name, _left_out_text(left_out)] = "seen"
    for ranks, facts in plan.items():
        names = [group.name for group in groups if ranks_of[id(group.mesh.mesh)] == ranks]
        facts["the model", "the order of its groups"] = ", ".join(names)
    return {
        ranks: plan[ranks] for ranks in sorted(plan, key=lambda ranks: (-len(ranks), ranks)) if len(ranks) > 1
    }


def full_loads_of(groups: Sequence[ParameterGroup]) -> Plan:
    """The full values that ``load_state_dict`` has sharded since the last comparison, as facts."""
    loads: Plan = {}
    for param in [param for group in groups for param in group.shards.params]:
        if param.full_load is not None:
            ranks = tuple(sorted(param.joint_mesh.mesh.flatten().tolist()))
            loads.setdefault(ranks, {})[param.fqn, FULL_LOAD] = param.full_load
    return loads


def _facts_of(param: Param, bucket: Bucket, group: ParameterGroup) -> dict[str, str]:
    precision = param.precision
    return {
        "its group": f"'{group.name}'",
        "shape": str(tuple(param.sharded.shape)),
        "dtype": _short(precision.stored),
        "mesh": mesh_text(param.joint_mesh),
        "placement": ", ".join(map(str, param.placements)),
        "dtype of computation": _short(precision.computed),
        "dtype of reduction": f"{_short(precision.reduced)}, accumulated in {_short(precision.accumulated)}",
        "dtype of .grad": _short(precision.kept),
        "class": type(bucket).__name__,
        "check_equal_weights": str(param.compares),
    }


def _settings_of(group: ParameterGroup, is_first: bool) -> dict[str, str]:
    settings = group.settings
    return {
        "mesh": f"{mesh_text(group.mesh.mesh)} ({', '.join(group.mesh.roles)})",
        **shared_settings(settings, with_those_of_microbatch=is_first),
        "number of modules": str(len(group.modules)),
        "comm_policy": str(group.policy),
        "where shards are kept": ", ".join(sorted({b.storage.device.type for b in group.buckets})),
        "set_all_reduce_hook": str(settings.all_reduce_hook is not None),
        "communication chosen by": ", ".join(sorted(group.choices)),
        "set_modules_to_forward_prefetch": _names(settings.forward_prefetch),
        "set_modules_to_backward_prefetch": _names(settings.backward_prefetch),
        "ignored parameters": str(
            [tuple(p.shape) for p in group.ignored] if settings.averages_ignored else []
        ),
    }


def _left_out_text(names: Sequence[str]) -> str:
    shown = listed(names, _MOST_SHOWN)
    if len(names) > _MOST_SHOWN:
        shown += f" [{crc32(repr(names).encode()):08x}]"  # as many others may begin alike
    return f"a backward without gradients of {shown} ({_REMEDY})"


def _names(groups: Sequence[ParameterGroup] | None) -> str:
    return "None" if groups is None else str([group.name for group in groups])


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
