"""The hooks around an optimizer's step, the gradient scaler, and elementwise operations of optimizers on
DTensors, run on their local tensors. Seen on 2.11 to 2.15.

The last are for steps that buckets/optimizer_steps.py cannot run. DTensor finds out in Python how the result
of any operation with a number is placed (80 us for ``p.mul_(0.9)``); pytorch/pytorch#134191 and #109477
report optimizers that are slow because of it. Where all operands are placed alike, there is nothing to find
out. DTensor first looks into a private table of handlers; without that table, everything works as before. The
table is that of the whole process, so handlers are in it only while an optimizer steps.

Operations on lists (``foreach=True``), and those of single tensors that are not here, cost DTensor less than
a handler would.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwise.torch_compat.autograd import profiler_is_on
from shardwise.torch_compat.dtensor import local_tensor, make_dtensor, spec_of


def step_post_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What ``register_step_post_hook`` has registered; torch has no public way to list them."""
    return list(optimizer._optimizer_step_post_hooks.values())


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``kind.step`` without the hooks that torch puts around it when the first of a class is made."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, of an optimizer, with the hooks and the profiler's label that torch puts around it.

    What torch puts there costs tens of microseconds for the label alone, so it is skipped where there are no
    hooks and no profiler. ``hooked`` tells torch that nothing is left to do.
    """
    as_in_torch = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def hooked(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        has_hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if has_hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or profiler_is_on():
            return as_in_torch(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    hooked.hooked = True  # type: ignore[attr-defined]
    return hooked


# --- the gradient scaler --------------------------------------------------------------------------

check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply gradients by a factor, and set a flag if any of them is infinite or NaN. Not documented; the only
operation that does both in one pass (2.11 to 2.13)."""


class GradScalerBase(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with a public method for how gradients are unscaled.

    Its ``unscale_`` and ``step`` both call one private method, and nothing public lies in between (2.11 to
    2.13).
    """

    @abstractmethod
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply all gradients by ``inv_scale``; by device, whether any of them was infinite or NaN."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16)


Operator = torch._ops.OpOverload
Arguments = tuple[Any, ...]
Handler = Callable[[Operator, Arguments, Mapping[str, Any]], Any]


def run_on_local_tensors() -> None:
    """Let these operations run on local tensors until ``run_as_torch``, for all DTensors of the process."""
    if (table := _table()) is not None:
        for op, handler in _handlers().items():
            table.setdefault(op, handler)


def run_as_torch() -> None:
    """Leave all operations to DTensor again."""
    if (table := _table()) is not None:
        for op, handler in _handlers().items():
            if table.get(op) is handler:
                table.pop(op, None)


def _table() -> dict[Operator, Handler] | None:
    return getattr(DTensor._op_dispatcher, "_custom_op_handlers", None)


@cache
def _handlers() -> dict[Operator, Handler]:
    aten = torch.ops.aten
    return {
        **dict.fromkeys((aten.add_.Tensor, aten.div_.Tensor, aten.mul_.Tensor), _in_place),
        **dict.fromkeys((aten.div.Tensor, aten.sqrt.default), _new),
    }


# --- handlers -------------------------------------------------------------------------------------


def _in_place(op: Operator, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    if (operands := _local_operands(args)) is None:
        return _as_torch(op, args, kwargs)
    op(*operands, **kwargs)
    return args[0]


def _new(op: Operator, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    if (operands := _local_operands(args)) is None:
        return _as_torch(op, args, kwargs)
    made, like = op(*operands, **kwargs), operands[0]
    if made.dtype != like.dtype or made.stride() != like.stride():
        return _as_torch(op, args, kwargs)  # of another spec
    return make_dtensor(made, spec_of(args[0]))


def _as_torch(op: Operator, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """As without a handler, also for other threads that run ``op`` in the meantime."""
    table = _table()
    assert table is not None  # it has led here
    handler = table.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            table[op] = handler


# --- what may run on local tensors ----------------------------------------------------------------


def _local_operands(args: Arguments) -> list[Any] | None:
    """``args`` with the local tensors of DTensors; None unless they are all placed like the first."""
    if type(args[0]) is not DTensor or not are_values((spec := spec_of(args[0])).placements):
        return None
    found = []
    for operand in args:
        if type(operand) is DTensor:
            if not are_alike(spec_of(operand), spec):
                return None
            operand = local_tensor(operand)
        elif not _is_same_everywhere(operand):
            return None
        found.append(operand)
    return found


def _is_same_everywhere(operand: Any) -> bool:
    """True for no tensor, or a plain one without dims, which DTensor takes for replicated."""
    return not isinstance(operand, Tensor) or (type(operand) is Tensor and not operand.dim())


@cache
def are_values(placements: tuple[Placement, ...]) -> bool:
    """True if ranks hold values of the full tensor, and not summands."""
    return not any(placement.is_partial() for placement in placements)


def are_alike(a: DTensorSpec, b: DTensorSpec) -> bool:
    """True if local tensors hold the same part of full tensors of one shape."""
    return a is b or (
        (a.mesh is b.mesh or a.mesh == b.mesh)
        and a.placements == b.placements
        and a.shape == b.shape
        and a.shard_order == b.shard_order
    )
