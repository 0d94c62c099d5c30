"""Unsharding as a function, and its derivative: what compiled graphs hold where eager runs have buffers.

    shards  --cast, flatten, concatenate-->  packed  --all-gather-->  (world, packed)  --cut-->  full tensors
    sums    <--cut--------- reduce-scatter, all-reduce, divide  <--pack--  full gradients, cast

One operator, ``shardwise::unshard``, made of ordinary ones: what compiles the graph sees those, with one
all-gather for all tensors of one dtype, and in backward one reduce-scatter for all gradients of one dtype.
It is given nothing but tensors and constants, knows no parameters and keeps no state. That it is an operator
makes dynamo leave it to autograd to run its derivative, so that a parameter that is not used gets no
gradient, instead of zeros.

World 2, weight (3, 2) and bias (3,), each rank's row of the packed buffer::

    rank 0   | w row 0, w row 1 | b 0, b 1 |        chunks of ceil(3 / 2) rows;
    rank 1   | w row 2, pad     | b 2, pad |        the full tensor is its first 3

In a graph a copy is cheap and a collective is not: compilers fuse the one with its neighbours and cannot
merge the others before they start. So, unlike in eager runs, large tensors are packed as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.communicators import factor_before_sum
from shardwise.layout.chunks import chunk_size
from shardwise.torch_compat import dynamo

_SCHEMA = (
    "(Tensor[] shards, int[] sizes, int[] num_dims, int[] sharded_dims, int[] own_sizes, str[] computed, "
    "str[] reduced, Device device, int world, str? all_gather_group, str? reduce_group, "
    "str? replicate_group, float divisor) -> Tensor[]"
)


@dataclass(frozen=True)
class Piece:
    """One tensor: its full shape, which of its dims is sharded, and in which dtypes it travels.

    ``own_size``: what this rank has of the sharded dim. It stands in the graph as a number, because torch's
    caches of compiled graphs, which ranks share, tell DTensors apart by their full shapes only: a rank with
    fewer rows would be given the graph of one with more.
    """

    shape: tuple[int, ...]
    dim: int
    own_size: int
    computed: torch.dtype
    reduced: torch.dtype


@dataclass(frozen=True)
class Ways:
    """Between whom tensors travel, by names of process groups; None where there is no other rank.

    Gradients are divided by ``divisor`` once they are summed.
    """

    device: torch.device
    world: int
    all_gather_group: str | None
    reduce_group: str | None
    replicate_group: str | None
    divisor: float


def unshard(shards: Sequence[Tensor], pieces: Sequence[Piece], ways: Ways) -> list[Tensor]:
    """The full tensors of ``shards``, differentiable: gradients come back summed over all ranks."""
    return torch.ops.shardwise.unshard(  # type: ignore[no-any-return]
        list(shards),
        [size for piece in pieces for size in piece.shape],
        [len(piece.shape) for piece in pieces],
        [piece.dim for piece in pieces],
        [piece.own_size for piece in pieces],
        [str(piece.computed) for piece in pieces],
        [str(piece.reduced) for piece in pieces],
        ways.device,
        ways.world,
        ways.all_gather_group,
        ways.reduce_group,
        ways.replicate_group,
        ways.divisor,
    )


def _unshard(
    shards: Sequence[Tensor],
    sizes: Sequence[int],
    num_dims: Sequence[int],
    sharded_dims: Sequence[int],
    own_sizes: Sequence[int],
    computed: Sequence[str],
    reduced: Sequence[str],
    *ways: Any,
) -> list[Tensor]:
    """The operator: its arguments put together again."""
    dynamo.put_random_states_before_objects()  # the graph that it is traced into is cut next
    left = iter(sizes)
    shapes = [tuple(next(left) for _ in range(count)) for count in num_dims]
    dtypes = [[_dtype(name) for name in names] for names in (computed, reduced)]
    pieces = [Piece(*row) for row in zip(shapes, sharded_dims, own_sizes, *dtypes, strict=True)]
    return list(_Unsharded.apply(pieces, Ways(*ways), *shards))


def _dtype(name: str) -> torch.dtype:
    """From its name: lists of dtypes reach an operator as numbers."""
    return getattr(torch, name.removeprefix("torch."))  # type: ignore[no-any-return]


torch.library.define("shardwise::unshard", _SCHEMA)
# Composite: what traces it sees the operators that it is made of, and autograd those of its derivative.
torch.library.impl("shardwise::unshard", "CompositeImplicitAutograd", _unshard)


class _Unsharded(torch.autograd.Function):
    """Forward all-gathers; backward sums and scatters the gradients of what was used."""

    @staticmethod
    def forward(ctx: Any, pieces: list[Piece], ways: Ways, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None stays None: of a parameter that was not used
        ctx.pieces, ctx.ways = pieces, ways
        ctx.kept = [(shard.device, shard.dtype) for shard in shards]
        fulls = _unsharded(shards, pieces, ways)
        wanted = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(f for f, is_wanted in zip(fulls, wanted, strict=True) if not is_wanted))
        return tuple(fulls)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(gradients)
        for indices in _by_dtype([piece.reduced for piece in ctx.pieces], gradients):
            pieces = [ctx.pieces[index] for index in indices]
            present = [gradient for index in indices if (gradient := gradients[index]) is not None]
            for index, chunk in zip(indices, _reduce(present, pieces, ctx.ways), strict=True):
                found[index] = chunk.to(*ctx.kept[index])
        return (None, None, *found)


def _by_dtype(dtypes: Sequence[torch.dtype], values: Sequence[Any]) -> Iterator[list[int]]:
    """Indices of the values that are there, those of one dtype together."""
    there = [index for index, value in enumerate(values) if value is not None]
    for dtype in dict.fromkeys(dtypes[index] for index in there):
        yield [index for index in there if dtypes[index] is dtype]


def _unsharded(shards: Sequence[Tensor], pieces: Sequence[Piece], ways: Ways) -> list[Tensor]:
    casts = [shard.to(ways.device, p.computed) for shard, p in zip(shards, pieces, strict=True)]
    # A scalar is whole on every rank. What forward has been given must not be what it returns.
    fulls = [cast.view_as(cast) for cast in casts]
    if ways.all_gather_group is None:
        return fulls
    travelling = [cast if piece.shape else None for cast, piece in zip(casts, pieces, strict=True)]
    for indices in _by_dtype([piece.computed for piece in pieces], travelling):
        chunks = [_padded(casts[i], _chunk_shape(pieces[i], ways.world)) for i in indices]
        packed = torch.cat([chunk.reshape(-1) for chunk in chunks])
        rows = _all_gather(packed, ways.world, ways.all_gather_group)
        columns = rows.split([chunk.numel() for chunk in chunks], dim=1)
        for index, column in zip(indices, columns, strict=True):
            fulls[index] = _joined(column, pieces[index], ways.world)
    return fulls


def _all_gather(packed: Tensor, world: int, group: str) -> Tensor:
    """What all ranks have packed, one row each."""
    c10d = dynamo.functional_collectives
    rows = c10d.all_gather_into_tensor(packed, world, group)
    return c10d.wait_tensor(rows).view(world, -1)  # type: ignore[no-any-return]


def _reduce(gradients: Sequence[Tensor], pieces: Sequence[Piece], ways: Ways) -> list[Tensor]:
    """This rank's part of the averages of gradients of one dtype."""
    rows = [_cut(g.to(p.reduced), p, ways.world) for g, p in zip(gradients, pieces, strict=True)]
    summed = _sum(torch.cat(rows, dim=1).view(-1), ways)
    chunks = list(summed.split([row.shape[1] for row in rows]))
    scalars = [index for index, piece in enumerate(pieces) if not piece.shape]
    if scalars and ways.reduce_group is not None and ways.world > 2:
        # All ranks keep them, but may have added them up in different orders: the first one's count.
        own = torch.cat([chunks[index] for index in scalars])
        agreed = _all_gather(own, ways.world, ways.reduce_group)[0].split(1)
        for index, chunk in zip(scalars, agreed, strict=True):
            chunks[index] = chunk
    return [_own(chunk, piece, ways.world) for chunk, piece in zip(chunks, pieces, strict=True)]


def _sum(rows: Tensor, ways: Ways) -> Tensor:
    """This rank's row of the sum over all ranks, divided."""
    c10d = dynamo.functional_collectives
    before = factor_before_sum(rows.dtype, ways.divisor)
    summed = rows / before if before != 1 else rows
    if ways.reduce_group is not None:
        scattered = c10d.reduce_scatter_tensor(summed, "sum", ways.world, ways.reduce_group)
        summed = c10d.wait_tensor(scattered)
    if ways.replicate_group is not None:
        summed = c10d.wait_tensor(c10d.all_reduce(summed, "sum", ways.replicate_group))
    after = ways.divisor / before
    return summed / after if after != 1 else summed


def _chunk_shape(piece: Piece, world: int) -> tuple[int, ...]:
    """What a rank keeps at most."""
    if not piece.shape:
        return ()
    shape, dim = piece.shape, piece.dim
    return (*shape[:dim], chunk_size(shape[dim], world), *shape[dim + 1 :])


def _joined(rows: Tensor, piece: Piece, world: int) -> Tensor:
    """The full tensor, of the chunks of all ranks, one a row."""
    shape, dim = _chunk_shape(piece, world), piece.dim
    joined = rows.reshape(world, *shape).movedim(0, dim).flatten(dim, dim + 1)
    return joined.narrow(dim, 0, piece.shape[dim]).contiguous()


def _cut(full: Tensor, piece: Piece, world: int) -> Tensor:
    """The chunks of all ranks, one a row."""
    if not piece.shape:
        return full.reshape(1, 1).expand(world, 1)  # all ranks keep it
    dim, shape = piece.dim, _chunk_shape(piece, world)
    whole = _padded(full, (*shape[:dim], world * shape[dim], *shape[dim + 1 :]))
    return whole.unflatten(dim, (world, shape[dim])).movedim(dim, 0).reshape(world, -1)


def _padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """``tensor`` with zeros behind it, up to ``shape``."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    padding = [n for size, own in zip(shape, tensor.shape, strict=True) for n in (size - own, 0)]
    return F.pad(tensor, padding[::-1])


def _own(chunk: Tensor, piece: Piece, world: int) -> Tensor:
    """What belongs to this rank of a flat chunk, padding aside."""
    whole = chunk.reshape(_chunk_shape(piece, world))
    return whole.narrow(piece.dim, 0, piece.own_size) if piece.shape else whole
