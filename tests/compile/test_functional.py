"""Unsharding as an operator, without a compiler: full tensors, and averages of their gradients."""

import pytest
import torch
import torch.distributed as dist
from meshed import device_mesh
from on_ranks import on_ranks
from torch import Tensor

from shardwise.compile.traced import Piece, Ways, unshard
from shardwise.layout.chunks import chunk_of

CPU = torch.device("cpu")


def ways_on(shape: tuple[int, ...], divisor: float) -> tuple[Ways, int]:
    """Over replicas and shards, if there are two dims; and this rank's number among the shards."""
    mesh = device_mesh(shape, ("replicate", "shard")[-len(shape) :])
    names = [mesh.get_group(dim).group_name for dim in mesh.mesh_dim_names or ()]
    replicas = names[0] if len(shape) > 1 else None
    return Ways(CPU, shape[-1], names[-1], names[-1], replicas, divisor), mesh.get_local_rank("shard")


def own_piece(full: Tensor, world: int, rank: int) -> tuple[Tensor, Piece]:
    """What a rank has of ``full``, whose rows are sharded; all ranks keep a scalar."""
    own = chunk_of(full, 0, world, rank) if full.dim() else full
    piece = Piece(tuple(full.shape), 0, own.shape[0] if own.dim() else 1, full.dtype, full.dtype)
    return own.clone().requires_grad_(), piece


@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1.0), (torch.float16, 3e4)])
@pytest.mark.parametrize(("shape", "divisor"), [((4,), 4.0), ((2, 2), 4.0), ((2, 2), 8.0)])
@on_ranks(4)
def test_gradients_are_averages_over_shards_and_replicas(
    shape: tuple[int, ...], divisor: float, dtype: torch.dtype, value: float
) -> None:
    """In float16, their sum alone would be infinite."""
    ways, rank = ways_on(shape, divisor)
    fulls = [torch.arange(6.0).view(3, 2).to(dtype), torch.tensor(7.0, dtype=dtype)]
    own, pieces = zip(*(own_piece(full, ways.world, rank) for full in fulls), strict=True)
    found = unshard(own, pieces, ways)
    for got, full in zip(found, fulls, strict=True):
        assert torch.equal(got, full)
    factor = value * (1 + (dist.get_rank() - 1.5) / 8)  # of mean `value`
    torch.autograd.backward(found, [torch.full_like(full, factor) for full in fulls])
    for each in own:
        assert each.grad is not None
        torch.testing.assert_close(each.grad, torch.full_like(each, value * 4 / divisor))


@on_ranks(4)
def test_all_ranks_keep_the_same_bits_of_the_gradients_of_scalars() -> None:
    ways, rank = ways_on((4,), 4.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    own, pieces = zip(*(own_piece(torch.zeros(()), 4, rank) for _ in range(50)), strict=True)
    found = unshard(own, pieces, ways)
    torch.autograd.backward(found, list(torch.randn(50, generator=generator).unbind()))
    gradients = torch.stack([each.grad for each in own])
    gathered = [torch.empty_like(gradients) for _ in range(4)]
    dist.all_gather(gathered, gradients)
    assert all(torch.equal(each, gradients) for each in gathered)


@on_ranks(2)
def test_what_is_not_used_gets_no_gradient() -> None:
    ways, rank = ways_on((2,), 2.0)
    own, pieces = zip(*(own_piece(torch.ones(2), 2, rank) for _ in range(2)), strict=True)
    unshard(own, pieces, ways)[1].sum().backward()
    assert own[0].grad is None
    assert torch.equal(own[1].grad, torch.ones(1))
