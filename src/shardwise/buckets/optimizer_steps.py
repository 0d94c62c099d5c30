"""Tells who wants to know of the steps of optimizers: after one, nobody has to look for changed shards.

Seen are steps of optimizers that are derived from ``torch.optim.Optimizer``.
"""

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.flat_slot import bucket_and_index


class StepListener(Protocol):
    """Who is told."""

    def optimizer_stepped(self, buckets: Iterable[Bucket]) -> None:
        """An optimizer with parameters of ``buckets``, which may come repeatedly, has stepped."""
        ...


_hooks: list[tuple["weakref.ref[StepListener]", Any]] = []


def tell_of_steps(listener: StepListener) -> None:
    """Tell ``listener`` of every step from now on, for as long as it lives.

    Hooks for those that are gone are removed here, not when they go: that may be while torch runs the hooks.
    """
    for ref, handle in _hooks[:]:
        if ref() is None:
            handle.remove()
            _hooks.remove((ref, handle))
    own = weakref.ref(listener)
    _hooks.append((own, register_optimizer_step_post_hook(partial(_tell, own))))


def _tell(listener: "weakref.ref[StepListener]", optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (own := listener()) is not None:
        own.optimizer_stepped(_buckets_of(optimizer))


def _buckets_of(optimizer: torch.optim.Optimizer) -> Iterator[Bucket]:
    params: Iterable[Tensor] = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for param in params:
        if (found := bucket_and_index(param)) is not None:
            yield found[0]
