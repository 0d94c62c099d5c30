"""Optimizers by name, for what they keep and what a step of them allocates."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.arguments import check_type

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
        TypeError: it is neither a name nor can be called, or returns something else.
    """
    known = known_optimizers()
    wanted = f"a name ({', '.join(known)}), a class, or a function of the list of parameters"
    check_type(caller, "optimizer", optimizer, wanted, str, Callable)
    if isinstance(optimizer, str) and optimizer.lower() not in known:
        raise ValueError(f"{caller}: there is no optimizer '{optimizer}'. Pass one of {', '.join(known)}.")

    def make(params: list[nn.Parameter]) -> Several:
        if isinstance(optimizer, str):
            return Several(_by_name(optimizer.lower(), is_foreach, params))
        made = optimizer(params)
        wanted = "a function that returns a torch.optim.Optimizer"
        check_type(caller, "what optimizer() returned", made, wanted, torch.optim.Optimizer)
        return Several([made])

    return make


def _by_name(name: str, is_foreach: bool, params: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    cls, options = _KNOWN[name]
    shares = {cls: params}
    if name == "muon":  # takes matrices; what is left goes to AdamW, as its authors recommend
        shares = {cls: [p for p in params if p.dim() == 2], "AdamW": [p for p in params if p.dim() != 2]}
    for cls, share in shares.items():
        make = getattr(torch.optim, cls)
        has_foreach = is_foreach and "foreach" in inspect.signature(make).parameters
        if share:
            yield make(share, **options, **({"foreach": True} if has_foreach else {}))
