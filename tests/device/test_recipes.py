"""Every way to train, with values that really travel: in a world of clones, and with ranks as threads.

On the host some of them always run, and the rest are slow; on a GPU all do, with delays of every lane.
"""

import pytest
import torch
from gpu_parts import correctness
from one_device.lanes import COPIES, LANES, Lanes, counted_copies
from one_device.recipes import RECIPES
from races import caller_recipes
from races.scenarios import SCENARIOS, run

from shardwise.comm import communicators

assert caller_recipes  # registers its scenarios

pytestmark = pytest.mark.processes

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


without_threads = pytest.mark.skipif(
    torch.__version__.startswith("2.11") and not torch.cuda.is_available(),
    reason="2.11 crashes when several threads enter a FakeTensorMode",
)


def marked(test: object) -> object:
    for mark in on_gpu:
        test = mark(test)
    return test


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", RECIPES)
def test_clones_train_as_one_process_does(name: str) -> None:
    correctness.check_in_clones(name, "cpu", lanes=["gather"])


@without_threads
@pytest.mark.sample(17)
@pytest.mark.parametrize("name", RECIPES)
def test_ranks_as_threads_train_as_one_process_does(name: str) -> None:
    correctness.check_in_threads(name, "cpu", 4 if name in correctness.NEEDS_FOUR else 2)


def test_every_lane_of_a_recipe_is_passed() -> None:
    """A delay of a lane that nothing passes would show nothing."""
    lanes = [lane for lane in LANES if lane not in COPIES]
    assert all(correctness.check_in_clones("hybrid", "cpu", lanes)["delays"].values())


def test_what_offload_copies_passes_through_lanes_of_its_own() -> None:
    """On a simulated device, as on the host nothing is copied."""
    lanes = Lanes()
    with counted_copies(lanes):
        outcome = run(SCENARIOS["offload"], steps=2)
    assert not outcome.findings
    assert lanes.passages["copy in"] > lanes.passages["copy out"] > 0  # for forward, and most for backward


def undivided(tensors: object, divisor: float) -> None:
    """Sums that are not divided."""


def test_a_reduction_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators.foreach, "div_", undivided)
    with pytest.raises(AssertionError, match=r"full: .* is off by"):
        correctness.check_in_clones("full", "cpu", lanes=[])


@without_threads
def test_a_reduction_that_is_wrong_is_noticed_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators.foreach, "div_", undivided)
    with pytest.raises(AssertionError, match=r"full, rank 0 of 2: .* is off by"):
        correctness.check_in_threads("full", "cpu", 2)


def test_memory_that_is_read_unwritten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-gathers that move nothing."""
    monkeypatch.setattr(
        communicators.BackendCollectives, "all_gather", lambda self, outputs, inputs: lambda: None
    )
    with pytest.raises(AssertionError, match="holds nan"):
        correctness.check_in_clones("full", "cpu", lanes=[])


@marked
@pytest.mark.parametrize("name", RECIPES)
def test_no_delay_changes_a_bit(name: str) -> None:
    correctness.check_in_clones(name, "cuda")


@marked
@pytest.mark.parametrize("name", RECIPES)
def test_ranks_as_threads_of_one_gpu_train_as_one_process_does(name: str) -> None:
    correctness.check_in_threads(name, "cuda", 4 if name in correctness.NEEDS_FOUR else 2)


@marked
@pytest.mark.parametrize(("missing", "lane"), correctness.MISSING_WAITS)
def test_a_missing_wait_is_noticed(missing: str, lane: str) -> None:
    correctness.check_that_a_missing_wait_is_seen(missing, lane)
