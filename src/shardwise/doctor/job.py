"""The ranks of the job, as a check meets them: what is around each, and how they tell rank 0.

Facts are left on the board of the job, which works where collectives do not. A rank whose check fails says so
there, so that the others do not wait for it.

    shardwise/doctor/1/check 3/1/2       what rank 2 told in the first exchange of a check
    shardwise/doctor/1/check 3/failed    a rank has failed in it
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.ranks.board import Board

T = TypeVar("T")


class CannotGoOn(Exception):
    """The text says what is wrong; without it, what follows cannot be checked."""


class Hung(CannotGoOn):
    """Something did not end in time, here and likely on other ranks as well."""


class OtherRankFailed(Exception):
    """What this rank waits for will not come, and the rank that failed says why."""


class NoAnswer(TimeoutError):
    """A rank has told nothing in time."""


@dataclass(frozen=True)
class Surroundings:
    """What is around one rank. Tests put something else there."""

    versions: Mapping[str, str]
    environment: Mapping[str, str]
    host: str
    clock: Callable[[], float] = time.time

    @staticmethod
    def of_this_process(version: str) -> "Surroundings":
        """What is there; ``version`` is that of this library."""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "shardwise": version}
        if torch.cuda.is_available():
            versions["cuda"] = str(torch.version.cuda)
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return Surroundings(versions, dict(os.environ), platform.node())


@dataclass
class Job:
    """One rank's end of the job; all ranks run the same checks in the same order.

    ``timeout_s``: how long to wait for the facts of a rank, and for a collective.
    ``has_hung``: a thread of this process is still in a collective.
    """

    rank: int
    world: int
    store: dist.Store
    timeout_s: float = 60.0
    has_hung: bool = field(default=False, init=False)
    board: Board = field(init=False)
    _scope: str = field(default="", init=False)
    _num_exchanges: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        run = self.store.add(f"shardwise/doctor/runs/{self.rank}", 1)  # earlier ones have left their facts
        self.board = Board(self.store, f"shardwise/doctor/{run}")

    def begin(self, scope: str) -> None:
        """Give what follows keys of its own, so that a rank that has failed before meets the others."""
        self._scope, self._num_exchanges = scope, 0

    def fail(self) -> None:
        """Tell the others that this rank leaves the scope early."""
        self.board.post(f"{self._scope}/failed", True)

    # --- exchanges ----------------------------------------------------------------------------------

    def gather(self, own: Any) -> list[Any] | None:
        """The facts of all ranks, in order, on rank 0; None elsewhere. They travel as JSON.

        Raises:
            NoAnswer: on rank 0, with the ranks that have not told theirs.
        """
        answers = self.answers(own)
        if answers is None:
            return None
        silent = [rank for rank in range(self.world) if rank not in answers]
        if silent:
            raise NoAnswer(f"no answer from {silent} within {self.timeout_s:g} s")
        return [answers[rank] for rank in range(self.world)]

    def answers(self, own: Any) -> dict[int, Any] | None:
        """As ``gather``, by rank, without those that have told nothing in time."""
        key = self.new_key()
        self.board.post(f"{key}/{self.rank}", own)
        if self.rank:
            return None
        found: dict[int, Any] = {}
        check = self._check_within(self.timeout_s)
        for rank in range(self.world):
            with suppress(NoAnswer):
                found[rank] = self.board.wait_for(f"{key}/{rank}", check)
        return found

    def share(self, value: Any) -> Any:
        """The ``value`` of rank 0, on all ranks."""
        key = self.new_key()
        if self.rank == 0:
            self.board.post(key, value)
        return self.wait_for(key, 3 * self.timeout_s)  # rank 0 may wait for others, and twice

    def wait_for(self, key: str, within_s: float | None = None) -> Any:
        """The fact at ``key``, once a rank has told it: ``within_s``, by default the timeout.

        Raises:
            NoAnswer: nobody has, in time.
        """
        return self.board.wait_for(key, self._check_within(within_s or self.timeout_s))

    def new_key(self) -> str:
        """A key that all ranks have in common, and that nobody has used."""
        self._num_exchanges += 1
        return f"{self._scope}/{self._num_exchanges}"

    # --- what may hang ------------------------------------------------------------------------------

    def within_timeout(self, what: str, function: Callable[[], T]) -> T:
        """What ``function`` returns. It runs in a thread, which is left behind if it does not come back.

        Raises:
            Hung: it has not come back within the timeout.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name=f"doctor: {what}", daemon=True).start()
        check = self._check_within(self.timeout_s)
        try:
            while not wait([result], timeout=0.2).done:
                check()
        except NoAnswer:
            raise Hung(
                f"{what} did not end within {self.timeout_s:g} s. Either a rank does not take part, or the "
                "network does not connect these ranks: look at firewalls, and at the interface that "
                "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names."
            ) from None
        finally:
            self.has_hung |= not result.done()
        return result.result()

    def _check_within(self, seconds: float) -> Callable[[], None]:
        """What to call while this rank waits: it raises once the time is over, or a rank has failed."""
        deadline = time.monotonic() + seconds

        def check() -> None:
            if self.board.read(f"{self._scope}/failed"):
                raise OtherRankFailed
            if time.monotonic() > deadline:
                raise NoAnswer(f"no answer within {seconds:g} s")

        return check
