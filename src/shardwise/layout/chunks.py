"""The chunk of a tensor that a rank keeps."""

from typing import Any

from torch import Tensor


def tensor_parallel_part(value: Tensor, spec: Any) -> Tensor:
    """This rank's part of a full tensor under the placements of ``spec``, as torch.chunk cuts it."""
    coordinate = spec.mesh.get_coordinate()
    for dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            value = chunk_of(value, placement.dim, spec.mesh.size(dim), coordinate[dim])
    return value


def chunk_of(value: Tensor, dim: int, count: int, index: int) -> Tensor:
    """Part ``index`` of ``count`` along ``dim``; empty where torch.chunk makes fewer."""
    parts = value.chunk(count, dim)
    return parts[index] if index < len(parts) else value.narrow(dim, 0, 0)
