"""Tensors with a graph that forward stores on attributes of its modules, such as auxiliary losses."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

_OF_ALL_MODULES = frozenset(vars(nn.Module()))


class SideTensors:
    """Looks for them on the attributes of ``managed_modules``.

    Modules of torch store none by themselves. There, it looks only at attributes that may be the user's, and
    that held a tensor, None or a number when an attribute was last added.
    """

    def __init__(self, managed_modules: Sequence[nn.Module]) -> None:
        self._own_attributes: list[dict[str, Any]] = []
        self._torch_attributes: list[dict[str, Any]] = []
        self._constants: list[Sequence[str]] = []  # what modules of torch have by themselves
        for module in managed_modules:
            if type(module).__module__.startswith("torch.nn."):
                self._torch_attributes.append(module.__dict__)
                self._constants.append(getattr(module, "__constants__", ()))
            else:
                self._own_attributes.append(module.__dict__)
        self._num_torch_attributes = -1

    def find(self) -> list[Tensor]:
        """The tensors that are there now and require gradients."""
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
