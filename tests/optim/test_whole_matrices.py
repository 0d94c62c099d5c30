"""A function of whole matrices on shards: what owners get, what comes back, who does how much of it."""

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from meshed import device_mesh, refusal
from on_ranks import on_ranks
from reference import full
from sent_bytes import counting_bytes
from strange_optimizers import root
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from shardwise.layout.regions import Split, cuts_in_order
from shardwise.optim import WholeMatrices, on_whole_matrices
from shardwise.optim.owners import BlockKey, OwnerPlan, Placed, Round
from shardwise.optim.whole_matrices import matrices_in

SHAPES = [(7, 5), (5, 7), (4, 4), (1, 6), (3, 5, 4), (7, 5)]


@dataclass(frozen=True)
class Lay:
    """Tensors of ``SHAPES`` on a mesh."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __str__(self) -> str:
        kinds = "".join(f"S{p.dim}" if isinstance(p, Shard) else "R" for p in self.placements)
        return f"{'x'.join(map(str, self.mesh))}_{kinds}"

    @property
    def ranks(self) -> int:
        return prod(self.mesh)

    @property
    def least(self) -> int:
        """Dims that a tensor must have more than, to be placed so."""
        return max((p.dim for p in self.placements if isinstance(p, Shard)), default=0)

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[DTensor]:
        mesh = device_mesh(self.mesh, ("a", "b")[: len(self.mesh)])
        return [
            distribute_tensor(whole, mesh, self.placements)
            for whole in wholes(dtype)
            if whole.dim() > self.least
        ]


LAYS = [
    *(Lay((n,), (Shard(0),)) for n in (1, 2, 3, 4)),
    *(Lay((3,), (Shard(1),)), Lay((2,), (Replicate(),)), Lay((3,), (Shard(2),))),
    *(Lay((2, 2), (Replicate(), Shard(0))), Lay((2, 2), (Shard(1), Replicate()))),
    *(Lay((2, 2), (Shard(0), Shard(1))), Lay((2, 2), (Shard(0), Shard(0)))),
]


def wholes(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def inverse_like(matrices: Tensor) -> Tensor:
    """Depends on every element of a matrix, and on where it is."""
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    return u @ torch.diag_embed(s.flip(-1)) @ vh


def results(lay: Lay, batch_bytes: int) -> Any:
    shapes: list[Any] = []

    def function(matrices: Tensor, keys: list[BlockKey]) -> Tensor:
        shapes.extend(zip(keys, [tuple(matrices.shape[1:])] * len(keys), strict=True))
        assert len(matrices) == len(keys)
        return inverse_like(matrices)

    tensors = lay.tensors()
    got = on_whole_matrices(tensors, function, batch_bytes=batch_bytes)
    assert all(a.placements == b.placements for a, b in zip(got, tensors, strict=True))
    return [full(tensor) for tensor in got], shapes


@pytest.mark.parametrize(
    ("lay", "batch_bytes"), [*((lay, 1) for lay in LAYS), (LAYS[1], 600), (LAYS[2], 1 << 20)], ids=str
)
def test_each_matrix_goes_through_the_function_once(
    lay: Lay, batch_bytes: int, request: pytest.FixtureRequest
) -> None:
    tensors = [whole for whole in wholes() if whole.dim() > lay.least]
    want = list(map(inverse_like, tensors))
    given = [
        (BlockKey(index, number), tuple(whole.shape[-2:]))
        for index, whole in enumerate(tensors)
        for number in range(len(whole) if whole.dim() == 3 else 1)
    ]
    ran = request.getfixturevalue(f"world{lay.ranks}").run(results, lay, batch_bytes)
    assert sorted(shape for _, shapes in ran for shape in shapes) == sorted(given)
    for got, _ in ran:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@on_ranks(2)
def test_fused_matrices_are_treated_one_by_one() -> None:
    whole = wholes()[0]
    mesh = device_mesh((2,), ("shard",))
    tensor = distribute_tensor(whole, mesh, (Shard(0),))
    (got,) = on_whole_matrices([tensor], lambda m, _: inverse_like(m), row_blocks={0: [3, 4]})
    want = torch.cat([inverse_like(part) for part in whole.split([3, 4])])
    torch.testing.assert_close(full(got), want)


# --- a method of its own on it --------------------------------------------------------------------


@torch.no_grad()
def shampoo_steps(lay: Lay | None) -> Any:
    """Shampoo (Gupta et al., 2018) in a page: each owner keeps the two statistics of its matrices."""
    tensors: Any = wholes() if lay is None else lay.tensors()
    params = [tensor for tensor in tensors if tensor.dim() == 2]
    whole = WholeMatrices(params)
    statistics: dict[BlockKey, tuple[Tensor, Tensor]] = {}

    def preconditioned(gradient: Tensor, key: BlockKey) -> Tensor:
        eye = [1e-2 * torch.eye(n, dtype=gradient.dtype) for n in gradient.shape]
        left, right = statistics.get(key, eye)
        left, right = left + gradient @ gradient.T, right + gradient.T @ gradient
        statistics[key] = left, right
        return root(left) @ gradient @ root(right)

    for _ in range(3):
        gradients = [(param * (index + 1)).sin() for index, param in enumerate(params)]
        updates = whole.apply(
            gradients, lambda matrices, keys: torch.stack(list(map(preconditioned, matrices, keys)))
        )
        for param, update in zip(params, updates, strict=True):
            param.sub_(0.1 * update)
    return [full(param) for param in params], len(statistics)


def test_shampoo_in_a_page_is_the_same_on_shards(world3: World) -> None:
    want, count = shampoo_steps(None)
    ran = world3.run(shampoo_steps, Lay((3,), (Shard(0),)))
    assert sum(statistics for _, statistics in ran) == count
    for got, _ in ran:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


# --- who owns what --------------------------------------------------------------------------------


def plan(world: int, shapes: list[tuple[int, ...]], dim: int = 0, replicas: int = 1) -> OwnerPlan:
    seats = tuple((i // world, i % world) for i in range(replicas * world))
    cuts = cuts_in_order([(1, dim, 1)], (replicas, world))
    tensors = {
        i: Placed(Split(shape, (replicas, world), cuts), seats, tuple(matrices_in(shape, None)))
        for i, shape in enumerate(shapes)
    }
    return OwnerPlan(tensors, replicas * world, lambda block: block.numel * min(block.shape[-2:]), {})


def rounds(of: OwnerPlan, active: set[int], own: int, limit: int) -> list[Round]:
    """``limit`` in elements."""
    return [of.round(owned, active, own) for owned in of.owned_in_rounds(lambda block: block.numel, limit)]


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (3, 2), (8, 1)])
def test_owners_have_the_same_to_do(world: int, replicas: int) -> None:
    of = plan(world, [(64, 64), (64, 192), (256, 64), (64, 256)] * 36, replicas=replicas)
    loads = [0.0] * of.world
    for blocks in of.blocks.values():
        for block in blocks:
            loads[of.owners[block.key]] += block.numel * min(block.shape)
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


def test_experts_stay_where_they_are() -> None:
    of = plan(4, [(8, 16, 16)] * 3)
    assert [of.owners[BlockKey(0, expert)] for expert in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not any(each.travels_there or each.travels_back for each in rounds(of, {0, 1, 2}, 1, 1 << 20))


def test_replicas_share_experts_and_send_results_only() -> None:
    of = plan(2, [(4, 16, 16)], replicas=2)
    assert sorted(of.owners.values()) == [0, 1, 2, 3]
    (found,) = {(each.travels_there, each.travels_back) for each in rounds(of, {0}, 1, 1 << 20)}
    assert found == (False, True)


def test_owners_do_not_depend_on_what_has_gradients() -> None:
    of = plan(3, [(9, 9)] * 6)
    owned = [each.key for some in rounds(of, {1, 4}, 1, 1 << 20) for each in some.owned]
    assert owned == [key for key, owner in of.owners.items() if owner == 1 and key.tensor in (1, 4)]


def test_both_ends_expect_the_same_pieces() -> None:
    of = plan(3, [(7, 5), (5, 7), (2, 9), (3, 4, 5)], replicas=2)
    of_all = [rounds(of, {0, 1, 2, 3}, member, 40) for member in range(6)]
    for number in range(len(of_all[0])):
        for sender in range(6):
            for receiver in range(6):
                mine, theirs = of_all[sender][number], of_all[receiver][number]
                for sent, received in (("sent_there", "received_there"), ("sent_back", "received_back")):
                    out, into = getattr(mine, sent)[receiver], getattr(theirs, received)[sender]
                    assert [p.block.key for p in out] == [p.block.key for p in into]
                    assert [p.in_block for p in out] == [p.in_block for p in into]


# --- what it costs --------------------------------------------------------------------------------


@on_ranks(4)
def test_an_exchange_sends_no_more_than_rows_there_and_back() -> None:
    mesh = device_mesh((4,), ("a",))
    tensors = [distribute_tensor(torch.ones(256, 256), mesh, (Shard(0),)) for _ in range(8)]
    whole = WholeMatrices(tensors, dtype=torch.bfloat16)
    assert len(whole.owned) == 2
    whole.apply(tensors, lambda matrices, _: matrices)
    counted: list[int] = []
    with counting_bytes(counted):
        whole.apply(tensors, lambda matrices, _: matrices)
    least = 1.5 * 8 * 256 * 256 * 2 / 4  # a fourth of 2 (W - 1) / W of the matrices
    assert 0.9 * least < counted[0] < 1.05 * least + 20_000


@on_ranks(2)
def test_memory_is_bounded_by_a_batch() -> None:
    width = 64
    mesh = device_mesh((2,), ("shard",))
    tensors = [distribute_tensor(torch.ones(width, width), mesh, (Shard(0),)) for _ in range(40)]
    most = 0

    def function(matrices: Tensor, keys: list[BlockKey]) -> Tensor:
        nonlocal most
        most = max(most, len(matrices))
        return matrices

    WholeMatrices(tensors, batch_bytes=3 * width * width * 4).apply(tensors, function)
    assert most == 3


# --- what is refused ------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_be_put_together_is_refused_by_name() -> None:
    mesh = device_mesh((2,), ("shard",))
    good = distribute_tensor(torch.ones(4, 4), mesh, (Shard(0),))
    bad: list[Any] = [
        DTensor.from_local(torch.ones(4, 4), mesh, (Partial(),)),
        torch.ones(4),
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(2, 2).to_sparse(),
    ]
    found = [refusal(lambda each=each: WholeMatrices([good, each], names=["good", "bad"])) for each in bad]
    found.append(refusal(lambda: WholeMatrices([good], row_blocks={0: [3, 2]})))
    found.append(refusal(lambda: WholeMatrices([good], batch_bytes=0)))
    whole = WholeMatrices([good])
    found.append(refusal(lambda: whole.apply([good, good], lambda m, _: m)))
    other = distribute_tensor(torch.ones(4, 4), mesh, (Shard(1),))
    found.append(refusal(lambda: whole.apply([other], lambda m, _: m)))
    found.append(
        refusal(lambda: WholeMatrices([torch.ones(2, 3)]).apply([torch.ones(2, 3)], lambda m, _: m.mT))
    )
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: bad: a DTensor with placement P(sum) holds parts of a sum, which have no place in the full tensor. Redistribute it to Shard(...) or Replicate() first.
ValueError: bad has shape (4,): it is neither a matrix, of 2 dims, nor a stack of matrices, of 3. Leave it out, or view it as a matrix.
ValueError: bad has dtype torch.int64; only matrices of floating numbers are supported.
ValueError: bad has dtype torch.complex64; only matrices of floating numbers are supported.
ValueError: bad has the layout torch.sparse_coo; only dense tensors are supported.
ValueError: tensor 0: its row blocks are (3, 2), where positive numbers that add up to its 4 rows (shape (4, 4)) are expected.
ValueError: WholeMatrices: batch_bytes is 0; pass a number of bytes above 0.
ValueError: WholeMatrices: 2 tensors were passed, but the plan was made for 1. Make another plan for other tensors.
ValueError: tensor 0 has shape (4, 4), placements (Shard(dim=1),) on DeviceMesh((shard=2), 'cpu', stride=(1,)), but the plan was made for shape (4, 4), placements (Shard(dim=0),) on DeviceMesh((shard=2), 'cpu', stride=(1,)). Make another plan for other tensors.
ValueError: the function of whole matrices returned (1, 3, 2) for 1 matrices of shape (2, 3); it has to return as many of that shape: (1, 2, 3).""",
    )


@on_ranks(2)
def test_ranks_with_other_matrices_are_told() -> None:
    mesh = device_mesh((2,), ("shard",))
    rank = mesh.get_local_rank()
    good = distribute_tensor(torch.ones(4, 4), mesh, (Shard(0),))
    whole = WholeMatrices([good] * (1 + rank))
    text = refusal(lambda: whole.apply([good] * (1 + rank), lambda m, _: m))
    assert text.startswith("ValueError: WholeMatrices: ranks disagree on the tensors: rank 0 has '1 in 1")
