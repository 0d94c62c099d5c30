"""Hooks around the steps of optimizers: count changes of parameters, notify listeners, and save host time.

For DTensors, steps over lists (``foreach=True``, the default on devices) and fused steps change the contents
but not the version counter, by which autograd refuses a backward whose weights have changed since the forward
(2.11 to 2.15). So the versions are increased here. Only steps of optimizers derived from
``torch.optim.Optimizer`` are seen.

DTensor takes 9 us of the host for each operation of an optimizer on one parameter (torch 2.13), and AdamW has
eight. A hook before a step may replace its arguments, of which the optimizer is the first: a stand-in of the
same class, made after all other hooks, steps the local tensors of torch's elementwise optimizers instead. The
optimizer itself is not changed, whatever the step raises.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.buckets.bucket import Bucket, bucket_and_index
from shardwise.params.parameter import DEFERRED, refuse_deferred
from shardwise.torch_compat import dtensor, optimizers
from shardwise.torch_compat.dtensor import local_tensor, placed_as, plain, spec_of
from shardwise.torch_compat.dynamo import break_graphs

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
        optimizers.run_on_local_tensors()
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
    if not optimizers.are_values((spec := spec_of(param)).placements):
        return None
    found = {}
    for name, value in values.items():
        if type(value) is DTensor and (
            (other := spec_of(value)) is spec or name in _NUMBERS or optimizers.are_alike(other, spec)
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


# --- the hooks ------------------------------------------------------------------------------------


class SteppedParameters:
    """The tensors that a step has ``changed``, sharded parameters and their local tensors, and the buckets of
    all parameters of the optimizer."""

    def __init__(self, changed: Sequence[Tensor], buckets: Iterable[Bucket]) -> None:
        self.changed = changed
        self._buckets = [weakref.ref(bucket) for bucket in dict.fromkeys(buckets)]

    @classmethod
    def of(cls, groups: Iterable[Mapping[str, Any]]) -> "SteppedParameters":
        """Made from param groups. Parameters without gradient were left out of the step."""
        found = [(p, place[0]) for p in params_of(groups) if (place := bucket_and_index(p)) is not None]
        changed = [param for param, _ in found if param.grad is not None]
        return cls([*changed, *map(dtensor.local_tensor, changed)], [bucket for _, bucket in found])

    def buckets(self) -> list[Bucket]:
        """The buckets that still exist."""
        return [bucket for ref in self._buckets if (bucket := ref()) is not None]


class StepListener(Protocol):
    """A listener to steps."""

    def optimizer_stepped(self, buckets: Iterable[Bucket]) -> None:
        """An optimizer with parameters of ``buckets`` has stepped."""
        ...


# In the order in which they were added: some communicate, in the same order on all ranks.
_listeners: "weakref.WeakKeyDictionary[StepListener, None]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # ranks may be threads
_handles: list[Any] = []  # of the hooks, once installed
_last_hooks: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]" = weakref.WeakKeyDictionary()


def install_step_hooks() -> None:
    """Hook the steps of all optimizers from now on. The hooks are global to the process, and stay."""
    with _lock:
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_about_to_step))
            _handles.append(register_optimizer_step_post_hook(_stepped))


def add_step_listener(listener: StepListener) -> None:
    """Notify ``listener`` of every step while it lives, once the hooks are installed."""
    with _lock:
        _listeners[listener] = None


def _about_to_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """The first hook before a step. Dynamo traces it, and then finds a constant: what it compiles is made for
    the parameters of the optimizer, not for those of a stand-in, which would be new ones in each step."""
    _begin_step(optimizer, args, kwargs, is_compiled=torch.compiler.is_compiling())


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, is_compiled: bool) -> None:
    if not _has_closure(args, kwargs):
        _refuse_deferred(optimizer)
    if (earlier := _last_hooks.pop(optimizer, None)) is not None:
        earlier.remove()
    if not any(map(bucket_and_index, params_of(optimizer.param_groups))):
        return
    if is_compiled:
        optimizers.run_on_local_tensors()
    else:  # again in each step, since hooks run in the order in which they were registered
        _last_hooks[optimizer] = optimizer.register_step_pre_hook(_replace_arguments)


def _replace_arguments(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """The last hook before a step: others may have replaced param groups and state, or given a closure."""
    own, *others = args
    if not _has_closure(args, kwargs) and (made := stand_in_for(optimizer)) is not None:
        return (made, *others), kwargs
    optimizers.run_on_local_tensors()
    checked = partial(_checked, optimizer)
    return (own, *map(checked, others)), {name: checked(value) for name, value in kwargs.items()}


def _has_closure(args: Any, kwargs: Any) -> bool:
    """True if the step calls something itself, which may run the last backward."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def _checked(optimizer: torch.optim.Optimizer, argument: Any) -> Any:
    """``argument``; of a closure, gradients that it leaves unreduced are refused before they are used."""
    if not callable(argument):
        return argument

    @wraps(argument)
    def closure(*args: Any) -> Any:
        loss = argument(*args)
        _refuse_deferred(optimizer)
        return loss

    return closure


def _refuse_deferred(optimizer: torch.optim.Optimizer) -> None:
    if DEFERRED:
        for param in params_of(optimizer.param_groups):
            if param.grad is not None:
                refuse_deferred(param.grad)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    optimizers.run_as_torch()
    known = getattr(optimizer, "stepped_parameters", None)  # saves a pass over all parameters
    stepped: SteppedParameters = (known and known()) or SteppedParameters.of(optimizer.param_groups)
    buckets = stepped.buckets()
    if not buckets:
        return
    increment_version(stepped.changed)
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        listener.optimizer_stepped(buckets)


break_graphs(_begin_step)
break_graphs(_replace_arguments)
break_graphs(_stepped)  # dynamo cannot read the attribute by which a parameter knows its bucket
