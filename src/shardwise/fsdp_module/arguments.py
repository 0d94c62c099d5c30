"""What the methods of FSDPModule check about their arguments, and which groups they act on."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from shardwise.engine.module_state import (
    ModuleState,
    is_sharded,
    module_state_of,
    sharded_module_states,
    under_compile,
)
from shardwise.groups.group import ParameterGroup

_OF_MICROBATCH = ("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward")
"""Setters that are called from one microbatch to the next. Ranks do not compare these settings each time."""


def check_flags(caller: str, **flags: object) -> None:
    """Refuse flags that are neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{caller}: {name} is {value!r}, a {type(value).__name__}; pass True or False.")


def groups_to_configure(module: Any, recurse: bool, caller: str) -> Iterator[ParameterGroup]:
    """The groups that the setter ``caller`` acts on."""
    check_flags(caller, recurse=recurse)
    module_states = sharded_module_states(module) if recurse else [module_state_of(module)]
    for module_state in module_states if caller not in _OF_MICROBATCH else ():
        module_state.root.plan_check.plan_changed()
    return (module_state.group for module_state in module_states)


def set_flag(
    module: Any, caller: str, flag: str, value: bool, recurse: bool, *, setting: str | None = None
) -> None:
    """What most setters do: check ``flag``, and change the setting of this or another name."""
    check_flags(caller, **{flag: value})
    for group in groups_to_configure(module, recurse, caller):
        group.configure(**{setting or flag: value})


def set_prefetch(module: Any, setting: str, modules: Any) -> None:
    """Have the group of ``module`` prefetch those of ``modules``, a list of sharded modules."""
    caller = f"set_modules_to_{setting}"
    if isinstance(modules, (nn.Module, str)) or not isinstance(modules, Sequence):
        raise TypeError(f"{caller}: modules is a {type(modules).__name__}; pass a list of sharded modules.")
    for index, each in enumerate(modules):
        if not is_sharded(each):
            raise ValueError(
                f"{caller}: {type(each).__name__} at [{index}] is not sharded, so there is nothing to "
                "prefetch. Call fully_shard on it first, or leave it out."
            )
    module_state = module_state_of(module)
    chosen = tuple(module_state_of(under_compile(each)).group for each in modules)
    module_state.group.configure(**{setting: chosen})
    module_state.root.start_over()


def root_module_state(module: Any, caller: str) -> ModuleState:
    """The state of ``module``, which has to be the root."""
    module_state = module_state_of(module)
    if module_state.root.group is not module_state.group:
        raise RuntimeError(
            f"{caller}: {module_state.group.name} is not the root, but inside a sharded module that drives "
            "it. Call it on the outermost sharded module."
        )
    return module_state
