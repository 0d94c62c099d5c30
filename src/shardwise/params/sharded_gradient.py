"""``.grad`` of one sharded parameter: reduced gradients, and unsharded ones that wait to be reduced.

The caller cannot see those, but ``zero_grad()`` has to clear them as well. ``.grad`` that was set to None is
easy to see; ``.grad`` that was zeroed in place is not: torch counts no versions for foreach operations on
DTensors, nor through ``.data``. So the local tensor of ``.grad`` is then one without values, which is told
what is done to it. Whoever reads it gets an error, rather than zeros or a part of the sum.
"""

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.params.replaced_parameter import describe
from shardwise.torch_compat import autograd, dtensor, pytree, tensor_impl

if TYPE_CHECKING:
    from shardwise.params.parameter import Param

aten = torch.ops.aten

DEFERRED: "weakref.WeakSet[ShardedGradient]" = weakref.WeakSet()
"""Those that stand for unreduced gradients: while there are none, no step has to look at each ``.grad``."""


class ShardedGradient:
    """``.grad`` of the sharded parameter of ``param``.

    While unsharded gradients wait to be reduced, it stands for them, so that the caller can clear them.
    """

    def __init__(self, param: "Param") -> None:
        self._param = param
        self._deferred: Tensor | None = None  # .grad that stands for unreduced gradients
        self._reduced: Tensor | None = None  # what .grad is without them

    def add(self, local: Tensor) -> None:
        """Add a reduced gradient to ``.grad``, and run the hooks of the sharded parameter."""
        sharded = self._param.sharded
        gradient: Tensor = dtensor.make_dtensor(local, self._param.gradient_spec)
        if hooks := autograd.gradient_hooks(sharded):
            gradient = autograd.run_gradient_hooks(hooks, gradient)
        self.show_reduced()
        if sharded.grad is None:
            sharded.grad = gradient
        else:
            self._accumulate(dtensor.local_tensor(gradient))
        for hooks in (self._param.original_post_hooks, autograd.post_accumulate_hooks(sharded)):
            for post in list(hooks.values()) if hooks else ():
                post(sharded)

    def _accumulate(self, local: Tensor) -> None:
        sharded, spec = self._param.sharded, self._param.gradient_spec
        existing = sharded.grad
        if not isinstance(existing, DTensor):
            raise RuntimeError(
                f"{self._param.fqn}: .grad is {describe(existing)}, where a DTensor is expected; a reduced "
                "gradient cannot be added to it. Assign only DTensors sharded as the parameter to "
                ".grad, or None."
            )
        if existing.placements != spec.placements:
            # Left by autograd, where the loss used the sharded parameter itself.
            existing = sharded.grad = existing.redistribute(placements=spec.placements)
        dtensor.local_tensor(existing).add_(local)

    def set(self, local: Tensor | None) -> None:
        """Set ``.grad`` to ``local`` without running hooks."""
        param = self._param
        if local is None:
            param.sharded.grad = None
            return
        own = torch.empty(param.local.shape, dtype=param.precision.kept, device=param.local.device)
        param.sharded.grad = dtensor.make_dtensor(own.copy_(local), param.gradient_spec)

    # --- deferred ---------------------------------------------------------------------------------

    def defer(self) -> None:
        """Have ``.grad`` stand for an unreduced gradient."""
        param, sharded = self._param, self._param.sharded
        if self._deferred is None or sharded.grad is not self._deferred:
            self._reduced = sharded.grad
            local = DeferredGradient.of(self, param.fqn, param.local, param.precision.kept)
            sharded.grad = self._deferred = dtensor.make_dtensor(local, param.gradient_spec)
            DEFERRED.add(self)

    @property
    def is_deferred(self) -> bool:
        """True while ``.grad`` stands for an unreduced gradient."""
        return self._deferred is not None

    @property
    def reduced(self) -> Tensor | None:
        """``.grad``, without an unreduced gradient."""
        return self._param.sharded.grad if self._deferred is None else self._reduced

    def show_reduced(self) -> None:
        """No longer stand for an unreduced gradient, which is reduced or dropped."""
        if self._deferred is not None and self._param.sharded.grad is self._deferred:
            self._param.sharded.grad = self._converted(self._deferred)
        self._forget()

    def zero(self) -> None:
        """The caller has zeroed ``.grad``, which is told by ``was_cleared``."""
        if self._deferred is not None and self._param.sharded.grad is self._deferred:
            self.beside(self._deferred).zero_()
            self._param.sharded.grad = self._reduced

    def beside(self, like: Tensor) -> Tensor:
        """The local tensor of the reduced gradient, to be added to; of the dtype and device of ``like``."""
        self._reduced = self._converted(like)
        if self._reduced is None:
            zeros = torch.zeros(self._param.local.shape, dtype=like.dtype, device=like.device)
            self._reduced = dtensor.make_dtensor(zeros, self._param.gradient_spec)
        return dtensor.local_tensor(self._reduced)

    def _converted(self, like: Tensor) -> Tensor | None:
        """The reduced gradient as ``module.to()`` would have made it, which has only seen ``like``."""
        return None if self._reduced is None else self._reduced.to(like.device, like.dtype)

    def was_cleared(self) -> bool:
        """Whether the caller cleared ``.grad`` since the gradient was deferred."""
        gradient = self._param.sharded.grad
        if self._deferred is None or gradient is self._deferred:
            return False
        if gradient is not None and gradient is not self._reduced:
            warnings.warn(
                f"{self._param.fqn}: .grad was replaced while gradients of backward passes without "
                "synchronisation (set_requires_gradient_sync(False)) wait to be reduced. They are "
                "dropped, as if it had been set to None. Synchronise in the last backward before "
                "replacing .grad.",
                stacklevel=2,
            )
        self._forget()
        return True

    def _forget(self) -> None:
        self._deferred = self._reduced = None
        DEFERRED.discard(self)


class DeferredGradient(Tensor):
    """The local tensor of a ``.grad`` that stands for an unreduced gradient. It has no values.

    It can be zeroed, added to, as autograd does, and moved to another dtype or device. All other operations
    raise an error.
    """

    _owner: "weakref.ref[ShardedGradient]"  # weak: Python's collector does not see what .grad refers to
    _fqn: str

    @classmethod
    def of(cls, owner: ShardedGradient, fqn: str, like: Tensor, dtype: torch.dtype) -> "DeferredGradient":
        """One that tells ``owner`` when it is zeroed, of the shape and device of ``like``."""
        return cls._made(weakref.ref(owner), fqn, like.shape, dtype, like.device)

    @classmethod
    def _made(cls, owner: Any, fqn: str, *place: Any) -> "DeferredGradient":
        made = tensor_impl.without_values(cls, *place)
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
                owner.zero()
            return found
        if func is aten.add_.Tensor and found is args[0] and owner is not None and owner.is_deferred:
            owner.beside(found).add_(*args[1:], **kwargs)
            return found
        if func is aten.detach.default or func is aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or found.dtype, kwargs.get("device") or found.device
            return cls._made(found._owner, found._fqn, found.shape, dtype, device)
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
