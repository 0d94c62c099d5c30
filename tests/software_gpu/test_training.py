"""Training on software GPUs equals plain torch, at once and with streams that run late."""

import math
from pathlib import Path

import pytest

from software_gpu import training
from software_gpu.launch import has_older_back_end, run_on_gpus

TOLERANCE = {"bfloat16": 0.1}


def check(results: list[dict[str, float]]) -> None:
    for rank, differences in enumerate(results):
        for case, off in differences.items():
            assert off <= TOLERANCE.get(case, 2e-5), f"rank {rank}, {case}: off by {off}"


@pytest.mark.parametrize("late", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_training_equals_plain_torch(late: int) -> None:
    check(run_on_gpus(2, training.differences, list(training.CASES), late=late))


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 3, 10, 11, 12])
def test_training_equals_plain_torch_in_any_order(late: int) -> None:
    check(run_on_gpus(2, training.differences, list(training.CASES), late=late, timeout_s=300))


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
def test_training_equals_plain_torch_on_the_older_back_end(late: int) -> None:
    if not has_older_back_end():
        pytest.skip("this torch has one back end for NCCL")
    check(run_on_gpus(2, training.differences, list(training.CASES), "nccl-legacy", late=late, timeout_s=300))


def strategies_and_checkpoint(folder: Path) -> dict[str, float]:
    return {
        **training.strategies(["zero1", "zero2", "zero3", "ddp"]),
        "checkpoint": training.checkpoint(folder),
    }


@pytest.mark.parametrize("late", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_strategies_and_checkpoints(late: int, tmp_path: Path) -> None:
    check(run_on_gpus(2, strategies_and_checkpoint, tmp_path / "saved", late=late))


def test_a_difference_that_is_not_a_number_is_one() -> None:
    with pytest.raises(AssertionError, match="off by nan"):
        check([{"zero3": math.nan}])
