"""A steady step on software GPUs: no new memory, no waits, peaks as documented, collectives in their order."""

from typing import Any

import pytest
from expecttest import assert_expected_inline

from software_gpu import steady_programs
from software_gpu.launch import OLDER, run_on_gpus
from software_gpu.steady_programs import STEADY

STEPS, GROUPS = 3, 4
# In each step, once for all copies from the host, in forward and in backward, and for each group's gradients.
WAITS_WHEN_OFFLOADED = STEPS * (2 + GROUPS)


def check_costs(found: list[dict[str, dict[str, int]]], names: list[str]) -> None:
    expected = {
        name: {"event waits": WAITS_WHEN_OFFLOADED} if name.startswith("offloaded") else {} for name in names
    }
    for costs in found:
        assert costs == expected


FEW = ["zero3", "zero2", "hybrid", "bfloat16", "offloaded", "two forwards before a backward"]
LOGGED = {"SOFTWARE_GPU_LOG": "1"}


def peaks_costs_and_collectives() -> tuple[Any, dict[str, dict[str, int]], list[str]]:
    peaks = steady_programs.peaks_against_estimates(["zero3"], sizes=steady_programs.SMALL)
    return peaks, steady_programs.steady(FEW), steady_programs.collectives_of_a_step({})


@pytest.fixture(scope="module")
def few() -> list[Any]:
    return run_on_gpus(2, peaks_costs_and_collectives, env=LOGGED)


def test_steady_steps_take_no_memory_and_wait_for_nothing(few: list[Any]) -> None:
    check_costs([costs for _, costs, _ in few], FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "late"), [(2, 0), (2, 1), (2, 2), (2, 11), (4, 0), (4, 2)])
@pytest.mark.parametrize("backend", ["nccl", OLDER])
def test_all_steady_steps_take_no_memory_and_wait_for_nothing(world: int, late: int, backend: str) -> None:
    """With late streams as well: memory is not taken anew because what used it is not done yet."""
    check_costs(run_on_gpus(world, steady_programs.steady, list(STEADY), backend, late=late), list(STEADY))


# --- memory ---------------------------------------------------------------------------------------


def check_estimates(found: dict[str, dict[str, float]], strategies: list[str]) -> None:
    """To the tenth that estimate() asks to leave: a block of the allocator may have a rest of up to 1 MB."""
    assert len(found) == 2 * len(strategies)
    for name, phases in found.items():
        for phase, part in phases.items():
            assert 0.9 < part < 1.1, (name, phase, part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategies"),
    [(2, ["zero3", "zero2", "zero1", "ddp"]), (4, ["zero3", "hybrid", "hybrid_zero2"])],
)
def test_estimates_are_what_the_allocator_says(world: int, strategies: list[str]) -> None:
    for found in run_on_gpus(world, steady_programs.peaks_against_estimates, strategies, timeout_s=400):
        check_estimates(found, strategies)


def test_estimates_of_small_groups_count_nothing_that_only_a_host_keeps(few: list[Any]) -> None:
    for found, _, _ in few:
        check_estimates(found, ["zero3"])


def offloaded_against_estimates(strategies: list[str]) -> dict[str, dict[str, float]]:
    return steady_programs.peaks_against_estimates(strategies, offload_policy="cpu")


@pytest.mark.slow
def test_estimates_with_offload_are_close_to_what_the_allocator_says() -> None:
    """How many copies lie beside each other hangs on when the host comes to them."""
    for found in run_on_gpus(2, offloaded_against_estimates, ["zero3", "zero2", "zero1"], timeout_s=400):
        assert len(found) == 6
        for name, phases in found.items():
            for phase in ("forward", "backward"):
                assert 0.8 < phases[phase] < 1.1, (name, phase, phases)


def offloaded_activations_against_estimates(strategies: list[str]) -> dict[str, dict[str, float]]:
    both = {"activation_checkpointing": True, "activation_offloading": True}
    return steady_programs.peaks_against_estimates(strategies, **both)


@pytest.mark.slow
def test_estimates_with_activations_in_host_memory_are_what_the_allocator_says() -> None:
    strategies = ["zero3", "zero2"]
    for found in run_on_gpus(2, offloaded_activations_against_estimates, strategies, timeout_s=400):
        check_estimates(found, strategies)


@pytest.mark.slow
def test_a_step_takes_the_blocks_that_are_documented() -> None:
    """docs/explain/memory.md, with the root's own parameters on top: a thirtieth of a block."""
    documented = {
        "float32": {"forward": 2, "backward": 3.4},
        "float32, in parts": {"forward": 2, "backward": 3},
        "bf16": {"forward": 3.1, "backward": 5.1},
        "bf16, in parts": {"forward": 3.1, "backward": 4.5},
    }
    for found in run_on_gpus(2, steady_programs.peaks_in_blocks):
        for name, phases in documented.items():
            for phase, blocks in phases.items():
                assert blocks - 1.5 < found[name][phase] < blocks + 0.05, (name, phase, found)


@pytest.mark.slow
def test_expandable_segments_are_refused() -> None:
    """There is no virtual memory: torch is told so, and does not go on without."""
    with pytest.raises(RuntimeError, match="no virtual memory"):
        run_on_gpus(1, steady_programs.one_tensor, env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


# --- collectives ----------------------------------------------------------------------------------


def the_same(of_ranks: list[list[str]]) -> str:
    first, *others = of_ranks
    assert all(lines == first for lines in others)
    return "\n".join(first)


def test_collectives_of_a_step(few: list[Any]) -> None:
    assert_expected_inline(
        the_same([collectives for _, _, collectives in few]),
        """\
all-gather                    3504 uint8     communicator A, stream A
all-gather                   28544 uint8     communicator A, stream A
all-gather                   28544 uint8     communicator A, stream A
all-gather                   28544 uint8     communicator A, stream A
all-gather                   28544 uint8     communicator A, stream A
reduce-scatter (mean)         7136 float32   communicator B, stream B
broadcast                        4 uint8     communicator B, stream B
all-gather                   28544 uint8     communicator A, stream A
reduce-scatter (mean)         7136 float32   communicator B, stream B
broadcast                        4 uint8     communicator B, stream B
reduce-scatter (mean)         7136 float32   communicator B, stream B
broadcast                        4 uint8     communicator B, stream B
reduce-scatter (mean)          876 float32   communicator B, stream B""",
    )


@pytest.mark.slow
def test_collectives_of_a_step_with_replicas() -> None:
    assert_expected_inline(
        the_same(run_on_gpus(4, steady_programs.collectives_of_a_step, {"hybrid": True}, env=LOGGED)),
        """\
all-gather                    3504 uint8     communicator A, stream A
all-gather                   28544 uint8     communicator A, stream A
all-gather                   28544 uint8     communicator A, stream A
all-gather                   28544 uint8     communicator A, stream A
all-gather                   28544 uint8     communicator A, stream A
reduce-scatter (scaled sum)   7136 float32   communicator B, stream B
all-reduce (sum)              7136 float32   communicator C, stream C
broadcast                        4 uint8     communicator B, stream C
all-gather                   28544 uint8     communicator A, stream A
reduce-scatter (scaled sum)   7136 float32   communicator B, stream B
all-reduce (sum)              7136 float32   communicator C, stream C
broadcast                        4 uint8     communicator B, stream C
reduce-scatter (scaled sum)   7136 float32   communicator B, stream B
all-reduce (sum)              7136 float32   communicator C, stream C
broadcast                        4 uint8     communicator B, stream C
reduce-scatter (scaled sum)    876 float32   communicator B, stream B
all-reduce (sum)               876 float32   communicator C, stream C""",
    )
