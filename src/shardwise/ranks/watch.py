"""While a rank waits for long, all ranks post what they do, and each prints a report of who waits for whom.

The thread of the monitor (failures.py) looks four times a second. A rank that has waited longer than the
limit opens a round on the board. All ranks check for a new round six times within the limit, even while they
compute.

    rank 0   has waited for 30 s: rounds = 1     ... reads status/1/*, posts report/1    prints
    rank 3   somewhere else       sees rounds = 1, posts status/1/3        sees report/1, prints

Reports cover waits in collectives of parameter groups, in comparisons of plans, and in public calls that
communicate, on the host and on devices. They do not cover the caller's own communication, as in
``dist.barrier()``, the communication of graphs compiled as a whole, and ranks that only compute, read data,
evaluate or are at a prompt, as long as no rank waits for them.
"""

import logging
import math
import os
from dataclasses import replace

from shardwise.ranks.activity import RankActivity
from shardwise.ranks.board import Board
from shardwise.ranks.verdicts import report_of
from shardwise.torch_compat import interpreter

VARIABLE = "SHARDWISE_WAIT_LIMIT"

_ASKED_IN_LIMIT = 6  # checks for new rounds within the limit

_log = logging.getLogger(__name__)


def limit_of_environment() -> float | None:
    """The limit in seconds that SHARDWISE_WAIT_LIMIT gives, or the default; None: never report.

    Raises:
        ValueError: it is not a number, or below 0.
    """
    text = os.environ.get(VARIABLE, "").strip() or "30"
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = -1.0
    if not limit_s >= 0:
        raise ValueError(f"{VARIABLE} is {text!r}; set it to seconds, or to 0 for no reports.")
    return limit_s or None


class StallReporter:
    """Reports of one rank; ``interval_s``: between two looks."""

    def __init__(
        self, board: Board, rank: int, world: int, activity: RankActivity, interval_s: float
    ) -> None:
        self._board = board
        self._rank = rank
        self._world = world
        self._activity = activity
        self._interval_s = interval_s
        self.limit_s = limit_of_environment()
        self._oldest: tuple[int, int] | None = None  # the current wait, once queried
        self._oldest_looks = 0  # since it last changed
        self._told_until: float = 0  # quiet looks: this wait was reported, or its round gave no report
        self._since_asked = 0
        self._round = board.count("rounds", 0)  # an earlier process group may have used this store
        self._looks_in_round: int | None = None  # None: none is open
        self._leads = False

    def look(self) -> None:
        """One look of the thread. Costs only a comparison until it is time to read the board."""
        quiet = self._activity.quiet_looks
        if quiet == 0:
            self._oldest, self._oldest_looks, self._told_until = None, 0, 0
        if self.limit_s is None:
            return
        # Events are queried only after nothing was issued for a while: a query breaks the capture of a CUDA
        # graph in another thread.
        if quiet >= self._looks(self.limit_s / 3):
            awaited = self._activity.awaited()
            oldest = None if awaited is None else (id(awaited[0]), awaited[1])
            self._oldest_looks = self._oldest_looks + 1 if oldest == self._oldest else 0
            self._oldest = oldest
        limit, between = self._looks(self.limit_s), self._looks(self.limit_s / _ASKED_IN_LIMIT)
        # On a device, waits are first looked at after a third of the limit.
        is_late = self._oldest is not None and quiet >= limit and self._oldest_looks >= limit // 2
        if self._looks_in_round is not None:
            self._looks_in_round += 1
            self._follow_round(self._looks_in_round, 2 + 2 * between, is_late)
            return
        self._since_asked += 1
        if self._since_asked >= between:
            self._since_asked = 0
            self._join_round(limit)
        if self._looks_in_round is None and is_late and quiet >= self._told_until:
            self._told_until = quiet + limit
            # Unless another rank has just opened this round.
            self._leads = self._board.count(f"rounds/{self._round + 1}") == 1
            if self._leads:
                self._board.count("rounds")
            self._join_round(limit)

    def _looks(self, seconds: float) -> int:
        return max(1, round(seconds / self._interval_s))

    def _join_round(self, limit: int) -> None:
        """Post what this rank does, if a rank has opened a round."""
        newest = self._board.count("rounds", 0)
        if newest != self._round:
            self._round, self._looks_in_round = newest, 0
            status, quiet = self._activity.status(), self._activity.quiet_looks
            # Half the limit is late enough to be reported once another rank is late.
            is_late = self._oldest is not None and status.event != "" and quiet >= limit // 2
            code, quiet_s = interpreter.where_main_thread_is(), quiet * self._interval_s
            status = replace(status, quiet_s=quiet_s, code=code, is_late=is_late)
            self._board.post(f"status/{newest}/{self._rank}", status)

    def _follow_round(self, looks: int, patience: int, is_late: bool) -> None:
        """Print the report once it exists; the rank that opened the round writes it."""
        if self._leads:
            told = self._board.statuses(f"status/{self._round}", range(self._world))
            told |= self._board.statuses("ended", [rank for rank, status in told.items() if status is None])
            if looks >= patience or None not in told.values():
                self._board.post(f"report/{self._round}", report_of(told) if is_late else "")
                self._leads = False
        text = self._board.read(f"report/{self._round}")
        if text:
            _log.warning(text)
            if self._oldest is not None:
                self._told_until = math.inf  # this wait: once
        if text is not None or looks >= 2 * patience:  # the rank that opened the round may be gone
            self._looks_in_round = None
