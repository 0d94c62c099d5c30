"""Which modules become groups: policies over module trees, and what they choose."""

import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence, Set
from typing import Any, Protocol

from torch import nn

from shardwise.arguments import check_number, describe
from shardwise.layout.fqns import listed, names_in, uncompiled
from shardwise.ranks.model_ranks import own_rank
from shardwise.torch_compat import nn_modules

# --- facts about modules in trees -----------------------------------------------------------------


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


_log = logging.getLogger("shardwise")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class WrapPolicy(Protocol):
    """Chooses the modules that become groups. Anything with this method is one."""

    def choose(self, model: nn.Module, ignored: Set[int]) -> list[nn.Module]:
        """The modules of ``model`` to shard, without ``model`` itself.

        ``ignored`` holds the ids of parameters that are not to be managed. Must come out the same on every
        rank.
        """
        ...


Wrap = type[nn.Module] | Collection[type[nn.Module]] | Callable[..., bool] | WrapPolicy
"""What ``wrap=`` may be: classes, a function of a module, or a policy."""


# --- policies that ask about each module for itself -----------------------------------------------


class _OfEach:
    def choose(self, model: nn.Module, ignored: Set[int] = frozenset()) -> list[nn.Module]:
        """The modules inside ``model`` that become groups, children before parents."""
        inside = modules_inside(model).items()
        return [module for module, name in inside if sizes_of(module, ignored) and self._wants(name, module)]

    def _wants(self, name: str, module: nn.Module) -> bool:
        raise NotImplementedError


class WrapClasses(_OfEach):
    """Every module of some classes, subclasses included, becomes a group.

    Args:
        classes: a module class, or a set, list or tuple of them. Where matches lie inside each other, each
            becomes a group, the inner ones first.

    Raises:
        TypeError: ``classes`` contains something other than module classes.
        ValueError: there is no class; or, from ``shard_model``, a module of one of them has no forward.

    Example::

        shard_model(model, wrap=WrapClasses({TransformerBlock, nn.Embedding}))
        shard_model(model, wrap={TransformerBlock, nn.Embedding})  # the same
    """

    def __init__(self, classes: type[nn.Module] | Collection[type[nn.Module]]) -> None:
        self.classes = _check_classes(classes, "WrapClasses: classes")

    def _wants(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, self.classes)

    def __repr__(self) -> str:
        return f"WrapClasses({', '.join(cls.__name__ for cls in self.classes)})"


class WrapWhere(_OfEach):
    """Every module for which a function returns True becomes a group.

    Args:
        predicate: ``(module) -> bool`` or ``(name, module) -> bool``, with the module's name as in
            ``model.named_modules()``. Must return the same on every rank.

    Raises:
        TypeError: ``predicate`` has other arguments; or it returns a dict, as functions for torch's
            ``CustomPolicy`` may: settings of single modules go into ``overrides=``.
        ValueError: from ``shard_model``, for a module without a forward.

    Example::

        shard_model(model, wrap=WrapWhere(lambda name, module: name.startswith("layers.")))
    """

    def __init__(self, predicate: Callable[..., bool]) -> None:
        style = _style(predicate, "WrapWhere: predicate")
        if style == "recursive":
            raise TypeError(
                f"WrapWhere: {text_of(predicate)} has the arguments of FSDP1's recursive policies. Pass it "
                "to shardwise.strategies.WrapRecursively, or a function of (module) or of (name, module)."
            )
        self.predicate = predicate
        self._takes_name = style == "named"

    def _wants(self, name: str, module: nn.Module) -> bool:
        answer = self.predicate(name, module) if self._takes_name else self.predicate(module)
        if isinstance(answer, dict):
            raise TypeError(
                f"{self!r} returned a dict for '{name}'. It only chooses modules: return True or False, and "
                "pass settings of single groups as shard_model(overrides={...})."
            )
        return bool(answer)

    def __repr__(self) -> str:
        return f"WrapWhere({text_of(self.predicate)})"


# --- policies that go down the tree and up again ---------------------------------------------------


class _Recursive:
    """FSDP1's recursion; see WrapRecursively."""

    _ask: Callable[[nn.Module, bool, int], Any]
    """(module, whether to descend into it or else to choose it, parameters not chosen yet) -> yes or no."""

    def choose(self, model: nn.Module, ignored: Set[int] = frozenset()) -> list[nn.Module]:
        """The modules inside ``model`` that become groups, children before parents."""
        found: list[nn.Module] = []
        root = uncompiled(model)
        taken: dict[nn.Module, dict[int, int]] = {}  # by what was chosen inside each module gone through

        def visit(module: nn.Module) -> dict[int, int]:
            if module in taken:
                return taken[module]
            inside = taken[module] = {}
            own = sizes_of(module, ignored)
            if not own or not self._ask(module, True, sum(own.values())):
                return inside
            for child in module.children():
                inside.update(visit(child))
            left_over = sum(numel for param, numel in own.items() if param not in inside)
            if module is not root and has_forward(module) and self._ask(module, False, left_over):
                found.append(module)
                inside.update(own)
            return inside

        visit(root)
        return found


class WrapRecursively(_Recursive):
    """FSDP1's ``auto_wrap_policy``: a function that is called on the way down and on the way up.

    For each module it is first called with ``recurse=True`` and the number of parameters inside. If it
    returns False, neither the module nor anything inside becomes a group. Otherwise its children are visited,
    and then it is called with ``recurse=False`` and the number of parameters inside that belong to no chosen
    module. A parameter counts once, and an ignored one does not count.

    The modules are those that ``FullyShardedDataParallel`` wraps, except for three kinds, which cannot be
    groups or would be empty: modules without a forward (``nn.ModuleList``), whose parameters then count for
    the module around them; modules without parameters; and a second place of one module. Two chosen modules
    may share a parameter, which FSDP1 did not support.

    Args:
        policy: ``(module, recurse, nonwrapped_numel) -> bool``; the last may be called ``unwrapped_params``,
            as in torch 1.11, or be left to ``**kwargs``. ``functools.partial`` passes further arguments. The
            functions and ``ModuleWrapPolicy`` of ``torch.distributed.fsdp.wrap`` work.

    Raises:
        TypeError: ``policy`` has other arguments, or needs some that are not given.

    Example::

        def policy(module, recurse, nonwrapped_numel, limit):
            return recurse or nonwrapped_numel >= limit

        shard_model(model, wrap=WrapRecursively(functools.partial(policy, limit=10_000)))
    """

    def __init__(self, policy: Callable[..., bool]) -> None:
        self._ask = _asking(policy, _signature(policy, "WrapRecursively: policy"))
        self.policy = policy

    def __repr__(self) -> str:
        return f"WrapRecursively({text_of(self.policy)})"


class WrapBySize(_Recursive):
    """Modules become groups of at least some number of parameters, from the leaves up.

    A module is chosen if it has enough parameters inside, without those of modules chosen inside it. The rest
    at the top stays with the model.

    Args:
        min_num_params: how many parameters are enough. The default is that of FSDP1 and FairScale, for
            models of billions.
        keep_whole: classes whose modules are not divided and, as in FSDP1, not chosen: they belong to the
            group around them. ``nn.MultiheadAttention``, for example, uses parameters of modules inside it
            without calling these modules.
        descend_only: classes whose modules are not chosen themselves, only modules inside them. Modules
            without a forward never are.

    Raises:
        TypeError, ValueError: ``min_num_params`` is not a number above 0, or the others are not module
            classes.

    Example::

        shard_model(model, wrap=WrapBySize(20_000_000))
    """

    def __init__(
        self,
        min_num_params: int = int(1e8),
        *,
        keep_whole: Collection[type[nn.Module]] = (nn.MultiheadAttention,),
        descend_only: Collection[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict),
    ) -> None:
        wanted = "the least number of parameters of a group, above 0"
        kinds = (int, float)  # infinity: no group but the model's
        check_number(
            "WrapBySize", "min_num_params", min_num_params, wanted, above=0, kinds=kinds, most=math.inf
        )
        self.min_num_params = min_num_params
        self.keep_whole = _check_classes(keep_whole, "WrapBySize: keep_whole", may_be_empty=True)
        self.descend_only = _check_classes(descend_only, "WrapBySize: descend_only", may_be_empty=True)

    def _ask(self, module: nn.Module, recurse: bool, num_params: int) -> bool:
        if recurse:
            return not isinstance(module, self.keep_whole)
        return num_params >= self.min_num_params and not isinstance(module, self.descend_only)

    def __repr__(self) -> str:
        return f"WrapBySize(min_num_params={self.min_num_params:_.0f})"


# --- the default ----------------------------------------------------------------------------------


class WrapRepeated:
    """The repeated blocks of a model become groups. This is what ``wrap=None`` means.

    If an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` has two or more children of the same
    class, with parameters, these are blocks. Only the outermost blocks are chosen, and nothing inside them. A
    module in several places counts once. Rank 0 logs the choice at level INFO of the logger "shardwise"; the
    others log it at level DEBUG.

    Example::

        WrapRepeated().choose(model)  # [model.blocks[0], model.blocks[1], ...]
    """

    def choose(self, model: nn.Module, ignored: Set[int] = frozenset()) -> list[nn.Module]:
        """The blocks of ``model``, children before parents; none if nothing is repeated."""
        runs = _repeated_modules(model, ignored)
        names = modules_inside(model)
        shown = [
            f"{len(run)} x {cls.__name__} ({range_of_names([names[m] for m in run])})" for cls, run in runs
        ]
        what = ", ".join(shown) or "no module besides the model itself, as nothing in it is repeated"
        _log.log(logging.DEBUG if own_rank() else logging.INFO, "shard_model: chose %s", what)
        wanted = {module for _, run in runs for module in run}
        return [module for module in names if module in wanted]

    def __repr__(self) -> str:
        return "WrapRepeated()"


def _repeated_modules(model: nn.Module, ignored: Set[int]) -> list[tuple[type, list[nn.Module]]]:
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


# --- from the argument to a policy ----------------------------------------------------------------


def as_policy(wrap: Any) -> WrapPolicy:
    """The policy that the argument ``wrap=`` of ``shard_model`` means. Functions go by their signatures."""
    if wrap is None:
        return WrapRepeated()
    if isinstance(wrap, (Set, list, tuple)) or (isinstance(wrap, type) and issubclass(wrap, nn.Module)):
        return WrapClasses(_check_classes(wrap, "shard_model: wrap"))
    if not isinstance(wrap, (type, nn.Module)):
        if callable(getattr(wrap, "choose", None)):
            return wrap
        if callable(wrap):
            is_recursive = _style(wrap, "shard_model: wrap") == "recursive"
            return WrapRecursively(wrap) if is_recursive else WrapWhere(wrap)
    raise TypeError(
        f"shard_model: wrap is {describe(wrap)}. Pass a module class or a set of them, a function of "
        "(module), (name, module) or (module, recurse, nonwrapped_numel), a policy such as "
        "shardwise.strategies.WrapBySize(...), or None for the repeated blocks. In place of a policy of "
        "FSDP1, pass the function that it was made of, and settings of single modules as overrides=."
    )


def _check_classes(classes: Any, where: str, may_be_empty: bool = False) -> tuple[type[nn.Module], ...]:
    """``classes`` as a tuple, those of a set in the order of their names, which all ranks share."""
    if isinstance(classes, type):
        classes = (classes,)
    if not isinstance(classes, (Set, list, tuple)):
        raise TypeError(f"{where} is {describe(classes)}; pass a module class or a set of them.")
    for each in classes:
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            hint = "pass module classes, or a function (name, module) -> bool to choose single modules"
            raise TypeError(f"{where} contains {describe(each)}; {hint}.")
    if not classes and not may_be_empty:
        raise ValueError(f"{where} is empty; pass a module class, or wrap=None for the repeated blocks.")
    if isinstance(classes, Set):
        return tuple(sorted(classes, key=lambda cls: (cls.__name__, cls.__module__, cls.__qualname__)))
    return tuple(dict.fromkeys(classes))


def _style(function: Any, where: str) -> str:
    """Which kind of function this is by its signature: of "module", "named" or "recursive"."""
    signature = _signature(function, where)
    parameters = signature.parameters
    required = [p for p in parameters.values() if p.default is p.empty]
    num_positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required)
    kinds = {p.kind for p in parameters.values()}
    takes_anything = kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    is_named = not {"recurse", "nonwrapped_numel", "unwrapped_params"}.isdisjoint(parameters)
    if num_positional >= 3 or is_named or takes_anything:
        return "recursive"
    if num_positional in (1, 2) and not any(p.kind is p.KEYWORD_ONLY for p in required):
        return ("module", "named")[num_positional - 1]
    raise TypeError(
        f"{where} is {text_of(function)}, whose signature is {signature}. Pass a "
        "function of (module), of (name, module) or of (module, recurse, nonwrapped_numel); give further "
        "arguments defaults, or values with functools.partial."
    )


def _signature(function: Any, where: str) -> inspect.Signature:
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{where} is {describe(function)}; pass a function.")
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise TypeError(
            f"{where} is {text_of(function)}, whose signature Python cannot read. Pass a function that calls "
            "it: lambda module: ..."
        ) from None


def _asking(policy: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """``policy`` as a function of three positional arguments, under any names.

    By name where it can be, since a partial makes arguments after those it gives keyword-only.
    """
    size = "unwrapped_params" if "unwrapped_params" in signature.parameters else "nonwrapped_numel"
    names = ("module", "recurse", size)
    for num_positional, by_name in ((1, names[1:]), (0, names), (2, names[2:]), (3, ()), (1, names[1:2])):
        try:
            signature.bind(*[None] * num_positional, **dict.fromkeys(by_name))
        except TypeError:
            continue

        def ask(*values: Any, num_positional: int = num_positional, by_name: Any = by_name) -> Any:
            named = dict(zip(names, values, strict=True))
            return policy(*values[:num_positional], **{name: named[name] for name in by_name})

        return ask
    raise TypeError(
        f"WrapRecursively: {text_of(policy)} has the signature {signature}, and would be "
        "given (module, recurse, nonwrapped_numel). Give values to further arguments with functools.partial; "
        "pass a function of (module) or of (name, module) to shardwise.strategies.WrapWhere."
    )


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
