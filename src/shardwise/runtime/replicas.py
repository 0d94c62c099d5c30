"""Copies of one tensor on several ranks: whether they are equal, bit for bit, and how to make them so.

A DTensor has copies along the mesh dimensions on which it is ``Replicate()``. What is compared is a number
for each tensor, made from its bits and where they stand; tensors never travel for it. Knows nothing of
modules and groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.runtime import compat
from shardwise.runtime.mesh import Axis, axes_of, highest_over, ranks_along
from shardwise.runtime.spread import Spread

Named = tuple[str, Tensor]

PACKED_BYTES = 32 << 20
"""So many bytes of tensors are made equal by one broadcast."""


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


def are_silent(axes: Sequence[Axis], device: torch.device) -> bool:
    """True where a back end only pretends to communicate, as in plans for more ranks than there are."""
    return any(axis.pg is not None and compat.backend_name(axis.pg, device) == "fake" for axis in axes)


# --- are they equal -------------------------------------------------------------------------------


@torch.no_grad()
def refuse_unequal(named: Sequence[Named], device: torch.device) -> None:
    """Raise on all ranks that share the tensors if copies of any differ.

    Reads each local tensor that has copies once, and reduces two numbers over each axis of copies and one
    over all axes. ``device`` is that of the meshes. Collective, unless nothing has copies. The first forward
    with gradients calls it, and so is collective over the replicas; one rank alone may do a dry run without.

    Raises:
        RuntimeError: with the names, and the ranks whose copies differ.
    """
    along: dict[tuple[int, ...], tuple[Axis, list[int]]] = {}  # by ranks, as in axes_of
    for index, (_, tensor) in enumerate(named):
        local = compat.plain(tensor)
        if type(local) is Tensor and not local.is_meta:  # other classes have forms of their own
            for _, axis in copied_along(tensor):
                along.setdefault(ranks_along(axis), (axis, []))[1].append(index)
    axes = axes_of(tensor for _, tensor in named)
    if not along or are_silent(axes, device):
        return
    numbers = _numbers_of(named, sorted({i for _, found in along.values() for i in found}), device)
    differs = torch.zeros(1, dtype=torch.int64, device=device)
    for axis, found in along.values():
        total = _mixed(numbers[found], torch.arange(len(found), device=device)).sum()
        extremes = torch.stack([total, ~total])  # the maximum of ~total is the minimum of total
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=axis.pg)
        differs |= extremes[0] != ~extremes[1]
    if len(axes) > 1:
        highest_over(differs, axes)
    if differs.item():
        names = [name for name, _ in named]
        raise RuntimeError(_message(_find(names, numbers, list(along.values()), axes)))


def _numbers_of(named: Sequence[Named], indices: Sequence[int], device: torch.device) -> Tensor:
    """A number for each tensor, on ``device``; 0 for those that are not in ``indices``."""
    pads: dict[torch.device, _Pad] = {}
    numbers = torch.zeros(len(named), dtype=torch.int64, device=device)
    for index in indices:
        local = compat.plain(named[index][1])
        if local.device not in pads:
            pads[local.device] = _Pad(local.device)
        numbers[index] = pads[local.device].number_of(local)
    return numbers


class _Pad:
    """Memory in which to compute the numbers of tensors, a piece at a time."""

    _FACTOR = 0x1E3779B97F4A7C15

    def __init__(self, device: torch.device) -> None:
        # On the host a piece stays in the cache through all passes; elsewhere fewer launches count more.
        self._num_bytes = 1 << 18 if device.type == "cpu" else 1 << 25
        count = self._num_bytes // 8
        self._words = torch.zeros(count, dtype=torch.int64, device=device)
        self._spare = torch.zeros_like(self._words)
        self._places = torch.arange(count, device=device).mul_(self._FACTOR)

    def number_of(self, tensor: Tensor) -> Tensor:
        """Depends on each bit and on its place; NaNs are bits like others."""
        contents = tensor.detach().contiguous().view(-1).view(torch.uint8)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for start in range(0, len(contents), self._num_bytes):
            piece = contents[start : start + self._num_bytes]
            count = -(-len(piece) // 8)
            words, spare = self._words[:count], self._spare[:count]
            words[-1:].zero_()  # the bytes after the last one count as zeros
            words.view(torch.uint8)[: len(piece)].copy_(piece)
            words.add_(self._places[:count]).add_(_wrapped(start * self._FACTOR))
            total += _mix(words, spare).sum()
        return total


def _mix(words: Tensor, spare: Tensor) -> Tensor:
    """Each word by itself, in place, so that a sum of them does not cancel out what differs."""
    words.mul_(-0x40A7B892E31B1A47)
    torch.bitwise_right_shift(words, 29, out=spare)
    words.bitwise_xor_(spare).mul_(-0x6B2FB644ECCEEE15)
    torch.bitwise_right_shift(words, 32, out=spare)
    return words.bitwise_xor_(spare)


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    words = words + places * _Pad._FACTOR
    return _mix(words, torch.empty_like(words))


def _wrapped(number: int) -> int:
    """As 64 bits with a sign would hold it."""
    return (number + 2**63) % 2**64 - 2**63


Findings = dict[str, set[tuple[int, int]]]
"""Names of tensors, and of which rank the copy differs from that of the first rank on its axis."""


def _find(
    names: Sequence[str], numbers: Tensor, along: Sequence[tuple[Axis, list[int]]], axes: Sequence[Axis]
) -> Findings:
    """What differs anywhere, the same on all ranks."""
    found: Findings = {}
    for axis, indices in along:
        assert axis.pg is not None
        own = numbers[indices]
        copies = [torch.empty_like(own) for _ in range(axis.world)]
        dist.all_gather(copies, own, group=axis.pg)
        ranks = compat.ranks_of(axis.pg)
        for rank, copy in zip(ranks, copies, strict=True):
            for place in (copy != copies[0]).nonzero().view(-1).tolist():
                found.setdefault(names[indices[place]], set()).add((ranks[0], rank))
    # There and back, as in highest_over.
    for axis in [*axes, *axes[-2::-1]]:
        others: list[Any] = [None] * axis.world
        dist.all_gather_object(others, found, group=axis.pg)
        for other in others:
            for name, pairs in other.items():
                found.setdefault(name, set()).update(pairs)
    return {name: found[name] for name in names if name in found}


def _message(found: Findings) -> str:
    first, *others = found
    more = f" and {len(others)} more" if others else ""
    pairs = {pair for each in found.values() for pair in each}
    return (
        f"{first}{more}: the copies on ranks {sorted({rank for _, rank in pairs})} differ from those on "
        f"ranks {sorted({rank for rank, _ in pairs})}. Replicas that start apart stay apart: gradients are "
        "averaged, weights are not. Seed all ranks alike, or call shardwise.sync_module_states(model) before "
        "the first forward."
    )


# --- make them equal ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """What a rank has of one tensor: which part, by its coordinate on a mesh; None: all of a plain one."""

    coordinate: Sequence[int] | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def fits(self, other: "Place") -> bool:
        """Whether both are parts of tensors of one form."""
        return (self.coordinate is None, self.shape, self.dtype) == (
            other.coordinate is None,
            other.shape,
            other.dtype,
        )


def places_of(named: Sequence[Named]) -> list[Place]:
    """What this rank has of the tensors."""
    return [
        Place(t.device_mesh.get_coordinate() if isinstance(t, DTensor) else None, tuple(t.shape), t.dtype)
        for _, t in named
    ]


def is_at(tensor: Tensor, coordinate: Sequence[int]) -> bool:
    """Whether copies of ``tensor`` come from this rank if the source is at ``coordinate``."""
    return all(axis.rank == coordinate[dim] for dim, axis in copied_along(tensor))


@torch.no_grad()
def make_equal(named: Sequence[Named], places: Sequence[Place], spread: Spread, device: torch.device) -> None:
    """Have all ranks hold what the source of ``spread`` holds, of what ranks hold alike.

    ``places`` are those of the source.

    Of a DTensor that are the copies along its replicated mesh dimensions: each rank takes over the part of
    its own place, from the members where the source is. A plain tensor comes from the source.

        mesh (replicate=2, shard=2), source at (1, 0)     (0, 0) <- (1, 0)     (0, 1) <- (1, 1)

    Collective. Written in place, so that versions count it.
    """
    routes: dict[tuple[tuple[int, int], ...] | None, tuple[list[tuple[Axis, int]], list[Tensor]]] = {}
    for (_, tensor), place in zip(named, places, strict=True):
        at = place.coordinate or ()
        steps = [(axis, at[dim]) for dim, axis in copied_along(tensor)]
        key = tuple((id(axis.pg), sender) for axis, sender in steps) if isinstance(tensor, DTensor) else None
        if key != ():
            routes.setdefault(key, (steps, []))[1].append(compat.plain(tensor))
    for key, (steps, tensors) in routes.items():
        for packed in _packed(tensors, device):
            if key is None:
                spread.tensor(packed)
            for axis, sender in steps:
                dist.broadcast(packed, group=axis.pg, group_src=sender)


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Buffers on ``device`` with contents of ``tensors``, which take over what the caller makes of them."""
    # The widest first: then each begins at a multiple of its element.
    ordered = sorted((t.detach() for t in tensors), key=lambda tensor: -tensor.itemsize)
    batch: list[Tensor] = []
    room = PACKED_BYTES
    for tensor in ordered:
        flat = tensor.contiguous().view(-1)
        for piece in flat.split(max(1, PACKED_BYTES // tensor.itemsize)):
            if piece.numel() * piece.itemsize > room:
                yield from _exchanged(batch, device)
                batch, room = [], PACKED_BYTES
            batch.append(piece)
            room -= piece.numel() * piece.itemsize
        if not tensor.is_contiguous():
            yield from _exchanged(batch, device)
            batch, room = [], PACKED_BYTES
            tensor.copy_(flat.view(tensor.shape))
    yield from _exchanged(batch, device)


def _exchanged(pieces: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    sizes = [piece.numel() * piece.itemsize for piece in pieces]
    if not sum(sizes):
        return
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    parts = buffer.split(sizes)
    for piece, part in zip(pieces, parts, strict=True):
        part.copy_(piece.view(torch.uint8))
    yield buffer
    for piece, part in zip(pieces, parts, strict=True):
        piece.copy_(part.view(piece.dtype))
