"""Wrap policies applied to a tree of modules."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

from torch import nn

from shardwise.arguments import describe
from shardwise.layout.fqns import listed, uncompiled
from shardwise.strategies.module_trees import has_forward, modules_inside, never_called, sizes_of, text_of
from shardwise.strategies.wrap_policies import WrapPolicy, WrapRepeated
from shardwise.torch_compat import nn_modules

# --- what a policy chooses ------------------------------------------------------------------------


def chosen(policy: WrapPolicy, model: nn.Module, ignored: Set[int]) -> list[nn.Module]:
    """What ``policy`` chooses inside ``model``: checked, and children before parents.

    Of a module and what ``torch.compile`` has made of it, the module: its name and class are the ones to know
    it by. Two kinds are left out: modules whose parameters are all ignored, and those inside an
    ``nn.MultiheadAttention``, which uses their parameters without calling them.
    """
    found = policy.choose(model, ignored)
    if not isinstance(found, (list, tuple, Set)):
        raise TypeError(
            f"shard_model: {text_of(policy)}.choose() returned {describe(found)}; return a list of modules."
        )
    order = modules_inside(model)
    for module in found:
        _check_choice(policy, module, model, order)
    wanted = set(map(uncompiled, found))
    uncalled = never_called(model)
    result = [m for m in order if m in wanted and m not in uncalled and sizes_of(m, ignored)]
    if not result and not isinstance(policy, WrapRepeated):
        can_be = [type(m).__name__ for m in order if has_forward(m) and sizes_of(m, ignored)]
        counts = [f"{count} x {name}" for name, count in Counter(can_be).most_common()]
        raise ValueError(
            f"shard_model: {text_of(policy)} chose no module with parameters inside the "
            f"{type(model).__name__}, so the whole model would be one group, unsharded at once. Modules that "
            f"can be chosen: {listed(counts, 6) or 'none'}. Choose some of these with wrap=, or pass "
            "wrap=None for the repeated blocks."
        )
    return result


def _check_choice(policy: Any, module: Any, model: nn.Module, names: dict[nn.Module, str]) -> None:
    where = f"shard_model: {text_of(policy)}.choose() returned"
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where} a list that contains {describe(module)}; return modules only.")
    if uncompiled(module) is uncompiled(model):
        raise ValueError(
            f"{where} the model itself, a {type(model).__name__}, which is sharded in any case, after what "
            "was chosen inside it. Leave it out."
        )
    if module not in names:
        raise ValueError(
            f"{where} a {type(module).__name__} that is not inside the {type(model).__name__} to be sharded. "
            "Return modules of the model it was given."
        )
    if not has_forward(module):
        raise ValueError(
            f"{where} '{names[module]}', a {type(module).__name__}, which has no forward: its children are "
            "called one by one, so it is unknown when to unshard its parameters. Choose its children, "
            "or the module around it."
        )


# --- several modules in one group -----------------------------------------------------------------


def merge_neighbours(
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
    Modules share a group only if ``key`` is equal for them.

    The groups hold each of ``modules``, which are as :func:`chosen` returns them, once. Modules
    inside a module of a group come in an earlier group.
    """
    wanted = set(modules)
    parents = [module for module in model.modules() if uncompiled(module) is module]
    places = Counter(
        uncompiled(child) for m in parents for child in nn_modules.children(m).values() if child is not None
    )
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
    sizes = sizes_of(module, ignored)
    return {
        id(param): sizes[id(param)] * param.element_size()
        for param in module.parameters()
        if id(param) in sizes and id(param) not in others
    }
