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
from collections.abc import Mapping
from dataclasses import replace

from shardwise.layout.fqns import listed, listed_ranks, ranks_by_value
from shardwise.ranks.activity import RankActivity, RankStatus
from shardwise.ranks.board import Board
from shardwise.torch_compat import interpreter

VARIABLE = "SHARDWISE_WAIT_LIMIT"

_ASKED_IN_LIMIT = 6  # checks for new rounds within the limit

_log = logging.getLogger(__name__)

Statuses = Mapping[int, RankStatus | None]
"""By rank; None for a rank that has not answered."""

_DIFFERENT_PLACES = (
    "numbers of microbatches or steps that differ by rank, or a call that all ranks have to make, such as "
    "save_checkpoint, and some do not. Run as many everywhere, and make such calls on all ranks."
)

_DIFFERENT_MODULES = (
    "control flow around these modules that differs by rank. If some ranks leave a module out, call "
    "set_may_be_unused() on it; if they use different parameters of one, "
    "set_reduce_scatter_unused_params(True)."
)


def limit_of_environment() -> float | None:
    """The limit in seconds that SHARDWISE_WAIT_LIMIT gives, or the default; None: never report."""
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
        self._oldest: tuple[str, int] | None = None  # the kind and count of the current wait, once queried
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
            oldest = None if awaited is None else (awaited[0].kind, awaited[1])
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


# --- who waits for whom, in words -----------------------------------------------------------------
#
# Facts and text only; failures.py uses it after two seconds and after a failed wait.


def ranks_behind(own: RankStatus, others: Statuses) -> dict[int, list[str]]:
    """Which of ``others`` keep the rank of ``own`` waiting, and the kinds of which they have issued too few;
    no kinds for a rank that has not answered.

    Earlier kinds count as well: many back ends match collectives only by their order, so whichever
    collective is left out, the last one is missing.
    """
    found: dict[int, list[str]] = {}
    for rank, other in others.items():
        if other is None:
            found[rank] = []
            continue
        for kind, count in own.due.items():
            issued = other.issued.get(kind, 0)
            is_there = other.kind == kind and (other.count >= count or other.event == "call")
            if issued is not None and issued < count and not is_there:
                found.setdefault(rank, []).append(kind)
    return found


def deadlock(stuck: Statuses) -> str | None:
    """The message if none of these ranks can continue; None if any of them can, or may.

    A rank that waits for no other is only slow, and the others may wait for it.
    """
    found = {rank: status for rank, status in stuck.items() if status is not None}
    if len(found) < len(stuck) or not all(ranks_behind(own, stuck) for own in found.values()):
        return None
    reasons = [f"on rank {rank} {each.reason}" for rank, each in found.items() if each.reason]
    if not reasons:
        return disagreement_text(stuck)
    waits = _by_clause({rank: _doing(each) for rank, each in found.items()})
    return (
        f"{'; '.join(reasons)}. The other ranks have no such change: {'; '.join(waits)}. Freeze and "
        "configure the model alike on all ranks."
    )


def disagreement_text(waits: Statuses) -> str:
    """The message that ranks waited for different things, with the usual cause."""
    told = _by_clause({r: _doing(wait) if wait else "in no call of shardwise" for r, wait in waits.items()})
    steps = {wait.step if wait and wait.event != "call" else None for wait in waits.values()}
    are_in_one_step = len(steps) == 1 and None not in steps
    causes = [_DIFFERENT_MODULES] if are_in_one_step else []
    if not are_in_one_step or len({wait.event for wait in waits.values() if wait}) > 1:
        # In one step: one rank reduces, and another does not, because its last microbatch is still to come.
        causes.append(_DIFFERENT_PLACES)
    return (
        f"the ranks disagree on what to communicate: {'; '.join(told)}. Collectives must be issued in the "
        f"same order everywhere. Usual cause: {' Or: '.join(causes)}"
    )


def ended_text(own: RankStatus, silent: Statuses, peer: int | None, closed: str) -> str:
    """The end of the message that a connection was ``closed``, by ``peer`` or another ``silent`` rank, each
    with what it has posted at the end of its program."""
    who = peer if peer is not None and peer in silent else min(silent)
    if (ended := silent[who]) is not None:
        return (
            f" ({own.moment}), because rank {who} has come to the end of its program, after step "
            f"{ended.step}. Usual cause: {_DIFFERENT_PLACES}"
        )
    named = f"rank {who} has ended; see its log"
    if who != peer and len(silent) > 1:
        named = f"one of {listed_ranks(silent)} has ended; see their logs"
    return (
        f", because {named}. Its connection was closed, and it has reported no error: it was killed, "
        f"ran out of memory, crashed, or came to its end before the others. ({closed})"
    )


def report_of(statuses: Statuses) -> str:
    """Which ranks wait for what, and where the awaited ranks are; empty if no rank waits for long."""
    shown: dict[int, RankStatus] = {}
    behind: set[int] = set()
    left_out: dict[int, str] = {}
    for rank, own in statuses.items():
        if own is None or not own.is_late:
            continue
        others = {other: statuses[other] for other in own.ranks if other != rank and other in statuses}
        missing = ranks_behind(own, others)
        if not missing and own.event == "call":
            continue  # all ranks are in it: it computes, or writes files
        shown[rank] = own
        behind |= missing.keys()
        for other, kinds in missing.items():
            if kinds and own.kind not in kinds:
                left_out.setdefault(other, _omission(*kinds))
    if not shown:
        return ""
    lines = _by_clause({rank: _doing(status) for rank, status in shown.items()})
    lines += _by_clause({rank: _whereabouts(statuses[rank]) for rank in sorted(behind - shown.keys())})
    lines += _by_clause(left_out)
    if not behind:
        lines += _undelivered(shown, statuses)
    elif behind <= shown.keys():
        lines.append(
            "they wait for each other, because they disagree on what to communicate. Usual cause: control "
            "flow that differs by rank"
        )
    longest_s = max(status.quiet_s for status in shown.values())
    return f"No progress for {longest_s:.0f} s: " + "; ".join(lines)


# Clauses without a verb, which would have to agree with the number of ranks.


def _doing(status: RankStatus) -> str:
    """What a rank waits for, and when."""
    what = f"waiting for the {status.event}"
    if status.event == "call":
        what = f"in {status.name}()"
    elif status.name:
        what += f" of '{status.name}'"
    return f"{what}{' on the device' if status.is_on_device else ''} ({status.moment})"


def _whereabouts(status: RankStatus | None) -> str:
    """Where an awaited rank is."""
    if status is None:
        return "not answering: ended, stopped, or no longer in the process group"
    if status.has_ended:
        return f"ended after step {status.step}"
    if status.event:
        where = _doing(status)
    elif status.phase:
        where = f"computing ({status.moment})"
    elif status.step == 0:
        where = "not training yet"
    else:
        where = f"in no step since step {status.step}"
    return f"{where}, at {status.code}" if status.code else where


def _omission(kind: str, *others: str) -> str:
    event, _, name = kind.partition(" ")
    left_out = listed([f"{event} of '{name}'", *others], 1)
    return f"left out the {left_out}, so that later collectives miss one"


def _undelivered(shown: Mapping[int, RankStatus], statuses: Statuses) -> list[str]:
    """For a collective that all ranks have issued and that does not complete: which ranks are elsewhere."""
    ranks = sorted({rank for status in shown.values() for rank in status.ranks} - shown.keys())
    others = {rank: _whereabouts(statuses[rank]) for rank in ranks if statuses.get(rank) is not None}
    cause = "a device still computes, or the network does not deliver"
    if not any(status.is_on_device for status in shown.values()):
        cause = "the network does not deliver, or the back end needs ranks that compute"
    if any(status.event == "reduction" for status in shown.values()):
        cause += ", or ranks use different parameters of the group"
    return [*_by_clause(others), f"all ranks have issued what is waited for: {cause}"]


def _by_clause(clauses: Mapping[int, str]) -> list[str]:
    """One line for all ranks with the same clause."""
    alike = ranks_by_value(sorted(clauses.items()))
    return [f"{listed_ranks(ranks)} {clause}" for clause, ranks in alike.items()]
