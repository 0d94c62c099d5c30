"""Runs a function on software GPUs: a process for each rank, each with a CUDA build of torch that sees devices."""

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from software_gpu import build

# How long the other ranks may go on after one has failed. A test of what they do then wants them to end by themselves.
PATIENCE_S = 30
# What the back end of torch 2.15 says of each process group of a rank that has failed.
NOISE = "was not finalized before destruction"
# Torch registers the names of its back ends only where it sees a device.
on_the_older_back_end = pytest.mark.skipif(
    not hasattr(distributed_c10d, "ProcessGroupNCCL2"), reason="this torch has one back end for NCCL"
)
OLDER = pytest.param("nccl-legacy", marks=[pytest.mark.slow, on_the_older_back_end])


def run_on_gpus(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    late: int = 0,
    timeout_s: float = 120,
) -> list[Any]:
    """Call a function of a module, `function(*args)`, in `world` processes; give back what each rank returned.

    Each process has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun, and `world` devices.
    `late` is a schedule of cpp/streams.h: 0 runs all work when it is launched, 1 as late as possible, 2 that of the
    default stream late and of others early, 3 all early in a thread, 4 the reverse of 2, 10 and more late in an order
    drawn by this seed.
    `env` holds further variables, or replaces them. Where an environment has no software GPUs, the test is skipped.

    Raises:
        RuntimeError: A rank failed or took too long. The text has the output of all ranks, and their stacks.
    """
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    libraries = build.built()
    folder = Path(tempfile.mkdtemp(prefix="software_gpu_", dir=_memory_or_disk()))
    try:
        (folder / "call").write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        shared = {**os.environ, **_variables(world, libraries, folder, late), **(env or {})}
        ranks = [_start(rank, shared, folder) for rank in range(world)]
        ended = _wait(ranks, timeout_s)
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(_report(ranks, ended, folder))
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _memory_or_disk() -> str | None:
    """Where ranks share memory: files of the folder, which goes with all that killed ranks left in it."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _variables(world: int, libraries: Path, folder: Path, late: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loaded_from = os.environ.get("LD_LIBRARY_PATH")
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "LD_LIBRARY_PATH": f"{libraries}:{loaded_from}" if loaded_from else str(libraries),
        "SOFTWARE_GPU_LIBRARIES": str(libraries),
        "SOFTWARE_GPU_FOLDER": str(folder),
        "SOFTWARE_GPU_COUNT": str(world),
        "SOFTWARE_GPU_LATE": str(late),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(world))),
    }


def _start(rank: int, shared: dict[str, str], folder: Path) -> "subprocess.Popen[bytes]":
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    # Preloaded by the interpreter only: programs that it starts have nothing to do with devices.
    own["LD_PRELOAD"] = str(Path(shared["SOFTWARE_GPU_LIBRARIES"]) / build.RUNTIME)
    command = [sys.executable, "-X", "faulthandler", "-m", "software_gpu.worker"]
    with open(folder / f"output{rank}", "wb") as output:
        return subprocess.Popen(command, env={**shared, **own}, stdout=output, stderr=subprocess.STDOUT)


def _wait(ranks: list["subprocess.Popen[bytes]"], timeout_s: float) -> str:
    """Until all have ended, in their time; tells how. Ranks that have not by then print their stacks and are killed."""
    end = time.monotonic() + timeout_s
    how = ""
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if not how and any(rank.returncode for rank in ranks):
                how = "a rank failed"
                end = min(end, time.monotonic() + PATIENCE_S)
            time.sleep(0.02)
    finally:
        running = [rank for rank in ranks if rank.poll() is None]
        for rank in running:
            rank.send_signal(signal.SIGUSR1)  # print the stacks: see worker.py
        if running:
            time.sleep(1)
        for rank in running:
            rank.kill()
        for rank in ranks:
            rank.wait()
    return how or (f"not at an end after {timeout_s} s" if running else "ended")


def _report(ranks: list["subprocess.Popen[bytes]"], ended: str, folder: Path) -> str:
    parts = [f"{ended}; exit codes of the ranks: {[rank.returncode for rank in ranks]}"]
    for rank in range(len(ranks)):
        output = (folder / f"output{rank}").read_text(errors="replace")
        lines = output.splitlines(keepends=True)
        output = "".join(line for line in lines if NOISE not in line)
        parts.append(f"--- rank {rank}\n{output[-6000:]}")
    return "\n".join(parts)
