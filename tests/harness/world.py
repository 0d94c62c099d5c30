"""A world of worker processes that lives as long as the test session.

    def mean_of_ranks(x):                       # module level: it is sent by name
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        return x

    def test_mean(world2):
        first, second = world2.run(mean_of_ranks, torch.ones(3))

The first start costs seconds (it imports torch), a later one 0.1 s, a task on running ranks a few
milliseconds, so the ranks stay, stopped until the next task: the threads of idle process groups wake up
100 times a second. They are given up after any failure, because a peer may wait in a collective for
ever and a failed gloo operation leaks its error into the next one, and after a task in which some have
begun more collectives than others, whose messages the next ones would get; the next run starts fresh
ones. This file knows processes and pipes; what a rank does is in `worker.py`, what a failure looks like
in `report.py`.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.report import WorkerError
from harness.stacks import python_stacks
from harness.worker import Answer, Seat, serve

START_TIMEOUT_S = 120.0  # the first start imports torch, on a machine that may be busy
GRACE_S = 1.0  # for the other ranks, once one has failed: they may be about to fail as well
# Tasks leave process groups behind, each with sockets and threads, and DTensor's caches still
# point to them, so they cannot be destroyed one by one.
MAX_FDS = 100

_context = multiprocessing.get_context("forkserver")
# Imported once by the server that forks the ranks, so that a rank starts with them loaded.
_context.set_forkserver_preload(
    [
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint.state_dict",
        "torch._dynamo",
        "pytest",
        "shardwise",  # half a second of each rank
    ]
)


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: ForkServerProcess
    conn: Connection
    stack_path: Path

    @property
    def place(self) -> tuple[int, Path]:
        """Whom to ask for a stack, and where the answer appears."""
        assert self.process.pid is not None
        return self.process.pid, self.stack_path


class World:
    """`size` ranks over gloo on this machine, started by the first `run`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._stacks: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; return the results in the order of ranks.

        Function, arguments and results travel by pickle. Raises `WorkerError` when a rank raises,
        warns, dies, or has not answered after `timeout` seconds.
        """
        __tracebackhide__ = True
        call = pickle.dumps((fn, args, kwargs))
        try:
            if not self._workers:
                self._start()
            self._signal(signal.SIGCONT)
            self._send(pickle.dumps((sys.path, call)))
            answers = self._collect(getattr(fn, "__qualname__", repr(fn)), timeout)
        except BaseException:
            self.close()
            raise
        has_unequal = len({answer.num_collectives for answer in answers}) > 1
        if has_unequal or max(answer.num_fds for answer in answers) > MAX_FDS:
            self.close()
        self._signal(signal.SIGSTOP)
        return [pickle.loads(answer.result) for answer in answers if answer.result is not None]

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.conn.close()
        self._workers = []
        self._store = None
        if self._stacks is not None:
            self._stacks.cleanup()
            self._stacks = None

    def _start(self) -> None:
        # The parent holds the store, so the kernel picks the port and a dying rank cannot take
        # the store with it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="world-")
        for rank in range(self.size):
            stack_path = Path(self._stacks.name, f"rank{rank}")
            stack_path.touch()  # read even if the rank dies before it opens it
            seat = Seat(rank, self.size, self._store.port, str(stack_path))
            conn, theirs = _context.Pipe()
            process = _context.Process(target=serve, args=(theirs, seat), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(rank, process, conn, stack_path))
        self._collect("start", START_TIMEOUT_S)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            # A dead one stays a process until it is joined.
            os.kill(worker.place[0], number)

    def _send(self, task: bytes) -> None:
        for worker in self._workers:
            # A broken pipe means that it is dead: _collect finds out, and says how it died.
            with contextlib.suppress(BrokenPipeError):
                worker.conn.send_bytes(task)

    def _collect(self, what: str, timeout: float) -> list[Answer]:
        __tracebackhide__ = True
        answers: dict[int, Answer] = {}
        started = time.monotonic()
        deadline = started + timeout
        in_grace = False
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            pending = {w.conn: w for w in self._workers if w.rank not in answers}
            for conn in wait(list(pending), left):
                worker = pending[conn]
                answers[worker.rank] = _receive(worker)
            if not in_grace and any(answer.error for answer in answers.values()):
                in_grace = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        errors = {rank: answer.error for rank, answer in sorted(answers.items()) if answer.error}
        silent = [worker.rank for worker in self._workers if worker.rank not in answers]
        if not errors and not silent:
            return [answers[rank] for rank in range(self.size)]
        waited_s = time.monotonic() - started
        # Nobody failed and somebody is silent: a hang, and any rank may be the one to blame.
        asked = silent if errors else range(self.size)
        stacks = python_stacks({r: self._workers[r].place for r in asked})
        raise WorkerError(what, self.size, waited_s, errors, silent, stacks)


def _receive(worker: _Worker) -> Answer:
    try:
        answer = pickle.loads(worker.conn.recv_bytes())
        assert isinstance(answer, Answer)
        if answer.error and (written := worker.stack_path.read_text()):
            return Answer(error=f"{answer.error}It has written to stderr:\n{written}")
        return answer
    except (EOFError, ConnectionResetError):
        return Answer(error=_epitaph(worker))


def _epitaph(worker: _Worker) -> str:
    worker.process.join()
    code = worker.process.exitcode
    cause = f"exit code {code}"
    if code is not None and code < 0:
        cause = f"signal {signal.Signals(-code).name}"
    # On a crash faulthandler and torch have left the stacks there.
    return f"the process died: {cause}\n{worker.stack_path.read_text()}"
