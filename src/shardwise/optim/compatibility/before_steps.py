"""Optimizers that DTensors do not suit are stepped on flat shards, or refused before they change anything.

Nothing public tells that an optimizer is made; a hook tells that one is about to step. It may give the step
other arguments, ``self`` among them. So the step that was called gets a ``self`` without parameters, and a
closure that steps the optimizer as a `FlatOptimizer`: within the step, after the hooks of the caller.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.buckets.bucket import bucket_and_index
from shardwise.buckets.optimizer_steps import OtherArguments, before_steps
from shardwise.comm.full_tensors import sharding_of
from shardwise.layout.regions import Split
from shardwise.optim.compatibility.elementwise import depends_on_shapes
from shardwise.optim.compatibility.known import (
    FLATTENING,
    LACK_AN_OPERATION,
    LOW_BIT,
    REFUSED,
    is_in,
    is_quantised,
    package_of,
)
from shardwise.optim.flat_optimizer import FlatOptimizer, become_flat
from shardwise.torch_compat.optimizers import step_without_hooks

Optimizer = torch.optim.Optimizer
_IS_FLAT_BY_DEFAULT = "_shardwise_is_flat_by_default"
PAGE = "docs/interop/optimizers.md of shardwise lists what works."


def prepare_step(optimizer: Optimizer, args: Any, kwargs: Any) -> OtherArguments | None:
    """Before each step of any optimizer; returns what it is called with instead, if anything."""
    kind: Any = type(optimizer)
    react = _reaction(kind)
    return None if react is None else react(optimizer, args, kwargs)


@cache
def _reaction(kind: Any) -> Callable[[Any, Any, Any], OtherArguments | None] | None:
    if issubclass(kind, FlatOptimizer):
        return _if_by_default if is_in(LACK_AN_OPERATION, kind) else None
    if is_in(LACK_AN_OPERATION, kind):
        return _flat_by_default
    if is_in(REFUSED, kind):
        return _refuse
    if is_in(LOW_BIT, kind):
        return _refuse_two_precisions
    return _refuse_uneven if is_in(FLATTENING, kind) else None


def _sharded(optimizer: Optimizer) -> Iterator[tuple[DTensor, str]]:
    """The parameters of ``optimizer`` that are shards of ours, with their names."""
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if isinstance(param, DTensor) and (place := bucket_and_index(param)) is not None:
            yield param, place[0].params[place[1]].fqn


# --- on flat shards -------------------------------------------------------------------------------


def _flat_by_default(optimizer: Optimizer, args: Any, kwargs: Any) -> OtherArguments | None:
    name = next((name for _, name in _sharded(optimizer)), None)
    if name is None:
        return None
    if depends_on_shapes(optimizer):
        raise RuntimeError(
            f"{name}: {_title(optimizer)} cannot step sharded parameters with these options: it uses an "
            "operation that torch's DTensor lacks, and cannot be stepped on flat shards, since it does not "
            "treat each element by itself. Nothing was changed. Choose other options or another optimizer: "
            f"{PAGE}"
        )
    become_flat(optimizer)
    setattr(optimizer, _IS_FLAT_BY_DEFAULT, True)
    return _step_flat(optimizer, *args[1:], **kwargs)


def _if_by_default(optimizer: FlatOptimizer, args: Any, kwargs: Any) -> OtherArguments | None:
    """The step may still be that of the class before: a scheduler keeps the one that it has wrapped.

    Not within a flat step, where a class may call the step of its base, around which there are hooks as well.
    """
    is_new = hasattr(optimizer, _IS_FLAT_BY_DEFAULT) and not optimizer.is_stepping
    return _step_flat(optimizer, *args[1:], **kwargs) if is_new else None


def _step_flat(optimizer: Any, closure: Callable[[], Any] | None = None) -> OtherArguments:
    step = partial(step_without_hooks(FlatOptimizer), optimizer, closure)
    return (_without_parameters(optimizer), step), {}


def _without_parameters(optimizer: FlatOptimizer) -> FlatOptimizer:
    """A copy whose steps, of its class or of the one that it was made of, call their closure alone."""
    bare: FlatOptimizer = object.__new__(type(optimizer))
    vars(bare).update(vars(optimizer))
    vars(bare).pop(_IS_FLAT_BY_DEFAULT, None)
    bare.param_groups = [
        group | {"params": [nn.Parameter(torch.empty(0))]} for group in optimizer.param_groups
    ]
    bare.state = defaultdict(dict)
    return bare


# --- refused --------------------------------------------------------------------------------------


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    name = next((name for _, name in _sharded(optimizer)), None)
    if name is not None:
        raise RuntimeError(
            f"{name}: {_title(optimizer)} cannot step sharded parameters: it computes norms or sums over "
            "whole parameters in ways that torch's DTensor does not support. Nothing was changed. Use "
            f"another optimizer: {PAGE} Functions of whole matrices run with "
            "shardwise.optim.on_whole_matrices."
        )


def _refuse_uneven(optimizer: Optimizer, *_: Any) -> None:
    for param, name in _sharded(optimizer):
        split = sharding_of(param)
        if not split.is_even:
            raise RuntimeError(
                f"{name}: {_title(optimizer)} flattens parameters, which torch's DTensor cannot do with "
                f"shape {split.shape} in {split.num_parts} shards of different sizes. Nothing was changed. "
                f"Choose sizes that divide by the ranks, or another optimizer: {PAGE}"
            )


def _refuse_two_precisions(optimizer: Any, *_: Any) -> None:
    """Where all shards are quantised, or none is, ranks do the same and lose no more than one process."""
    block_size = optimizer.block_size
    for param, name in _sharded(optimizer):
        if not param.requires_grad and param.grad is None:
            continue  # never stepped
        split = sharding_of(param)
        numels = _shard_numels(split)
        low = [numel for numel in numels if is_quantised(numel, block_size)]
        if low and len(low) < len(numels):
            full = next(numel for numel in numels if numel not in low)
            raise RuntimeError(
                f"{name}: {_title(optimizer)} quantises its state where a shard has at least 4096 elements, "
                f"in whole blocks of {block_size}. Of the {split.num_parts} shards of shape {split.shape}, "
                f"one of {low[0]} elements would be quantised, and one of {full} would not: parts of one "
                "parameter would be trained in different precision, and its state could not be gathered. "
                "Nothing was changed. Choose sizes that divide by the ranks, shard this parameter on another "
                f"dim (shard_placement_fn), or give it a torch.optim.AdamW of its own: {PAGE}"
            )


@cache
def _shard_numels(split: Split) -> list[int]:
    """How many elements shards have, the same on all ranks. An empty one has no state."""
    return sorted({split.region(place).numel for place in split.coordinates()} - {0})


def _title(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__name__} of {'torch.optim' if package_of(kind) == 'torch' else package_of(kind)}"


before_steps(prepare_step)
