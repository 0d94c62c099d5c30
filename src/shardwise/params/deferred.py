"""``.grad`` of a shard while full gradients, which the caller cannot see, wait to be reduced.

After ``zero_grad()`` those have to go as well. Setting ``.grad`` to None is seen by looking; zeroing
it in place is not: torch counts no versions for foreach operations on DTensors, nor through
``.data``. So ``.grad`` is then a DTensor that notices what is done to it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.torch_compat import dtensor


class Mark:
    """What happened to a gradient since it was marked; shared by all views of it."""

    def __init__(self) -> None:
        self.is_zeroed = False
        self.is_changed = False

    def note(self, name: str) -> None:
        """Take note of the operation in place called ``name``."""
        if name in ("zero_", "_foreach_zero_"):
            self.is_zeroed = True
        elif name not in ("requires_grad_", "detach_"):
            self.is_changed = True


_SAME_MEMORY = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


class DeferredGradient(DTensor):
    """A DTensor that notes operations in place on itself in ``mark``."""

    mark: Mark

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Note an operation in place on the first argument, then do what a DTensor does."""
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(tensor, DeferredGradient):
                    tensor.mark.note(name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _SAME_MEMORY and isinstance(result, DTensor):
            return _marked(result, args[0].mark)
        return result


def deferred_gradient(gradient: Tensor) -> DeferredGradient:
    """A DeferredGradient over the memory of ``gradient``, a DTensor."""
    return _marked(gradient, Mark())


def _marked(gradient: Tensor, mark: Mark) -> DeferredGradient:
    marked = dtensor.make_dtensor(dtensor.local_tensor(gradient), gradient._spec, DeferredGradient)  # type: ignore[attr-defined]
    assert isinstance(marked, DeferredGradient)
    marked.mark = mark
    return marked
