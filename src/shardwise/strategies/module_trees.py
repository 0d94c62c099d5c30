"""Facts about modules in trees."""

import functools
from collections.abc import Set
from typing import Any

from torch import nn

from shardwise.layout.fqns import names_in, uncompiled


def modules_inside(model: nn.Module) -> dict[nn.Module, str]:
    """All modules inside ``model`` and their names, children before parents, else in order."""
    names = names_in(model)
    order: dict[nn.Module, str] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module not in seen:
            seen.add(module)
            for child in module.children():
                visit(child)
            order[module] = names[module]

    visit(model)
    return {module: name for module, name in order.items() if uncompiled(module) is not uncompiled(model)}


def sizes_of(module: nn.Module, ignored: Set[int]) -> dict[int, int]:
    """Numbers of elements of the parameters to manage in ``module``, by their ids. Lazy ones count 0."""
    return {
        id(param): 0 if nn.parameter.is_lazy(param) else param.numel()
        for param in module.parameters()
        if id(param) not in ignored
    }


def has_forward(module: nn.Module) -> bool:
    """True if ``module`` has a forward."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def never_called(model: nn.Module) -> set[nn.Module]:
    """Modules whose parent uses their parameters without calling them, so that nothing would unshard them."""
    forward = nn.MultiheadAttention.forward
    users = [m for m in model.modules() if getattr(type(m), "forward", None) is forward]
    return {inner for user in users for inner in user.modules() if inner is not user}


def range_of_names(names: list[str]) -> str:
    """One or two names as they are, more as the first and the last."""
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]}"


def text_of(value: Any) -> str:
    """A policy, or a function by its name, without addresses."""
    if isinstance(value, functools.partial):
        return f"partial({text_of(value.func)})"
    if hasattr(type(value), "choose") and type(value).__repr__ is not object.__repr__:
        return repr(value)
    return getattr(value, "__name__", None) or type(value).__name__
