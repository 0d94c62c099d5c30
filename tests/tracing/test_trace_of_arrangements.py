"""What a trace records where models are sharded otherwise: by strategies, with tensor parallelism, with weights
that travel in a form of their own.

Bytes are those that a rank sends in a step, reckoned from shapes.
"""

from itertools import groupby
from typing import Any

import pytest
import torch
from harness import World
from meshed import device_mesh
from models import SquareBlock, built, random_batch
from on_ranks import on_ranks
from reference import mean_of_squares
from strategies import shard_as
from tensor_subclasses import TravelsLow
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise import fully_shard, no_sync
from shardwise.tracing.records import Recording

WIDTH = 64
BLOCK, ROOT = 2 * WIDTH * WIDTH * 8, WIDTH * WIDTH * 8  # bytes of square matrices of float64
BLOCKS = ["blocks.0", "blocks.1"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SquareBlock(WIDTH) for _ in BLOCKS)
        self.outlet = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def made() -> Model:
    return built(Model, seed=0)


def traced(model: nn.Module, microbatches: int = 1) -> Recording:
    """A step like all later ones, of so many backwards; the last one reduces."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for index in range(microbatches - 1):
            with no_sync(model):
                mean_of_squares(model, random_batch(index, 4, WIDTH)).backward()
        mean_of_squares(model, random_batch(9, 4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with shardwise.trace(model) as trace:
        step()
    return trace.recording


def sent(recording: Recording) -> dict[str, list[tuple[str, str, int]]]:
    """For each row that has any: phase, name and bytes of what travelled; parts of a group are summed up."""
    found: dict[str, dict[tuple[str, str], int]] = {}
    for span in (span for span in recording.spans if span.num_bytes):
        of_row = found.setdefault(span.row, {})
        key = span.phase, span.name
        of_row[key] = of_row.get(key, 0) + span.num_bytes
    return {row: [(*key, num_bytes) for key, num_bytes in sums.items()] for row, sums in found.items()}


def in_forward(block: int, root: int) -> list[tuple[str, str, int]]:
    return [("forward", "Model", root), *(("forward", name, block) for name in BLOCKS)]


def in_backward(block: int, root: int) -> list[tuple[str, str, int]]:
    return [("backward", "Model", root), *(("backward", name, block) for name in reversed(BLOCKS))]


def in_both(block: int, root: int) -> list[tuple[str, str, int]]:
    """The last block and the root stay unsharded for backward."""
    return [*in_forward(block, root), ("backward", BLOCKS[0], block)]


# --- strategies -----------------------------------------------------------------------------------


def of_strategy(strategy: str, microbatches: int = 1) -> Recording:
    model = made()
    shard_as(model, strategy)
    return traced(model, microbatches)


# On two ranks half of everything travels; a sum over two costs each rank as many bytes as it has.
HALF = BLOCK // 2, ROOT // 2
ON_TWO = {
    "ddp": {"all-reduce": in_backward(BLOCK, ROOT)},
    "zero1": {"all-gather": in_forward(*HALF), "reduce-scatter": in_backward(*HALF)},
    "zero2": {"all-gather": in_forward(*HALF), "reduce-scatter": in_backward(*HALF)},
    "zero3": {"all-gather": in_both(*HALF), "reduce-scatter": in_backward(*HALF)},
}


@pytest.mark.parametrize("strategy", ON_TWO)
def test_a_strategy_sends_what_it_promises(world2: World, strategy: str) -> None:
    for recording in world2.run(of_strategy, strategy):
        assert sent(recording) == ON_TWO[strategy]


@pytest.mark.parametrize(("strategy", "gathers"), [("hybrid", in_both), ("hybrid_zero2", in_forward)])
def test_a_hybrid_strategy_sums_its_shards_over_replicas(world4: World, strategy: str, gathers: Any) -> None:
    for recording in world4.run(of_strategy, strategy):
        assert sent(recording) == {
            "all-gather": gathers(*HALF),
            "reduce-scatter": in_backward(*HALF),
            "all-reduce": in_backward(*HALF),
        }


@pytest.mark.parametrize(("strategy", "gathers"), [("zero1", 1), ("zero3", 3)])
def test_microbatches_without_synchronisation_reduce_once(world2: World, strategy: str, gathers: int) -> None:
    """And under zero1 they share an all-gather."""
    once = ON_TWO[strategy]
    for recording in world2.run(of_strategy, strategy, 3):
        assert sent(recording) == {
            "all-gather": [(*key, gathers * num_bytes) for *key, num_bytes in once["all-gather"]],
            "reduce-scatter": once["reduce-scatter"],
        }
        computed = (span.name for span in recording.of_row("computation") if span.phase == "forward")
        assert [name for name, _ in groupby(name for name in computed if name in BLOCKS)] == 3 * BLOCKS


# --- tensor parallelism ---------------------------------------------------------------------------


@on_ranks(4)
def test_of_a_block_that_tensor_parallelism_has_split_its_part_travels() -> None:
    half_of_part = BLOCK // 4, ROOT // 2
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = made()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    recording = traced(fully_shard(model, mesh=mesh["dp"]))
    assert sent(recording) == {
        "all-gather": in_both(*half_of_part),
        "reduce-scatter": in_backward(*half_of_part),
    }
    assert {group.name: group.unsharded_bytes for group in recording.groups} == {
        "Model": ROOT,
        **dict.fromkeys(BLOCKS, BLOCK // 2),
    }


# --- weights that say themselves what travels -----------------------------------------------------


@on_ranks(2)
def test_a_weight_that_travels_in_bfloat16_sends_a_quarter_of_its_bytes() -> None:
    part = (BLOCK // 2 + BLOCK // 2 // 4) // 2  # one of its two matrices; its gradient travels as it is
    model = made()
    for block in model.blocks:
        block.up.weight = nn.Parameter(TravelsLow(block.up.weight.detach()))
        fully_shard(block)
    assert sent(traced(fully_shard(model))) == {
        "all-gather": in_both(part, ROOT // 2),
        "reduce-scatter": in_backward(*HALF),
    }
