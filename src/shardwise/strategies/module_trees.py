"""Walks over trees of modules, for wrap policies."""

import functools
from collections.abc import Callable, Set
from typing import Any

from torch import nn

from shardwise.layout.fqns import names_in, uncompiled

Ask = Callable[[nn.Module, bool, int], Any]
"""(module, whether to descend into it or else to choose it, parameters not chosen yet) -> yes or no."""


def choose_each(
    model: nn.Module, ignored: Set[int], wants: Callable[[str, nn.Module], bool]
) -> list[nn.Module]:
    """The modules with parameters that are wanted, each for itself."""
    inside = modules_inside(model).items()
    return [module for module, name in inside if sizes_of(module, ignored) and wants(name, module)]


def choose_recursively(model: nn.Module, ignored: Set[int], ask: Ask) -> list[nn.Module]:
    """FSDP1's recursion; see WrapRecursively."""
    found: list[nn.Module] = []
    root = uncompiled(model)
    taken: dict[nn.Module, dict[int, int]] = {}  # by what was chosen inside each module gone through

    def visit(module: nn.Module) -> dict[int, int]:
        if module in taken:
            return taken[module]
        inside = taken[module] = {}
        own = sizes_of(module, ignored)
        if not own or not ask(module, True, sum(own.values())):
            return inside
        for child in module.children():
            inside.update(visit(child))
        left_over = sum(numel for param, numel in own.items() if param not in inside)
        if module is not root and has_forward(module) and ask(module, False, left_over):
            found.append(module)
            inside.update(own)
        return inside

    visit(root)
    return found


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_modules(model: nn.Module, ignored: Set[int]) -> list[tuple[type, list[nn.Module]]]:
    """The runs of blocks in ``model``: for each container, class by class; see WrapRepeated."""
    containers = [module for module in model.modules() if isinstance(module, _CONTAINERS)]
    runs = [run for container in containers for run in _runs_of(container, ignored).items()]
    inside = {inner for _, run in runs for block in run for inner in block.modules() if inner is not block}
    result = []
    for cls, run in runs:
        if left := [block for block in run if block not in inside]:
            result.append((cls, left))
            inside.update(left)  # the next container may have it as well
    return result


def _runs_of(container: nn.Module, ignored: Set[int]) -> dict[type, list[nn.Module]]:
    """The children of a container that are repeated, by class.

    A child also counts for the class of a sibling that its own derives from: so does a sharded module,
    whose class derives from that of those that are not.
    """
    inside = map(uncompiled, container.children())
    children = [child for child in inside if has_forward(child) and sizes_of(child, ignored)]
    classes = {type(child) for child in children}
    runs: dict[type, list[nn.Module]] = {}
    for child in children:
        base = next(cls for cls in reversed(type(child).__mro__) if cls in classes)
        runs.setdefault(base, []).append(child)
    return {cls: run for cls, run in runs.items() if len(run) > 1}


# --- about modules --------------------------------------------------------------------------------


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
