"""The modules of a group: who owns their parameters, later additions, tensors that forward stores there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from shardwise.layout.fqns import clean, joined
from shardwise.layout.nested import is_not_none
from shardwise.params.parameter import name_of_replaced
from shardwise.torch_compat import nn_modules

_OWNER = "_shardwise_owner"
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_wants_gradient = attrgetter("requires_grad")


@dataclass(eq=False)
class Owner:
    """Stored on every module whose parameters a group has taken: the group, and the module's name."""

    group: Any  # ParameterGroup
    fqn: str

    def __deepcopy__(self, memo: dict[int, Any]) -> "Owner | None":
        """A module that is copied without its group is free.

        Raises:
            RuntimeError: its parameters are unsharded, and the copy would go on computing with these values.
        """
        group = memo.get(id(self.group))
        if group is None and self.group.unsharded.is_shown:
            raise RuntimeError(
                f"copy.deepcopy of '{self.fqn}' while its group '{self.group.name}' is unsharded: the copy "
                "would hold both shards and full parameters, and compute with the latter whatever becomes of "
                "the former. Copy it between forwards; or before fully_shard, and shard the copy as well."
            )
        return None if group is None else Owner(group, self.fqn)


def set_owner(module: nn.Module, owner: Owner) -> None:
    """Store on ``module`` the group that owns its parameters."""
    module.__dict__[_OWNER] = owner


def owner_of(module: nn.Module) -> Owner | None:
    """The owner of its parameters; None if no group has taken them."""
    owner: Owner | None = module.__dict__.get(_OWNER)
    return owner


# --- parameters that are added later --------------------------------------------------------------


class AddedParameters:
    """Parameters added to ``managed_modules`` after ``fully_shard``: no group reduces their gradients.

    A group owns the parameters that its modules had in its ``fully_shard`` call. Later registrations belong
    to no group: a parameter in a module of the group, or a module, such as an adapter, anywhere inside.
    Every forward ends with a search for these, in C loops; names are looked up only if it finds any.
    """

    def __init__(self, managed_modules: Sequence[nn.Module]) -> None:
        self._managed = dict.fromkeys(managed_modules)
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
        """Like ``is_untouched``, for dynamo, which cannot trace loops that run in C."""
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

        Searches the managed modules, and new ones that are not sharded. Also finds a parameter of ``fulls``,
        the unsharded ones, that was registered anywhere. Other additions count as known from now on.
        ``names``: the name of every module of the tree.
        """
        found = {module: names.get(module) for module in self._managed}
        _add_new_modules(found, names)
        added: list[tuple[str, nn.Parameter]] = []
        frozen: list[nn.Parameter] = []
        for module, prefix in found.items():
            for name, param in nn_modules.parameters_in_graph(module).items():
                if param is None or (module, name) in self._known:
                    continue
                if module not in self._managed and name_of_replaced(param) is not None:
                    continue  # a shard, which belongs to a group
                if param.requires_grad or any(param is full for full in fulls):
                    added.append((clean(joined(prefix or "", name)), param))
                else:
                    frozen.append(param)
        if not added:
            self._frozen = frozen
            self._take_stock(list(found))
        return added


def _add_new_modules(found: dict[nn.Module, str | None], names: Mapping[nn.Module, str]) -> None:
    """Add to ``found``, names by module, the modules inside whose parameters no group has taken."""
    around = list(found)
    for module in around:
        for own, child in nn_modules.children_in_graph(module).items():
            if child is not None and owner_of(child) is None and child not in found:
                found[child] = names.get(child) or clean(joined(found[module] or "", own))
                around.append(child)


def _names_of(module: nn.Module) -> list[str]:
    return [name for name, param in nn_modules.parameters_in_graph(module).items() if param is not None]


# --- tensors on attributes ------------------------------------------------------------------------


class SideTensors:
    """Tensors with a graph that forward stores on attributes of ``managed_modules``: auxiliary losses, say.

    torch's modules store none. On them, this searches only attributes that may be the user's, and that held
    a tensor, None or a number when an attribute was last added.
    """

    def __init__(self, managed_modules: Sequence[nn.Module]) -> None:
        self._own_attributes: list[dict[str, Any]] = []
        self._torch_attributes: list[dict[str, Any]] = []
        self._constants: list[Sequence[str]] = []  # attributes that torch's modules define
        for module in managed_modules:
            if type(module).__module__.startswith("torch.nn."):
                self._torch_attributes.append(module.__dict__)
                self._constants.append(getattr(module, "__constants__", ()))
            else:
                self._own_attributes.append(module.__dict__)
        self._num_torch_attributes = -1

    def find(self) -> list[Tensor]:
        """The current tensors that require gradients."""
        if sum(map(len, self._torch_attributes)) != self._num_torch_attributes:
            self._choose_on_torchs()
        on_torchs = list(map(dict.get, self._holders, self._names))
        found = _with_graph(on_torchs) if Tensor in map(type, on_torchs) else []
        for own in self._own_attributes:
            if Tensor in map(type, own.values()):
                found += _with_graph(own.values())
        return found

    def _choose_on_torchs(self) -> None:
        self._num_torch_attributes = sum(map(len, self._torch_attributes))
        chosen = [
            (own, name)
            for own, constants in zip(self._torch_attributes, self._constants, strict=True)
            for name, value in own.items()
            if (value is None or type(value) in (Tensor, int, float))
            and name not in _OF_ALL_MODULES
            and name not in constants
        ]
        self._holders = [own for own, _ in chosen]
        self._names = [name for _, name in chosen]


def _with_graph(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if type(value) is Tensor and value.requires_grad]
