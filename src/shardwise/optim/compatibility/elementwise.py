"""Whether an optimizer treats each element of a parameter by itself: tried out, on small tensors.

Elementwise, what a step makes of an element does not depend on how parameters are cut::

    two parameters   | a a a a  a a a a  a a a a | b b b b b |     one optimizer
    cut otherwise    | a a a a  a a a | a  a a a a  b b b b b |     an optimizer each, as on two ranks

Norms, sums over rows and columns, and random numbers all make a difference between the two.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.torch_compat.optimizers import forget_step_hooks, step_without_hooks

STEPS = 20
_CUT = 7


def depends_on_shapes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of ``optimizer``, with its options, differ between the two ways above.

    Only what was seen counts: False also where copies of ``optimizer`` cannot step small tensors at all. It
    is left as it is, as are random number generators.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return any(_differ(optimizer, group) for group in optimizer.param_groups)


def _differ(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    options = {
        key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")
    }
    weight, bias = _values(0)
    flat = torch.cat([weight.flatten(), bias])
    params = [weight, bias], [flat[:_CUT].clone()], [flat[_CUT:].clone()]
    try:
        whole, *parts = (_Copy(optimizer, options, list(map(nn.Parameter, some))) for some in params)
        for step in range(1, STEPS + 1):
            weight, bias = _values(step)
            whole.step([weight, bias])
            flat = torch.cat([weight.flatten(), bias])
            parts[0].step([flat[:_CUT]])
            parts[1].step([flat[_CUT:]])
    except Exception:
        return False
    stepped = torch.cat([param.detach().flatten() for part in parts for param in part.params])
    expected = torch.cat([param.detach().flatten() for param in whole.params])
    return not torch.allclose(stepped, expected, rtol=1e-10, atol=1e-14)


def _values(step: int) -> tuple[Tensor, Tensor]:
    """A matrix and a vector: parameters at step 0, then gradients.

    Later gradients shrink and grow, since some methods clip by what came before. They keep their signs, by
    which methods that look for a step size lengthen it. Those of the first step are nearly orthogonal to the
    rows of the matrix, since others project only then.
    """
    rows = 1 + torch.arange(3, dtype=torch.float64).unsqueeze(1)
    if step < 2:
        row = [1.0, -1.0, 1.0, -1.0] if step == 0 else [2.02, 0.98, -0.98, -0.02]
        weight = rows * torch.tensor(row, dtype=torch.float64)
    else:
        weight = torch.sin(step + rows * torch.arange(1, 5)) + 1.5
    scale = 1.0 if step < STEPS // 2 else 4.0 ** (step % 3)
    return scale * weight, scale * (torch.cos(step + torch.arange(5, dtype=torch.float64)) + 1.5)


class _Copy:
    """A copy of an optimizer with other ``params``, in one group with ``options``, before its first step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: dict[str, Any], params: list[nn.Parameter]
    ) -> None:
        self.params = params
        kind: Any = type(optimizer)
        self._optimizer = object.__new__(kind)
        vars(self._optimizer).update({name: _own(value) for name, value in vars(optimizer).items()})
        self._optimizer.param_groups = [copy.deepcopy(options) | {"params": params}]
        self._optimizer.state = defaultdict(dict)
        forget_step_hooks(self._optimizer)  # a step that calls that of a base class would run them
        self._step = step_without_hooks(kind)

    def step(self, gradients: list[Tensor]) -> None:
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient.clone()
        self._step(self._optimizer)


def _own(value: Any) -> Any:
    """What a copy may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value
