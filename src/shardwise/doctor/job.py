"""The ranks of the job, as a check meets them: what is around each, and how they tell rank 0.

Facts go through the store of the job, which works where collectives do not. A rank whose check fails says so
there, so that the others do not wait for it.

    run/1/check 3/1/2       what rank 2 told in the first exchange of a check
    run/1/check 3/failed    a rank has failed in it
"""

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

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
    _run: int = field(init=False)
    _scope: str = field(default="", init=False)
    _num_exchanges: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._run = self.store.add(f"runs/{self.rank}", 1)  # earlier ones have left their facts behind

    def begin(self, scope: str) -> None:
        """Give what follows keys of its own, so that a rank that has failed before meets the others."""
        self._scope, self._num_exchanges = f"run/{self._run}/{scope}", 0

    def fail(self) -> None:
        """Tell the others that this rank leaves the scope early."""
        self.store.set(f"{self._scope}/failed", "")

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
        self.store.set(f"{key}/{self.rank}", json.dumps(own))
        if self.rank:
            return None
        awaited = list(range(self.world))

        def all_have_told() -> bool:
            nonlocal awaited
            awaited = [rank for rank in awaited if not self.store.check([f"{key}/{rank}"])]
            return not awaited

        self._until(all_have_told, self.timeout_s, lambda: time.sleep(0.01))
        told = (rank for rank in range(self.world) if rank not in awaited)
        return {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in told}

    def share(self, value: Any) -> Any:
        """The ``value`` of rank 0, on all ranks."""
        key = self.new_key()
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.wait_for(key, 3 * self.timeout_s))  # it may wait for others, and twice

    def wait_for(self, key: str, within_s: float | None = None) -> bytes:
        """The value at ``key``, once a rank has set it: ``within_s``, by default the timeout.

        Raises:
            NoAnswer: nobody has, in time.
        """
        within_s = self.timeout_s if within_s is None else within_s
        if not self._until(lambda: self.store.check([key]), within_s, lambda: time.sleep(0.001)):
            raise NoAnswer(f"no answer within {within_s:g} s")
        return self.store.get(key)

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
        try:
            is_over = self._until(result.done, self.timeout_s, lambda: wait([result], timeout=0.2))
        finally:
            self.has_hung |= not result.done()
        if not is_over:
            raise Hung(
                f"{what} did not end within {self.timeout_s:g} s. Either a rank does not take part, or the "
                "network does not connect these ranks: look at firewalls, and at the interface that "
                "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names."
            )
        return result.result()

    def _until(self, is_over: Callable[[], bool], within_s: float, pause: Callable[[], object]) -> bool:
        """Wait until ``is_over``; False if it is not in time."""
        deadline = time.monotonic() + within_s
        while not is_over():
            if self.store.check([f"{self._scope}/failed"]) and not is_over():
                raise OtherRankFailed
            if time.monotonic() > deadline:
                return False
            pause()
        return True


def by_value(values: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """The ranks of each value, from values by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks
