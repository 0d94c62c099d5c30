"""Norms of gradients with any placements: local norms first, then combined over ranks.

Each rank measures its own gradients, then sends one number for each kind of placement. ``Shard`` on a mesh
dimension: the ranks hold different parts, whose norms are combined. ``Replicate``: they hold the same, and
one counts. Not on the dimension, such as plain tensors: they may differ, and the largest norm counts, so
that all ranks clip alike.

    mesh (dp=2, tp=2), ranks 0 1 / 2 3        over dp          over tp
    up       (Shard(0), Shard(0)) on both     combined         combined
    norm     Shard(0) on dp                   combined         largest
    scale    plain, of ignored_params         largest          largest

Ranks all-reduce a vector of zeros in which each has filled in its own number, and every rank combines all
numbers in the same order. So the result has the same bits everywhere and does not depend on the back end's
order of additions; NaNs arrive, which a maximum may lose; and powers, which may overflow, never leave a rank.

One more number per rank shows whether all pass the same parameters. It is a sum over the names of the
DTensors on a mesh: their order may differ by rank, and only ranks on the mesh are compared.

    over dp, rank 0   passes a.weight, b.weight    number("a.weight") + number("b.weight")
             rank 1   passes b.weight              number("b.weight"): both ranks raise
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, reduce
from hashlib import blake2b
from itertools import chain
from operator import attrgetter, or_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from shardwise.buckets.bucket import bucket_and_index
from shardwise.layout.chunks import round_up
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import device_of
from shardwise.params.parameter import NAME, refuse_deferred
from shardwise.torch_compat import c10d, dtensor, foreach

_RANGE = 2**52
"""float64 holds all integers up to twice that."""


# --- whether all ranks pass the same --------------------------------------------------------------


# Numbers that all ranks of a process group have sent. Where reading would wait for a device, a rank reads
# only if its own number is new.
_agreed: "WeakKeyDictionary[dist.ProcessGroup, set[int]]" = WeakKeyDictionary()


class PassedParameters:
    """The names of the DTensors that ``caller`` was given, by mesh."""

    def __init__(self, caller: str) -> None:
        self.caller = caller
        # For meshes that are equal: the names, and these meshes by id.
        self._on: dict[DeviceMesh, tuple[list[str], dict[int, DeviceMesh]]] = {}

    def add(self, mesh: DeviceMesh, names: Iterable[str]) -> None:
        """Add parameters that live on ``mesh``."""
        own, equal = self._on.setdefault(mesh, ([], {}))
        own.extend(names)
        equal[id(mesh)] = mesh

    def group_of(self, mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
        """The process group of a dimension of ``mesh``, of which equal meshes may have different ones.

        The choice depends neither on the order of the parameters, which may differ by rank, nor on other
        dimensions.
        """
        _, equal = self._on.get(mesh, ([], {id(mesh): mesh}))
        return min((each.get_group(dim) for each in equal.values()), key=attrgetter("group_name"))

    def along(self, pg: dist.ProcessGroup, others: Sequence[str], is_on_host: bool) -> "PassedAlong":
        """Those on all ranks of ``pg``, a dimension of their meshes, besides ``others``."""
        names = list(others)
        for own, equal in self._on.values():
            groups = chain.from_iterable(mesh.get_all_groups() for mesh in equal.values())
            if any(group.group_name == pg.group_name for group in groups):
                names += own
        return PassedAlong(self.caller, pg, names, is_on_host)


class PassedAlong:
    """The names of parameters on all ranks of a process group, to be compared among them."""

    def __init__(self, caller: str, pg: dist.ProcessGroup, names: Sequence[str], is_on_host: bool) -> None:
        self._caller = caller
        self._pg = pg
        self._names = names
        own = 1 + sum(map(_number_of, names)) % _RANGE
        # To be sent; negative if this rank will not read those of others.
        self.number = own if is_on_host or own not in _agreed.get(pg, ()) else -own

    def compare(self, numbers: Tensor) -> None:
        """Refuse different ``numbers`` of ranks, on every rank that reads them.

        On a device, ranks that pass what all have passed before do not read, and raise in their next wait.
        """
        if self.number < 0:
            return
        found = [int(number) for number in numbers.tolist()]
        if len({abs(number) for number in found if number}) > 1:  # 0 is that of a fake rank
            raise ValueError(
                f"{self._caller}: ranks have passed different parameters: {self._difference(found)}. All "
                "ranks get the same result, so they must pass the same parameters, such as "
                "model.parameters(); a parameter without .grad counts as zeros."
            )
        _agreed.setdefault(self._pg, set()).add(self.number)

    def _difference(self, numbers: Sequence[int]) -> str:
        ranks = c10d.ranks_of(self._pg)
        if min(numbers) < 0:  # not all ranks come here to send their names
            others = [str(r) for r, number in zip(ranks, numbers, strict=True) if abs(number) != self.number]
            return f"this rank {len(self._names)} ({listed(self._names, 4)}), rank {listed(others)} others"
        everyone: list[Any] = [None] * len(ranks)
        dist.all_gather_object(everyone, list(self._names), group=self._pg)
        counts: dict[int, Counter[str]] = dict(zip(ranks, map(Counter, everyone), strict=True))
        lacking = []
        for name, most in reduce(or_, counts.values()).items():
            if without := [str(rank) for rank, own in counts.items() if own[name] < most]:
                lacking.append(f"{name} (not on rank {listed(without)})")
        return listed(lacking, 4)


@cache
def _number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest())


# The host adds float32 numbers one by one: the norm of 10 million is off by 4e-4. Norms of pieces of this
# size, combined in float64, are off by 2e-7, at the same speed. Devices work in pieces anyway.
_PIECE_NUMEL = 2**16
# Up to this exponent, powers of all float32 numbers fit into float64.
_LARGEST_PLAIN_POWER = 6.0
# Sums of powers between 1e-250 and 1e250 have lost no terms at either end of float64.
_PLAIN_DECADES = 250.0


GradientPlacement = tuple[DeviceMesh, tuple[Placement, ...]]


class HeldGradient(NamedTuple):
    """A gradient as this rank holds it.

    ``param``: its parameter, or, where neighbouring gradients are one flat tensor, the first of theirs.
    ``local``: what is scaled; None if this rank has none. ``measured``: the same tensor, or, if the local one
    is only a summand of the gradient, the sum. ``place``: mesh and placements; None for a plain tensor.
    """

    param: Tensor
    local: Tensor | None
    measured: Tensor | None
    place: GradientPlacement | None


def gradients_in(
    params: Sequence[Tensor], passed: PassedParameters, name_of: Callable[[Tensor], str]
) -> list[HeldGradient]:
    """The gradients of ``params``, as few tensors.

    The buckets determine the grouping in all common cases, so ranks that hold copies compute the same bits.
    """
    rest = {id(param): param for param in params}
    buckets = dict.fromkeys(found[0] for found in map(bucket_and_index, params) if found is not None)
    held = []
    for bucket in buckets:
        shards = bucket.sharded_gradients.shards
        keys = list(map(id, shards))
        if (
            all(map(rest.__contains__, keys))
            and (flat := bucket.sharded_gradients.flat_gradient()) is not None
        ):
            spec = dtensor.spec_of(shards[0])
            held.append(HeldGradient(shards[0], flat, flat, (spec.mesh, without_sums(spec.placements))))
            passed.add(spec.mesh, [param.fqn for param in bucket.params])
            for key in keys:
                del rest[key]
    others = list(rest.values())
    note_passed(others, passed)
    return held + held_gradients(others, [param.grad for param in others], passed.caller, name_of)


def note_passed(tensors: Iterable[Tensor], passed: PassedParameters) -> None:
    """Compare those of ``tensors`` that are DTensors between the ranks of their meshes."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            name = vars(tensor).get(NAME) or f"one of shape {tuple(tensor.shape)}"
            passed.add(dtensor.spec_of(tensor).mesh, [name])


def refuse_meta(caller: str, tensor: Tensor, name_of: Callable[[Tensor], str]) -> None:
    """Refuse a tensor without values, by its name."""
    if tensor.is_meta:
        raise ValueError(
            f"{caller}: {name_of(tensor)} is on the meta device: it has a shape, but no values. Call "
            "shardwise.materialize(model) or load a checkpoint first."
        )


def held_gradients(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    caller: str,
    name_of: Callable[[Tensor], str],
) -> list[HeldGradient]:
    """The gradients of all parameters that are trainable or have one; their kinds are equal on all ranks.

    Pending sums are redistributed, one by one.
    """
    found = []
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            _check_gradient(param, gradient, caller, name_of)
        elif not param.requires_grad:
            continue
        # The parameter's placement, since another rank may have no gradient.
        placed = param if isinstance(param, DTensor) else gradient
        place, local = None, None if gradient is None else dtensor.plain(gradient)
        measured = local
        if isinstance(placed, DTensor):
            place = placed.device_mesh, without_sums(placed.placements)
            if isinstance(gradient, DTensor) and gradient.placements != place[1]:
                measured = dtensor.local_tensor(gradient.redistribute(placements=place[1]))
        found.append(HeldGradient(param, local, measured, place))
    return found


def without_sums(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements after the pending sums: ``Replicate`` for ``Partial``."""
    if not any(placement.is_partial() for placement in placements):
        return placements
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _check_gradient(param: Tensor, gradient: Tensor, caller: str, name_of: Callable[[Tensor], str]) -> None:
    refuse_deferred(gradient)
    if not isinstance(param, DTensor):
        return
    if not isinstance(gradient, DTensor) or gradient.device_mesh != param.device_mesh:
        found = f"on {gradient.device_mesh}" if isinstance(gradient, DTensor) else "a plain tensor"
        raise RuntimeError(
            f"{caller}: {name_of(param)}: .grad is {found}, where a DTensor on the mesh of the parameter, "
            f"{param.device_mesh}, is expected: this rank cannot tell which part of the gradient it holds. "
            "Assign None to .grad, or a DTensor with the placements of the parameter."
        )


# --- norms on this rank ---------------------------------------------------------------------------


def _norms_of_pieces(tensors: Iterable[Tensor | None], power: float) -> list[Tensor]:
    """The norms of the pieces of all tensors; an empty tensor has none."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for piece in chain.from_iterable(_pieces(tensor) for tensor in tensors if tensor is not None):
        alike.setdefault((piece.device, piece.dtype), []).append(piece)
    norms: list[Tensor] = []
    for (device, dtype), pieces in alike.items():
        # At least float32; float64 for exponents whose powers would soon leave the range of float32.
        least = torch.float32 if power in (1.0, 2.0, math.inf) else widest(device)
        summed = torch.promote_types(torch.promote_types(dtype, least), torch.float32)
        if _LARGEST_PLAIN_POWER < power < math.inf:
            norms += [norm_of(piece.to(summed), power) for piece in pieces]
        else:
            norms += foreach.norm(pieces, power, dtype=summed)
    return norms


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.layout is not torch.strided:
        # The other elements are zero. Uncoalesced, one element may have several terms.
        tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    if tensor.numel() == 0:
        return ()
    if tensor.numel() > _PIECE_NUMEL and tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor.view(-1).split(_PIECE_NUMEL)
    return (tensor,)


def widest(device: torch.device) -> torch.dtype:
    """The dtype in which a device sums best."""
    return torch.float32 if device.type == "mps" else torch.float64


def norm_of(values: Tensor, power: float, dim: int | None = None) -> Tensor:
    """The norm of all ``values``, or along ``dim`` 0, without overflow or underflow of powers."""
    if values.numel() == 0:
        return values.new_zeros(() if dim is None else values.shape[1:])
    plain = torch.linalg.vector_norm(values, power, dim=dim) if values.device.type == "cpu" else None
    if plain is not None and plain.numel() == 1 and _is_in_range(plain.item(), power):
        return plain
    largest = torch.linalg.vector_norm(values, math.inf, dim=dim)
    if power == math.inf:
        return largest
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    return torch.linalg.vector_norm(values / scale, power, dim=dim) * scale


def _is_in_range(norm: float, power: float) -> bool:
    """True if its power is far from the limits of float64, so that no term that mattered was lost."""
    return power == math.inf or (norm > 0 and abs(math.log10(norm)) * power < _PLAIN_DECADES)


def stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Norms of any dtypes and devices as one tensor, to be combined."""
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(device) for norm in norms]
    return (torch.stack(list(norms)) if norms else torch.zeros(0)).to(device, widest(device))


# --- norms over ranks -----------------------------------------------------------------------------

Combine = Callable[[Tensor], Tensor]
_OTHERS = "plain parameters or some on other meshes"


class _Column(NamedTuple):
    """One kind of gradients: the groups of ranks that it is split over, and those in which it may differ."""

    split: frozenset[dist.ProcessGroup]
    unknown: frozenset[dist.ProcessGroup]


class NormPlan:
    """Which numbers are combined over which ranks, in the same order on all of them.

    A *column* is a kind of placement. ``members`` has the indices of the gradients in each.
    """

    def __init__(self, gradients: Sequence[HeldGradient], passed: PassedParameters) -> None:
        self._passed = passed
        places = list(dict.fromkeys(gradient.place for gradient in gradients))
        if len(places) > 1:  # alike on all ranks
            places.sort(key=lambda p: (p[0].mesh_dim_names or (), tuple(p[0].shape), str(p[1])) if p else ())
        meshes = {
            mesh: _groups_of(mesh, passed) for mesh in dict.fromkeys(p[0] for p in places if p is not None)
        }
        agreeing, covering = _groups_to_agree(meshes, None in places)
        kinds: dict[GradientPlacement | None, _Column] = {}
        for place in places:
            if place is None:
                kinds[place] = _Column(frozenset(), frozenset(agreeing))
                continue
            mesh, placements = place
            split = (pg for dim, pg in meshes[mesh].items() if not placements[dim].is_replicate())
            unknown = () if mesh in covering else set(agreeing) - set(meshes[mesh].values())
            kinds[place] = _Column(frozenset(split), frozenset(unknown))
        self.columns = list(dict.fromkeys(kinds.values()))
        # What to call those in a column whose names no mesh has.
        self.labels: list[Sequence[str]] = [[_OTHERS]] * len(self.columns)
        self.members: list[list[int]] = [[] for _ in self.columns]
        index_of = {place: self.columns.index(column) for place, column in kinds.items()}
        for index, gradient in enumerate(gradients):
            self.members[index_of[gradient.place]].append(index)
        # Where ranks exchange norms: the device of the mesh, even if gradients are in host memory.
        own = dtensor.plain(gradients[0].param).device if gradients else torch.device("cpu")
        self.device = next((device_of(mesh) for mesh in meshes), own)
        concerned = {pg for column in self.columns for pg in column.split | column.unknown}
        everywhere = dict.fromkeys(pg for groups in meshes.values() for pg in groups.values())
        self._groups = [pg for pg in everywhere if pg in concerned]

    def over_ranks(
        self, columns: Sequence[Tensor], combine: Combine, choose: Combine, room: int = 0
    ) -> list[Tensor]:
        """Each column over all ranks, from this rank's, whose first dimension is the same on all of them.

        ``combine``: those of ranks that hold different parts, stacked on dim 0; ``choose``: of those that may
        hold different things. ``room``: how many numbers a rank sends before names are compared: lists of
        parameters that differ may make columns of different lengths.
        """
        columns = list(columns)
        for pg in self._groups:
            taking = [i for i, (split, unknown) in enumerate(self.columns) if pg in split or pg in unknown]
            own = torch.cat([columns[index] for index in taking])
            others = [name for i in taking if pg in self.columns[i].unknown for name in self.labels[i]]
            passed = self._passed.along(pg, others, is_on_host=room > 0 or own.device.type == "cpu")
            all_of_them = _from_all_ranks(own, passed, pg, room)
            lengths = [len(columns[index]) for index in taking]
            for index, of_ranks in zip(taking, all_of_them.split(lengths, dim=1), strict=True):
                columns[index] = (combine if pg in self.columns[index].split else choose)(of_ranks)
        return columns


def _from_all_ranks(own: Tensor, passed: PassedAlong, pg: dist.ProcessGroup, room: int) -> Tensor:
    """``own`` of all ranks of ``pg``, stacked."""
    rank, world = dist.get_rank(pg), dist.get_world_size(pg)
    flat = own.flatten()
    # Rounded up, so that a rank with one more kind sends the same length. The last one identifies parameters.
    length = room or round_up(own.numel() + 1, 4) - 1
    first, rest = flat[:length], flat[length:]
    sent = own.new_zeros(world, length + 1)
    sent[rank, : len(first)] = first
    sent[rank, -1].fill_(passed.number)  # to assign it is a copy from the host, which no CUDA graph captures
    dist.all_reduce(sent, group=pg)
    passed.compare(sent[:, -1])
    found = sent[:, : len(first)]
    if len(rest):
        sent = own.new_zeros(world, len(rest))
        sent[rank] = rest
        dist.all_reduce(sent, group=pg)
        found = torch.cat([found, sent], dim=1)
    return found.reshape(world, *own.shape)


def total_norm(gradients: Sequence[HeldGradient], passed: PassedParameters, power: float) -> Tensor:
    """The norm of all ``gradients`` over all ranks, without dimensions."""
    plan, own = NormPlan(gradients, passed), []
    for indices in plan.members:
        norms = _norms_of_pieces([gradients[i].measured for i in indices], power)
        own.append(norm_of(stacked(norms, plan.device), power).view(1))
    largest = partial(norm_of, power=math.inf, dim=0)
    of_kinds = plan.over_ranks(own, partial(norm_of, power=power, dim=0), largest)
    if len(of_kinds) == 1:
        total = of_kinds[0][0]
    else:
        total = norm_of(torch.cat(of_kinds), power) if of_kinds else torch.zeros((), device=plan.device)
    return total.to(_dtype_of_result(gradients))


def _dtype_of_result(gradients: Sequence[HeldGradient]) -> torch.dtype:
    """The same on all ranks: a missing gradient counts with the dtype that it would have."""
    dtypes = {
        getattr(param, "grad_dtype", None) or param.dtype if measured is None else measured.dtype
        for param, _, measured, _ in gradients
    }
    return torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32


def _groups_of(mesh: DeviceMesh, passed: PassedParameters) -> dict[int, dist.ProcessGroup]:
    """The process groups of the mesh dimensions with more than one rank, by index."""
    if mesh.get_coordinate() is None:
        return {}
    return {dim: passed.group_of(mesh, dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1}


def _groups_to_agree(
    meshes: dict[DeviceMesh, dict[int, dist.ProcessGroup]], has_plain: bool
) -> tuple[list[dist.ProcessGroup], list[DeviceMesh]]:
    """Groups that reach all ranks, and the meshes whose own groups do: parameters there are the same for all
    ranks.
    """
    if len(meshes) < 2 and not has_plain:
        return [], list(meshes)
    ranks = {mesh: set(mesh.mesh.flatten().tolist()) for mesh in meshes}
    everyone = set().union(*ranks.values())
    covering = [mesh for mesh in meshes if ranks[mesh] == everyone]
    if covering:
        return list(min((meshes[mesh] for mesh in covering), key=len).values()), covering
    return list(dict.fromkeys(pg for groups in meshes.values() for pg in groups.values())), []
