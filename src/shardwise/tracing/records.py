"""What a trace has recorded: plain numbers, without references to the model.

Times are nanoseconds since the trace began: on the host of its clock, on a device of the device's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

COMPUTATION, OPTIMIZER, COPIES = "computation", "optimizer", "copies"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
TRANSFERS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
ROWS = (COMPUTATION, *TRANSFERS, COPIES, OPTIMIZER)
"""The rows of a trace, from top to bottom."""

FORWARD, BACKWARD, RECOMPUTATION = "forward", "backward", "recomputation"
OUTSIDE = "outside of the sharded modules"

KINDS = {
    "shards": "shards",
    "reduced_gradients": "reduced gradients",
    "unsharded": "unsharded parameters",
    "full_gradients": "full gradients",
    "kept": "kept for the next use",
}
"""The kinds of memory in a sample, and what pictures call them; what stays longest first."""


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        row: one of ``ROWS``.
        name: of the group, as in errors and events; in the row ``optimizer`` the optimizer's class.
        phase: ``forward``, ``backward`` or ``recomputation``; empty outside of these.
        num_bytes: what a transfer sends to each other rank or by way of it, together: of an all-gather or a
            reduce-scatter (W - 1) / W of the unsharded bytes, of an all-reduce 2 (W - 1) / W of its tensors.
        awaits: of a wait in the row ``computation``, the row that it waits for; else None.
        late_rank: of a wait, the rank that was the last to begin the transfer, if that was after the wait
            began; else None.
        late_ns: how long the wait lasted until then.
        lag_ns: of a computation on a device, how far the device was behind the host at either end, at most:
            near 0 it had nothing left to do, and waited for the host; else None.
    """

    row: str
    name: str
    phase: str
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    awaits: str | None = None
    late_rank: int | None = None
    late_ns: int = 0
    lag_ns: int | None = None

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns

    @property
    def uncovered_ns(self) -> int:
        """Of a wait: how long it lasted after all ranks had begun the transfer."""
        return self.ns - self.late_ns

    @property
    def label(self) -> str:
        """What pictures and trace viewers call it."""
        if self.awaits is not None:
            return f"wait for {self.awaits} {self.name}"
        return f"{self.phase} {self.name}" if self.row == COMPUTATION else f"{self.row} {self.name}"


@dataclass(frozen=True)
class MemorySample:
    """What the groups had in memory on this rank from ``at_ns`` on, in bytes; as in ``memory_snapshot``."""

    at_ns: int
    shards: int
    reduced_gradients: int
    unsharded: int
    full_gradients: int
    kept: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True)
class TracedGroup:
    """A group that was traced.

    Attributes:
        prefetch: how many groups it unshards ahead by the recorded order; None where the caller has chosen
            which.
        unshards, reductions: how often it was all-gathered, and its gradients reduced.
    """

    name: str
    unsharded_bytes: int
    prefetch: int | None
    unshards: int
    reductions: int


@dataclass(frozen=True)
class Straggler:
    """The rank that others wait for.

    Attributes:
        waiter, waited_ns: the rank that waits for it longest, and how long.
        place: where it takes longer than other ranks by most: ``<group> in <phase>``, the name of an
            optimizer, or ``OUTSIDE``.
        ns, usual_ns: how long it takes there, and the median of other ranks.
    """

    rank: int
    waiter: int
    waited_ns: int
    place: str
    ns: int
    usual_ns: int


@dataclass(frozen=True)
class Recording:
    """What one rank has recorded.

    Attributes:
        device: ``cpu``, ``cuda``, ...
        began: seconds since the epoch, by the rank's own clock.
        is_aligned: the ranks of the model began together: zero is the same moment on all of them.
        knew_order: whether an earlier forward had recorded which group comes next.
        straggler: the rank that others waited for, if ranks began together and one stands out.
    """

    rank: int
    device: str
    began: float
    is_aligned: bool
    knew_order: bool
    end_ns: int
    spans: Sequence[Span]
    memory: Sequence[MemorySample]
    groups: Sequence[TracedGroup]
    straggler: Straggler | None = None

    def of_row(self, row: str) -> list[Span]:
        """The spans of ``row`` in order of time, without waits."""
        return [span for span in self.spans if span.row == row and span.awaits is None]

    def waits(self) -> list[Span]:
        """The waits of the computation, in order of time."""
        return [span for span in self.spans if span.awaits is not None]

    def rows(self) -> dict[str, list[list[Span]]]:
        """For each row that has spans, from top to bottom, the lanes that they lie in."""
        found = {row: lanes([span for span in self.spans if span.row == row]) for row in ROWS}
        return {row: of_row for row, of_row in found.items() if of_row}

    def shifted(self, by_ns: int) -> "Recording":
        """The same, later by ``by_ns``."""
        return replace(
            self,
            end_ns=self.end_ns + by_ns,
            spans=tuple(replace(s, start_ns=s.start_ns + by_ns, end_ns=s.end_ns + by_ns) for s in self.spans),
            memory=tuple(replace(sample, at_ns=sample.at_ns + by_ns) for sample in self.memory),
        )

    @staticmethod
    def from_dict(found: dict[str, Any]) -> "Recording":
        """What ``dataclasses.asdict`` has made a dict of."""
        parts = {
            "spans": tuple(Span(**each) for each in found["spans"]),
            "memory": tuple(MemorySample(**each) for each in found["memory"]),
            "groups": tuple(TracedGroup(**each) for each in found["groups"]),
            "straggler": Straggler(**found["straggler"]) if found.get("straggler") else None,
        }
        return Recording(**(found | parts))


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """``spans`` in as few lanes as keep those apart that overlap in time, each in order of time."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        free = next((lane for lane in found if lane[-1].end_ns <= span.start_ns), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found
