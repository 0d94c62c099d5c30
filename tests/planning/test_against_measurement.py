"""Estimates against what training on gloo holds, as bench/estimate.py measures it."""

import argparse
from functools import partial
from itertools import product
from typing import Any

import estimate as bench
import pytest
import torch
from dynamo import forget_graphs
from harness import World

import shardwise
from shardwise.strategies.meshes import STRATEGIES

SMALL = {"layers": 3, "width": 192, "heads": 4, "vocab": 64, "context": 32, "batch": 2}
SIZES = {
    "25M": {"layers": 8, "width": 512, "heads": 8, "vocab": 256, "context": 64, "batch": 4},
    "100M": {"layers": 12, "width": 768, "heads": 12, "vocab": 16000, "context": 64, "batch": 4},
}


def assert_within_bounds(world: World, ranks: int, **options: object) -> None:
    options_ = argparse.Namespace(**options)
    rows = bench.largest_of(world.run(bench.measured_rows, options_, timeout=500))
    for row in rows:
        row["estimated"] = bench.estimated(row["strategy"], row["is_checkpointed"], ranks, options_)
    assert not bench.misses(rows)


def cases(*strategies: str) -> pytest.MarkDecorator:
    """Each with and without activation checkpointing; not all run always: the rest is made of the same parts."""
    always = {("zero3", True), ("hybrid_zero2", False)}
    return pytest.mark.parametrize(
        ("strategy", "checkpointing"),
        [
            pytest.param(*case, marks=() if case in always else pytest.mark.slow)
            for case in product(strategies, (False, True))
        ],
    )


@cases("ddp", "zero1", "zero2", "zero3")
def test_a_small_model(world2: World, strategy: str, checkpointing: bool) -> None:
    assert_within_bounds(world2, 2, strategies=[strategy], checkpointing=[checkpointing], **SMALL)


@pytest.mark.slow
@cases("hybrid", "hybrid_zero2", "zero3_hpz")
def test_a_small_model_on_two_hosts(world4: World, strategy: str, checkpointing: bool) -> None:
    assert_within_bounds(world4, 4, strategies=[strategy], checkpointing=[checkpointing], **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "size"),
    [*((strategy, "25M") for strategy in STRATEGIES), ("zero3", "100M"), ("ddp", "100M")],
)
def test_larger_models(world4: World, strategy: str, size: str) -> None:
    assert_within_bounds(world4, 4, strategies=[strategy], checkpointing=[False, True], **SIZES[size])


@pytest.mark.slow
@pytest.mark.processes
def test_a_trillion_parameters() -> None:
    seconds, gib, table = bench.claim()
    assert seconds < bench.LIMIT_S
    assert gib < bench.LIMIT_GIB
    assert "zero3 1024" in table


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_of_a_gpu() -> None:
    found = bench.on_gpu("zero3", 8, argparse.Namespace(**SIZES["25M"]))
    for phase in bench.PHASES:
        assert found["estimated"][phase] == pytest.approx(found["measured"][phase], rel=0.10), phase


def compiled_peaks(options: argparse.Namespace) -> list[dict[str, int]]:
    def compiled(strategy: str, checkpointing: bool) -> Any:
        forget_graphs()
        torch.manual_seed(0)
        mesh = bench.mesh_of(strategy)
        switches = {"activation_checkpointing": checkpointing, "compile": True}
        return shardwise.shard_model(bench.GPT(options), strategy=strategy, mesh=mesh, **switches)

    return [bench.held(partial(compiled, *case), options) for case in COMPILED]


COMPILED = [*product(("zero3", "ddp"), (False, True))]


@pytest.mark.slow
def test_blocks_compiled_by_inductor_need_no_more(world2: World) -> None:
    """Estimates are of the model as it is."""
    options = argparse.Namespace(**SMALL)
    ranks = world2.run(compiled_peaks, options, timeout=500)
    for index, case in enumerate(COMPILED):
        said = bench.estimated(*case, 2, options)
        for phase in bench.PHASES:
            assert 0.5 < max(peaks[index][phase] for peaks in ranks) / said[phase] < 1.1, (case, phase)
