"""The gradient scaler of ``torch.amp``."""

from abc import abstractmethod

import torch
from torch import Tensor

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
