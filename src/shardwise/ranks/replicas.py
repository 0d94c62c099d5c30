"""Copies of one tensor on several ranks: whether they are equal, bit for bit, and how to make them equal.

A DTensor has copies along the mesh dimensions on which it is ``Replicate()``. Ranks compare a checksum of
each tensor, made from its bits and their positions; they never send the tensors. Knows no modules and no
groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.layout.fqns import listed, listed_ranks
from shardwise.layout.mesh import Axis, all_reduce_max, axes_of, ranks_along
from shardwise.ranks.model_ranks import Broadcast, gather_from_all
from shardwise.ranks.packing import in_messages, num_packed_bytes, views_in
from shardwise.torch_compat import c10d, dtensor, tensor_impl

Named = tuple[str, Tensor]

PACKED_BYTES = 32 << 20
"""Bytes of tensors that share one broadcast."""


def copied_along(tensor: Tensor) -> list[tuple[int, Axis]]:
    """The mesh dimensions along which other ranks hold the same part of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        (dim, Axis(mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)))
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(dim) > 1
    ]


def are_fake(axes: Sequence[Axis], device: torch.device) -> bool:
    """True if the back end is fake, as in plans for more ranks than exist."""
    return any(axis.pg is not None and "fake" in c10d.backend_name(axis.pg, device) for axis in axes)


# --- comparison -----------------------------------------------------------------------------------


PIECE_WORDS = 1 << 15
"""Words of a tensor processed at a time on the host: they stay in the cache through all passes."""
_FACTOR = 0x1E3779B97F4A7C15


class Checksums:
    """Checksums of the bits of tensors and their positions, computed on the devices of the tensors.

    The scratch memory, for a piece at a time, is kept for the next tensor.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor | None:
        """The checksum of ``tensor``, a scalar; None if it has no values, or is of an unknown subclass.

        It depends on each bit and its position, also in NaNs.
        """
        inner = tensor_impl.plain_parts(tensor.detach())
        if not all(tensor_impl.is_plain(part) and not part.is_meta for part in inner):
            return None
        numbers = [self._of_plain(part) for part in inner]
        return _combined(torch.stack([number.to(numbers[0].device) for number in numbers]))

    def _of_plain(self, tensor: Tensor) -> Tensor:
        contents = tensor.detach().contiguous().view(-1).view(torch.uint8)
        num_words, rest = divmod(len(contents), 8)
        whole = contents[: 8 * num_words]
        # Memory may begin anywhere, but words only at multiples of their size.
        is_aligned = contents.data_ptr() % 8 == 0 and contents.storage_offset() % 8 == 0
        words = whole.view(torch.int64) if is_aligned else whole.clone().view(torch.int64)
        num_full = num_words // PIECE_WORDS
        pieces = words[: num_full * PIECE_WORDS].view(-1, PIECE_WORDS)
        sums = [self._sums_of(rows) for rows in pieces.split(_num_rows(tensor.device)) if len(rows)]
        last = words[num_full * PIECE_WORDS :]
        if rest:
            last = torch.cat([last, torch.zeros(1, dtype=torch.int64, device=tensor.device)])
            last[-1:].view(torch.uint8)[:rest].copy_(contents[8 * num_words :])
        return _combined(torch.cat([*sums, self._sums_of(last.unsqueeze(0))]))

    def _sums_of(self, pieces: Tensor) -> Tensor:
        """A checksum for each row of words."""
        rows, count = pieces.shape
        if pieces.device not in self._buffers or count > len(self._buffers[pieces.device][2]):
            self._allocate(count, pieces.device)
        words, spare, positions = self._buffers[pieces.device]
        words, spare = words[:rows, :count], spare[:rows, :count]
        torch.add(pieces, positions[:count], out=words)
        return _mix(words, spare).sum(1)

    def _allocate(self, num_words: int, device: torch.device) -> None:
        """Allocate scratch memory for pieces of up to ``num_words``."""
        words = torch.empty(_num_rows(device), num_words, dtype=torch.int64, device=device)
        positions = torch.arange(num_words, device=device).mul_(_FACTOR)
        self._buffers[device] = words, torch.empty_like(words), positions


def _num_rows(device: torch.device) -> int:
    """Pieces computed at once: many on a device, to save launches."""
    return 1 if device.type == "cpu" else 128


def _combined(numbers: Tensor) -> Tensor:
    """Combine numbers into one that depends on their order."""
    if len(numbers) == 1:
        return numbers[0]
    mixed = numbers + torch.arange(len(numbers), device=numbers.device) * _FACTOR
    return _mix(mixed, torch.empty_like(mixed)).sum()


def _mix(words: Tensor, spare: Tensor) -> Tensor:
    """Mix each word separately, in place, so that differences do not cancel out in a sum."""
    words.mul_(-0x40A7B892E31B1A47)
    torch.bitwise_right_shift(words, 29, out=spare)
    words.bitwise_xor_(spare).mul_(-0x6B2FB644ECCEEE15)
    torch.bitwise_right_shift(words, 32, out=spare)
    return words.bitwise_xor_(spare)


@dataclass(frozen=True)
class Claim:
    """A checksum of something that must be equal on the ranks along ``axes``.

    ``is_unchanged`` is False if this rank has legitimately changed it since. If any rank has, the comparison
    covers only unchanged ranks whose checksum ``is_telling``: a change would have changed it. ``takes_part``
    is False on a rank that the claim does not concern.
    """

    name: str
    axes: Sequence[Axis]
    ranks: tuple[int, ...]
    number: Tensor
    is_unchanged: Tensor | bool = True
    is_telling: Tensor | bool = True
    takes_part: bool = True


@torch.no_grad()
def refuse_unequal(named: Sequence[Named], device: torch.device) -> None:
    """Raise on all ranks that share the tensors if copies of any differ.

    Reads each local tensor that has copies once. Reduces a few numbers per tensor over each axis of copies,
    and one over all axes. ``device`` is that of the meshes. Collective, unless nothing has copies.

    Raises:
        RuntimeError: with the names, and the ranks whose copies differ.
    """
    claims, checksums = [], Checksums()
    for name, tensor in named:
        along = copied_along(tensor)
        number = checksums.of(dtensor.plain(tensor)) if along else None
        if number is not None:
            claims += [Claim(name, [axis], ranks_along(axis), number) for _, axis in along]
    if findings := differing(claims, axes_of(tensor for _, tensor in named), device):
        raise RuntimeError(
            f"{_told(findings, 'the copies on', 'differ from those on')}. Replicas that start different stay "
            "different: gradients are averaged, weights are not. Use the same seed on all ranks, or call "
            "shardwise.init.sync_module_states(model) before the first forward."
        )


class Findings(NamedTuple):
    """Names of differing tensors; for some, the ranks that agree with the first rank, and the others."""

    names: list[str]
    as_first: list[int]
    others: list[int]


_MOST_LOOKED_AT = 8

_LEAST = -(2**63)


@torch.no_grad()
def differing(claims: Sequence[Claim], axes: Sequence[Axis], device: torch.device) -> Findings | None:
    """Which ``claims`` differ between the ranks that ``axes`` connect; the same result on all ranks.

    Collective, over the axes of each claim and then over ``axes``; not without claims.
    """
    if not claims or are_fake(axes, device):
        return None
    own = _table(claims, device)
    along: dict[tuple[int, ...], tuple[Axis, list[int]]] = {}  # by ranks, as in axes_of
    for index, claim in enumerate(claims):
        for axis in claim.axes:
            along.setdefault(ranks_along(axis), (axis, []))[1].append(index)
    if not _any_over(axes, *(_differ_along(axis, own[:, indices]) for axis, indices in along.values())):
        return None
    highest = own.clone()
    for axis, indices in along.values():
        part = highest[:, indices]
        dist.all_reduce(part, op=dist.ReduceOp.MAX, group=axis.pg)
        highest[:, indices] = part
    is_changed = highest[0] != 0
    all_differ = (highest[1] != ~highest[2]) & (highest[2] != _LEAST)
    telling_differ = (highest[3] != ~highest[4]) & (highest[4] != _LEAST)
    differs = torch.where(is_changed, telling_differ, all_differ)
    if not _any_over(axes, differs.any()):
        return None
    return _find(claims, own, differs.tolist(), axes)


def _differ_along(axis: Axis, table: Tensor) -> Tensor:
    """Whether anything in ``table`` differs between the ranks of ``axis``, found with two numbers."""
    is_changed, numbers = table[0], table[1]
    total = _combined(torch.where(is_changed != 0, _FACTOR, numbers))
    extremes = torch.stack([total, ~total])  # the maximum of ~total is the minimum of total
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=axis.pg)
    return extremes[0] != ~extremes[1]


def _any_over(axes: Sequence[Axis], *flags: Tensor) -> bool:
    flag = torch.stack(flags).any().to(torch.int64).view(1)
    if len(axes) > 1:
        all_reduce_max(flag, axes)
    return bool(flag.item())


def _table(claims: Sequence[Claim], device: torch.device) -> Tensor:
    """Rows whose maximum over ranks shows whether the claims agree: the maximum of ~n is the minimum of n."""

    def row(values: Sequence[Tensor | bool]) -> Tensor:
        return torch.stack([torch.as_tensor(value, device=device).to(torch.int64) for value in values])

    numbers = row([claim.number for claim in claims])
    takes_part = row([claim.takes_part for claim in claims]).bool()
    is_changed = takes_part & ~row([claim.is_unchanged for claim in claims]).bool()
    tells = takes_part & ~is_changed & row([claim.is_telling for claim in claims]).bool()
    return torch.stack(
        [
            is_changed.to(torch.int64),
            torch.where(takes_part, numbers, _LEAST),
            torch.where(takes_part, ~numbers, _LEAST),
            torch.where(tells, numbers, _LEAST),
            torch.where(tells, ~numbers, _LEAST),
        ]
    )


def _find(claims: Sequence[Claim], own: Tensor, differs: Sequence[bool], axes: Sequence[Axis]) -> Findings:
    rows = [row for row in zip(claims, differs, own[0].tolist(), own[1].tolist(), strict=True) if row[1]]
    own_names = dict.fromkeys(claim.name for claim, *_ in rows)
    shown = set(list(own_names)[:_MOST_LOOKED_AT])
    own_numbers = {
        (claim.name, claim.ranks): number
        for claim, _, is_changed, number in rows
        if claim.name in shown and claim.takes_part and not is_changed
    }
    names: dict[str, None] = {}
    numbers: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, (its_names, its_numbers) in gather_from_all(axes, (own_names, own_numbers)).items():
        names |= its_names
        for key, number in its_numbers.items():
            numbers.setdefault(key, {})[rank] = number
    as_first: set[int] = set()
    unlike: set[int] = set()
    for by_rank in numbers.values():
        for rank, number in by_rank.items():
            (as_first if number == by_rank[min(by_rank)] else unlike).add(rank)
    return Findings(list(names), sorted(as_first), sorted(unlike))


def _told(findings: Findings, of_these: str, on_ranks: str) -> str:
    others, as_first = listed_ranks(findings.others), listed_ranks(findings.as_first)
    return f"{listed(findings.names, 1)}: {of_these} {others} {on_ranks} {as_first}"


def message_on_initial_values(findings: Findings) -> str:
    """The message about parameters that ranks have sharded from different values."""
    told = _told(findings, "the values on", "differed from those on")
    return (
        f"{told} when fully_shard cut them, so their shards are parts of different models. Seed or load all "
        "ranks alike before fully_shard, pass sync_module_states=True, or load the same values on all ranks "
        "before the first forward. check_equal_weights=False compares nothing."
    )


def message_on_edits(findings: Findings) -> str:
    """The message about full parameters that ranks have changed in different ways."""
    told = _told(findings, "what was made of it inside unsharded() on", "differs from what was made on")
    return (
        f"{told}. Nothing was written. Make the same change on all ranks, or pass src_rank= to take over "
        "that of one rank."
    )


# --- making copies equal --------------------------------------------------------------------------


class TensorInfo(NamedTuple):
    """A rank's part of one tensor, by its coordinate on a mesh; None for a plain tensor, which is whole."""

    coordinate: Sequence[int] | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def fits(self, other: "TensorInfo") -> bool:
        """Whether both are parts of tensors of one shape and dtype."""
        return (self.coordinate is None, *self[1:]) == (other.coordinate is None, *other[1:])


def tensor_infos(named: Sequence[Named]) -> list[TensorInfo]:
    """This rank's parts of the tensors."""
    places = [t.device_mesh.get_coordinate() if isinstance(t, DTensor) else None for _, t in named]
    return [TensorInfo(at, tuple(t.shape), t.dtype) for at, (_, t) in zip(places, named, strict=True)]


def sends_copies(tensor: Tensor, coordinate: Sequence[int]) -> bool:
    """Whether this rank sends copies of ``tensor`` if the source is at ``coordinate``."""
    return all(axis.rank == coordinate[dim] for dim, axis in copied_along(tensor))


@torch.no_grad()
def make_equal(
    named: Sequence[Named], infos: Sequence[TensorInfo], broadcast: Broadcast, device: torch.device
) -> None:
    """Give all ranks the replicated values of the source of ``broadcast``.

    ``infos`` are those of the source.

    For a DTensor, the copies along its replicated mesh dimensions are made equal: each rank gets its own part
    from the ranks at the coordinate of the source. A plain tensor comes from the source.

        mesh (replicate=2, shard=2), source at (1, 0)     (0, 0) <- (1, 0)     (0, 1) <- (1, 1)

    Collective. Writes in place, so that versions count it.
    """
    routes: dict[tuple[tuple[int, int], ...] | None, tuple[list[tuple[Axis, int]], list[Tensor]]] = {}
    for (_, tensor), info in zip(named, infos, strict=True):
        at = info.coordinate or ()
        steps = [(axis, at[dim]) for dim, axis in copied_along(tensor)]
        key = tuple((id(axis.pg), sender) for axis, sender in steps) if isinstance(tensor, DTensor) else None
        if key != ():
            routes.setdefault(key, (steps, []))[1].append(dtensor.plain(tensor))
    for key, (steps, tensors) in routes.items():
        for packed in _packed(tensors, device):
            if key is None:
                broadcast.tensor(packed)
            for axis, sender in steps:
                dist.broadcast(packed, group=axis.pg, group_src=sender)


def broadcast_tensors(tensors: Sequence[Tensor], broadcast: Broadcast, device: torch.device) -> None:
    """Give all ranks the source's contents of plain ``tensors``. Collective."""
    for packed in _packed(tensors, device, is_source=broadcast.is_source):
        broadcast.tensor(packed)


def _packed(tensors: Sequence[Tensor], device: torch.device, *, is_source: bool = False) -> Iterator[Tensor]:
    """Messages on ``device`` packed from ``tensors``; the caller's writes are copied back to them.

    ``is_source``: they are sent from here, and stay as they are.
    """
    flats = ((tensor.detach(), tensor.detach().contiguous().view(-1)) for tensor in tensors)
    items = ((each, each[1].numel(), each[1].itemsize) for each in flats if each[1].numel())
    for some in in_messages(items, PACKED_BYTES):
        pieces = [flat[start:end] for (_, flat), start, end in some]
        forms = [(piece.shape, piece.dtype) for piece in pieces]
        message = torch.empty(num_packed_bytes(forms), dtype=torch.uint8, device=device)
        views = views_in(message, forms)
        for piece, view in zip(pieces, views, strict=True):
            view.copy_(piece)
        yield message
        if is_source:
            continue
        for piece, view in zip(pieces, views, strict=True):
            piece.copy_(view)
        for (tensor, flat), _, end in some:
            if end == len(flat) and not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))
