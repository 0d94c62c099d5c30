"""The class of a sharded module: its own class, with FSDPModule mixed in; copies of such modules.

A copy keeps the mesh, and shares nothing else: it has shards, groups and a root of its own. The module tree
itself is copied by ``copy.deepcopy``. What hangs on it and is ours is entered in its memo beforehand, empty,
so that modules and hooks of the copy point at ours of the copy, and filled afterwards.
"""

import copy
import importlib
import re
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.extension import ExtensionBucket
from shardwise.engine.module_state import (
    ModuleState,
    compute_after_optimizer,
    drive,
    module_state_of,
    sharded_module_states,
)
from shardwise.engine.root import Root
from shardwise.fsdp_module import FSDPModule
from shardwise.groups.group import ParameterGroup
from shardwise.layout.fqns import uncompiled
from shardwise.params.parameter import Param, Site
from shardwise.setup.hooks import explain_calls, wrap_method, wrapped_methods
from shardwise.torch_compat import dtensor

Memo = dict[int, Any]


# --- copies ---------------------------------------------------------------------------------------


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
    for module_state, copied in zip(module_states, copies, strict=True):
        _fill_group(module_state.group, memo)
        ModuleState.__init__(copied, memo[id(module_state.group)], root, module_state.in_graphs)
    root.finalization.by_hand = module_states[0].root.finalization.by_hand
    drive(root, copies, copies[0])
    for copied in copies:
        explain_calls(copied.group)
    for module_state, copied in zip(module_states, copies, strict=True):
        for module in module_state.group.modules:
            for name in wrapped_methods(module):
                twin = memo[id(module)]
                twin.__dict__.pop(name, None)
                wrap_method(twin, name, copied)


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


# --- the mixed-in classes -------------------------------------------------------------------------

_classes: dict[type, type] = {}  # original class -> its sharded class; facts, not state
_classes_lock = Lock()


def sharded_class(original: type) -> type:
    """``original`` with FSDPModule mixed in, under its own name. Made once a class.

    Frameworks look classes up by name: those whose instances to wrap, or for which models to shift labels.
    Printed, such a module is called ``FSDP<Name>``.

    FSDPModule comes last among the bases and its methods are copied into the class: in this order
    the memory layout is that of ``original`` for any bases it has, which assigning
    ``__class__`` requires.

    Raises:
        TypeError: ``original`` uses one of the names of FSDPModule's methods for its own ends.
    """
    with _classes_lock:
        made = _classes.get(original)
        if made is None:
            made = _classes[original] = _make_sharded_class(original)
        return made


def _make_sharded_class(original: type) -> type:
    methods = {name: getattr(FSDPModule, name) for name in dir(FSDPModule) if not name.startswith("_")}
    if taken := [name for name in methods if hasattr(original, name)]:
        raise TypeError(
            f"fully_shard: {original.__name__} has an attribute '{taken[0]}' of its own, a name that sharded "
            "modules need: the method of FSDPModule would take its place. Rename it in the class."
        )
    special = {
        "__new__": lambda cls, *args, **kwargs: original(*args, **kwargs),
        "__deepcopy__": _deep_copy,
        "__reduce_ex__": _refuse_to_copy,
        "_apply": _apply_and_follow,
        "__repr__": lambda self: f"FSDP{original.__repr__(self)}",  # type: ignore[call-arg]
        "_get_fsdp_state": lambda self: _NO_STATE,
        "__module__": __name__,
        "__doc__": original.__doc__,
        "__qualname__": f"FSDP<{original.__module__}:{original.__qualname__}>".replace(".", "/"),
    }
    try:
        return type(original.__name__, (original, FSDPModule), methods | special)
    except Exception as error:
        raise TypeError(
            f"fully_shard: the class {original.__name__} cannot be extended ({error}); shard the module "
            "around it instead."
        ) from error


class _NoState:
    """What ``_get_fsdp_state()`` returns to frameworks, which look for torch's parameter group in it."""

    _fsdp_param_group = None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"_get_fsdp_state().{name} was set, a field of torch's FSDP: shardwise has sharded this module, "
            "and it would have no effect. Call the module's own setters, such as set_reshard_after_forward()."
        )


_NO_STATE = _NoState()


def __getattr__(name: str) -> type:
    """Give sharded classes a home that pickle can find: here, by the name of the original class."""
    match = re.fullmatch(r"FSDP<(.+):(.+)>", name)
    if match is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module, path = (part.replace("/", ".") for part in match.groups())
    original: Any = importlib.import_module(module)
    for part in path.split("."):
        original = getattr(original, part)
    return sharded_class(original)


def original_class(module: nn.Module) -> type:
    """The class that a sharded module had before."""
    return type(module).__bases__[0] if isinstance(module, FSDPModule) else type(module)


def _apply_and_follow(self: Any, fn: Any, recurse: bool = True) -> Any:
    """What ``.to()`` and its like call: the shards move back into their buffer at once."""
    result = original_class(self)._apply(self, fn, recurse)  # type: ignore[attr-defined]
    module_state_of(self).group.adopt_when_moved()
    return result


def _deep_copy(self: Any, memo: dict[int, Any]) -> Any:
    """A copy with shards and groups of its own, over the same mesh."""
    is_outermost = id(module_state_of(self)) not in memo
    module_states = sharded_module_states(self) if is_outermost else []
    for module_state in module_states:
        module_state.group.refuse_if_summoned("copy.deepcopy")
    compute_after_optimizer(module_states)
    shown = [module_state.group for module_state in module_states if module_state.group.unsharded.is_shown]
    for group in shown:
        group.unsharded.hide()  # the copy is not unsharded
    try:
        if is_outermost:
            prepare_memo(module_states, memo)
        twin = memo[id(self)] = object.__new__(type(self))
        _copy_attributes(self, twin, memo)
        if is_outermost:
            fill_copies(module_states, memo)
    finally:
        for group in shown:
            group.unsharded.show()
    return twin


def _copy_attributes(module: Any, twin: Any, memo: dict[int, Any]) -> None:
    """All but compiled code, which would run ``module`` in place of its copy."""
    state = dict(module.__dict__)
    state.pop("_compiled_call_impl", None)  # of module.compile(); nn.Module leaves it out as well
    if uncompiled(module) is module:
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in state.items()})
        return
    del state["forward"]  # of torch.compile(module), which makes it anew
    memo[id(module.dynamo_ctx)] = module.dynamo_ctx
    twin.__setstate__({name: copy.deepcopy(value, memo) for name, value in state.items()})


def _refuse_to_copy(self: Any, protocol: Any) -> Any:
    raise NotImplementedError(
        f"{module_state_of(self).group.name}: a sharded module cannot be pickled or copied shallowly: its "
        "process groups stay behind, or two modules would drive one group. Use copy.deepcopy, or save its "
        "state_dict()."
    )
