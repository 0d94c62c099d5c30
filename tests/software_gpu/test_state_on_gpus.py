"""Weights from the meta device, generation and checkpoints on software GPUs."""

from pathlib import Path

import pytest

from software_gpu import state_programs
from software_gpu.launch import on_the_older_back_end, run_on_gpus


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "late", "backend"),
    [
        *((2, 0, "nccl"), (2, 2, "nccl"), (4, 0, "nccl"), (4, 11, "nccl")),
        pytest.param(2, 2, "nccl-legacy", marks=on_the_older_back_end),
    ],
)
def test_what_happens_around_steps(world: int, late: int, backend: str, tmp_path: Path) -> None:
    run_on_gpus(world, state_programs.check_all, tmp_path, backend, late=late, timeout_s=300)
