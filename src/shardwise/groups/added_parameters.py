"""Parameters that are added to a sharded tree after ``fully_shard``: no group reduces their gradients.

A group owns the parameters that its modules had in its ``fully_shard`` call. Whatever is registered later
belongs to no group: a parameter in a module of the group, or a module, such as an adapter, anywhere inside.
Every forward ends with a search for these, in loops that run in C; names are looked up only if it finds any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn

from shardwise.buckets.sharded_gradients import is_not_none
from shardwise.layout.fqns import clean
from shardwise.params.replaced_parameter import name_of_replaced
from shardwise.torch_compat import nn_modules

_OWNER = "_shardwise_owner"


@dataclass(eq=False)
class Owner:
    """Noted on every module whose parameters a group has taken: the group, and the module's name."""

    group: Any  # ParameterGroup
    fqn: str

    def __deepcopy__(self, memo: dict[int, Any]) -> "Owner | None":
        """A module that is copied without its group is free."""
        group = memo.get(id(self.group))
        return None if group is None else Owner(group, self.fqn)


def set_owner(module: nn.Module, owner: Owner) -> None:
    """Note on ``module`` whose parameters its own are."""
    module.__dict__[_OWNER] = owner


def owner_of(module: nn.Module) -> Owner | None:
    """What was noted; None if no group has taken its parameters."""
    owner: Owner | None = module.__dict__.get(_OWNER)
    return owner


_wants_gradient = attrgetter("requires_grad")


class ModuleWatch:
    """The modules of a group, and what was registered in them when the group was made."""

    def __init__(self, managed_modules: Sequence[nn.Module]) -> None:
        self._known = {(module, name) for module in managed_modules for name in _names_of(module)}
        self._frozen: list[nn.Parameter] = []
        self._take_stock(managed_modules)

    def _take_stock(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._num_parameters = sum(len(_names_of(module)) for module in modules)
        self._leaves = [module for module in modules if not nn_modules.children(module)]
        self._parents = [module for module in modules if nn_modules.children(module)]
        self._inside = [child for parent in self._parents for child in nn_modules.children(parent).values()]
        self._num_inside = len(self._inside)

    def is_untouched(self) -> bool:
        """True if no parameter or module was added or replaced, and no frozen addition was unfrozen."""
        values = chain.from_iterable(map(dict.values, map(nn_modules.parameters, self._modules)))
        num_parameters = len(list(filter(is_not_none, values)))
        if num_parameters != self._num_parameters or any(map(nn_modules.children, self._leaves)):
            return False
        inside = list(chain.from_iterable(map(dict.values, map(nn_modules.children, self._parents))))
        if len(inside) != self._num_inside or not all(map(is_, inside, self._inside)):
            return False
        return not self._frozen or not any(map(_wants_gradient, self._frozen))

    def is_untouched_in_graph(self) -> bool:
        """The same, for dynamo, which cannot trace loops that run in C."""
        if (
            sum(p is not None for m in self._modules for p in nn_modules.parameters_in_graph(m).values())
            != self._num_parameters
        ):
            return False
        inside = [child for m in self._modules for child in nn_modules.children_in_graph(m).values()]
        if len(inside) != len(self._inside):
            return False
        for child, before in zip(inside, self._inside, strict=True):
            if child is not before:
                return False
        return not any(param.requires_grad for param in self._frozen)

    def find_added(
        self, names: Mapping[nn.Module, str], fulls: Sequence[nn.Parameter]
    ) -> list[tuple[str, nn.Parameter]]:
        """Added parameters that would be trained, by full name.

        Looks in known modules, and in new ones that are not sharded themselves. Also finds a parameter of
        ``fulls``, the unsharded ones, that was registered anywhere. Other additions are known from now on.
        ``names``: the name of every module of the tree.
        """
        modules = dict.fromkeys(self._modules)
        added: list[tuple[str, nn.Parameter]] = []
        frozen: list[nn.Parameter] = []

        def look(where: str, param: nn.Parameter) -> None:
            if param.requires_grad or any(param is full for full in fulls):
                added.append((where, param))
            else:
                frozen.append(param)

        for module in self._modules:
            for name, param in nn_modules.parameters_in_graph(module).items():
                if param is not None and (module, name) not in self._known:
                    look(_joined(names.get(module), name), param)

        def visit(module: nn.Module, name: str | None) -> None:
            for own, child in nn_modules.children_in_graph(module).items():
                if child is None or owner_of(child) is not None or child in modules:
                    continue
                modules[child] = None
                where = names.get(child) or _joined(name, own)
                for key, param in nn_modules.parameters_in_graph(child).items():
                    if param is not None and name_of_replaced(param) is None:  # shards have a group to notice
                        look(_joined(where, key), param)
                visit(child, where)

        for module in self._modules:
            visit(module, names.get(module))
        added += self._unfrozen(names)
        if not added:
            self._known |= {(module, name) for module in modules for name in _names_of(module)}
            self._frozen += frozen
            self._take_stock(list(modules))
        return added

    def _unfrozen(self, names: Mapping[nn.Module, str]) -> list[tuple[str, nn.Parameter]]:
        trained = {param for param in self._frozen if param.requires_grad}
        return [
            (_joined(names.get(module), name), param)
            for module in self._modules
            for name, param in nn_modules.parameters_in_graph(module).items()
            if param in trained
        ]


def _names_of(module: nn.Module) -> list[str]:
    return [name for name, param in nn_modules.parameters_in_graph(module).items() if param is not None]


def _joined(prefix: str | None, name: str) -> str:
    return clean(f"{prefix}.{name}" if prefix else name)
