"""Weights from the meta device, generation and checkpoints on software GPUs."""

from pathlib import Path

import pytest

from software_gpu import state_programs
from software_gpu.launch import has_older_back_end, run_on_gpus


@pytest.mark.slow
@pytest.mark.parametrize(("world", "late"), [(2, 0), (2, 2), (4, 0), (4, 11)])
def test_what_happens_around_steps(world: int, late: int, tmp_path: Path) -> None:
    run_on_gpus(world, state_programs.check_all, tmp_path, late=late, timeout_s=300)


@pytest.mark.slow
def test_what_happens_around_steps_on_the_older_back_end(tmp_path: Path) -> None:
    if not has_older_back_end():
        pytest.skip("this torch has one back end for NCCL")
    run_on_gpus(2, state_programs.check_all, tmp_path, "nccl-legacy", late=2, timeout_s=300)
