"""Copies of sharded models: ``copy.deepcopy`` of a module tree, for averages of weights and the like.

The copy keeps the mesh, and shares nothing else: it has shards, groups and a root of its own. The
module tree itself is copied by ``copy.deepcopy``. What hangs on it and is ours is entered in its memo
beforehand, empty, so that modules and hooks of the copy point at ours of the copy, and filled afterwards.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.extension import ExtensionBucket
from shardwise.engine.module_state import ModuleState, drive
from shardwise.engine.root import Root
from shardwise.groups.group import ParameterGroup
from shardwise.params.parameter import Param, Site
from shardwise.setup.hooks import wrap_method, wrapped_methods
from shardwise.setup.outside_calls import explain_calls
from shardwise.torch_compat import dtensor

Memo = dict[int, Any]


def prepare_memo(module_states: Sequence[ModuleState], memo: Memo) -> None:
    """Have what ``module_states`` are replaced by in the copy stand in ``memo``, still empty."""
    keep_alive = memo.setdefault(id(memo), [])
    for module_state in module_states:
        memo[id(module_state)] = object.__new__(ModuleState)
        memo[id(module_state.group)] = object.__new__(ParameterGroup)
        keep_alive += [module_state, module_state.group]
        for bucket in module_state.group.buckets:
            for param in bucket.params:
                memo[id(param.sharded)] = _copy_of(param)


def _copy_of(param: Param) -> nn.Parameter:
    old = param.sharded
    local = dtensor.local_tensor(old).detach().clone()
    new = dtensor.make_parameter(local, dtensor.spec_of(old), old.requires_grad)
    vars(new).update(vars(old))
    return new


def fill_copies(module_states: Sequence[ModuleState], memo: Memo) -> None:
    """Make the groups of the copy, once its modules are there. ``module_states`` outermost first."""
    copies: list[ModuleState] = [memo[id(module_state)] for module_state in module_states]
    root = Root(module_states[0].group.device)
    for module_state, copy in zip(module_states, copies, strict=True):
        _fill_group(module_state.group, memo)
        ModuleState.__init__(copy, memo[id(module_state.group)], root, module_state.in_graphs)
    root.finalization.by_hand = module_states[0].root.finalization.by_hand
    drive(root, copies, copies[0])
    for copy in copies:
        explain_calls(copy.group)
    for module_state, copy in zip(module_states, copies, strict=True):
        for module in module_state.group.modules:
            for name in wrapped_methods(module):
                twin = memo[id(module)]
                twin.__dict__.pop(name, None)
                wrap_method(twin, name, copy)


def _fill_group(old: ParameterGroup, memo: Memo) -> None:
    new: ParameterGroup = memo[id(old)]
    buckets = [_copied_bucket(bucket, memo) for bucket in old.buckets]
    modules = [_twin(module, memo) for module in old.modules]
    managed_modules = [_twin(module, memo) for module in old.managed_modules]
    ParameterGroup.__init__(new, old.name, modules, managed_modules, buckets, old.mesh, old.policy, old.casts)
    new.take_settings(old)
    new.ignored = [memo.get(id(param), param) for param in old.ignored]
    for bucket in buckets:
        bucket.rebuild_flat_shard()


def _twin(module: nn.Module, memo: Memo) -> nn.Module:
    twin = memo.get(id(module))
    if twin is None:
        raise RuntimeError(
            f"copy.deepcopy: {type(module).__name__} belongs to a group that reaches beyond the module being "
            "copied (fully_shard was given a list). Copy the module around all of them."
        )
    return twin


def _copied_bucket(old: Bucket, memo: Memo) -> Bucket:
    params = []
    for param in old.params:
        sites = [Site(_twin(site.module, memo), site.name, site.fqn) for site in param.sites]
        params.append(param.copied(sites, memo[id(param.sharded)]))
    if isinstance(old, ExtensionBucket):
        new: Bucket = ExtensionBucket(params[0], old.mesh, old.policy, old.storage, old.mp_policy)
    else:
        new = Bucket(params, old.mesh, old.policy, old.storage)
    new.communication.use(old.communication.options)
    new.lay_out(torch.device("meta"))
    return new
