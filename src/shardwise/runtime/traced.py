"""What the hooks of a sharded module do where ``torch.compile`` traces them, inside a larger graph.

A module that is compiled on its own has its hooks outside of its graph: they run as ever. Where what is
compiled calls the module (a model its blocks, a function a model), its hooks are in the graph, and come here:

    before forward    full tensors are a function of the shards, and shadow them
    after forward     the shadows go
    backward          is what autograd makes of that function: functional.py

Nothing of the eager runtime takes part: no buffers, no states, no recorded order. Both can alternate, since
the graph reads the registered shards and leaves gradients on them. What the graph could not do is refused:
under ``fullgraph=True`` with the reason, else the graph breaks there and the hooks run as ever.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.runtime import compat
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.functional import Piece, Ways, gather, gather_again_in_backward
from shardwise.runtime.group import GradientState, Group
from shardwise.runtime.mesh import Axis
from shardwise.runtime.outputs import map_tensors
from shardwise.runtime.param import Param
from shardwise.runtime.schedule import Member


def before_forward(member: Member, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Let the module see full tensors, and bring inputs to the device and dtype of the computation."""
    group = member.group
    is_root = group is member.schedule.root
    _refuse_in_graphs(member)
    gathers_again = group.reshard_after_forward
    if gathers_again is None:
        gathers_again = not is_root
    for bucket in group.buckets:
        params = _params_of(module, group, bucket)
        fulls = _full_tensors(group, bucket, params, bool(gathers_again) and torch.is_grad_enabled())
        compat.allowed_in_checkpoints(_shadow, params, fulls)
    if is_root and group.device.type != "cpu":
        args, kwargs = map_tensors((args, kwargs), lambda t: t.to(group.device, non_blocking=True))
    return group.casts.inputs(args, kwargs) or (args, kwargs)


def after_forward(member: Member, module: nn.Module, output: Any) -> Any:
    """Let the module see its shards again."""
    group = member.group
    for bucket in group.buckets:
        compat.allowed_in_checkpoints(_unshadow, _params_of(module, group, bucket))
    return group.casts.output(output)


def _params_of(module: nn.Module, group: Group, bucket: Bucket) -> list[Param]:
    """Those that are gathered for a call of ``module``: its own, where the group is of several modules."""
    if len(group.modules) == 1:
        return bucket.params
    inside = list(module.modules())
    return [p for p in bucket.params if any(site.module is m for site in p.sites for m in inside)]


def _full_tensors(
    group: Group, bucket: Bucket, params: Sequence[Param], gathers_again: bool
) -> list[Tensor]:
    shards = [_registered(param).to_local() for param in params]
    pieces = [Piece(p.shape, p.dim, p.precision.computed, p.precision.reduced) for p in params]
    run = partial(gather, pieces=pieces, ways=_ways(group, bucket))

    def gathered(*shards: Tensor) -> list[Tensor]:
        return run(shards)

    fulls = gather_again_in_backward(gathered, *shards) if gathers_again else gathered(*shards)
    return [param.as_seen_in_graphs(full) for param, full in zip(params, fulls, strict=True)]


def _ways(group: Group, bucket: Bucket) -> Ways:
    mesh = bucket.mesh
    return Ways(
        group.device,
        mesh.shard.world,
        _name(mesh.shard),
        _name(mesh.shard) if bucket.comms.reduce_pg is None else bucket.comms.reduce_pg.group_name,
        _name(mesh.replicate),
        group.divide_factor or float(mesh.num_ranks),
    )


def _name(axis: Axis) -> str | None:
    return None if axis.pg is None or axis.is_alone else axis.pg.group_name


def _registered(param: Param) -> DTensor:
    """What stands in the module now: it may have been replaced since the last eager forward."""
    site = param.sites[0]
    found = site.registered()
    if not isinstance(found, DTensor) or compat.is_shadowed(site.module, site.name):
        compat.refuse_graph(
            f"{param.fqn}: a graph is being compiled while a full parameter stands in place of the shard that "
            "it would gather: inside unsharded(), after unshard(), or in a call of a module inside itself. "
            "Leave the context, or call reshard(), before the first compiled forward."
        )
    assert isinstance(found, DTensor)
    return found


def _shadow(params: Sequence[Param], fulls: Sequence[Tensor]) -> None:
    for param, full in zip(params, fulls, strict=True):
        for site in param.sites:
            compat.shadow_in_graph(site.module, site.name, full)


def _unshadow(params: Sequence[Param]) -> None:
    for param in params:
        for site in param.sites:
            compat.unshadow_in_graph(site.module, site.name, param.sharded)


# --- what is not possible -------------------------------------------------------------------------


def _refuse_in_graphs(member: Member) -> None:
    """Break the graph where it would not do what the caller has asked for."""
    group = member.group
    for what, remedy in _not_in_graphs(member):
        compat.refuse_graph(
            f"{group.name}: {what}, which a graph of the model around it cannot do. {remedy}, or compile the "
            "sharded modules one by one (module.compile()), whose hooks then run outside of their graphs."
        )


def _not_in_graphs(member: Member) -> list[tuple[str, str]]:
    """What was asked for in vain, and what to do instead."""
    group = member.group
    found: list[tuple[str, str]] = []
    if torch.is_grad_enabled():
        if not group.requires_gradient_sync:
            found.append(
                ("gradients are to stay unreduced (no_sync)", "Reduce them in every backward: they add up")
            )
        if not group.requires_all_reduce and group.mesh.num_ranks > group.mesh.shard.world:
            found.append(
                ("set_requires_all_reduce(False) was called", "Reduce in every backward: gradients add up")
            )
        if group.gradient_state is GradientState.DEFERRED:
            found.append(
                ("gradients of earlier backwards wait to be reduced", "Run the last one of them uncompiled")
            )
        if group.zeros_for_unused or group.may_be_unused:
            found.append(
                ("ranks may differ in what they use", "Let all ranks use the module, and do not say otherwise")
            )
        if group.all_reduce_hook is not None or group.averages_ignored:
            found.append(("hooks of the caller are to see reduced gradients", "Do without them"))
    if member.schedule.is_in_inference:
        found.append(("inference() keeps parameters gathered", "Leave it"))
    if group.partly_loaded is not None:
        found.append((f"a load failed half-way ({group.partly_loaded})", "Load a complete checkpoint"))
    for bucket in group.buckets:
        found += _not_in_graphs_of(bucket)
    return found


def _not_in_graphs_of(bucket: Bucket) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    comms = bucket.comms
    if type(bucket) is not Bucket:
        found.append(("its parameters say themselves what is gathered of them", "Use plain parameters"))
    if comms.make_gather or comms.make_reduce or comms.reducer or bucket.policy.quantized_gather is not None:
        found.append(("it communicates by other collectives than the back end's", "Use those"))
    for param in bucket.params:
        if param.has_hooks_of_original:
            found.append(
                (f"{param.fqn} had hooks before it was sharded", "Register them on the shard, after fully_shard")
            )
        if param.precision.kept != param.precision.stored:
            found.append((f"gradients of {param.fqn} are to keep a dtype of their own", "Leave them in its own"))
        if param.is_tensor_parallel and param.mesh.full is not None:
            found.append((f"{param.fqn} is a DTensor on all of the mesh (dp_mesh_dims)", "Pass the mesh to shard over"))
    return found
