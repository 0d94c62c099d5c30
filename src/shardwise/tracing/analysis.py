"""What a recording shows: what each group sent, what the computation waited for, who waits for whom; advice.

A transfer is covered while a module computes. The computation stands still where it waits, so what of a
transfer is not covered is what is waited for:

    computation   [ blocks.1 ][ wait ][ blocks.2 ]
    all-gather    [      AG blocks.2  ]                 of which the wait is not covered
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

from shardwise.layout.fqns import listed
from shardwise.layout.text_tables import ruled
from shardwise.tracing.records import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTATION,
    COPIES,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    REDUCE_SCATTER,
    TRANSFERS,
    Recording,
    Span,
    Straggler,
    TracedGroup,
)

_SHARE_WORTH_A_WORD = 0.01
"""Waits that take less of the traced time are not worth more prefetch."""
_SHARE_OF_A_LIMIT = 0.05
"""What takes less of it limits nothing."""
_LAG_OF_AN_IDLE_DEVICE_NS = 100_000


@dataclass(frozen=True)
class Traffic:
    """Transfers of one group.

    Attributes:
        num_bytes: what they sent.
        ns: how long they took, together.
        waited_ns: how long the computation waited for them.
    """

    num_bytes: int = 0
    ns: int = 0
    waited_ns: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.num_bytes + other.num_bytes, self.ns + other.ns, self.waited_ns + other.waited_ns)

    @property
    def uncovered(self) -> float:
        """The share of them that no computation covers; 0 where nothing was sent."""
        return min(1.0, self.waited_ns / self.ns) if self.ns else 0.0


@dataclass(frozen=True)
class TracedWork:
    """What one group did while a trace recorded.

    Attributes:
        name: of the group.
        unshards: how often it was all-gathered.
        reductions: how often its gradients were reduced.
        all_gather: its all-gathers.
        reduction: its reduce-scatters and all-reduces.
        computed_ns: how long its modules computed, forward and backward.
    """

    name: str
    unshards: int
    reductions: int
    all_gather: Traffic
    reduction: Traffic
    computed_ns: int

    @property
    def both(self) -> Traffic:
        """All its transfers."""
        return self.all_gather + self.reduction


def work_of_groups(recording: Recording) -> list[TracedWork]:
    """What each group did, in the order of the model."""
    return [
        TracedWork(
            group.name,
            group.unshards,
            group.reductions,
            _traffic(recording, group.name, (ALL_GATHER,)),
            _traffic(recording, group.name, (REDUCE_SCATTER, ALL_REDUCE)),
            sum(span.ns for span in recording.of_row(COMPUTATION) if span.name == group.name),
        )
        for group in recording.groups
    ]


def _traffic(recording: Recording, name: str, rows: Sequence[str]) -> Traffic:
    sent = [s for s in recording.spans if s.name == name and s.row in rows]
    waits = [s for s in recording.waits() if s.name == name and s.awaits in rows]
    return Traffic(sum(s.num_bytes for s in sent), sum(s.ns for s in sent), sum(s.ns for s in waits))


# --- in words -------------------------------------------------------------------------------------


HEAD = ("group", "unsharded", "reduced", "MB sent", "ms transfers", "ms waited", "uncovered", "ms computed")
"""Of the columns of ``cells``."""


def cells(recording: Recording) -> list[list[str]]:
    """A table of the groups, without its head; the last row has the totals."""
    works = work_of_groups(recording)
    total = TracedWork(
        "total",
        sum(work.unshards for work in works),
        sum(work.reductions for work in works),
        sum((work.all_gather for work in works), Traffic()),
        sum((work.reduction for work in works), Traffic()),
        sum(work.computed_ns for work in works),
    )
    return [[work.name, *figures_of(work)] for work in (*works, total)]


def figures_of(work: TracedWork) -> list[str]:
    """The cells of a group, except its name."""
    both = work.both
    return [
        str(work.unshards),
        str(work.reductions),
        f"{both.num_bytes / 1e6:,.{1 if both.num_bytes >= 1e6 else 4}f}",
        f"{both.ns / 1e6:,.1f}",
        f"{both.waited_ns / 1e6:,.1f}",
        f"{both.uncovered:.0%}",
        f"{work.computed_ns / 1e6:,.1f}",
    ]


def summary(recording: Recording) -> str:
    """What took the time, a table of the groups, and advice."""
    lines = ruled([HEAD, *cells(recording)], right=range(1, len(HEAD)), has_total=True)
    return "\n".join([title(recording), *lines, *advice(recording)])


def title(recording: Recording) -> str:
    """Which rank, how long, and what took the time."""
    parts = [f"rank {recording.rank} ({recording.device}): {ms(recording.end_ns)}"]
    parts.append(f"computation {ms(length(recording.of_row(COMPUTATION)))}")
    parts.append(f"waits {ms(length(recording.waits()))}")
    for row in (*TRANSFERS, COPIES, OPTIMIZER):
        if spans := recording.of_row(row):
            parts.append(f"{row} {ms(length(spans))}")
    return ", ".join(parts)


def ms(ns: float) -> str:
    """Nanoseconds as text, in ms."""
    return f"{ns / 1e6:,.1f} ms"


# --- advice ---------------------------------------------------------------------------------------


def advice(recording: Recording) -> list[str]:
    """Sentences on what would shorten the step, where the recording leaves no doubt."""
    if not recording.of_row(COMPUTATION):
        return [
            "No module has computed: a model that is compiled as a whole runs as one graph, which a trace "
            "cannot see into."
        ]
    found = [*_on_straggler(recording), *_on_host(recording)]
    waits = [s for s in recording.waits() if s.awaits == ALL_GATHER and s.phase == FORWARD]
    if waits and not recording.knew_order:
        return [
            *found,
            "The first forward of a model records the order of its blocks and unshards nothing ahead: trace "
            "a later step to see what usually waits.",
        ]
    late = _late_prefetch(recording)
    return [*found, *_on_prefetch(recording, late), *_on_uncovered(recording, late)]


def _on_straggler(recording: Recording) -> Iterator[str]:
    """The rank that others wait for, and where it takes longer than they do."""
    found = recording.straggler
    if found is None or found.waited_ns < _SHARE_OF_A_LIMIT * recording.end_ns:
        return
    place = found.place if found.place == OUTSIDE else f"for {found.place}"
    where = f"It takes {ms(found.ns)} {place}, where others take {ms(found.usual_ns)}"
    if found.ns - found.usual_ns < found.waited_ns / 2:
        where = f"It is slower in many places. {where}"
        remedy = "compare its device, and what else runs on its host"
    elif found.place == OUTSIDE:
        remedy = "look at what it loads, logs or saves there"
    else:
        remedy = "look for larger samples there, or work that other ranks do not have"
    yield (
        f"Rank {found.rank} is the slowest: rank {found.waiter} waits {found.waited_ns / 1e6:,.1f} "
        f"of {ms(recording.end_ns)} for it. {where}: {remedy}."
    )


def _on_host(recording: Recording) -> Iterator[str]:
    """Whether the device computes no faster than the host queues its work."""
    computed = [span for span in recording.of_row(COMPUTATION) if span.lag_ns is not None]
    idle = [s for s in computed if s.lag_ns is not None and s.lag_ns < _LAG_OF_AN_IDLE_DEVICE_NS]
    total, bound = length(computed), length(idle)
    if bound <= total / 2 or bound < _SHARE_OF_A_LIMIT * recording.end_ns:
        return
    of_group: Counter[str] = Counter()
    for span in idle:
        of_group[span.name] += span.ns
    (name, longest), *_ = of_group.most_common(1)
    yield (
        f"The host is the limit: for {bound / 1e6:,.1f} of {ms(total)} of computation, longest in {name} "
        f"({ms(longest)}), the device had nothing queued. Compile the blocks, or give each rank more "
        "samples; the trace itself takes time of the host."
    )


def _late_prefetch(recording: Recording) -> dict[tuple[TracedGroup, str], list[Span]]:
    """By group and phase, the waits for all-gathers that one more group of prefetch would cover."""
    found = {}
    phases = dict.fromkeys(span.phase for span in recording.of_row(ALL_GATHER) if span.phase)
    for group, phase in product(recording.groups, phases):
        waits = [
            wait
            for wait in recording.waits()
            if (wait.name, wait.phase, wait.awaits) == (group.name, phase, ALL_GATHER)
            and wait.uncovered_ns > _SHARE_WORTH_A_WORD * recording.end_ns
        ]
        if group.prefetch is not None and waits and all(_is_coverable(recording, wait) for wait in waits):
            found[group, phase] = waits
    return found


def _on_prefetch(
    recording: Recording, late: Mapping[tuple[TracedGroup, str], Sequence[Span]]
) -> Iterator[str]:
    """A sentence for the groups of a phase."""
    sharing: dict[tuple[str, int], dict[TracedGroup, float]] = {}
    for (group, phase), waits in late.items():
        mean = sum(wait.uncovered_ns for wait in waits) / len(waits)
        sharing.setdefault((phase, (group.prefetch or 0) + 1), {})[group] = mean
    unless = "" if recording.is_aligned else "where no rank is late, "
    for (phase, prefetch), some in sharing.items():
        names, longest = [group.name for group in some], ms(max(some.values()))
        more = f"({max(group.unsharded_bytes for group in some) / 1e6:,.1f} MB more in memory)"
        would = f"{unless}prefetch={prefetch} would cover it {more}."
        if len(names) == 1:
            yield f"{names[0]} waits {longest} for its all-gather in {phase}: {would}"
        else:
            yield f"{listed(names, 2)} wait up to {longest} for their all-gathers in {phase}: {would}"


def _on_uncovered(
    recording: Recording, late: Mapping[tuple[TracedGroup, str], Sequence[Span]]
) -> Iterator[str]:
    """Waits for transfers that all ranks had begun, and that more prefetch would not cover."""
    known = [id(wait) for waits in late.values() for wait in waits]
    waits = [s for s in recording.waits() if s.awaits in TRANSFERS and id(s) not in known]
    by_transfer: Counter[tuple[str, str, str]] = Counter()
    for wait in waits:
        by_transfer[wait.name, wait.awaits or "", wait.phase] += wait.uncovered_ns
    total = by_transfer.total()
    if not recording.is_aligned or total < _SHARE_OF_A_LIMIT * recording.end_ns:
        return
    ((name, row, phase), longest), *_ = by_transfer.most_common(1)
    when = f" in {phase}" if phase else ""
    yield (
        f"No computation covers {ms(total)} of communication, {total / recording.end_ns:.0%} of the time; "
        f"most is the {row} of {name}{when}, {ms(longest)}. Give each rank more samples, send fewer bytes "
        "(an mp_policy in bfloat16), or shard smaller modules, so that one computes while another travels."
    )


def _is_coverable(recording: Recording, wait: Span) -> bool:
    """Whether the wait would be none if its all-gather had been issued together with the one before it.

    That is what one more group of prefetch does. It is certain if nothing travelled in between for as long as
    was waited: the transfer would have had that time.
    """
    issued = [
        s for s in recording.of_row(ALL_GATHER) if s.phase == wait.phase and s.start_ns <= wait.start_ns
    ]
    own = next((s for s in reversed(issued) if s.name == wait.name), None)
    if own is None:
        return False
    earlier = [s.start_ns for s in issued if s.start_ns < own.start_ns and s.name != wait.name]
    if not earlier:
        return False
    begin, end = earlier[-1], own.start_ns
    between = [s for s in recording.spans if begin < s.start_ns < end]
    passes = {s.phase == FORWARD for s in between if s.row == COMPUTATION}
    if any(s.row == OPTIMIZER for s in between) or (own.phase != FORWARD) in passes:
        return False  # the one before is of another pass
    others = [s for s in recording.spans if s.row in TRANSFERS and s is not own]
    return end - begin - length(others, begin, end) >= wait.uncovered_ns


def length(spans: Iterable[Span], begin: int = 0, end: int | None = None) -> int:
    """How much of the time from ``begin`` to ``end`` the spans cover together."""
    total, reached = 0, begin
    for span in sorted(spans, key=lambda span: span.start_ns):
        start = max(span.start_ns, reached)
        stop = span.end_ns if end is None else min(span.end_ns, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total


# --- who waits for whom -----------------------------------------------------------------------------
#
# What ranks that began a trace together tell each other at its end. A transfer begins when the last of its
# ranks has come to it. Until then a wait is for that rank:
#
#     rank 0   computation   [ blocks.0 ][       wait       ]
#              all-gather                [    AG blocks.1   ]
#     rank 1   computation   [    blocks.0    ][    wait    ]
#              all-gather                      [AG blocks.1 ]
#                                        <---->                rank 0 waits for rank 1

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
