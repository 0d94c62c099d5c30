"""Hooks around the steps of optimizers: count changes of parameters, notify listeners, and save host time.

For DTensors, steps over lists (``foreach=True``, the default on devices) and fused steps change the contents
but not the version counter, by which autograd refuses a backward whose weights have changed since the forward
(2.11 to 2.15). So the versions are increased here. Only steps of optimizers derived from
``torch.optim.Optimizer`` are seen.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.buckets.bucket import Bucket, bucket_and_index
from shardwise.buckets.local_steps import params_of, stand_in_for
from shardwise.params.parameter import DEFERRED, refuse_deferred
from shardwise.torch_compat import dtensor, elementwise
from shardwise.torch_compat.dynamo import break_graphs


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
        elementwise.run_on_local_tensors()
    else:  # again in each step, since hooks run in the order in which they were registered
        _last_hooks[optimizer] = optimizer.register_step_pre_hook(_replace_arguments)


def _replace_arguments(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """The last hook before a step: others may have replaced param groups and state, or given a closure."""
    own, *others = args
    if not _has_closure(args, kwargs) and (made := stand_in_for(optimizer)) is not None:
        return (made, *others), kwargs
    elementwise.run_on_local_tensors()
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
    elementwise.run_as_torch()
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
