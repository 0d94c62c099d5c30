"""Pipelines and tensor parallelism on software GPUs give the numbers of plain torch in one process."""

import pytest

from software_gpu import parallel_programs
from software_gpu.launch import on_the_older_back_end, run_on_gpus

TOLERANCE = {"tensor parallel, bfloat16": 0.03}  # of the largest number; everything else is in float64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "late", "backend"),
    [
        *((world, late, "nccl") for world in (2, 4) for late in (0, 2)),
        pytest.param(4, 2, "nccl-legacy", marks=on_the_older_back_end),
    ],
)
def test_pipelines_and_tensor_parallelism(world: int, late: int, backend: str) -> None:
    for rank, found in enumerate(
        run_on_gpus(world, parallel_programs.differences, backend, late=late, timeout_s=400)
    ):
        for name, off in found.items():
            assert off <= TOLERANCE.get(name, 1e-9), f"rank {rank}, {name}: off by {off}"
