"""Who waits for whom: what ranks tell of where they are, put into words.

Facts and text only. Which rank asks, and when, is in watch.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """Where one rank is. It travels as JSON.

    ``step``: the running one, or the last; ``phase``: "forward", "backward" or "" outside of both.
    ``event``, ``name``, ``count``: what it waits for, if it does; ``ranks``: who takes part in that.
    ``kind``: event and name, with a number if several models use the name.
    ``due``: how many collectives of each kind these ranks have issued if none is missing.
    ``is_late``: it has waited for longer than the limit. ``code``: where the main thread is, outside of torch
    and of this library. ``issued``: how many collectives of each kind; None where that is not known.
    """

    step: int = 0
    phase: str = ""
    quiet_s: float = 0.0
    event: str = ""
    name: str = ""
    count: int = 0
    ranks: Sequence[int] = ()
    kind: str = ""
    due: Mapping[str, int] = field(default_factory=dict)
    is_late: bool = False
    is_on_device: bool = False
    has_ended: bool = False
    code: str = ""
    issued: Mapping[str, int | None] = field(default_factory=dict)

    def lacks(self, other: "Place") -> list[str]:
        """The kinds of which this rank has issued fewer than ``other`` had with what that waits for.

        Not only of what it waits for: many back ends match collectives by their order alone, so that the last
        one misses, whichever was left out.
        """
        found = []
        for kind, count in other.due.items():
            issued = self.issued.get(kind, 0)
            is_there = self.kind == kind and (self.count >= count or self.event == "call")
            if issued is not None and issued < count and not is_there:
                found.append(kind)
        return found


Places = Mapping[int, Place | None]
"""Places by rank; None of a rank that has not answered."""


def report_of(places: Places) -> str:
    """Which ranks wait for what, and where those are that they wait for; empty if nobody waits for long."""
    waiting = {rank: place for rank, place in places.items() if place is not None and place.is_late}
    behind: dict[int, None] = {}  # an ordered set
    shown: dict[int, Place] = {}
    left_out: dict[int, list[str]] = {}
    for rank, place in waiting.items():
        others = [other for other in place.ranks if other != rank and other in places]
        missing = [other for other in others if (told := places[other]) is None or told.lacks(place)]
        if not missing and place.event == "call":
            continue  # all ranks have come to it: it computes, or writes files
        shown[rank] = place
        behind |= dict.fromkeys(missing)
        for other in missing:
            if (told := places[other]) is not None and place.kind not in (kinds := told.lacks(place)):
                left_out.setdefault(other, kinds)
    if not shown:
        return ""
    lines = _alike({rank: _wait(place) for rank, place in shown.items()})
    lines += _alike({rank: _whereabouts(places[rank]) for rank in sorted(behind) if rank not in shown})
    lines += _alike({rank: _omission(kinds) for rank, kinds in left_out.items()})
    if not behind:
        lines += _undelivered(shown, places)
    elif behind.keys() <= shown.keys():
        lines.append(_DISAGREEMENT)
    longest_s = max(place.quiet_s for place in shown.values())
    return f"No progress for {longest_s:.0f} s: " + "; ".join(lines)


_DISAGREEMENT = (
    "they wait for each other, because they disagree on what to communicate. Usual cause: control flow that "
    "differs by rank"
)


def _wait(place: Place) -> str:
    """What a late rank waits for, as a clause without its subject."""
    if place.event == "call":
        return f"{{is}} in {_literal(place.name)}() ({moment(place.step, place.phase)})"
    device = "{is} with {its device} at" if place.is_on_device else "{waits} for"
    named = f" of {_literal(place.name)}" if place.name else ""
    return f"{device} the {place.event}{named} ({moment(place.step, place.phase)})"


def _whereabouts(place: Place | None) -> str:
    """Where a rank is that others wait for."""
    if place is None:
        return "{does} not answer: {it} {has} ended, {was} stopped, or {has} left the process group"
    if place.has_ended:
        return f"{{has}} ended after step {place.step}"
    at = f", at {_literal(place.code)}" if place.code else ""
    if place.event == "call":
        return f"{{is}} in {_literal(place.name)}() ({moment(place.step, place.phase)}){at}"
    if place.event:
        return f"{_wait(place)}{at}"
    if place.phase:
        return f"{{computes}} ({moment(place.step, place.phase)}){at}"
    if place.step == 0:
        return "{has} not begun to train" + at
    return f"{{has}} left the training loop after step {place.step}, or {{does}} something else there{at}"


def _omission(kinds: Sequence[str]) -> str:
    more = f" and {len(kinds) - 1} more" if len(kinds) > 1 else ""
    event, _, name = kinds[0].partition(" ")
    return f"{{has}} left out the {event} of {_literal(name)}{more}, so that later collectives miss one"


def _undelivered(shown: Mapping[int, Place], places: Places) -> list[str]:
    """All ranks have issued what is waited for, and it does not complete: who is elsewhere?"""
    ranks = sorted({rank for place in shown.values() for rank in place.ranks} - shown.keys())
    others = {rank: _whereabouts(places[rank]) for rank in ranks if places.get(rank) is not None}
    cause = "a device still computes, or the network does not deliver"
    if not any(place.is_on_device for place in shown.values()):
        cause = "the network does not deliver, or the back end needs ranks that compute"
    return [*_alike(others), f"all ranks have issued what is waited for: {cause}"]


def moment(step: int, phase: str) -> str:
    """When that is: in a pass of the running step, or after the last one."""
    return f"step {step}, {phase}" if phase else f"after step {step}"


def _alike(clauses: Mapping[int, str]) -> list[str]:
    """One line for all ranks of which the same is told."""
    by_clause: dict[str, list[int]] = {}
    for rank, clause in clauses.items():
        by_clause.setdefault(clause, []).append(rank)
    return [f"{_named(ranks)} {_conjugated(clause, len(ranks) > 1)}" for clause, ranks in by_clause.items()]


def _literal(text: str) -> str:
    """``text`` of others inside of a clause, where braces stand for verbs."""
    return text.replace("{", "{{").replace("}", "}}")


def _conjugated(clause: str, is_plural: bool) -> str:
    singular = ("is", "waits", "does", "has", "computes", "it", "its device", "was")
    plural = ("are", "wait", "do", "have", "compute", "they", "their devices", "were")
    return clause.format(**dict(zip(singular, plural if is_plural else singular, strict=True)))


def _named(ranks: Sequence[int]) -> str:
    """Ranks by number, neighbours as a range."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
