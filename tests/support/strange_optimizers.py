"""Optimizer classes that look at whole parameters, keep odd state or go wrong, each in a few lines.

They know nothing of shards: they are what other people write for one process.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Simple(torch.optim.Optimizer):
    """A class that updates each parameter from its gradient and state, in ``update``."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def active(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, param.grad, self.state[param]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare()
        for group, param, grad, state in self.active():
            param.sub_(group["lr"] * self.update(group, param, grad, state))
        return loss

    def prepare(self) -> None:
        """What comes before all parameters."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad


class Shampoo(Simple):
    """Shampoo (Gupta et al., 2018) in a page: a statistic for each side of a matrix."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        matrix = grad.reshape(len(grad), -1) if grad.dim() else grad.view(1, 1)
        if not state:
            state["left"], state["right"] = (1e-2 * torch.eye(n, dtype=grad.dtype) for n in matrix.shape)
        state["left"] += matrix @ matrix.T
        state["right"] += matrix.T @ matrix
        return (root(state["left"]) @ matrix @ root(state["right"])).view_as(grad)


def root(matrix: Tensor) -> Tensor:
    if not matrix.numel():
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values ** (-1 / 4)) @ vectors.T


class Lists(Simple):
    """Keeps lists of tensors, Python's numbers, texts and nothing in its state."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state.update(past=[], count=0, scale=1.0, kind="new", nothing=None, pair=(1, 2.5))
        state["past"] = [*state["past"][-1:], grad.clone()]
        state["count"] += 1
        state["scale"] = float(grad.norm()) / 2 + state["scale"] / 2
        state["kind"] = "old"
        return sum(state["past"]) / (state["scale"] * state["count"])


class CountsInGroup(Simple):
    """Counts its steps in its param groups, as Adam of several libraries does."""

    def prepare(self) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad / (group["count"] * (1 + grad.norm()))


class CountsInItself(Simple):
    """Counts its steps in an attribute, which no state has."""

    count = 0

    def prepare(self) -> None:
        self.count += 1

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad / self.count


class CountsBesideParameters(Simple):
    """Counts its steps in its state, but under no parameter."""

    def prepare(self) -> None:
        self.state["all"] = {"count": self.state["all"].get("count", 0) + 1}

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad / self.state["all"]["count"]


class Normed(Simple):
    """Divides by the norm of all gradients, as LAMB does first."""

    def prepare(self) -> None:
        norms = [grad.norm() for _, _, grad, _ in self.active()]
        self.norm = torch.stack(norms).norm() if norms else torch.tensor(1.0)

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad / self.norm


class Estimates(Simple):
    """Keeps an estimate over all gradients in its groups, and steps by it, as Prodigy does."""

    def prepare(self) -> None:
        largest = max((float(grad.abs().max()) for _, _, grad, _ in self.active() if grad.numel()), default=0)
        for group in self.param_groups:
            group["largest"] = max(group.get("largest", 0.0), largest)

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad / group["largest"]


class EstimatesUnseen(Estimates):
    """Keeps the estimate, but does not step by it: only its groups tell."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad


class Replaces(Simple):
    """Puts another object in the place of a parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["params"] = [
                nn.Parameter(p - 0.1 * p.grad) if p.grad is not None else p for p in group["params"]
            ]


class Raises(Simple):
    """Raises in step ``at`` where it finds a parameter of this many elements."""

    def __init__(self, params: Any, lr: float = 0.1, at: int = 1, numel: int = 0) -> None:
        super().__init__(params, lr, at=at, numel=numel)

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["count"] = state.get("count", 0) + 1
        if state["count"] == group["at"] and grad.numel() == group["numel"]:
            raise ArithmeticError(f"no step {group['at']} for {tuple(grad.shape)}")
        return grad


class DecaysAll(Simple):
    """Decays all parameters, with gradients or without."""

    def prepare(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.is_floating_point():
                    param.mul_(0.9)


class ChangesAtTimes(Simple):
    """Halves its learning rate in every second step."""

    def prepare(self) -> None:
        self.steps = vars(self).get("steps", 0) + 1
        for group in self.param_groups:
            group["lr"] *= 1 if self.steps % 2 else 0.5


class Sign(Simple):
    """NaN where a gradient is zero, as in one process."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad / grad.abs()


class ByAttribute(Simple):
    """Steps a parameter as an attribute says that the caller has set."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad * getattr(param, "factor", 1.0)


class NormedByGroup(Simple):
    """Divides by the norm of the gradients of a group, where the group says so."""

    def __init__(self, params: Any, lr: float = 0.1, normed: bool = False) -> None:
        super().__init__(params, lr, normed=normed)

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        norms = [each.grad.norm() for each in group["params"] if each.grad is not None]
        return grad / torch.stack(norms).norm() if group["normed"] else grad
