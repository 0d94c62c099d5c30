"""``.grad`` of one sharded parameter: reduced gradients, and unsharded ones that wait to be reduced.

The caller cannot see those, but ``zero_grad()`` has to clear them as well. ``.grad`` that was set to None is
easy to see; ``.grad`` that was zeroed in place is not: torch counts no versions for foreach operations on
DTensors, nor through ``.data``. So ``.grad`` is then a DTensor that records what is done to it.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.params.replaced_parameter import describe
from shardwise.torch_compat import autograd, dtensor, tensor_impl

if TYPE_CHECKING:
    from shardwise.params.parameter import Param


class ShardedGradient:
    """``.grad`` of the sharded parameter of ``param``.

    While unsharded gradients wait to be reduced, it stands for them, so that the caller can clear them.
    """

    def __init__(self, param: "Param") -> None:
        self._param = param
        self._deferred: DeferredGradient | None = None
        self._shows_deferred = False  # whether .grad is the unreduced gradient itself

    def add(self, local: Tensor) -> None:
        """Add a reduced gradient to ``.grad``, and run the hooks of the sharded parameter."""
        sharded = self._param.sharded
        gradient: Tensor = dtensor.make_dtensor(local, self._param.gradient_spec)
        if hooks := autograd.gradient_hooks(sharded):
            gradient = autograd.run_gradient_hooks(hooks, gradient)
        shows_deferred, self._shows_deferred = self._shows_deferred, False
        self._deferred = None  # it holds memory
        if sharded.grad is None or shows_deferred:
            sharded.grad = gradient
        else:
            self._accumulate(dtensor.local_tensor(gradient))
        for hooks in (self._param.original.post_hooks, autograd.post_accumulate_hooks(sharded)):
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
        elif isinstance(existing, DeferredGradient):
            existing = dtensor.make_dtensor(dtensor.local_tensor(existing), spec)
            sharded.grad = existing
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

    def defer(self, full: Tensor | None) -> None:
        """Leave the unsharded gradient ``full`` unreduced, and notice if the caller clears ``.grad``.

        If all of it belongs to this rank, ``.grad`` shows it; else zeros, unless there is a sharded gradient.
        """
        param, sharded = self._param, self._param.sharded
        if sharded.grad is None:
            own = None if full is None else param.original.content_of(full, param.mesh)
            self._shows_deferred = own is not None and self._may_show(own)
            if own is None or not self._shows_deferred:
                own = torch.zeros_like(param.local, dtype=param.precision.kept)
            sharded.grad = dtensor.make_dtensor(own.detach(), param.gradient_spec)
        sharded.grad = self._deferred = _recording(sharded.grad, InPlaceChanges())

    def _may_show(self, own: Tensor) -> bool:
        local = self._param.local
        return (
            type(own) is Tensor
            and self._param.mesh.shard_axis.is_alone
            and own.is_contiguous()
            and (own.shape, own.dtype) == (local.shape, self._param.precision.kept)
            and own.device == local.device
        )

    @property
    def is_deferred(self) -> bool:
        """True while ``.grad`` stands for an unreduced gradient."""
        return self._deferred is not None or self._shows_deferred

    def hide_deferred(self) -> None:
        """Stop showing the unreduced gradient in ``.grad``: it is dropped."""
        if self._shows_deferred:
            self._shows_deferred = False
            self._param.sharded.grad = self._deferred = None

    def was_cleared(self) -> bool:
        """Whether the caller cleared ``.grad`` since the gradient was deferred."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return False
        if self._param.sharded.grad is not deferred:
            if self._param.sharded.grad is not None and not self._shows_deferred:
                warnings.warn(
                    f"{self._param.fqn}: .grad was replaced while gradients of backward passes without "
                    "synchronisation (set_requires_gradient_sync(False)) wait to be reduced. They are "
                    "dropped, as if it had been set to None. Synchronise in the last backward before "
                    "replacing .grad.",
                    stacklevel=2,
                )
            self._shows_deferred = False
            return True
        if not isinstance(deferred, DeferredGradient):
            return False  # converted by .to(), which swaps what a tensor is
        if deferred.changes.is_changed and not deferred.changes.is_zeroed and not self._shows_deferred:
            warnings.warn(
                f"{self._param.fqn}: .grad was changed in place while gradients of backward passes without "
                "synchronisation (set_requires_gradient_sync(False)) wait to be reduced. The change does "
                "not apply to them; they will be added to it. Synchronise in the last backward before "
                "changing .grad.",
                stacklevel=2,
            )
        if deferred.changes.is_zeroed:
            self._shows_deferred = False
        return deferred.changes.is_zeroed


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


def _recording(gradient: Tensor, changes: InPlaceChanges) -> DeferredGradient:
    deferred = dtensor.make_dtensor(
        dtensor.local_tensor(gradient), dtensor.spec_of(gradient), DeferredGradient
    )
    assert isinstance(deferred, DeferredGradient)
    deferred.changes = changes
    return deferred
