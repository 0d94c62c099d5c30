"""A ``.grad`` that stands for unsharded gradients that wait to be reduced.

The caller cannot see those, but ``zero_grad()`` has to clear them as well. ``.grad`` that was set to None is
easy to see; ``.grad`` that was zeroed in place is not: torch counts no versions for foreach operations on
DTensors, nor through ``.data``. So the local tensor of ``.grad`` is then one without values, which is told
what is done to it. Whoever reads it gets an error, rather than zeros or a part of the sum.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_compat import dtensor, pytree, tensor_impl

aten = torch.ops.aten


DEFERRED: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Each Param whose ``.grad`` is one: while there are none, no step has to look at each ``.grad``."""


class DeferredGradient(Tensor):
    """The local tensor of a ``.grad`` that stands for an unreduced gradient. It has no values.

    It can be zeroed, added to, as autograd does, and moved to another dtype or device. All other operations
    raise an error.
    """

    _owner: "weakref.ref[Any]"  # weak: Python's collector does not see what .grad refers to
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
        """One that tells ``owner``, a Param, what is done to it."""
        made = tensor_impl.without_values(cls, shape, dtype, device)
        made._owner, made._fqn = owner, fqn
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """What it stands for."""
        return f"<unreduced gradient of {self._fqn}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Tell the owner what it can follow, or make another like it."""
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
    """Raise the error of a ``.grad`` that stands for an unreduced gradient, before anything is done."""
    if isinstance(local := dtensor.plain(gradient), DeferredGradient):
        raise RuntimeError(local._refusal())
