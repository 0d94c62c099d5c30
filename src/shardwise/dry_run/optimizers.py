"""Optimizers by name, for what they keep and what a step of them allocates."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
    "muon": ("Muon", {}),
}
"""By name: the class in ``torch.optim``, and its options."""


def known_optimizers() -> list[str]:
    """The names that this torch has a class for."""
    return [name for name, (cls, _) in _KNOWN.items() if hasattr(torch.optim, cls)]


class Several:
    """Optimizers that step together."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)

    def step(self) -> None:
        """A step of each."""
        for optimizer in self._optimizers:
            optimizer.step()

    def state(self) -> list[Tensor]:
        """All tensors that they keep between steps."""
        states = [values for each in self._optimizers for values in each.state.values()]
        return [value for values in states for value in values.values() if isinstance(value, Tensor)]


def optimizer_named(
    caller: str, optimizer: Any, *, is_foreach: bool
) -> Callable[[list[nn.Parameter]], Several]:
    """A function that makes the optimizer of some parameters.

    Args:
        caller: the call whose argument it is, for messages.
        optimizer: a name, a class, or a function of a list of parameters that returns an optimizer.
        is_foreach: whether those by name take all parameters at once, as torch does on a GPU.

    Raises:
        ValueError: there is no such optimizer.
        TypeError: it is neither a name nor can be called.
    """
    known = known_optimizers()
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise TypeError(
                f"{caller}: optimizer is a {type(optimizer).__name__}; pass a name ({', '.join(known)}), a "
                "class, or a function of the list of parameters that returns an optimizer."
            )
        return partial(_made_by_caller, caller, optimizer)
    if optimizer.lower() not in known:
        raise ValueError(f"{caller}: there is no optimizer '{optimizer}'. Pass one of {', '.join(known)}.")
    return partial(_made, optimizer.lower(), is_foreach)


def _made(name: str, is_foreach: bool, params: list[nn.Parameter]) -> Several:
    class_name, options = _KNOWN[name]
    if name == "muon":  # takes matrices; what is left goes to AdamW, as its authors recommend
        matrices = [param for param in params if param.dim() == 2]
        others = [param for param in params if param.dim() != 2]
        return Several(
            [*([_of(class_name, is_foreach, matrices)] * bool(matrices)),
             *([_of("AdamW", is_foreach, others)] * bool(others))]
        )  # fmt: skip
    return Several([_of(class_name, is_foreach, params, **options)])


def _of(
    class_name: str, is_foreach: bool, params: list[nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    cls = getattr(torch.optim, class_name)
    if is_foreach and "foreach" in inspect.signature(cls).parameters:
        options["foreach"] = True
    return cls(params, **options)


def _made_by_caller(caller: str, make: Callable[..., Any], params: list[nn.Parameter]) -> Several:
    made = make(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"{caller}: optimizer() returned a {type(made).__name__}, not a torch.optim.Optimizer."
        )
    return Several([made])
