"""Traces, snapshots of memory, the doctor and the choice of a strategy on software GPUs."""

from pathlib import Path

import pytest

from software_gpu import observing_programs
from software_gpu.launch import run_on_gpus


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
def test_what_tells_about_training(late: int, tmp_path: Path) -> None:
    run_on_gpus(2, observing_programs.check_all, tmp_path, late=late, timeout_s=400)
