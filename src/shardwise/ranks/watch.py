"""While a rank waits for long, all ranks tell what they do, and each prints the report of who waits for whom.

The thread of the monitor (failures.py) looks four times a second, from outside. A rank that has waited for
longer than the limit opens a round on the board. All ranks ask for a new round six times within the limit,
whatever they do.

    rank 0   has waited for 30 s: rounds = 1     ... reads place/1/*, posts report/1    prints
    rank 3   somewhere else       sees rounds = 1, posts place/1/3        sees report/1, prints

Told are waits in collectives of parameter groups, in comparisons of plans, and in public calls that
communicate, on the host and on devices. Not told: what the caller communicates, as in ``dist.barrier()``, and
what graphs communicate that were compiled as a whole; and ranks that only compute, read data, evaluate or are
at a prompt, for as long as no rank waits for them.
"""

import logging
import math
import os
from dataclasses import replace

from shardwise.ranks.activity import RankActivity
from shardwise.ranks.board import Board
from shardwise.ranks.verdicts import report_of
from shardwise.torch_compat import interpreter

DEFAULT_LIMIT_S = 30.0
VARIABLE = "SHARDWISE_WAIT_LIMIT"

_ASKED_IN_LIMIT = 6  # how often the board is asked for new rounds

_log = logging.getLogger(__name__)


def limit_of_environment() -> float | None:
    """The limit in seconds that SHARDWISE_WAIT_LIMIT gives, or the default; None: never report.

    Raises:
        ValueError: it is no number from 0 on.
    """
    text = os.environ.get(VARIABLE, "").strip() or str(DEFAULT_LIMIT_S)
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
        self._oldest: tuple[int, int] | None = None  # what is waited for, once that was asked
        self._oldest_looks = 0  # since it is that
        self._told_until: float = 0  # quiet looks: this wait was reported, or asked about in vain
        self._since_asked = 0
        self._round = board.count("rounds", 0)  # an earlier process group may have used this store
        self._looks_in_round: int | None = None  # None: none is open
        self._leads = False

    def look(self) -> None:
        """One look of the thread. Costs nothing but a comparison unless it is time to ask the board."""
        if self._activity.quiet_looks == 0:
            self._oldest, self._oldest_looks, self._told_until = None, 0, 0
        if self.limit_s is None:
            return
        # Events are asked only once nothing was issued for a while: a CUDA graph that another thread captures
        # does not survive such questions.
        if self._activity.quiet_looks >= self._looks(self.limit_s / 3):
            awaited = self._activity.awaited()
            oldest = None if awaited is None else (id(awaited[0]), awaited[1])
            self._oldest_looks = self._oldest_looks + 1 if oldest == self._oldest else 0
            self._oldest = oldest
        between = self._looks(self.limit_s / _ASKED_IN_LIMIT)
        if self._looks_in_round is not None:
            self._follow_round(self._looks_in_round + 1, patience=2 + 2 * between)
            return
        self._since_asked += 1
        if self._since_asked >= between:
            self._since_asked = 0
            self._join_round()
        is_told = self._activity.quiet_looks < self._told_until
        if self._looks_in_round is None and self._is_late() and not is_told:
            self._open_round()

    def _looks(self, seconds: float) -> int:
        return max(1, round(seconds / self._interval_s))

    def _is_late(self) -> bool:
        limit = self._looks(self.limit_s or 0)
        # On a device, what is waited for was first looked at after a third of the limit.
        is_old = self._oldest is not None and self._oldest_looks >= limit // 2
        return is_old and self._activity.quiet_looks >= limit

    def _open_round(self) -> None:
        """Ask all ranks what they do, unless another rank has just done so."""
        self._told_until = self._activity.quiet_looks + self._looks(self.limit_s or 0)
        if self._board.count(f"rounds/{self._round + 1}") == 1:
            self._leads = True
            self._board.count("rounds")
        self._join_round()

    def _join_round(self) -> None:
        """Tell what this rank does if a rank has asked."""
        newest = self._board.count("rounds", 0)
        if newest == self._round:
            return
        self._round, self._looks_in_round = newest, 0
        status, quiet = self._activity.status(), self._activity.quiet_looks
        # Half the limit is late enough to be told once another rank is late.
        is_late = self._oldest is not None and quiet >= self._looks((self.limit_s or 0) / 2)
        told = replace(
            status,
            quiet_s=quiet * self._interval_s,
            code=interpreter.where_main_thread_is(),
            is_late=is_late and status.event != "",
        )
        self._board.post(f"place/{newest}/{self._rank}", told)

    def _follow_round(self, looks: int, patience: int) -> None:
        """Print the report when it is there; the rank that has asked writes it."""
        self._looks_in_round = looks
        if self._leads:
            self._write_report(is_last=looks >= patience)
        text = self._board.read(f"report/{self._round}")
        if text:
            _log.warning(text)
            if self._oldest is not None:
                self._told_until = math.inf  # this wait: once
        if text is not None or looks >= 2 * patience:  # or who has asked is gone
            self._looks_in_round = None

    def _write_report(self, *, is_last: bool) -> None:
        told = self._board.statuses(f"place/{self._round}", range(self._world))
        told |= self._board.statuses("ended", [rank for rank, status in told.items() if status is None])
        if is_last or None not in told.values():
            self._board.post(f"report/{self._round}", report_of(told) if self._is_late() else "")
            self._leads = False
