"""What type checkers say of a training script: training_script.py, which holds the expected errors."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_a_training_script_is_checked_as_it_says() -> None:
    command = [sys.executable, "-m", "mypy", "tests/typed/training_script.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
