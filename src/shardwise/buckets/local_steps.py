"""Steps of torch's elementwise optimizers over the local tensors of sharded parameters.

DTensor takes 9 us of the host for each operation of an optimizer on one parameter (torch 2.13), and AdamW has
eight. A hook before a step may replace its arguments, of which the optimizer is the first: a stand-in of the
same class steps the local tensors instead. The optimizer itself is not changed, whatever the step raises.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.torch_compat.dtensor import local_tensor, placed_as, plain
from shardwise.torch_compat.elementwise import are_placed_alike

Optimizer = torch.optim.Optimizer

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
    *(torch.optim.Rprop, torch.optim.ASGD),
)
"""Optimizers of torch that treat each element of a parameter by itself, so that shards can step alone."""

_NUMBERS = ("step", "eta", "mu", "mu_product")
"""State of these that is a plain number beside tensors like the parameter."""


def params_of(groups: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    """The parameters of param groups."""
    return chain.from_iterable(group["params"] for group in groups)


def stand_in_for(optimizer: Optimizer) -> Optimizer | None:
    """An optimizer that steps the local tensors in place of ``optimizer``; None if the result could differ.

    It reads gradients and state when its step asks for them, after other hooks.
    """
    if type(optimizer) not in ELEMENTWISE or optimizer.defaults.get("differentiable"):
        return None
    for param in params_of(optimizer.param_groups):
        if isinstance(param, DTensor) and not _is_local(param, optimizer.state.get(param, {})):
            return None
    made: Optimizer = object.__new__(type(optimizer))
    state = _LocalState(optimizer.state)
    vars(made).update(vars(optimizer), param_groups=_LocalGroups(optimizer.param_groups, state), state=state)
    return made


def _is_local(param: DTensor, state: dict[str, Any]) -> bool:
    """True if its gradient and ``state`` are placed as ``param`` is, so that local tensors step alone."""
    if (grad := param.grad) is None:
        return True
    beside = [value for name, value in state.items() if isinstance(value, Tensor) and name not in _NUMBERS]
    return grad.dtype == param.dtype and all(
        type(each) is DTensor and are_placed_alike(param, each) for each in (grad, *beside)
    )


class _LocalGroups:
    """Param groups, with the local tensors of parameters."""

    def __init__(self, groups: Iterable[dict[str, Any]], state: "_LocalState") -> None:
        self._groups, self._state = groups, state

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for group in self._groups:
            yield {**group, "params": list(map(self._state.local, group["params"]))}


class _LocalState(dict[Tensor, Any]):
    """The state of an optimizer by local tensors, of which each has the gradient of its parameter."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._params: dict[Tensor, Tensor] = {}

    def local(self, param: Tensor) -> Tensor:
        """Another tensor over the local one of ``param``, with its gradient; a plain tensor itself."""
        if not isinstance(param, DTensor):
            return param
        local, grad = local_tensor(param).detach(), param.grad
        local.grad = None if grad is None else local_tensor(grad)
        self._params[local] = param
        return local

    def __missing__(self, key: Tensor) -> Any:
        param = self._params.get(key, key)
        state = self._state[param]
        self[key] = made = _StateOfLocal(param, state) if isinstance(param, DTensor) else state
        return made


class _StateOfLocal(dict[str, Any]):
    """The state of a parameter, in local tensors.

    What the step adds to it is in ``state`` at once, in DTensors: hooks after the step, which may move the
    state elsewhere, find it there.
    """

    def __init__(self, param: DTensor, state: dict[str, Any]) -> None:
        super().__init__(zip(state, map(plain, state.values()), strict=True))
        self._param, self._state = param, state

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name not in self._state or plain(self._state[name]) is not value:
            is_number = name in _NUMBERS or not isinstance(value, Tensor)
            self._state[name] = value if is_number else placed_as(self._param, value)
