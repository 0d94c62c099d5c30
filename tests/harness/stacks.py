"""Where other processes are in their Python code, even when they are stuck inside C++."""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from harness.worker import STACK_SIGNAL

WAIT_S = 1.0  # a dump takes milliseconds; a stopped process never gives one
# The outermost frame of a worker: the command line of the server that forked it. The main thread
# comes last in a dump, so this line ends it.
LAST_LINE_END = "in <module>\n"


def python_stacks(places: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """Ask each rank's process, given its pid and the file it writes to, for all its stacks."""
    for pid, _ in places.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + WAIT_S
    return {rank: _read(path, deadline) for rank, (_, path) in places.items()}


def _read(path: Path, deadline: float) -> str:
    while not (text := path.read_text()).endswith(LAST_LINE_END):
        if time.monotonic() > deadline:
            return text or "(it did not even react to a signal)\n"
        time.sleep(0.005)
    return "".join(line for line in text.splitlines(True) if not _is_plumbing(line))


def _is_plumbing(line: str) -> bool:
    return "/multiprocessing/" in line or 'File "<string>", line 1 in <module>' in line
