"""Chunks: how ``torch.chunk``, and with it ``Shard``, cuts a dim. The one home of this arithmetic.

chunk_size(10, 4)        3      every chunk but the last ones
chunk_range(10, 4, r)    [0, 3)  [3, 6)  [6, 9)  [9, 10)
chunk_range(4, 3, r)     [0, 2)  [2, 4)  [4, 4)                there are fewer chunks than ranks
"""

from typing import Any

from torch import Tensor


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def round_up(number: int, multiple: int) -> int:
    """The next multiple of ``multiple`` that is not below ``number``."""
    return ceil_div(number, multiple) * multiple


chunk_size = ceil_div
"""Of a dim of some size, cut into some number of chunks: the size of all but the last ones."""


def chunk_range(size: int, count: int, index: int) -> tuple[int, int]:
    """Chunk ``index`` of a dim of ``size`` cut into ``count``: [start, end), empty past the end."""
    chunk = chunk_size(size, count)
    start = min(index * chunk, size)
    return start, min(start + chunk, size)


def chunk_of(value: Tensor, dim: int, count: int, index: int) -> Tensor:
    """Chunk ``index`` of ``count`` along ``dim``, by torch's own operator, which tensor subclasses have."""
    chunks = value.chunk(count, dim)
    return chunks[index] if index < len(chunks) else value.narrow(dim, 0, 0)


def local_chunk(value: Tensor, spec: Any) -> Tensor:
    """This rank's part of a full tensor, placed as ``spec`` says: its mesh and placements."""
    coordinate = spec.mesh.get_coordinate()
    for mesh_dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            value = chunk_of(value, placement.dim, spec.mesh.size(mesh_dim), coordinate[mesh_dim])
    return value


def shard_of(unsharded: Tensor, slot: Any, rank: int) -> Tensor:
    """The shard of ``rank``, of an unsharded parameter that is laid out in ``slot``."""
    if slot.is_replicated:
        return unsharded
    start, end = slot.index_range(rank)
    return unsharded.narrow(slot.dim, start, end - start)
