"""Full state out of a sharded model, one bucket at a time: no rank ever holds the model twice."""

from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.arguments import check_bytes, check_flags, check_floating, check_module
from shardwise.comm.full_tensors import BUCKET_BYTES, STAGING_BYTES, batches, full_values, gather_full
from shardwise.layout.fqns import listed
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitor_of_job, monitored
from shardwise.ranks.model_ranks import Broadcast, axes_of_given, axes_of_model, device_of_model
from shardwise.state.named_state import check_at_rest, each_once, entries_of, named_parameters
from shardwise.state.optimizer_state import full_optimizer_state

State = dict[str, Any]
T = TypeVar("T")


@overload
def full_state_dict(
    model: nn.Module, optimizer: None = None, *, cpu: bool = True, rank0_only: bool = True
) -> State: ...
@overload
def full_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, cpu: bool = True, rank0_only: bool = True
) -> tuple[State, State]: ...


@monitored
def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    cpu: bool = True,
    rank0_only: bool = True,
) -> State | tuple[State, State]:
    """The state of ``model`` as plain PyTorch has it: full tensors, that a model which is not sharded loads.

    Names are those of the model without wrappers of ``torch.compile`` or activation checkpointing. Tied
    parameters appear under each of their names, as one tensor. All values are copies.

    Args:
        model: sharded, in parts or not at all; on any meshes.
        optimizer: also return its state, as a second dict ``{"state": ..., "param_groups": ...}`` by
            parameter name. :func:`shardwise.state.rekey_optimizer_state_dict` turns names into the ids that
            an optimizer of a model that is not sharded loads.
        cpu: move each tensor to host memory as soon as it is full.
        rank0_only: only the first rank of the model gets them; all others get empty dicts.

    Returns:
        The dict, or with ``optimizer`` two of them.

    Raises:
        RuntimeError: called in a forward or backward, inside ``unsharded``, or on the meta device.

    Collective. In addition to the result, it needs a bucket of 64 MiB, or of the largest tensor, on each rank
    that gets the state, and less on the others.

    Example::

        state = full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")
    """

    def check() -> None:
        check_at_rest(model, "full_state_dict")
        check_flags("full_state_dict", cpu=cpu, rank0_only=rank0_only)

    told = {"rank0_only": rank0_only, "optimizer": "None" if optimizer is None else "an optimizer"}
    _check_together(model, check, "full_state_dict", told)
    owner = None
    if rank0_only and dist.is_initialized():  # the model's first rank
        owner = Broadcast(axes_of_model(model), None, device_of_model(model)).object(dist.get_rank())
    state = full_values({name: entry.value for name, entry in entries_of(model).items()}, owner, cpu)
    if optimizer is None:
        return state
    return state, full_optimizer_state(model, optimizer, owner, cpu)


@monitored
def iter_full_parameters(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over names and full values of parameters, on all ranks, gathered in buckets.

    Use it to export weights, to send them to an inference engine, or to look at one parameter at a time.
    Values are copies on the device of the mesh. The memory of a bucket is free once the caller has dropped
    all values in it (a loop variable holds its last value while the next one is gathered).

    Args:
        model: sharded, in parts or not at all.
        bucket_bytes: the most memory for full tensors that are gathered at once, including buffers. A larger
            parameter is gathered alone.
        dtype: floating-point parameters are converted to it before they are sent.
        names: which parameters, by canonical names; in the order of the model. None: all of them, tied ones
            once, under their first name.

    Raises:
        TypeError: ``bucket_bytes`` is not an int.
        ValueError: the model has no parameter of one of the ``names``; ``bucket_bytes`` is not above 0, or
            ``dtype`` is not of floating-point numbers.
        RuntimeError: called in a forward or backward, inside ``unsharded``, or on the meta device.

    Collective: all ranks must iterate to the same point. Weights must not change meanwhile.

    Example::

        for name, weight in iter_full_parameters(model, dtype=torch.bfloat16):
            engine.update_weight(name, weight)
    """

    def check() -> list[tuple[str, nn.Parameter]]:
        check_at_rest(model, "iter_full_parameters")
        check_bytes("iter_full_parameters", "bucket_bytes", bucket_bytes)
        check_floating("iter_full_parameters", dtype)
        return _chosen(model, names)

    is_collection = isinstance(names, Collection) and not isinstance(names, str)
    same_names = sorted(map(str, names)) if is_collection else names  # type: ignore[arg-type]
    told = {"bucket_bytes": bucket_bytes, "dtype": dtype, "names": same_names}
    chosen = _check_together(model, check, "iter_full_parameters", told)
    return _full_parameters(chosen, bucket_bytes, dtype)


def _check_together(model: Any, check: Callable[[], T], caller: str, same: dict[str, Any]) -> T:
    """Check on all ranks: if one check fails, or arguments differ, all ranks raise."""
    check_module(caller, model)
    return run_on_all_ranks(axes_of_model(model), device_of_model(model), check, caller=caller, same=same)


def _chosen(model: nn.Module, names: Collection[str] | None) -> list[tuple[str, nn.Parameter]]:
    every = list(named_parameters(model))
    if names is None:
        return list(each_once(every).items())
    if isinstance(names, str):
        raise TypeError("iter_full_parameters: names is a string; pass a collection of names.")
    if unknown := sorted(set(names) - {name for name, _ in every}):
        raise ValueError(f"iter_full_parameters: the model has no parameter named {listed(unknown)}.")
    wanted = set(names)
    return [(name, param) for name, param in every if name in wanted]


def _full_parameters(
    chosen: list[tuple[str, nn.Parameter]], bucket_bytes: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    staging = min(STAGING_BYTES, bucket_bytes // 4)
    dtypes = [dtype if dtype and p.dtype.is_floating_point else p.dtype for _, p in chosen]
    params: list[Tensor] = [param for _, param in chosen]
    for batch in batches(params, bucket_bytes - 2 * staging, dtypes):
        some = [params[index] for index in batch]
        with monitor_of_job().call("iter_full_parameters", lambda: axes_of_given(params)):
            bucket = gather_full(some, None, [dtypes[index] for index in batch], staging)
        for index in batch:
            full, bucket[index - batch.start] = bucket[index - batch.start], None  # only the caller holds it
            assert full is not None
            yield chosen[index][0], full
            del full
