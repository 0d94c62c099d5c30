"""Who waits for whom: what ranks that began a trace together tell each other at its end.

A transfer begins when the last of its ranks has come to it. Until then a wait is for that rank:

    rank 0   computation   [ blocks.0 ][       wait       ]
             all-gather                [    AG blocks.1   ]
    rank 1   computation   [    blocks.0    ][    wait    ]
             all-gather                      [AG blocks.1 ]
                                       <---->                rank 0 waits for rank 1
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from shardwise.tracing.analysis import length
from shardwise.tracing.records import (
    COMPUTATION,
    COPIES,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    TRANSFERS,
    Recording,
    Span,
    Straggler,
)

Gather = Callable[[Any], Mapping[int, Any]]
"""From the value of this rank those of all, by rank. Collective."""


def compare(
    recording: Recording, sharers: Mapping[tuple[str, str], Collection[int]], gather: Gather
) -> Recording:
    """``recording`` with the late ranks of its waits, and with the straggler. Collective.

    ``sharers``: the ranks that take part in transfers, by their row and the name of the group.
    """
    transfers: dict[tuple[str, str], list[Span]] = {}
    for span in recording.spans:
        if span.row in TRANSFERS:
            transfers.setdefault((span.row, span.name), []).append(span)
    starts = gather({key: [span.start_ns for span in spans] for key, spans in transfers.items()})

    def attributed(wait: Span) -> Span:
        key = wait.awaits or "", wait.name
        own = transfers.get(key, [])
        others = {rank: starts[rank].get(key, ()) for rank in sharers.get(key, ())}
        if not own or not others or {len(begun) for begun in others.values()} != {len(own)}:
            return wait
        index = min(range(len(own)), key=lambda i: abs(own[i].end_ns - wait.end_ns))
        rank = max(others, key=lambda rank: others[rank][index])
        since = max(wait.start_ns, own[index].start_ns)
        late_ns = min(wait.end_ns, others[rank][index]) - since
        return replace(wait, late_rank=rank, late_ns=late_ns) if late_ns > 0 else wait

    spans = tuple(attributed(span) if span.awaits else span for span in recording.spans)
    late: Counter[int] = Counter()
    for span in spans:
        if span.late_rank is not None:
            late[span.late_rank] += span.late_ns
    told = gather((late, _places(recording)))
    return replace(recording, spans=spans, straggler=_straggler(told))


def _places(recording: Recording) -> Counter[str]:
    """What this rank takes its time with, beside waits."""
    found: Counter[str] = Counter()
    for span in recording.of_row(COMPUTATION):
        found[f"{span.name} in {FORWARD if span.phase == FORWARD else 'backward'}"] += span.ns
    for span in recording.of_row(OPTIMIZER):
        found[span.name] += span.ns
    inside = [span for span in recording.spans if span.row in (COMPUTATION, COPIES, OPTIMIZER)]
    found[OUTSIDE] = recording.end_ns - length(inside)
    return found


def _straggler(told: Mapping[int, tuple[Counter[int], Counter[str]]]) -> Straggler | None:
    """The rank that another waits for longest, net of its own waits for others; None if ranks take turns."""
    waiter_of = {rank: max(told, key=lambda other: told[other][0][rank]) for rank in told}
    waited = {rank: told[waiter][0][rank] for rank, waiter in waiter_of.items()}
    own = {rank: late.total() for rank, (late, _) in told.items()}
    rank = max(told, key=lambda rank: waited[rank] - own[rank])
    if waited[rank] <= 2 * own[rank]:
        return None
    places = told[rank][1]
    usual = {place: median(told[other][1][place] for other in told if other != rank) for place in places}
    place = max(places, key=lambda place: places[place] - usual[place])
    return Straggler(rank, waiter_of[rank], waited[rank], place, places[place], round(usual[place]))
