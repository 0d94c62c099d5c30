"""The ranks of the job, as a check meets them: how they tell each other, and what they find.

Facts are left on the board of the job, which works where collectives do not. Rank 0 puts them together, so
that a rank has a few operations, and all ranks come to the same findings.

    shardwise/doctor/1/3/2      what rank 2 told in the third exchange of the first examination
    shardwise/doctor/1/3/all    what all have told, for all of them
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.layout.fqns import listed_ranks, ranks_by_value
from shardwise.layout.text_tables import aligned
from shardwise.ranks.board import Board

T = TypeVar("T")

_LONGEST_ERROR = 400

# --- findings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What one check has found on ``subject``: the figures, or what is not well and what to do.

    ``verdict``: "ok"; "slow": training works, and takes longer than it would have to; or "wrong": training
    fails, hangs or goes astray.
    """

    verdict: str
    subject: str
    text: str


ok, slow, wrong = (partial(Finding, verdict) for verdict in ("ok", "slow", "wrong"))


def table(findings: Sequence[Finding]) -> str:
    """One line for each finding, and a last one with the count of those that are not well."""
    rows = [(each.verdict, each.subject, each.text) for each in findings]
    lines = aligned([("verdict", "what", "found"), *rows], right=())
    verdicts = [each.verdict for each in findings]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "slow", "wrong"))
    return "\n".join([*lines, "", counts])


# --- the ranks ------------------------------------------------------------------------------------


class CheckFailed(Exception):
    """A check could not be made, for the reasons in ``findings``; raised on all ranks alike."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(table(findings))
        self.findings = findings


class CannotGoOn(Exception):
    """The text says what is wrong on this rank."""


class Hung(CannotGoOn):
    """Something did not end in time, perhaps because of another rank."""


class Job:
    """One rank's end of the job; all ranks run the same checks in the same order.

    ``timeout_s``: how long to wait for the facts of a rank, and for a collective.
    ``has_hung``: a thread of this process is still in a collective.
    """

    def __init__(self, rank: int, world: int, store: dist.Store, timeout_s: float = 60.0) -> None:
        self.rank = rank
        self.world = world
        self.store = store
        self.timeout_s = timeout_s
        self.has_hung = False
        run = store.add(f"shardwise/doctor/runs/{rank}", 1)  # earlier ones have left their facts
        self._board = Board(store, f"shardwise/doctor/{run}")
        self._num_exchanges = 0

    def gather(self, subject: str, function: Callable[[], T]) -> list[T]:
        """What ``function`` returns on each rank, on all ranks, sent as JSON; CheckFailed if it has raised on
        any, or one has sent nothing in time."""
        told: dict[str, Any] = {}
        try:
            told["fact"] = function()
        except Hung as error:
            told["hung"] = str(error)
        except Exception as error:
            text = str(error) if isinstance(error, CannotGoOn) else f"{type(error).__name__}: {error}"
            told["error"] = " ".join(text.split())[:_LONGEST_ERROR]
        self._num_exchanges += 1
        key = str(self._num_exchanges)
        self._board.post(f"{key}/{self.rank}", told)
        if self.rank == 0:
            self._board.post(f"{key}/all", self._collected(key))
        everyone = self._wait_for(f"{key}/all", 10 * self.timeout_s)  # rank 0 may have more to do
        for kind in ("error", "hung"):  # who has hung waits for who has failed
            failed = ranks_by_value((rank, each[kind]) for rank, each in enumerate(everyone) if kind in each)
            if failed:
                texts = [f"{listed_ranks(ranks)}: {text}" for text, ranks in failed.items()]
                raise CheckFailed([wrong(subject, text) for text in texts])
        return [each["fact"] for each in everyone]

    def run(self, subject: str, function: Callable[[], T]) -> T:
        """What ``function`` returns on this rank, once it has returned on all; raises as ``gather``."""
        results: list[T] = []
        self.gather(subject, lambda: results.append(function()))
        return results[0]

    def leave(self) -> None:
        """To be called at the end: rank 0 leaves last, since the store may be in its process."""
        self._board.post(f"left/{self.rank}", {})
        if self.rank == 0:
            self._collected("left")

    def _collected(self, key: str) -> list[dict[str, Any]]:
        """What all ranks have told at ``key``; an error of those that have told nothing in time."""
        deadline = time.monotonic() + 2 * self.timeout_s  # a rank may be in ``within_timeout``
        found = []
        for rank in range(self.world):
            try:
                found.append(self._wait_for(f"{key}/{rank}", deadline - time.monotonic()))
            except TimeoutError:
                found.append({"error": f"no answer within {2 * self.timeout_s:g} s. Has its process ended?"})
        return found

    def _wait_for(self, key: str, within_s: float) -> Any:
        deadline = time.monotonic() + within_s

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"doctor: rank 0 has sent nothing within {within_s:g} s. Has it ended?")

        return self._board.wait_for(key, check)

    def within_timeout(self, what: str, function: Callable[[], T]) -> T:
        """What ``function`` returns. It runs in a thread, which is left behind if it does not come back in
        time; then Hung is raised."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name=f"doctor: {what}", daemon=True).start()
        if not wait([result], timeout=self.timeout_s).done:
            self.has_hung = True
            raise Hung(
                f"{what} did not end within {self.timeout_s:g} s. Either a rank does not take part, or the "
                "network does not connect these ranks: look at firewalls, and at the interface that "
                "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names."
            )
        return result.result()
