"""Full tensors from DTensors, many in few collectives, and rows of full tensors into DTensors.

Works for any DTensor: parameters, optimizer state, averages, on any mesh with any placements. Knows no
modules and no groups.

A tensor that is the concatenation of its parts is all-gathered in place. Others are all-gathered a few rows
at a time into a staging buffer, from which each rank's rows are copied into place:

    staging, world 2    | rank 0: rows of A, of B, padding | rank 1: rows of A, of B, padding |
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.comm.communicators import make_communicator
from shardwise.comm.streams import Finish, waiting_for
from shardwise.layout.chunks import stretches
from shardwise.layout.mesh import Axis, device_of
from shardwise.layout.regions import Region, Split, cuts_in_order
from shardwise.ranks.model_ranks import own_rank
from shardwise.ranks.packing import in_messages, num_packed_bytes, views_in
from shardwise.torch_compat import c10d, dtensor

STAGING_BYTES = 8 << 20
"""The size of a staging buffer over all ranks, unless a row of a tensor needs more."""

PACKED_BELOW = 64 << 10
"""Parts smaller than this are sent together: a message costs as much as copying several times that."""

BUCKET_BYTES = 64 << 20
"""Bytes to gather or send at once, unless one tensor is larger."""


def sharding_of(tensor: DTensor) -> Split:
    """How ``tensor`` is sharded over its mesh; a ValueError if its ranks hold parts of a sum."""
    shards: list[tuple[int, int, int]] = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(
                f"a DTensor with placement {placement} holds parts of a sum, which have no place in the full "
                "tensor. Redistribute it to Shard(...) or Replicate() first."
            )
        if dtensor.is_strided_shard(placement):
            shards.append((mesh_dim, placement.dim, placement.split_factor))  # type: ignore[attr-defined]
        elif placement.is_shard():
            shards.append((mesh_dim, placement.dim, 1))  # type: ignore[attr-defined]
    sizes = tuple(tensor.device_mesh.shape)
    return Split(tuple(tensor.shape), sizes, cuts_in_order(shards, sizes))


def own_region(tensor: Tensor) -> Region:
    """The part of a full tensor that this rank holds; all of it if ``tensor`` is not a DTensor."""
    if not isinstance(tensor, DTensor):
        return Region.all_of(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return sharding_of(tensor).region(coordinate)


# --- from DTensors --------------------------------------------------------------------------------


def batches(tensors: Sequence[Tensor], limit: int, dtypes: Sequence[torch.dtype]) -> Iterator[range]:
    """Ranges of ``tensors`` whose full bytes stay below ``limit``, or single tensors."""
    return stretches([t.numel() * d.itemsize for t, d in zip(tensors, dtypes, strict=True)], limit)


@torch.no_grad()
def gather_full(
    tensors: Sequence[Tensor],
    owner: int | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> list[Tensor | None]:
    """The full tensors, in separate memory, on the device of their mesh.

    Collective over the ranks that share the tensors, in this order. Copies tensors that are not DTensors.

    Args:
        tensors: with any placements except partial ones.
        owner: the global rank that gets them, while others get None; None: all ranks do.
        dtypes: convert each to one of these before it is sent.
        staging_bytes: memory that the gather may use besides the full tensors.
    """
    dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else dtypes
    result: list[Tensor | None] = [None] * len(tensors)
    routes: dict[tuple[int, tuple[int, ...]], _Route] = {}
    staged: dict[_Route, list[_StagedRows]] = {}
    for index, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if not isinstance(tensor, DTensor):
            if owner in (None, own_rank()):
                result[index] = tensor.detach().to(dtype, copy=True)
            continue
        split = sharding_of(tensor)
        key = (id(tensor.device_mesh), split.mesh_dims)
        route = routes.setdefault(key, _Route(tensor.device_mesh, split.mesh_dims, owner))
        if not route.takes_part:
            continue
        local = dtensor.local_tensor(tensor).detach()
        if type(local) is not Tensor:
            whole = tensor.full_tensor()  # the subclass gathers itself
            result[index] = whole if route.receives else None
        elif split.is_concatenation and (not split.cuts or local.numel() * dtype.itemsize >= PACKED_BELOW):
            result[index] = route.concatenated(local.to(route.device, dtype), split)
        else:
            full = torch.empty(tensor.shape, dtype=dtype, device=route.device) if route.receives else None
            result[index] = full
            staged.setdefault(route, []).append(_StagedRows(local, full, split, dtype))
    for route in routes.values():
        route.wait()
    for route, parts in staged.items():
        largest = [(part, part.split.largest) for part in parts if part.split.numel]
        items = ((part, shape[0], prod(shape[1:]) * part.dtype.itemsize) for part, shape in largest)
        for some in in_messages(items, staging_bytes // parts[0].split.num_parts):
            _gather_staged(route, some)
    return result


class _Route:
    """How parts of tensors on one mesh reach their receivers: along one mesh dim after another."""

    def __init__(self, mesh: DeviceMesh, mesh_dims: tuple[int, ...], owner: int | None) -> None:
        self.device = device_of(mesh)
        self._mesh = mesh
        self._in_flight: list[tuple[Finish, Tensor]] = []  # with its input, which it keeps alive
        own = mesh.get_coordinate()
        assert own is not None
        self._own = tuple(own)
        found = [] if owner is None else (mesh.mesh == owner).nonzero().tolist()
        self._target = tuple(found[0]) if found else None
        # An owner outside this mesh is served by the ranks that share a mesh with it.
        is_elsewhere = owner is not None and not found
        self.receives = not is_elsewhere and self._target in (None, self._own)
        self.takes_part = not is_elsewhere and all(
            self._target is None or self._own[dim] == self._target[dim]
            for dim in range(mesh.ndim)
            if dim not in mesh_dims
        )

    def gather(self, own: Tensor, along: Sequence[int]) -> Tensor | None:
        """The bytes of ``own`` of all ranks; along the first dim of ``along`` they are farthest apart."""
        received: Tensor | None = own.contiguous().view(-1).view(torch.uint8)
        for dim in reversed(along):
            if received is not None and self._mesh.size(dim) > 1:
                self.wait()
                received = self._gather_along(received, dim)  # None: another rank has it
        return received

    def wait(self) -> None:
        """Wait for all gathers in flight; until then, results of ``gather`` are incomplete."""
        for finish, _ in self._in_flight:
            finish()
        self._in_flight.clear()

    def _gather_along(self, own: Tensor, dim: int) -> Tensor | None:
        pg, world = self._mesh.get_group(dim), self._mesh.size(dim)
        if self._target is None:
            everywhere = own.new_empty(world * own.numel())
            finish = make_communicator(pg, self.device).all_gather([everywhere], [own])
            self._in_flight.append((finish, own))
            return everywhere
        is_target = self._own[dim] == self._target[dim]
        whole: Tensor | None = own.new_empty(world * own.numel()) if is_target else None
        pieces = None if whole is None else list(whole.view(world, -1))
        self._in_flight.append((gather_to(pg, self._target[dim], own, pieces), own))
        return whole

    def concatenated(self, local: Tensor, split: Split) -> Tensor | None:
        """A full tensor that is the concatenation of its parts."""
        if not split.numel:
            return local.new_empty(split.shape) if self.receives else None
        whole = self.gather(local, [cut.mesh_dim for cut in split.cuts])
        if whole is None or not self.receives:
            return None
        return (whole.clone() if split.num_parts == 1 else whole).view(local.dtype).view(split.shape)


def gather_to(pg: dist.ProcessGroup, dst: int, own: Tensor, pieces: Sequence[Tensor] | None) -> Finish:
    """Gather ``own`` of each rank of ``pg`` into ``pieces`` on rank ``dst``; other ranks pass None."""
    if own.device.type != "cpu" or c10d.backend_name(pg, own.device) != "gloo":
        everywhere = None if pieces is None else list(pieces)
        return waiting_for([dist.gather(own, everywhere, group=pg, group_dst=dst, async_op=True)])
    # gloo's own gather receives into an extra buffer.
    if pieces is None:
        return waiting_for([dist.isend(own, group=pg, group_dst=dst)])
    others = [(rank, piece) for rank, piece in enumerate(pieces) if rank != dst]
    works = [dist.irecv(piece, group=pg, group_src=rank) for rank, piece in others]
    pieces[dst].copy_(own)
    return waiting_for(works)


@dataclass(frozen=True, eq=False)
class _StagedRows:
    """A tensor that is gathered through the staging buffer."""

    local: Tensor
    full: Tensor | None
    split: Split
    dtype: torch.dtype


def _gather_staged(route: _Route, some: Sequence[tuple[_StagedRows, int, int]]) -> None:
    """Gather rows of parts, packed, as many bytes from each rank as from the one with the largest part."""
    forms = [((end - start, *part.split.largest[1:]), part.dtype) for part, start, end in some]
    own = torch.empty(num_packed_bytes(forms), dtype=torch.uint8, device=route.device)
    for view, (part, start, end) in zip(views_in(own, forms), some, strict=True):
        rows = part.local[start:end]
        _corner(view, rows.shape).copy_(rows)
    split = some[0][0].split
    whole = route.gather(own, split.mesh_dims)
    route.wait()
    if whole is None or not route.receives:
        return
    for sent, coordinate in zip(whole.view(split.num_parts, -1), split.coordinates(), strict=True):
        for view, (part, start, end) in zip(views_in(sent, forms), some, strict=True):
            region = part.split.region(coordinate).rows(start, end)
            assert part.full is not None
            part.full[region.slices].copy_(_corner(view, region.sizes))


def _corner(view: Tensor, sizes: Sequence[int]) -> Tensor:
    return view if view.shape == sizes else view[tuple(slice(size) for size in sizes)]


def full_values(entries: Mapping[Any, Any], owner: int | None, cpu: bool) -> dict[Any, Any]:
    """A copy of a dict with full tensors; an empty dict if ``owner`` is another rank.

    Gathers a bucket at a time, and moves each to host memory if ``cpu``.
    """
    tensors = {id(value): value for value in entries.values() if isinstance(value, Tensor)}
    full: dict[int, Tensor] = {}
    order = list(tensors.values())
    for batch in batches(order, BUCKET_BYTES, [tensor.dtype for tensor in order]):
        some = [order[index] for index in batch]
        for tensor, whole in zip(some, gather_full(some, owner), strict=True):
            if whole is not None:
                full[id(tensor)] = whole.cpu() if cpu else whole
    if owner not in (None, own_rank()):
        return {}
    return {
        name: full[id(value)] if isinstance(value, Tensor) else deepcopy(value)
        for name, value in entries.items()
    }


# --- into DTensors --------------------------------------------------------------------------------


class RowScatter:
    """Sends rows of full tensors from one rank directly to the ranks that hold them, along one axis.

    For large tensors sharded on dim 0; packing and broadcasting others is faster.
    """

    def __init__(self, axis: Axis, sender: int, device: torch.device) -> None:
        """``sender``: the rank along ``axis`` that has the full tensors."""
        self._axis, self._sender, self._device = axis, sender, device

    def takes(self, target: Tensor, start: int, end: int) -> bool:
        """Whether to send rows [start, end) of ``target`` this way; equal on all ranks."""
        if not isinstance(target, DTensor) or tuple(target.device_mesh.shape) != (self._axis.world,):
            return False
        if dtensor.local_tensor(target).device.type != self._device.type:
            return False  # offloaded
        split = sharding_of(target)
        are_rows = len(split.cuts) == 1 and split.cuts[0].dim == 0
        return are_rows and (end - start) * prod(split.shape[1:]) * target.itemsize >= PACKED_BELOW

    def send(self, target: Tensor, start: int, rows: Tensor) -> list[Any]:
        """On the sender: send rows [start, ...) to the other ranks, and write its own."""
        split, sent = sharding_of(target), []  # type: ignore[arg-type]
        for rank in range(self._axis.world):
            in_rows, _ = split.region([rank]).overlap(start, start + len(rows))
            piece = rows[in_rows]
            if rank == self._axis.rank:
                write_rows(target, start, rows)
            elif len(piece):
                piece = piece.to(self._device, target.dtype).contiguous()
                sent.append(dist.P2POp(dist.isend, piece, group=self._axis.pg, group_peer=rank))
        return sent

    def receive(self, target: Tensor, start: int, end: int) -> list[Any]:
        """On the other ranks: receive their part of rows [start, end)."""
        split = sharding_of(target)  # type: ignore[arg-type]
        _, in_local = split.region([self._axis.rank]).overlap(start, end)
        piece = dtensor.plain(target)[in_local]
        if not len(piece):
            return []
        torch.autograd.graph.increment_version(piece)  # process groups write without counting versions
        return [dist.P2POp(dist.irecv, piece, group=self._axis.pg, group_peer=self._sender)]


@torch.no_grad()
def write_rows(target: Tensor, start: int, rows: Tensor) -> None:
    """Copy into ``target`` its part of the rows [start, start + len(rows)) of its full tensor.

    In place and local; a scalar is one row. Elements are converted to the dtype of ``target``.
    """
    local = dtensor.plain(target)
    if not target.dim():
        local.copy_(rows.reshape(()))
        return
    region = own_region(target)
    in_rows, in_local = region.overlap(start, start + len(rows))
    if in_local.start < in_local.stop and region.numel:
        local[in_local].copy_(rows[(in_rows, *region.slices[1:])])
