"""A ``.grad`` that stands for unsharded gradients waiting to be reduced.

The caller cannot see those, but ``zero_grad()`` must clear them as well. A ``.grad`` set to None is easy to
detect; one zeroed in place is not: torch counts no versions for foreach operations on DTensors, nor through
``.data``. So the local tensor of such a ``.grad`` has no values, and intercepts operations on it. Reading it
raises an error, instead of returning zeros or a part of the sum.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_compat import dtensor, pytree, tensor_impl

aten = torch.ops.aten


DEFERRED: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Each Param with a deferred ``.grad``: while there are none, no step needs to check each ``.grad``."""


class DeferredGradient(Tensor):
    """The local tensor of a ``.grad`` that stands for an unreduced gradient. It has no values.

    It can be zeroed, added to, as by autograd, and moved to another dtype or device. All other operations
    raise an error.
    """

    _owner: "weakref.ref[Any]"  # weak: Python's collector cannot see references from .grad
    _fqn: str

    @classmethod
    def make(
        cls,
        owner: "weakref.ref[Any]",
        fqn: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "DeferredGradient":
        """One that forwards operations on it to ``owner``, a Param."""
        made = tensor_impl.without_values(cls, shape, dtype, device)
        made._owner, made._fqn = owner, fqn
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Name the parameter."""
        return f"<unreduced gradient of {self._fqn}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Forward to the owner what it can follow, or make another like this."""
        kwargs = kwargs or {}
        if func is aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
        found = next(
            each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DeferredGradient)
        )
        owner = found._owner()
        if func is aten.zero_.default:
            if owner is not None:
                owner.zero_gradient()
            return found
        if func is aten.add_.Tensor and found is args[0] and owner is not None and owner.is_deferred:
            owner.reduced_local(found).add_(*args[1:], **kwargs)
            return found
        if func is aten.detach.default or func is aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or found.dtype, kwargs.get("device") or found.device
            return cls.make(found._owner, found._fqn, found.shape, dtype, device)
        raise RuntimeError(found._refusal())

    def _refusal(self) -> str:
        return (
            f"{self._fqn}: gradients of backward passes without synchronisation (no_sync, "
            "set_requires_gradient_sync(False), set_requires_all_reduce(False)) wait to be reduced; .grad "
            "does not contain them yet. Run the last backward with synchronisation before .grad is read or "
            "changed, gradients are clipped or an optimizer steps; or call zero_grad()."
        )


def refuse_deferred(gradient: Tensor) -> None:
    """Raise the error of a ``.grad`` that stands for an unreduced gradient, before anything changes."""
    if isinstance(local := dtensor.plain(gradient), DeferredGradient):
        raise RuntimeError(local._refusal())
