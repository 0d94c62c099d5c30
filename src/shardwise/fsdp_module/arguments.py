"""What methods of FSDPModule and functions of whole models check about their arguments; what they act on."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
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


def check_module(caller: str, module: object) -> None:
    """Refuse what is no module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: {type(module).__name__} is not an nn.Module.")


def check_rank(caller: str, name: str, rank: object) -> None:
    """Refuse anything but a global rank or None."""
    if isinstance(rank, bool) or not isinstance(rank, (int, type(None))):
        raise TypeError(
            f"{caller}: {name} is {rank!r}, a {type(rank).__name__}; pass a global rank, or None."
        )


def check_bytes(caller: str, name: str, num_bytes: object) -> None:
    """Refuse what is no number of bytes."""
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 1:
        raise ValueError(f"{caller}: {name} is {num_bytes!r}; pass a number of bytes above 0.")


def check_floating(caller: str, dtype: object) -> None:
    """Refuse a dtype that is not of floating-point numbers."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{caller}: dtype is {dtype!r}; pass a floating-point dtype, or None.")


def module_states_at_rest(module: Any, caller: str) -> list[ModuleState]:
    """The states of the sharded modules in ``module``, which need not have any.

    Raises:
        TypeError: it is no module.
        RuntimeError: one of them is in a forward or backward, or inside ``unsharded``.
    """
    check_module(caller, module)
    module_states = sharded_module_states(module)
    for module_state in module_states:
        module_state.root.refuse_at_work(caller, module_state.group)
        module_state.group.refuse_if_summoned(caller)
    return module_states


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
