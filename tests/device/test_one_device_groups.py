"""The process groups of ranks on one device: every collective writes what NCCL would, in both worlds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_device.groups import CloneWorld, ThreadWorld
from one_device.lanes import Lanes, poisoned_memory
from torch import Tensor

from shardwise.torch_compat import c10d

pytestmark = pytest.mark.processes

RANKS = 3
SUM, MAX, AVG = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG


def held_by(rank: int, numel: int = 6) -> Tensor:
    """What a rank brings: exact in float64 whatever is added."""
    return torch.arange(numel, dtype=torch.float64) + 100 * rank


def stacked(numel: int = 6) -> Tensor:
    return torch.stack([held_by(rank, numel) for rank in range(RANKS)])


def gathered(rank: int) -> Tensor:
    output = torch.empty(6 * RANKS, dtype=torch.float64)
    c10d.all_gather(dist.group.WORLD, output, held_by(rank), False)
    return output


def gathered_in_place(rank: int) -> Tensor:
    output = torch.zeros(6 * RANKS, dtype=torch.float64)
    own = output.view(RANKS, -1)[rank]
    own.copy_(held_by(rank))
    c10d.all_gather(dist.group.WORLD, output, own, False)
    return output


def gathered_together(rank: int) -> Tensor:
    outputs = [torch.empty(RANKS * numel, dtype=torch.float64) for numel in (2, 5)]
    c10d.all_gather_coalesced(dist.group.WORLD, outputs, [held_by(rank, 2), held_by(rank, 5)], False)
    return torch.cat(outputs)


def gathered_in_a_list(rank: int) -> Tensor:
    outputs = [torch.empty(6, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(outputs, held_by(rank))
    return torch.cat(outputs)


def reduced(rank: int, op: Any = SUM) -> Tensor:
    output = torch.empty(2, dtype=torch.float64)
    c10d.reduce_scatter(dist.group.WORLD, output, held_by(rank), op, False)
    return output


def averaged(rank: int) -> Tensor:
    return reduced(rank, AVG)


def reduced_together(rank: int) -> Tensor:
    outputs = [torch.empty(numel, dtype=torch.float64) for numel in (1, 2)]
    c10d.reduce_scatter_coalesced(dist.group.WORLD, outputs, [held_by(rank, 3), held_by(rank)], SUM, False)
    return torch.cat(outputs)


def summed_in_place(rank: int) -> Tensor:
    tensor = held_by(rank)
    dist.all_reduce(tensor)
    return tensor


def highest(rank: int) -> Tensor:
    tensor = held_by(rank)
    dist.all_reduce(tensor, MAX)
    return tensor


def exchanged(rank: int) -> Tensor:
    output = torch.empty(6, dtype=torch.float64)
    dist.all_to_all_single(output, held_by(rank))
    return output


def exchanged_unevenly(rank: int) -> Tensor:
    """Every rank sends r rows to rank r."""
    output = torch.empty(rank * RANKS, dtype=torch.float64)
    dist.all_to_all_single(output, held_by(rank, 3), [rank] * RANKS, [0, 1, 2])
    return output


def broadcast(rank: int) -> Tensor:
    tensor = held_by(rank)
    dist.broadcast(tensor, 1)
    return tensor


def scattered(rank: int) -> Tensor:
    output = torch.empty(2, dtype=torch.float64)
    pieces = list(held_by(rank).chunk(RANKS)) if rank == 1 else None
    dist.scatter(output, pieces, src=1)
    return output


PIECES = stacked().view(RANKS, RANKS, -1)  # by sender, by receiver
CASES: list[tuple[Callable[[int], Tensor], Callable[[int], Tensor]]] = [
    (gathered, lambda rank: stacked().flatten()),
    (gathered_in_place, lambda rank: stacked().flatten()),
    (gathered_together, lambda rank: torch.cat([stacked(2).flatten(), stacked(5).flatten()])),
    (gathered_in_a_list, lambda rank: stacked().flatten()),
    (reduced, lambda rank: PIECES[:, rank].sum(0)),
    (averaged, lambda rank: PIECES[:, rank].mean(0)),
    (reduced_together, lambda rank: torch.cat([stacked(3).sum(0)[rank : rank + 1], PIECES[:, rank].sum(0)])),
    (summed_in_place, lambda rank: stacked().sum(0)),
    (highest, lambda rank: held_by(RANKS - 1)),
    (exchanged, lambda rank: PIECES[:, rank].flatten()),
    (exchanged_unevenly, lambda rank: stacked(3)[:, [0, 0, 1][rank] : [0, 1, 3][rank]].flatten()),
    (broadcast, lambda rank: held_by(1)),
    (scattered, lambda rank: PIECES[1, rank]),
]


@pytest.mark.parametrize(("act", "expected"), CASES, ids=[act.__name__ for act, _ in CASES])
def test_threads_get_what_the_others_hold(
    act: Callable[[int], Tensor], expected: Callable[[int], Tensor]
) -> None:
    found = ThreadWorld(RANKS).run(act)
    for rank in range(RANKS):
        assert torch.equal(found[rank], expected(rank)), f"rank {rank} got {found[rank]}"


def test_what_keeps_a_thread_from_joining_is_raised() -> None:
    with pytest.raises(RuntimeError, match=r"rank \d of 2 threads: "):
        ThreadWorld(2, device=torch.device("cuda", 99)).run(held_by)


def test_clones_hold_what_rank_0_holds() -> None:
    with CloneWorld(RANKS).joined():
        own = held_by(0)
        assert torch.equal(gathered(0), own.repeat(RANKS))
        assert torch.equal(reduced(0), RANKS * own[:2])
        assert torch.equal(averaged(0), own[:2])
        assert torch.equal(summed_in_place(0), RANKS * own)
        assert torch.equal(exchanged(0), own[:2].repeat(RANKS))


def test_subgroups_of_threads_exchange_among_themselves() -> None:
    def act(rank: int) -> float:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = torch.tensor(10.0**rank)
        dist.all_reduce(tensor, group=mesh.get_group("b"))
        return tensor.item()

    assert ThreadWorld(4).run(act) == [11.0, 11.0, 1100.0, 1100.0]


def test_ranks_that_call_different_things_are_told_instead_of_hanging() -> None:
    def act(rank: int) -> None:
        (summed_in_place if rank else gathered)(rank)

    with pytest.raises(RuntimeError, match="they would hang"):
        ThreadWorld(2).run(act)


def test_the_failure_of_a_rank_wakes_the_others_and_is_the_one_that_is_raised() -> None:
    def act(rank: int) -> None:
        if rank == 1:
            raise OSError("disk full")
        summed_in_place(rank)

    with pytest.raises(RuntimeError, match=r"rank 1 of 2 threads: OSError: disk full"):
        ThreadWorld(2).run(act)


def test_passages_are_counted_by_lane() -> None:
    lanes = Lanes("reduce")
    with CloneWorld(RANKS, lanes).joined():
        for act in (gathered, gathered, reduced, exchanged, summed_in_place, broadcast):
            act(0)
    assert dict(lanes.passages) == {"gather": 2, "reduce": 2, "replicate": 1}


def test_memory_holds_nan_before_it_is_written_and_after_it_is_freed() -> None:
    with poisoned_memory():
        assert torch.empty(4).isnan().all()
        as_bytes = torch.empty(8, dtype=torch.uint8)
        assert as_bytes.view(torch.float32).isnan().all()
        tensor = torch.ones(4)
        storage = tensor.untyped_storage()
        storage.resize_(0)
        storage.resize_(16)
        assert tensor.isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    storage.resize_(0)  # torch's own again
