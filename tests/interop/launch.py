"""Real jobs of frameworks: a function of a test file, run by torchrun in processes of its own.

Frameworks keep state of the whole process and set up process groups themselves, so that they cannot share the
workers of other tests.

    torchrun --nproc-per-node 2 launch.py test_accelerate trains FOLDER

What the function returns for ``FOLDER`` on rank 0 is the result of the job.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
PATH = (TESTS.parent / "src", TESTS, TESTS / "support", TESTS / "interop")
LIMIT_S = 400


def run_job(function: Any, folder: Path, *, ranks: int = 2) -> Any:
    words = [function.__module__, function.__name__, str(folder)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--no-python"),
            *(sys.executable, str(Path(__file__)), *words),
        ],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, PATH)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(folder / "result.pt")


def result_of(job: Any, *, ranks: int = 2) -> Any:
    """A fixture of a module: what a job comes to, which runs once."""

    @pytest.fixture(scope="module")
    def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
        return run_job(job, tmp_path_factory.mktemp(job.__name__), ranks=ranks)

    return result


def main(module: str, name: str, folder: str) -> None:
    result = getattr(importlib.import_module(module), name)(Path(folder))
    if os.environ["RANK"] == "0":
        torch.save(result, Path(folder) / "result.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
