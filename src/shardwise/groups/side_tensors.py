"""Tensors with a graph that forward stores on attributes of its modules, such as auxiliary losses."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class SideTensors:
    """Looks for them on the attributes of ``managed_modules``."""

    def __init__(self, managed_modules: Sequence[nn.Module]) -> None:
        is_torchs = {module: type(module).__module__.startswith("torch.nn.") for module in managed_modules}
        self._own_attributes = [module.__dict__ for module in managed_modules if not is_torchs[module]]
        self._torch_attributes = [module.__dict__ for module in managed_modules if is_torchs[module]]
        self._num_torch_attributes = -1

    def find(self) -> list[Tensor]:
        """The tensors that are there now and require gradients."""
        found = _left_on(self._own_attributes)
        # Modules of torch store none by themselves, so they are searched only if an attribute was added.
        if sum(map(len, self._torch_attributes)) != self._num_torch_attributes:
            on_torch = _left_on(self._torch_attributes)
            if not on_torch:
                self._num_torch_attributes = sum(map(len, self._torch_attributes))
            found += on_torch
        return found


def _left_on(attributes: list[dict[str, Any]]) -> list[Tensor]:
    with_tensors = [own for own in attributes if Tensor in map(type, own.values())]
    return [t for own in with_tensors for t in own.values() if type(t) is Tensor and t.requires_grad]
