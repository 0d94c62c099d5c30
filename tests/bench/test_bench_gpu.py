"""What bench/gpu.py reads from a trace, and that it runs as far as a CPU goes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.py"


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


TRACE = [
    {"ph": "M", "name": "process_name", "ts": 0},
    span("user_annotation", gpu.COUNTED, 100, 100),
    span("cpu_op", "c10d::_allgather_base_", 120, 20),
    span("cuda_runtime", "cudaLaunchKernel", 90, 1, correlation=1),  # before the step
    span("cuda_runtime", "cudaLaunchKernel", 110, 1, correlation=2),
    span("cuda_runtime", "cudaMemcpyAsync", 125, 1, correlation=3),  # inside the collective
    span("cuda_runtime", "cudaMemcpyAsync", 130, 1, tid=2, correlation=4),  # beside it, on another thread
    span("cuda_driver", "cuLaunchKernel", 150, 1, tid=2, correlation=5),
    span("cuda_runtime", "cudaStreamSynchronize", 160, 5, correlation=6),
    span("cuda_runtime", "cudaMalloc", 170, 5, correlation=7),
    span("cuda_runtime", "cudaDeviceSynchronize", 210, 5, correlation=8),  # after the step
    span("kernel", "early", 95, 10, correlation=1),
    span("kernel", "gemm", 300, 1000, correlation=2),
    span("gpu_memcpy", "Memcpy DtoD", 1000, 500, correlation=3, bytes=4096),
    span("gpu_memcpy", "Memcpy DtoD", 2000, 500, correlation=4, bytes=100),
    span("kernel", "gemm", 2600, 400, correlation=5),
    span("gpu_user_annotation", gpu.COUNTED, 300, 3000),
]


def test_a_trace_is_read_by_who_launched_what() -> None:
    found = gpu.read_trace(TRACE)
    assert (found.kernels, found.in_group_kernels) == (3, 1)
    assert dict(found.by_name) == {"gemm": 2, "Memcpy DtoD": 1}
    assert (found.memcpy_bytes, found.in_group_memcpy_bytes) == (100, 4096)
    assert (found.syncs, found.mallocs) == (1, 1)
    assert found.busy_ms == pytest.approx((1200 + 500 + 400) / 1e3)  # the first two overlap
    assert found.in_group_ms == 0.5


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_stops() -> None:
    done = run()
    assert done.returncode == 2
    assert "sees no CUDA device" in done.stderr


@pytest.mark.processes
def test_its_logic_runs_on_a_cpu(tmp_path: Path) -> None:
    record = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--tiny", "--steps", "2", "--warmup", "1", "--json", str(record))
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert [(row["world"], row["variant"]) for row in rows] == [
        (world, variant) for world in (8, 64) for variant in ("plain", "peer", "peer tuned", "ours")
    ]
    assert all(row["step_ms"]["median"] > 0 for row in rows)
    plain, peer, *_ = rows
    assert plain["copied_mb"] == 0 < peer["copied_mb"]
