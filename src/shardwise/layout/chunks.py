"""Chunks: how ``torch.chunk``, and so ``Shard``, cuts a dim. The only place with this arithmetic.

chunk_size(10, 4)        3      every chunk except the last ones
chunk_range(10, 4, r)    [0, 3)  [3, 6)  [6, 9)  [9, 10)
chunk_range(4, 3, r)     [0, 2)  [2, 4)  [4, 4)                fewer chunks than ranks
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return ceil_div(number, multiple) * multiple


chunk_size = ceil_div
"""The size of all chunks except the last ones, for a dim of some size cut into some number of chunks."""


def chunk_range(size: int, count: int, index: int) -> tuple[int, int]:
    """Chunk ``index`` of a dim of ``size`` cut into ``count``: [start, end), empty past the end."""
    chunk = chunk_size(size, count)
    start = min(index * chunk, size)
    return start, min(start + chunk, size)


def stretches(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Ranges of items whose ``sizes`` add up to at most ``limit``, or of a single item."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


def chunk_of(value: Tensor, dim: int, count: int, index: int) -> Tensor:
    """Chunk ``index`` of ``count`` along ``dim``, by torch's operator, which tensor subclasses have."""
    chunks = value.chunk(count, dim)
    return chunks[index] if index < len(chunks) else value.narrow(dim, 0, 0)


def local_chunk(value: Tensor, spec: Any) -> Tensor:
    """This rank's part of a full tensor, for the mesh and placements of ``spec``."""
    coordinate = spec.mesh.get_coordinate()
    for mesh_dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            value = chunk_of(value, placement.dim, spec.mesh.size(mesh_dim), coordinate[mesh_dim])
    return value


def shard_of(unsharded: Tensor, slot: Any, rank: int) -> Tensor:
    """The shard of ``rank`` of an unsharded parameter laid out in ``slot``."""
    if slot.is_replicated:
        return unsharded
    start, end = slot.index_range(rank)
    return unsharded.narrow(slot.dim, start, end - start)
