"""``.grad`` of a sharded parameter while unsharded gradients wait to be reduced, which the caller cannot see.

``zero_grad()`` has to clear those as well. ``.grad`` that was set to None is easy to see; ``.grad`` that was
zeroed in place is not: torch counts no versions for foreach operations on DTensors, nor through ``.data``. So
``.grad`` is then a DTensor that records what is done to it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.torch_compat import dtensor, tensor_impl


class InPlaceChanges:
    """In-place changes of a gradient since it was deferred; shared by all views of it."""

    def __init__(self) -> None:
        self.is_zeroed = False
        self.is_changed = False

    def record(self, name: str) -> None:
        """Record the in-place operation ``name``."""
        if name in ("zero_", "_foreach_zero_"):
            self.is_zeroed = True
        elif name not in ("requires_grad_", "detach_"):
            self.is_changed = True


_SAME_MEMORY = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


class DeferredGradient(DTensor):
    """A DTensor that records in-place operations on itself in ``changes``."""

    changes: InPlaceChanges

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record an in-place operation on the first argument, then do what a DTensor does."""
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(tensor, DeferredGradient):
                    tensor.changes.record(name)
        with tensor_impl.plain_access():
            result = func(*args, **(kwargs or {}))
        if func in _SAME_MEMORY and isinstance(result, DTensor):
            return _recording(result, args[0].changes)
        return result


def deferred_gradient(gradient: Tensor) -> DeferredGradient:
    """A DeferredGradient over the memory of ``gradient``, a DTensor."""
    return _recording(gradient, InPlaceChanges())


def _recording(gradient: Tensor, changes: InPlaceChanges) -> DeferredGradient:
    deferred = dtensor.make_dtensor(
        dtensor.local_tensor(gradient), dtensor.spec_of(gradient), DeferredGradient
    )
    assert isinstance(deferred, DeferredGradient)
    deferred.changes = changes
    return deferred
