"""Runs a command line of Python, and all that it starts, on software GPUs."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from software_gpu import build, launch

STARTUP = Path(__file__).with_name("startup")
OF_A_RANK = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_program(
    devices: int,
    arguments: Sequence[str],
    *,
    late: int = 0,
    env: dict[str, str] | None = None,
    timeout_s: float = 600,
) -> "subprocess.CompletedProcess[str]":
    """`python *arguments` in a process that sees so many devices, as do all processes that it starts.

    It is no rank of a job: what it starts finds its ranks by itself. `late` is a schedule of cpp/streams.h. Where an
    environment has no software GPUs, the test is skipped.
    """
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    libraries = build.built()
    folder = Path(tempfile.mkdtemp(prefix="software_gpu_", dir=launch._memory_or_disk()))
    simulated = launch._variables(devices, libraries, folder, late)
    path = os.pathsep.join((str(STARTUP), simulated["PYTHONPATH"]))
    preload = {"PYTHONPATH": path, "LD_PRELOAD": str(libraries / build.RUNTIME)}
    shared = {key: value for key, value in {**os.environ, **simulated}.items() if key not in OF_A_RANK}
    try:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *arguments],
            env={**shared, **preload, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # what it started ends with it
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(process.args, process.returncode, output, "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
