"""The norm of all gradients, and clipping by it, wherever the gradients lie.

A rank measures the gradients that it holds; then it sends one number for each way in which they are
spread over ranks. ``Shard`` on a dimension of a mesh: the ranks hold different parts, whose norms are put
together. ``Replicate``: they hold the same, and one counts. Not on the dimension at all, as plain tensors:
they may hold anything, and the largest counts, so that all ranks clip by the same.

    mesh (dp=2, tp=2), ranks 0 1 / 2 3        over dp          over tp
    up       (Shard(0), Shard(0)) on both     put together     put together
    norm     Shard(0) on dp                   put together     largest
    scale    plain, of ignored_params         largest          largest

A vector of zeros in which each rank fills in its own place is summed: that moves the numbers, and every
rank computes with all of them in the same order. So the result has the same bits everywhere, in whatever
order a back end adds up; a NaN arrives, which a maximum may lose; and powers, which may overflow, stay at
home.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from shardwise.checks import describe
from shardwise.runtime import compat
from shardwise.runtime.collectives import all_reduce
from shardwise.runtime.deferred import DeferredGradient
from shardwise.runtime.param import sharded_before

# The host adds up float32 numbers one after the other: 10 million of them to 4e-4. In pieces of this size,
# whose norms are put together in float64, it is 2e-7, at the same speed. Devices work in pieces anyway.
_PIECE_NUMEL = 2**16
# Up to this power those of all float32 numbers are numbers of float64.
_LARGEST_PLAIN_POWER = 6.0


@torch.no_grad()
def clip_grad_norm_(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``; return what it was.

    As ``torch.nn.utils.clip_grad_norm_`` does for plain gradients, for any mixture: DTensors on any meshes,
    sharded, replicated and tensor-parallel, plain tensors, gradients in host memory, of several dtypes,
    sparse ones, empty shards. Gradients are scaled in place; the host waits for a device only where gradients
    are in host memory.

    Args:
        model_or_parameters: a module, a parameter, or an iterable of parameters. One that appears twice
            counts once; one without ``.grad`` counts as zeros.
        max_norm: the largest norm to leave, at least 0; ``inf`` only measures. A number, or a tensor with one
            (which is read: on a device, that waits for it).
        norm_type: p of the p-norm, above 0; ``inf`` or ``"inf"`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, where the norm is infinite or NaN. Waits for the norm.
        foreach: False computes tensor by tensor. None and True use torch's functions of lists of tensors;
            the results are the same.

    Returns:
        The norm before clipping: a plain tensor without dimensions on the device of the mesh, float32, or
        float64 if a gradient is. The same bits on every rank of the largest mesh.

    Collective: all ranks of a mesh call it, with corresponding parameters in the same order. It costs one
    all-reduce of 8 bytes a rank and kind of placement for each mesh dimension over which a parameter is
    sharded, and none where nothing is. Which ones depends on the parameters alone: a rank may lack any
    gradient. Gradients with other placements than their parameter (``Partial``) are redistributed first, one
    by one, to be measured.

    Parameters may differ between ranks where no mesh says how they belong together: plain ones beside
    DTensors, whose gradients are the rank's own (``ignored_params``), and DTensors on a slice of a mesh on
    whose other dimensions other parameters lie. Then the largest of the ranks' norms counts, for one more
    all-reduce over each such dimension that had none. Experts, of which each is to count, should be DTensors
    over the ranks that share them.

    Raises:
        TypeError: no module, tensor or iterable of tensors; ``max_norm`` or ``foreach`` of another type.
        ValueError: ``max_norm`` is negative or NaN, ``norm_type`` is not above 0.
        RuntimeError: gradients of backwards without synchronisation wait to be reduced, a gradient is not on
            the mesh of its parameter, or the norm is not finite and ``error_if_nonfinite`` is set. Gradients
            are then as they were.

    Example::

        loss.backward()
        norm = clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
    """
    caller = "clip_grad_norm_"
    limit = _check_max_norm(max_norm)
    power = _check_norm_type(caller, norm_type)
    if foreach is not None and not isinstance(foreach, bool):
        raise TypeError(f"{caller}: foreach is {foreach!r}, {describe(foreach)}; pass True, False or None.")
    params = _check_parameters(caller, model_or_parameters)
    name_of = partial(_name_of, model_or_parameters, params)
    gradients = _gradients_of(params, caller, name_of)
    norms = _norms_of_pieces([each.measured for each in gradients], power, foreach is not False)
    plan = _Plan(gradients, params)
    columns: list[list[Tensor]] = [[] for _ in plan.columns]
    for column, pieces in zip(plan.column_of, norms, strict=True):
        columns[column] += pieces
    own = [_norm(_stacked(column, plan.device), power).view(1) for column in columns]
    total = plan.over_ranks(own, power)[0].to(_dtype_of_result(gradients))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(_message_about_nonfinite(total, power, gradients, norms, name_of))
    if limit < math.inf:
        _scale(gradients, limit, total, foreach is not False)
    return total


@torch.no_grad()
def grad_norms_by_module(model: nn.Module, norm_type: float | str = 2.0) -> dict[str, float]:
    """The norm of the gradients of all parameters inside each module of ``model``, by its name.

    To see where gradients explode or vanish. Modules inside a module count towards it, so that ``""``, the
    whole model, has the norm by which :func:`clip_grad_norm_` would clip. A tied parameter counts once in
    every module that contains it.

    Args:
        model: any module, sharded or not.
        norm_type: as in :func:`clip_grad_norm_`.

    Returns:
        Names as in ``model.named_modules()`` and norms, equal on every rank. Modules with nothing trainable
        inside are left out; those whose parameters have no gradient have norm 0.

    Collective, as :func:`clip_grad_norm_`: as many all-reduces for all modules together, of 8 bytes a
    module, rank and kind of placement. Waits for the device.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``norm_type`` is not above 0.
        RuntimeError: gradients of backwards without synchronisation wait to be reduced.

    Example::

        loss.backward()
        for name, norm in grad_norms_by_module(model).items():
            print(f"{name:40} {norm:.3e}")
    """
    caller = "grad_norms_by_module"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: model is {describe(model)}; pass an nn.Module.")
    power = _check_norm_type(caller, norm_type)
    params = list(model.parameters())
    gradients = _gradients_of(params, caller, partial(_name_of, model, params))
    pieces = _norms_of_pieces([each.measured for each in gradients], power, is_foreach=True)
    plan = _Plan(gradients, params)
    index_of = {id(each.param): index for index, each in enumerate(gradients)}
    inside = {
        name: indices
        for name, module in model.named_modules()
        if (indices := [index_of[id(p)] for p in module.parameters() if id(p) in index_of])
    }
    if not inside:
        return {}
    # On the host, where so many small sums cost less than on a device.
    on_host = _stacked([norm for own in pieces for norm in own], plan.device).cpu()
    norms = torch.stack([_norm(own, power) for own in on_host.split([len(own) for own in pieces])])
    columns = []
    for column in range(len(plan.columns)):
        rows = [[i for i in indices if plan.column_of[i] == column] for indices in inside.values()]
        columns.append(torch.stack([_norm(norms[row], power) for row in rows]).to(plan.device))
    return dict(zip(inside, plan.over_ranks(columns, power).tolist(), strict=True))


# --- the gradients --------------------------------------------------------------------------------


_Place = tuple[DeviceMesh, tuple[Placement, ...]]


@dataclass(eq=False, slots=True)
class _Gradient:
    """What this rank holds of the gradient of ``param``; None where it has none.

    ``local`` is scaled and ``measured`` has the norm: the same tensor, or where ``local`` is a summand of
    the gradient, the sum. ``place`` says how it is spread over which ranks; None for a plain tensor.
    """

    param: Tensor
    local: Tensor | None
    measured: Tensor | None
    place: _Place | None


def _gradients_of(params: Sequence[Tensor], caller: str, name_of: Callable[[Tensor], str]) -> list[_Gradient]:
    """One for each parameter that is trainable or has a gradient: a list of the same kinds on all ranks."""
    found = []
    for param in params:
        gradient = param.grad
        if gradient is not None:
            _check_gradient(param, gradient, caller, name_of)
        elif not param.requires_grad:
            continue
        # The parameter's place rather than the gradient's: another rank may have no gradient.
        placed = param if isinstance(param, DTensor) else gradient
        if not isinstance(placed, DTensor):
            found.append(_Gradient(param, gradient, gradient, None))
            continue
        place = placed.device_mesh, _without_sums(placed.placements)
        if gradient is None:
            found.append(_Gradient(param, None, None, place))
            continue
        assert isinstance(gradient, DTensor)
        local = measured = compat.local_tensor(gradient)
        if gradient.placements != place[1]:
            measured = compat.local_tensor(gradient.redistribute(placements=place[1]))
        found.append(_Gradient(param, local, measured, place))
    return found


def _without_sums(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    if not any(placement.is_partial() for placement in placements):
        return placements
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _check_gradient(param: Tensor, gradient: Tensor, caller: str, name_of: Callable[[Tensor], str]) -> None:
    if isinstance(gradient, DeferredGradient) and not gradient.mark.is_zeroed:
        raise RuntimeError(
            f"{caller}: {name_of(param)}: gradients of backward passes without synchronisation "
            "(no_sync, set_requires_gradient_sync(False), set_requires_all_reduce(False)) wait to be "
            "reduced; .grad does not contain them yet, so that they would escape the norm. Clip after the "
            "synchronised backward."
        )
    if not isinstance(param, DTensor):
        return
    if not isinstance(gradient, DTensor) or gradient.device_mesh != param.device_mesh:
        found = f"on {gradient.device_mesh}" if isinstance(gradient, DTensor) else "a plain tensor"
        raise RuntimeError(
            f"{caller}: {name_of(param)}: .grad is {found}, where a DTensor on the mesh of the parameter, "
            f"{param.device_mesh}, is expected: nothing says which part of the gradient it is. Assign only "
            "DTensors that are placed as the parameter to .grad, or None."
        )


# --- norms of what is here ------------------------------------------------------------------------


def _norms_of_pieces(tensors: Sequence[Tensor | None], power: float, is_foreach: bool) -> list[list[Tensor]]:
    """For each tensor the norms of its pieces; there are none of an empty one."""
    norms: list[list[Tensor]] = [[] for _ in tensors]
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[list[Tensor], Tensor]]] = {}
    for own, tensor in zip(norms, tensors, strict=True):
        for piece in () if tensor is None else _pieces(tensor):
            alike.setdefault((piece.device, piece.dtype), []).append((own, piece))
    for (device, dtype), members in alike.items():
        pieces = [piece for _, piece in members]
        summed = _dtype_of_sums(device, dtype, power)
        found: Iterable[Tensor]
        if _LARGEST_PLAIN_POWER < power < math.inf:
            found = [_norm(piece.to(summed), power) for piece in pieces]
        elif is_foreach:
            found = torch._foreach_norm(pieces, power, dtype=summed)
        else:
            found = [torch.linalg.vector_norm(piece, power, dtype=summed) for piece in pieces]
        for (own, _), norm in zip(members, found, strict=True):
            own.append(norm)
    return norms


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.layout is not torch.strided:
        # Of a sparse gradient the rest is zero; one that is not coalesced has several terms of one number.
        tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    if tensor.numel() == 0:
        return ()
    if tensor.numel() > _PIECE_NUMEL and tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor.view(-1).split(_PIECE_NUMEL)
    return (tensor,)


def _dtype_of_sums(device: torch.device, dtype: torch.dtype, power: float) -> torch.dtype:
    """At least float32; float64 where other powers than squares would soon leave the range of float32."""
    if power not in (1.0, 2.0, math.inf):
        dtype = torch.promote_types(dtype, _widest(device))
    return torch.promote_types(dtype, torch.float32)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _norm(values: Tensor, power: float, dim: int | None = None) -> Tensor:
    """The norm of all ``values``, or along ``dim`` 0; none of their powers leaves the range of numbers."""
    if values.numel() == 0:
        return values.new_zeros(() if dim is None else values.shape[1:])
    largest = torch.linalg.vector_norm(values, math.inf, dim=dim)
    if power == math.inf:
        return largest
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    return torch.linalg.vector_norm(values / scale, power, dim=dim) * scale


def _stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Norms of any dtypes and devices as one tensor, in which they can be put together."""
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(device) for norm in norms]
    return (torch.stack(list(norms)) if norms else torch.zeros(0)).to(device, _widest(device))


# --- norms over ranks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    """The ranks along a dimension of a mesh; slices of a mesh have the same."""

    name: str
    pg: dist.ProcessGroup = field(compare=False)


@dataclass(frozen=True)
class _Column:
    """Over which axes a kind of gradients is split, and over which it may differ."""

    split: frozenset[_Axis]
    unknown: frozenset[_Axis]


class _Plan:
    """Which numbers of this rank meet those of which others, in the same order on all of them.

    A *column* is a kind of placement. ``column_of`` says for each gradient which of ``columns`` is its own.
    """

    def __init__(self, gradients: Sequence[_Gradient], params: Sequence[Tensor]) -> None:
        places = sorted(dict.fromkeys(each.place for each in gradients), key=_order)
        meshes = {mesh: _axes_of(mesh) for mesh in dict.fromkeys(p[0] for p in places if p is not None)}
        agreeing, covering = _axes_to_agree_over(meshes, None in places)
        kinds: dict[_Place | None, _Column] = {}
        for place in places:
            if place is None:
                kinds[place] = _Column(frozenset(), frozenset(agreeing))
                continue
            mesh, placements = place
            split = (axis for dim, axis in meshes[mesh].items() if not placements[dim].is_replicate())
            unknown = () if mesh in covering else set(agreeing) - set(meshes[mesh].values())
            kinds[place] = _Column(frozenset(split), frozenset(unknown))
        self.columns = list(dict.fromkeys(kinds.values()))
        index_of = {place: self.columns.index(column) for place, column in kinds.items()}
        self.column_of = [index_of[each.place] for each in gradients]
        self.device = _device_for(gradients, params)
        concerned = {axis for column in self.columns for axis in column.split | column.unknown}
        everywhere = dict.fromkeys(axis for axes in meshes.values() for axis in axes.values())
        self._axes = [axis for axis in everywhere if axis in concerned]

    def over_ranks(self, columns: Sequence[Tensor], power: float) -> Tensor:
        """The norms over all ranks and columns, from those of this rank: a tensor of as many a column."""
        columns = list(columns)
        for axis in self._axes:
            taking = [
                index
                for index, column in enumerate(self.columns)
                if axis in column.split or axis in column.unknown
            ]
            own = torch.stack([columns[index] for index in taking])
            all_of_them = own.new_zeros(dist.get_world_size(axis.pg), *own.shape)
            all_of_them[dist.get_rank(axis.pg)] = own
            all_reduce(axis.pg, [all_of_them], is_async=False)()
            for position, index in enumerate(taking):
                of_ranks = all_of_them[:, position]
                is_split = axis in self.columns[index].split
                columns[index] = _norm(of_ranks, power if is_split else math.inf, dim=0)
        if not columns:
            return torch.zeros(1, device=self.device)
        return _norm(torch.stack(columns), power, dim=0)


def _order(place: _Place | None) -> tuple[Any, ...]:
    """Sorts places alike on all ranks, even where they come in the order of a set."""
    if place is None:
        return ()
    mesh, placements = place
    return mesh.mesh_dim_names or (), tuple(mesh.shape), str(placements)


def _axes_of(mesh: DeviceMesh) -> dict[int, _Axis]:
    """The axes along which this rank has anybody to ask, by dimension."""
    if mesh.get_coordinate() is None:
        return {}
    groups = {dim: mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1}
    return {dim: _Axis(pg.group_name, pg) for dim, pg in groups.items()}


def _axes_to_agree_over(
    meshes: dict[DeviceMesh, dict[int, _Axis]], has_plain: bool
) -> tuple[list[_Axis], list[DeviceMesh]]:
    """Axes that lead to all ranks there are, and the meshes whose own do.

    What is on a mesh with all ranks is the same for all of them.
    """
    if len(meshes) < 2 and not has_plain:
        return [], list(meshes)
    ranks = {mesh: set(mesh.mesh.flatten().tolist()) for mesh in meshes}
    everyone = set().union(*ranks.values())
    covering = [mesh for mesh in meshes if ranks[mesh] == everyone]
    if covering:
        return list(min((meshes[mesh] for mesh in covering), key=len).values()), covering
    return list(dict.fromkeys(axis for axes in meshes.values() for axis in axes.values())), []


def _device_for(gradients: Sequence[_Gradient], params: Sequence[Tensor]) -> torch.device:
    """Where the ranks exchange norms: the device of the mesh, also while gradients are kept on the host."""
    kind = next((each.place[0].device_type for each in gradients if each.place is not None), None)
    devices = (compat.plain(each.param).device for each in gradients if each.place is not None)
    if kind is None:
        return compat.plain(params[0]).device if params else torch.device("cpu")
    if kind == "cpu":
        return torch.device("cpu")
    return next(
        (device for device in devices if device.type == kind),
        torch.device(kind, torch.get_device_module(kind).current_device()),
    )


# --- what comes of it -----------------------------------------------------------------------------


def _dtype_of_result(gradients: Sequence[_Gradient]) -> torch.dtype:
    """The same on ranks that lack a gradient: then that counts which it would have."""
    dtypes = {
        getattr(each.param, "grad_dtype", None) or each.param.dtype
        if each.measured is None
        else each.measured.dtype
        for each in gradients
    }
    return torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32


def _scale(gradients: Sequence[_Gradient], limit: float, total: Tensor, is_foreach: bool) -> None:
    """Multiply by ``limit / total`` where that is below 1, without waiting for a device to say so."""
    factor = torch.clamp(limit / (total + 1e-6), max=1.0)
    if factor.device.type == "cpu" and factor >= 1:
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in (each.local for each in gradients if each.local is not None):
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    factors = {device: factor.to(device) for device, _ in alike}
    for (device, _), members in alike.items():
        if is_foreach:
            torch._foreach_mul_(members, factors[device])
            continue
        for tensor in members:
            tensor.mul_(factors[device])


def _message_about_nonfinite(
    total: Tensor,
    power: float,
    gradients: Sequence[_Gradient],
    norms: Sequence[Sequence[Tensor]],
    name_of: Callable[[Tensor], str],
) -> str:
    names = [
        name_of(each.param)
        for each, own in zip(gradients, norms, strict=True)
        if not all(norm.isfinite() for norm in own)
    ]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    here = (
        f"On this rank it comes from {', '.join(names[:4])}{more}."
        if names
        else "No gradient on this rank is to blame: other ranks name theirs."
    )
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
        raise TypeError(f"clip_grad_norm_: max_norm is {max_norm!r}, {describe(max_norm)}; pass a number.")
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


def _check_parameters(caller: str, given: Any) -> list[Tensor]:
    """The parameters in ``given``, each once."""
    if isinstance(given, nn.Module):
        return list(given.parameters())
    if isinstance(given, Tensor):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(
            f"{caller}: expected a module, a parameter or an iterable of parameters, got {describe(given)}."
        )
    params = list(given)
    for index, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"{caller}: at [{index}] of the iterable is {describe(param)}, where a parameter is "
                "expected. Pass the module itself, or model.parameters()."
            )
    return list({id(param): param for param in params}.values())


def _name_of(given: Any, params: Sequence[Tensor], param: Tensor) -> str:
    """What to call ``param`` in a message."""
    if isinstance(given, nn.Module):
        return next(name for name, each in given.named_parameters() if each is param)
    known = sharded_before(param) if isinstance(param, nn.Parameter) else None
    return known or f"parameter {next(i for i, each in enumerate(params) if each is param)}"
