"""Hooks around the steps of optimizers: count changes of parameters, notify listeners, and save host time.

For DTensors, steps over lists (``foreach=True``, the default on devices) and fused steps change the contents
but not the version counter, by which autograd refuses a backward whose weights have changed since the forward
(2.11 to 2.15). So the versions are increased here. Only steps of optimizers derived from
``torch.optim.Optimizer`` are seen.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
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
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))  # which may run the last backward
    if DEFERRED and not has_closure:
        for param in params_of(optimizer.param_groups):
            if param.grad is not None:
                refuse_deferred(param.grad)
    if not any(map(bucket_and_index, params_of(optimizer.param_groups))):
        return None
    if not has_closure and (stand_in := stand_in_for(optimizer)) is not None:
        return (stand_in, *args[1:]), kwargs
    elementwise.run_on_local_tensors()
    return None


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


break_graphs(_about_to_step)
break_graphs(_stepped)  # dynamo cannot read the attribute by which a parameter knows its bucket
