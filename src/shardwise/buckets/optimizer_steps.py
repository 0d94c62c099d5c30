"""Notices the steps of optimizers: counts what they change, and tells who keeps unsharded parameters.

Where parameters are DTensors, steps over lists (``foreach=True``, the default on devices) and fused steps
change the contents but not the version counter, by which autograd refuses a backward whose weights have
changed since the forward (2.11 to 2.15). So the versions are increased here. Only steps of optimizers derived
from ``torch.optim.Optimizer`` are seen.
"""

import threading
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.flat_slot import bucket_and_index
from shardwise.torch_compat import dtensor
from shardwise.torch_compat.dynamo import break_graphs


class StepListener(Protocol):
    """Who is told."""

    def optimizer_stepped(self, buckets: Iterable[Bucket]) -> None:
        """An optimizer with parameters of ``buckets``, which may come repeatedly, has stepped."""
        ...


_listeners: "weakref.WeakSet[StepListener]" = weakref.WeakSet()
_lock = threading.Lock()  # ranks may be threads
_handles: list[Any] = []  # of the hook, once there is one


def count_steps() -> None:
    """Count the steps of all optimizers from now on."""
    with _lock:
        if not _handles:
            _handles.append(register_optimizer_step_post_hook(_stepped))


def tell_of_steps(listener: StepListener) -> None:
    """Tell ``listener`` of every step, for as long as it lives, once steps are counted."""
    with _lock:
        _listeners.add(listener)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    params: Iterable[Tensor] = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    buckets: list[Bucket] = []
    changed: list[Tensor] = []
    for param in params:
        if (found := bucket_and_index(param)) is not None:
            buckets.append(found[0])
            if param.grad is not None:  # without a gradient it was left out
                changed += (param, dtensor.local_tensor(param))
    if not buckets:
        return
    increment_version(changed)
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        listener.optimizer_stepped(buckets)


break_graphs(_stepped)  # dynamo cannot read the attribute by which a parameter knows its bucket
