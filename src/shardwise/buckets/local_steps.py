"""Steps of torch's elementwise optimizers over the local tensors of sharded parameters.

DTensor takes 9 us of the host for each operation of an optimizer on one parameter (torch 2.13), and AdamW has
eight. A hook before a step may replace its arguments, of which the optimizer is the first: a stand-in of the
same class, made after all other hooks, steps the local tensors instead. The optimizer itself is not changed,
whatever the step raises.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.torch_compat import elementwise
from shardwise.torch_compat.dtensor import local_tensor, placed_as, plain, spec_of

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
    """An optimizer that steps local tensors in place of ``optimizer``, once; None if it is not one of these,
    or if a method of it was replaced."""
    kind = type(optimizer)
    methods = vars(optimizer).keys() - {"step"}  # schedulers wrap it
    if kind not in ELEMENTWISE or any(callable(getattr(kind, name, None)) for name in methods):
        return None
    state = _LocalState(optimizer.state)
    groups = list(map(state.local_group, optimizer.param_groups))
    made: Optimizer = object.__new__(kind)
    vars(made).update(vars(optimizer), param_groups=groups, state=state)
    return made


class _LocalState(dict[Tensor, Any]):
    """The state of an optimizer by local tensors, of which each has the gradient of its parameter."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """``group`` with local tensors in place of parameters; if the result could differ, itself, which
        DTensor steps."""
        given = group["params"]
        if not group.get("differentiable") and len(set(map(id, given))) == len(given):
            params = list(map(self._local, given))
            if all(param is not None for param in params):
                return {**group, "params": params}
        elementwise.run_on_local_tensors()
        return group

    def _local(self, param: Tensor) -> Tensor | None:
        """Another tensor over the local one of ``param``, with its gradient; None if gradient or state are
        placed otherwise; ``param`` itself if it is a plain tensor or has no gradient."""
        if not isinstance(param, DTensor) or (grad := param.grad) is None:
            return param
        values = _local_values(param, {"grad": grad, **self._state.get(param, {})})
        if values is None or grad.dtype != param.dtype:
            return None
        local = local_tensor(param).detach()
        local.grad = values.pop("grad")
        self[local] = _StateOfLocal(param, self._state, values)
        return local

    def __missing__(self, key: Tensor) -> Any:
        return self._state[key]


def _local_values(param: DTensor, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """``values`` with the local tensors of DTensors; None if a tensor is not placed as ``param`` is."""
    if not elementwise.are_values((spec := spec_of(param)).placements):
        return None
    found = {}
    for name, value in values.items():
        if type(value) is DTensor and (
            (other := spec_of(value)) is spec or name in _NUMBERS or elementwise.are_alike(other, spec)
        ):
            value = local_tensor(value)
        elif isinstance(value, Tensor) and name not in _NUMBERS:
            return None
        found[name] = value
    return found


class _StateOfLocal(dict[str, Any]):
    """The state of a parameter, in local tensors.

    What the step adds to it is in ``state`` at once, in DTensors: hooks after the step, which may move the
    state elsewhere, find it there.
    """

    def __init__(self, param: DTensor, state: Any, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._param, self._state = param, state

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        state = self._state[self._param]
        if name not in state or plain(state[name]) is not value:
            is_number = name in _NUMBERS or not isinstance(value, Tensor)
            state[name] = value if is_number else placed_as(self._param, value)
