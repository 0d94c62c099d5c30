"""What the hooks of a sharded module do where ``torch.compile`` traces them, inside a larger graph.

A module that is compiled on its own has its hooks outside of its graph: they run as ever. Where what is
compiled calls the module (a model its blocks, a function a model), its hooks are in the graph, and come here:

    before forward    full tensors are a function of the shards, and shadow them
    after forward     the shadows go
    backward          is what autograd makes of that function: functional.py

Nothing of the eager runtime takes part: no buffers, no states, no recorded order. Both can alternate, since
the graph reads the registered shards and leaves gradients on them. Full parameters are plain tensors there,
no ``nn.Parameter`` and without attributes of the caller's, for dynamo can give a tensor neither.

What the graph could not do is refused: under ``fullgraph=True`` with the reason, else the graph breaks there
and the hooks run as ever.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise.buckets.bucket import Bucket
from shardwise.compile.functional import Piece, Ways, unshard
from shardwise.engine.module_state import ModuleState
from shardwise.groups.group import ParameterGroup, open_tie_message
from shardwise.groups.shards import meta_message
from shardwise.groups.states import DEFERRED
from shardwise.layout.mesh import Axis
from shardwise.layout.nested import map_tensors
from shardwise.params.parameter import Param
from shardwise.torch_compat import dynamo


def before_forward(module_state: ModuleState, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Let the module see full tensors, and bring inputs to the device and dtype of the computation."""
    group = module_state.group
    is_root = group is module_state.root.group
    _refuse_in_graphs(module_state)
    unshards_again = module_state.root.reshards_after_forward(group) and torch.is_grad_enabled()
    reduce_groups = module_state.names_of_reduce_groups().splitlines()
    for bucket, reduce_group in zip(group.buckets, reduce_groups, strict=True):
        params = _params_of(module, group, bucket)
        ways = _ways(group, bucket, reduce_group)
        fulls = _full_tensors(ways, params, unshards_again)
        dynamo.allowed_in_checkpoints(_shadow, params, fulls)
    if is_root and group.device.type != "cpu":
        args, kwargs = map_tensors((args, kwargs), lambda t: t.to(group.device, non_blocking=True))
    return group.casts.inputs(args, kwargs) or (args, kwargs)


def after_forward(module_state: ModuleState, module: nn.Module, output: Any) -> Any:
    """Let the module see its shards again."""
    group = module_state.group
    for bucket in group.buckets:
        dynamo.allowed_in_checkpoints(_unshadow, _params_of(module, group, bucket))
    return group.casts.output(output)


def _params_of(module: nn.Module, group: ParameterGroup, bucket: Bucket) -> list[Param]:
    """Those that are unsharded for a call of ``module``: its own, where the group is of several modules."""
    if len(group.modules) == 1:
        return bucket.params
    inside = list(module.modules())
    return [p for p in bucket.params if any(site.module is m for site in p.sites for m in inside)]


def _full_tensors(ways: Ways, params: Sequence[Param], unshards_again: bool) -> list[Tensor]:
    shards = [_registered(param).to_local() for param in params]
    pieces = []
    for param, shard in zip(params, shards, strict=True):
        own_size = shard.shape[param.dim] if param.shape else 1
        dtypes = param.precision.computed, param.precision.reduced
        pieces.append(Piece(param.shape, param.dim, own_size, *dtypes))

    def unsharded(*shards: Tensor) -> list[Tensor]:
        return unshard(shards, pieces, ways)

    # Again in backward, by the mark of activation checkpointing, which the partitioners of AOTAutograd obey.
    # Uncompiled graphs (backend="eager") keep the tensors, for what uses them has saved them.
    if unshards_again:
        fulls: list[Tensor] = checkpoint(unsharded, *shards, use_reentrant=False)
    else:
        fulls = unsharded(*shards)
    return [param.as_seen_in_graphs(full) for param, full in zip(params, fulls, strict=True)]


def _ways(group: ParameterGroup, bucket: Bucket, reduce_group: str) -> Ways:
    mesh = bucket.mesh
    if group.settings.separate_reduce_group is False:  # read here, so that a graph ends with the choice
        reduce_group = ""
    return Ways(
        group.device,
        mesh.shard_axis.world,
        _name(mesh.shard_axis),
        reduce_group or _name(mesh.shard_axis),
        _name(mesh.replicate_axis),
        group.settings.divide_factor or float(mesh.num_ranks),
    )


def _name(axis: Axis) -> str | None:
    return None if axis.pg is None or axis.is_alone else axis.pg.group_name


def _registered(param: Param) -> DTensor:
    """What stands in the module now: it may have been replaced since the last eager forward."""
    site = param.sites[0]
    found = site.registered()
    if not isinstance(found, DTensor) or dynamo.is_shadowed(site.module, site.name):
        dynamo.refuse_graph(
            f"{param.fqn}: a graph is being compiled that unshards this parameter, but a full one stands "
            "where its shard should: inside unsharded(), after unshard(), or where a module calls itself. "
            "Leave the context, or call reshard(), before the first compiled forward."
        )
    assert isinstance(found, DTensor)
    if found is not param.sharded and not dynamo.RESTORES_ALL_IN_GRAPHS:
        dynamo.refuse_graph(
            f"{param.fqn}: another parameter was put in its place since the last eager forward, and a "
            f"graph of torch {torch.__version__} would put back the one before. Run one forward uncompiled, "
            "or use load_state_dict(assign=True)."
        )
    return found


def _shadow(params: Sequence[Param], fulls: Sequence[Tensor]) -> None:
    for param, full in zip(params, fulls, strict=True):
        for site in param.sites:
            dynamo.shadow_in_graph(site.module, site.name, full)


def _unshadow(params: Sequence[Param]) -> None:
    for param in params:
        for site in param.sites:
            dynamo.unshadow_in_graph(site.module, site.name, param.sharded)


# --- what is not possible -------------------------------------------------------------------------


def _refuse_in_graphs(module_state: ModuleState) -> None:
    """Break the graph where it would not do what the caller has asked for."""
    if reason := _about_model(module_state):
        dynamo.refuse_graph(reason)
    if asked := _asked_in_vain(module_state):
        dynamo.refuse_graph(
            f"{module_state.group.name}: {asked}. The graph of a whole model does not do that. Leave it out, "
            "or compile the sharded modules one by one (module.compile()), not the one around them: their "
            "hooks are then outside of their graphs, and do all that they do in eager runs."
        )


def _about_model(module_state: ModuleState) -> str:
    """What eager runs refuse as well, when they begin or at the end of a forward: the whole message."""
    group = module_state.group
    if group.ties:  # without a look at what they are tied to, which dynamo would ask for its gradient
        return open_tie_message(group.ties[0].site.fqn, "a parameter that")
    try:
        group.refuse_partly_loaded()
        if not group.added.is_untouched_in_graph():
            group.refuse_added(module_state.root.lazy_init.module_names())
    except RuntimeError as error:
        return str(error)
    # As the modules have them: of tensors that it meets elsewhere first, dynamo takes the sizes for dynamic.
    standing = [(param.fqn, param.sites[0].registered()) for param in group.shards.params]
    if names := [fqn for fqn, tensor in standing if tensor is not None and tensor.is_meta]:
        return f"Cannot run forward: {meta_message(names)}"
    return ""


def _asked_in_vain(module_state: ModuleState) -> str:
    """What was asked of the group that a graph does not do; empty if all of it can be done."""
    group, settings = module_state.group, module_state.group.settings
    if not module_state.root.ranks_run_alike:
        return "parameters stay unsharded inside inference()"
    if module_state.root.post_optim_event is not None:
        return "all-gathers wait for the event of set_post_optim_event()"
    if torch.is_grad_enabled():
        if not settings.requires_gradient_sync:
            return "gradients are to stay unreduced (no_sync)"
        if not settings.requires_all_reduce and group.shards.are_replicated:
            return "gradients are not to be summed over replicas (set_requires_all_reduce)"
        if group.gradients.state is DEFERRED:
            return "gradients of earlier backwards wait to be reduced together with these"
        if settings.ranks_that_keep is not None:
            return f"reshard_after_forward={settings.ranks_that_keep} keeps parameters among a few ranks"
        if settings.ranks_may_differ:
            return "ranks were said to differ in what they use"
        if settings.all_reduce_hook is not None or settings.averages_ignored:
            return "set_all_reduce_hook() or set_reduce_ignored_params() was called"
    for bucket in group.buckets:
        if asked := _asked_of_bucket(bucket):
            return asked
    return ""


def _asked_of_bucket(bucket: Bucket) -> str:
    options = bucket.communication.options
    if type(bucket) is not Bucket:
        return "its parameters are tensor subclasses that define their own all-gather"
    quantized = bucket.policy.quantized_all_gather
    own = (options.make_all_gather, options.make_reduce_scatter, options.make_all_reduce, quantized)
    if any(each is not None for each in own):  # torch 2.11 cannot trace whether a partial is true
        return (
            "it was given collectives or memory of its own (set_custom_all_gather, "
            "set_custom_reduce_scatter, register_comm_hook, quantized_all_gather, or an allocator)"
        )
    for param in bucket.params:
        precision = param.precision
        if param.has_own_class:
            return f"{param.fqn} is of a class of its own, not nn.Parameter"
        if param.has_original_hooks:
            return f"{param.fqn} had hooks for its full gradient before fully_shard"
        if precision.accumulated not in (precision.computed, precision.reduced):
            return f"gradients of {param.fqn} are to add up in {precision.accumulated} (accumulate_dtype)"
        if precision.kept != precision.stored:
            return f"gradients of {param.fqn} are kept in {precision.kept} (keep_low_precision_grads)"
        if param.is_tensor_parallel and param.mesh.full_mesh is not None:
            return f"{param.fqn} is a DTensor on the whole mesh, so that its gradient would be summed twice"
    return ""
