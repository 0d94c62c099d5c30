"""What happens to gradients before a step: clipping by their norm, and loss scaling. norms.py measures norms.

``torch.amp.GradScaler`` reduces its flag for infinities by the placement of the first gradient in its list.
If that is replicated (a scalar, a block under ``ddp``, a parameter that is not sharded) and others are not,
only one rank sees an infinity in its shard, and the ranks continue with different weights.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_type, describe
from shardwise.layout.fqns import clean, listed
from shardwise.layout.mesh import all_reduce_max, axes_of
from shardwise.optim.norms import (
    PassedParameters,
    gradients_in,
    held_gradients,
    note_passed,
    refuse_meta,
    total_norm,
)
from shardwise.params.parameter import name_of_replaced, refuse_deferred
from shardwise.ranks.failures import monitor_of_job, monitored
from shardwise.ranks.model_ranks import axes_of_given
from shardwise.torch_compat import dtensor, foreach, optimizers, tensor_impl


@torch.no_grad()
def clip_grad_norm_(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``; return the norm before.

    Does what ``torch.nn.utils.clip_grad_norm_`` does for plain gradients, for any mixture: DTensors on any
    meshes, sharded, replicated and tensor-parallel, plain tensors, gradients in host memory, of several
    dtypes, sparse ones, empty shards. Gradients are scaled in place; the host waits for a device only where
    gradients are in host memory.

    Args:
        model_or_parameters: a module, a parameter, or an iterable of parameters. One that appears twice
            counts once; one without ``.grad`` counts as zeros.
        max_norm: the largest norm to leave, at least 0; ``inf`` only measures. A number, or a tensor of one
            element (the host reads it, and waits for it on a device).
        norm_type: p of the p-norm, above 0; ``inf`` or ``"inf"`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, if the norm is infinite or NaN. Waits for the norm.
        foreach: accepted as by torch; gradients of one device and dtype are always scaled together.

    Returns:
        The norm before clipping: a plain tensor without dimensions on the device of the mesh, float32, or
        float64 if a gradient is. The same bits on every rank of the largest mesh.

    Collective: all ranks of a mesh call it, with the same parameters; a rank may lack any gradient. It costs
    one all-reduce for each mesh dimension over which a parameter is sharded, of 32 bytes a rank: 8 for each
    kind of placement (seldom more than three), and 8 to compare the parameters. Gradients whose placements
    differ from their parameter's (``Partial``) are first redistributed, one by one.

    Parameters may differ between ranks where no mesh relates them: plain ones beside DTensors, whose
    gradients belong to the rank (``ignored_params``), and DTensors on a slice of a mesh whose other
    dimensions hold other parameters. Then the largest of the ranks' norms counts, at the cost of one more
    all-reduce over each such dimension that had none. For every expert to count, make experts DTensors over
    the ranks that share them.

    Raises:
        TypeError: the first argument is not a module, a tensor or an iterable of tensors, or ``max_norm`` or
            ``foreach`` has the wrong type.
        ValueError: ``max_norm`` is negative or NaN, ``norm_type`` is not above 0, or the ranks of a mesh have
            passed different parameters. On a device, a rank that passes the same as in an earlier step does
            not wait to read the answer: it raises in its next wait.
        RuntimeError: gradients of backwards without synchronisation wait to be reduced, a gradient is not on
            the mesh of its parameter, or the norm is not finite and ``error_if_nonfinite`` is set. Gradients
            are left unchanged.

    Example::

        loss.backward()
        norm = clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
    """
    if isinstance(model_or_parameters, Iterator):  # the report of a long wait reads it again
        model_or_parameters = list(model_or_parameters)
    caller = "clip_grad_norm_"
    with monitor_of_job().call(caller, lambda: axes_of_given(model_or_parameters)):
        limit = _check_max_norm(max_norm)
        power = _check_norm_type(caller, norm_type)
        check_type(caller, "foreach", foreach, "True, False or None", bool, type(None))
        given = model_or_parameters
        if isinstance(given, nn.Module):
            params: list[Tensor] = list(given.parameters())
        else:
            wanted = "a module, a parameter or an iterable of parameters"
            params = _check_tensors(caller, given, wanted, "Pass the module itself, or model.parameters().")
        name_of = partial(_name_of, given if isinstance(given, nn.Module) else params)
        passed = PassedParameters(caller)
        gradients = gradients_in(params, passed, name_of)
        total = total_norm(gradients, passed, power)
        if error_if_nonfinite and not total.isfinite():
            bad = [name_of(param) for param in params if not _is_finite(param.grad)]
            raise RuntimeError(_message_about_nonfinite(total, power, bad))
        if limit < math.inf:
            present = [gradient.local for gradient in gradients if gradient.local is not None]
            _scale(present, limit, total)
        return total


@monitored
@torch.no_grad()
def global_norm(tensors: Tensor | Iterable[Tensor], norm_type: float | str = 2.0) -> Tensor:
    """The norm of all elements of ``tensors``, whole ones, however they are divided between ranks.

    What ``torch.nn.utils.get_total_norm`` is for plain tensors, for those of :func:`clip_grad_norm_`, and
    with its collectives. The tensors themselves are measured: for gradients, pass ``param.grad``. No graph is
    recorded.

    Args:
        tensors: a tensor, or an iterable of tensors; the same on all ranks of a mesh. One that appears twice
            counts once. Where plain tensors differ by rank beside DTensors, the largest of the norms counts.
        norm_type: p of the p-norm, above 0; ``inf`` or ``"inf"`` for the largest absolute value.

    Returns:
        A plain tensor without dimensions on the device of the mesh, float32, or float64 if a tensor is.
        Summed in float64, and the same bits on every rank.

    Raises:
        TypeError: ``tensors`` is or contains something else, such as the ``.grad`` of a parameter without.
        ValueError: ``norm_type`` is not above 0, a tensor is on the meta device, or ranks of a mesh have
            passed different tensors.
        RuntimeError: a tensor is a gradient that waits to be reduced.

    Example::

        norm = global_norm(model.parameters())
        moved = global_norm(p - before for p, before in zip(model.parameters(), snapshot))
    """
    caller = "global_norm"
    power = _check_norm_type(caller, norm_type)
    wanted, advice = "a tensor or an iterable of tensors", "Leave out gradients that are None."
    given = _check_tensors(caller, tensors, f"{wanted}, such as model.parameters()", advice)
    passed = PassedParameters(caller)
    name_of = partial(_name_of, given)
    for tensor in given:
        refuse_meta(caller, tensor, name_of)
    held = held_gradients(given, given, caller, name_of)
    note_passed(given, passed)
    return total_norm(held, passed, power)


# --- scaling and errors ---------------------------------------------------------------------------


def _scale(tensors: Sequence[Tensor], limit: float, total: Tensor) -> None:
    """Multiply by ``limit / total`` if that is below 1, without waiting for a device."""
    factor = torch.clamp(limit / (total + 1e-6), max=1.0)
    if factor.device.type == "cpu" and factor >= 1:
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    factors = {device: factor.to(device) for device, _ in alike}
    for (device, _), members in alike.items():
        foreach.mul_(members, factors[device])


def _is_finite(gradient: Tensor | None) -> bool:
    local = torch.zeros(()) if gradient is None else dtensor.plain(gradient)
    return bool((local if local.layout is torch.strided else local.to_dense()).isfinite().all())


def _message_about_nonfinite(total: Tensor, power: float, names: Sequence[str]) -> str:
    here = "No gradient on this rank is infinite or NaN: other ranks name theirs, or the norm overflows."
    if names:
        here = f"On this rank it comes from {listed(names, 4)}."
    return (
        f"clip_grad_norm_: the norm of the gradients (norm_type={power}) is {total.item()}; scaling by it "
        f"would leave zeros and NaN. {here} All ranks raise this, and gradients are as they were: skip the "
        "step, or pass error_if_nonfinite=False to scale all the same."
    )


# --- arguments ------------------------------------------------------------------------------------


def _check_max_norm(max_norm: Any) -> float:
    if isinstance(max_norm, Tensor):
        if max_norm.numel() != 1:
            raise ValueError(
                f"clip_grad_norm_: max_norm is a tensor of shape {tuple(max_norm.shape)}; pass a number, or "
                "a tensor of one element."
            )
    elif isinstance(max_norm, (bool, str)) or not hasattr(max_norm, "__float__"):
        raise TypeError(f"clip_grad_norm_: max_norm is {describe(max_norm)}; pass a number.")
    value = float(max_norm)
    if not value >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {value}; it must be a number of at least 0.")
    return value


def _check_norm_type(caller: str, norm_type: Any) -> float:
    try:
        value = math.nan if isinstance(norm_type, bool) else float(norm_type)
    except (TypeError, ValueError):
        value = math.nan
    if not value > 0:
        raise ValueError(
            f"{caller}: norm_type is {norm_type!r}; it is the p of a p-norm: a number above 0, or 'inf' for "
            "the largest absolute value."
        )
    return value


def _check_tensors(caller: str, given: Any, wanted: str, advice: str) -> list[Tensor]:
    """The distinct tensors of ``given``, one or an iterable."""
    if isinstance(given, Tensor):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"{caller}: expected {wanted}, got {describe(given)}.")
    tensors = list(given)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{caller}: at [{index}] of the iterable is {describe(tensor)}, where a tensor is expected. "
                f"{advice}"
            )
    return list({id(tensor): tensor for tensor in tensors}.values())


def _name_of(given: nn.Module | Sequence[Tensor], param: Tensor) -> str:
    """The name of ``param`` in a message."""
    if isinstance(given, nn.Module):
        return next(clean(name) for name, each in given.named_parameters() if each is param)
    known = name_of_replaced(param) if isinstance(param, nn.Parameter) else None
    return known or f"parameter {next(i for i, each in enumerate(given) if each is param)}"


# --- loss scaling ---------------------------------------------------------------------------------


class GradScaler(optimizers.GradScalerBase):
    """A ``torch.amp.GradScaler`` in which all ranks see every infinity, for gradients of any placement.

    It has torch's arguments, and is used like torch's. Costs 2 d - 1 all-reduces of one number for d mesh
    dimensions; all ranks must call ``step`` (or ``unscale_``) together.

    Raises:
        RuntimeError: from ``step`` or ``unscale_``: gradients of backwards without synchronisation
            (``no_sync``) wait to be reduced.
        ValueError: gradients are in float16, as in torch.

    Example::

        scaler = GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the local tensors of all gradients, and report infinities to all ranks."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        found: dict[torch.device, Tensor] = {}
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with monitor_of_job().call("GradScaler", lambda: axes_of(params)), torch.no_grad():
            for param in params:
                if param.grad is not None:
                    local = _values(param.grad, allow_fp16)
                    by_kind.setdefault((local.device, local.dtype), []).append(local)
            for (device, _), gradients in by_kind.items():
                flag = found.setdefault(device, found_inf.to(device, copy=True))
                optimizers.check_and_unscale_(gradients, flag, inv_scale.to(device))
            _agree(found, found_inf, params)
        return found or {found_inf.device: found_inf}


def _values(gradient: Tensor, allow_fp16: bool) -> Tensor:
    """This rank's numbers of a gradient."""
    refuse_deferred(gradient)
    if not allow_fp16 and gradient.dtype is torch.float16:
        raise ValueError("Attempting to unscale FP16 gradients.")  # torch's words
    local = dtensor.plain(gradient)
    return tensor_impl.sparse_values(local) if local.is_sparse else local


def _agree(found: dict[torch.device, Tensor], like: Tensor, params: list[Tensor]) -> None:
    """Report infinities on any rank to every device, including ranks without gradients."""
    axes = axes_of(params)
    if not axes:
        return
    devices = {torch.device(param.device_mesh.device_type) for param in params if isinstance(param, DTensor)}
    highest = like.to(devices.pop() if len(devices) == 1 else like.device, copy=True)
    for flag in found.values():
        torch.maximum(highest, flag.to(highest.device), out=highest)
    all_reduce_max(highest, axes)
    for flag in found.values():
        flag.copy_(highest)
    found.setdefault(highest.device, highest)
