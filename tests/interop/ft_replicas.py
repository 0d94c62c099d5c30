"""Replicas under torchft whose processes are killed and started again, and what their ranks have to tell.

A replica is some processes with a process group of their own, as under torchrun: where one of them is gone, the
others are killed as well, and all start again.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)  # of one wait
LIMIT_S = 240  # of a run; one of three kills takes 15 where nothing else runs
Line = dict[str, Any]
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Place:
    folder: Path
    replica: int
    rank: int
    ranks: int
    attempt: int  # how often this replica has been started before
    port: int  # of its store
    lighthouse: str

    def tell(self, **what: Any) -> None:
        """Add a line to what this rank has told; it stays if the process is killed next."""
        with told_by(self.folder, self.replica, self.rank).open("a") as file:
            file.write(json.dumps({"attempt": self.attempt, **what}) + "\n")

    def wait_for(self, replica: int, attempt: int) -> None:
        """Until that replica has been started so often, and has told something."""
        while all(line["attempt"] < attempt for line in read(told_by(self.folder, replica, 0))):
            time.sleep(0.01)


def told_by(folder: Path, replica: int, rank: int) -> Path:
    return folder / f"{replica}-{rank}.jsonl"


def read(path: Path) -> list[Line]:
    """Its whole lines: another process may be writing one."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Replica:
    def __init__(self, number: int, start: Callable[..., Any], sizes: Sequence[int]):
        self.number, self._start, self._sizes = number, start, list(sizes)
        self.attempt = -1
        self.begin()

    def begin(self) -> None:
        self.attempt += 1
        ranks = self._sizes[self.attempt]
        # A store of its own for each attempt: torchft would find the address of a dead process in an old one.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            self._start(self.number, rank, ranks, self.attempt, self._store.port) for rank in range(ranks)
        ]

    def kill(self) -> list[int]:
        for process in self.processes:
            process.kill()
            process.join()
        return [process.exitcode for process in self.processes]

    @property
    def running(self) -> list[Any]:
        return [process for process in self.processes if process.exitcode is None]

    @property
    def has_failed(self) -> bool:
        return any(process.exitcode for process in self.processes)


def run_replicas(
    program: Callable[..., None], folder: Path, *arguments: Any, sizes: Sequence[Sequence[int]]
) -> list[list[Line]]:
    """What rank 0 of each replica told while all ran ``program(place, *arguments)`` to its end.

    ``sizes`` has, for each replica, its number of ranks in each attempt: it may fail once less.
    """
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=5_000
    )

    def start(*place: int) -> Any:
        process = _context.Process(
            target=run_rank, args=(program, Place(folder, *place, lighthouse.address()), arguments)
        )
        process.start()
        return process

    replicas = [Replica(number, start, of_attempts) for number, of_attempts in enumerate(sizes)]
    deadline = time.monotonic() + LIMIT_S
    try:
        while any(process.exitcode != 0 for replica in replicas for process in replica.processes):
            assert time.monotonic() < deadline, f"hangs\n{logs(folder)}"
            running = [process.sentinel for replica in replicas for process in replica.running]
            wait(running, timeout=1.0)  # and look again: one may have ended while the list was made
            for replica in replicas:
                if replica.has_failed:
                    replica.kill()
                    assert replica.attempt + 1 < len(sizes[replica.number]), logs(folder)
                    replica.begin()
    finally:
        for replica in replicas:
            replica.kill()
        lighthouse.shutdown()
    return [read(told_by(folder, number, 0)) for number in range(len(sizes))]


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(folder.glob("*.log")))


def run_rank(program: Callable[..., None], place: Place, arguments: tuple[Any, ...]) -> None:
    """Be a rank, as torchrun starts it; what it writes is in a file."""
    log = os.open(place.folder / f"{place.replica}-{place.rank}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ |= {
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(place.port)},
        **{
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.ranks),
            "LOCAL_WORLD_SIZE": "2",
            "TORCHFT_LIGHTHOUSE": place.lighthouse,
        },
    }
    store = dist.TCPStore("localhost", place.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks, timeout=PATIENCE)
    program(place, *arguments)
