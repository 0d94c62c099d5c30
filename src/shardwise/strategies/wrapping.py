"""What a wrap policy comes to on a tree of modules."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

from torch import nn

from shardwise.layout.fqns import names_in, uncompiled
from shardwise.strategies.wrap_policies import WrapPolicy, WrapRepeated, _Ask, _kind, _text

# --- what a policy chooses ------------------------------------------------------------------------


def chosen(policy: WrapPolicy, model: nn.Module, ignored: Set[int]) -> list[nn.Module]:
    """What ``policy`` chooses inside ``model``: checked, and children before parents.

    Of a module and what ``torch.compile`` has made of it, the module: its name and class are the ones to know
    it by.

    Two kinds are left out: modules whose parameters are all ignored, and those inside an
    ``nn.MultiheadAttention``, which uses their parameters without calling them.

    Args:
        policy: any object with the method ``choose`` of :class:`WrapPolicy`.
        model: what is to be sharded.
        ignored: ids of the parameters that are not to be managed.

    Raises:
        TypeError: the policy returned something else than modules.
        ValueError: it chose ``model`` itself, a module that is not inside, one without a forward, or one
            twice; or nothing, unless it is a :class:`WrapRepeated`.

    Example::

        for block in chosen(as_policy(wrap), model, set()):
            fully_shard(block)
        fully_shard(model)
    """
    found = policy.choose(model, ignored)
    if not isinstance(found, (list, tuple, Set)):
        raise TypeError(
            f"shard_model: {_text(policy)}.choose() returned {_kind(found)}; return a list of modules."
        )
    order = _inside(model)
    seen: set[nn.Module] = set()
    for module in found:
        _check_choice(policy, module, model, order)
        if module in seen:
            raise ValueError(
                f"shard_model: {_text(policy)}.choose() returned '{order[module]}' twice; return it once."
            )
        seen.add(module)
    wanted = set(map(uncompiled, seen))
    uncalled = _never_called(model)
    result = [m for m in order if m in wanted and m not in uncalled and _sizes(m, ignored)]
    if not result and not isinstance(policy, WrapRepeated):
        raise ValueError(_message_about_nothing(policy, model, ignored))
    return result


def _check_choice(policy: Any, module: Any, model: nn.Module, names: dict[nn.Module, str]) -> None:
    where = f"shard_model: {_text(policy)}.choose() returned"
    if not isinstance(module, nn.Module):
        hint = ", not their names" if isinstance(module, str) else ""
        raise TypeError(f"{where} {_kind(module)} among the modules; return the modules themselves{hint}.")
    if isinstance(module, nn.Module) and uncompiled(module) is uncompiled(model):
        raise ValueError(
            f"{where} the model itself, a {type(model).__name__}, which is sharded in any case, after what "
            "was chosen inside it. Leave it out."
        )
    if module not in names:
        raise ValueError(
            f"{where} a {type(module).__name__} that is not inside the {type(model).__name__} to be sharded. "
            "Return modules of the model it was given."
        )
    if not _has_forward(module):
        raise ValueError(_message_without_forward(policy, names[module], module))


def _message_without_forward(policy: Any, name: str, module: nn.Module) -> str:
    return (
        f"shard_model: {_text(policy)} chose '{name}', a {type(module).__name__}, which has no forward: its "
        "children are called one by one, so nothing would tell when to gather its parameters. Choose its "
        "children, or the module around it."
    )


def _message_about_nothing(policy: Any, model: nn.Module, ignored: Set[int]) -> str:
    head = f"shard_model: {_text(policy)} chose no module with parameters inside the {type(model).__name__}"
    can_be = [m for m in _inside(model) if _has_forward(m) and _sizes(m, ignored)]
    if not can_be:
        return f"{head}, and there is none. Pass wrap=None to have the model as one group."
    counts = Counter(type(m).__name__ for m in can_be)
    classes = ", ".join(f"{count} x {name}" for name, count in counts.most_common(6))
    more = " and others" if len(counts) > 6 else ""
    total = sum(_sizes(model, ignored).values())
    return (
        f"{head}: it has {classes}{more}, {total:,} parameters in all. They would all be in one group, "
        "gathered at once. Choose some of these with wrap=, or pass wrap=None for the repeated blocks."
    )


def _choose_each(
    policy: Any, model: nn.Module, ignored: Set[int], wants: Callable[[str, nn.Module], bool]
) -> list[nn.Module]:
    """The modules with parameters that are wanted, each for itself."""
    found = []
    for module, name in _inside(model).items():
        if _sizes(module, ignored) and wants(name, module):
            if not _has_forward(module):
                raise ValueError(_message_without_forward(policy, name, module))
            found.append(module)
    return found


def _choose_recursively(model: nn.Module, ignored: Set[int], ask: _Ask) -> list[nn.Module]:
    """FSDP1's recursion; see WrapRecursively."""
    found: list[nn.Module] = []
    root = uncompiled(model)
    taken: dict[nn.Module, dict[int, int]] = {}  # by what was chosen inside each module gone through

    def visit(module: nn.Module) -> dict[int, int]:
        if module in taken:
            return taken[module]
        inside = taken[module] = {}
        own = _sizes(module, ignored)
        if not own or not ask(module, True, sum(own.values())):
            return inside
        for child in module.children():
            inside.update(visit(child))
        left_over = sum(numel for param, numel in own.items() if param not in inside)
        if module is not root and _has_forward(module) and ask(module, False, left_over):
            found.append(module)
            inside.update(own)
        return inside

    visit(root)
    return found


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _repeated(model: nn.Module, ignored: Set[int]) -> list[tuple[type, list[nn.Module]]]:
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
    children = [child for child in inside if _has_forward(child) and _sizes(child, ignored)]
    classes = {type(child) for child in children}
    runs: dict[type, list[nn.Module]] = {}
    for child in children:
        base = next(cls for cls in reversed(type(child).__mro__) if cls in classes)
        runs.setdefault(base, []).append(child)
    return {cls: run for cls, run in runs.items() if len(run) > 1}


# --- several modules in one group -----------------------------------------------------------------


def merged(
    model: nn.Module,
    modules: Sequence[nn.Module],
    ignored: Set[int],
    cap_bytes: float,
    key: Callable[[nn.Module], Hashable],
) -> list[list[nn.Module]]:
    """Put neighbours among ``modules`` into common groups of up to ``cap_bytes``.

    Neighbours are children of the same module with no other chosen child between them. A parameter counts
    once a group, in its own dtype, unless it is ignored or in a chosen module further inside. A module
    larger than the cap is alone; so is one that stands in several places, whose calls come in no order.

    Args:
        model: the model.
        modules: chosen ones inside it, children before parents, as :func:`chosen` returns them.
        ignored: ids of parameters that are not managed.
        cap_bytes: the most bytes of full parameters that a group of several modules has.
        key: modules share a group only if it is equal for them.

    Returns:
        Groups that together hold each of ``modules`` once; whatever lies inside a module of a group comes in
        an earlier group.

    Example::

        for group in merged(model, blocks, set(), 25e6, type):
            fully_shard(group)
    """
    wanted = set(modules)
    parents = [module for module in model.modules() if uncompiled(module) is module]
    places = Counter(uncompiled(child) for m in parents for child in m._modules.values() if child is not None)
    groups = [[module] for module in modules if places[module] > 1]
    for parent in parents:
        run: list[nn.Module] = []
        run_bytes: dict[int, int] = {}
        for child in (child for child in map(uncompiled, parent.children()) if child in wanted):
            if places[child] > 1:
                run = []
                continue
            own = _bytes_of_group(child, wanted, ignored)
            fits = sum((run_bytes | own).values()) <= cap_bytes
            if run and fits and key(child) == key(run[0]):
                run.append(child)
                run_bytes |= own
            else:
                run, run_bytes = [child], own
                groups.append(run)
    order = {module: index for index, module in enumerate(modules)}
    return sorted(groups, key=lambda group: max(order[module] for module in group))


def _bytes_of_group(module: nn.Module, wanted: set[nn.Module], ignored: Set[int]) -> dict[int, int]:
    """Bytes of the parameters that ``module`` has to itself, by their ids."""
    others = {
        id(param)
        for inner in module.modules()
        if inner is not module and inner in wanted
        for param in inner.parameters()
    }
    sizes = _sizes(module, ignored)
    return {
        id(param): sizes[id(param)] * param.element_size()
        for param in module.parameters()
        if id(param) in sizes and id(param) not in others
    }


# --- about modules --------------------------------------------------------------------------------


def _inside(model: nn.Module) -> dict[nn.Module, str]:
    """All modules inside ``model`` and their names, children before parents, else as they stand."""
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


def _sizes(module: nn.Module, ignored: Set[int]) -> dict[int, int]:
    """Numbers of elements of the parameters to manage in ``module``, by their ids. Lazy ones count 0."""
    return {
        id(param): 0 if nn.parameter.is_lazy(param) else param.numel()
        for param in module.parameters()
        if id(param) not in ignored
    }


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _never_called(model: nn.Module) -> set[nn.Module]:
    """Modules whose parameters are used by the module around, without a call that would gather them."""
    forward = nn.MultiheadAttention.forward
    users = [m for m in model.modules() if getattr(type(m), "forward", None) is forward]
    return {inner for user in users for inner in user.modules() if inner is not user}
