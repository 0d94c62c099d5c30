"""The hooks around an optimizer's step, and the gradient scaler. Seen on 2.11 to 2.13."""

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwise.torch_compat.autograd import profiler_is_on


def step_post_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What ``register_step_post_hook`` has registered; torch has no public way to list them."""
    return list(optimizer._optimizer_step_post_hooks.values())


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``kind.step`` without the hooks that torch puts around it when the first of a class is made."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, of an optimizer, with the hooks and the profiler's label that torch puts around it.

    What torch puts there costs tens of microseconds for the label alone, so it is skipped where there are no
    hooks and no profiler. ``hooked`` tells torch that nothing is left to do.
    """
    as_in_torch = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def hooked(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        has_hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if has_hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or profiler_is_on():
            return as_in_torch(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    hooked.hooked = True  # type: ignore[attr-defined]
    return hooked


# --- the gradient scaler --------------------------------------------------------------------------

check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply gradients by a factor, and set a flag if any of them is infinite or NaN. Not documented; the only
operation that does both in one pass (2.11 to 2.13)."""


class GradScalerBase(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with a public method for how gradients are unscaled.

    Its ``unscale_`` and ``step`` both call one private method, and nothing public lies in between (2.11 to
    2.13).
    """

    @abstractmethod
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply all gradients by ``inv_scale``; by device, whether any of them was infinite or NaN."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16)
