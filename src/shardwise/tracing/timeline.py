"""What happens while a trace records, in the order in which it happens; marks become times at the end.

Clock       marks moments: of the host, or of a device by events on its streams
Marked      a span between two marks
HeldMemory  what groups have in memory
Timeline    all of it, and which module computes now
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwise.comm.streams import has_streams, timed_event
from shardwise.groups.group import ParameterGroup
from shardwise.observe import bytes_of_gradients, bytes_of_shards, bytes_of_unsharded
from shardwise.tracing.records import BACKWARD, COMPUTATION, COPIES, MemorySample, Span

_SHORTEST_COPY_NS = 20_000
"""Copies in the computing thread of the host that take less are part of the computation."""


class DeviceMark(NamedTuple):
    """An event on a stream, and when the host queued it."""

    event: Any
    queued_ns: int


class Clock:
    """Notes moments, which ``ns_of`` turns into ns since the clock was made.

    The device is idle when the clock is made, so that its zero is the host's as well.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_of_host = not has_streams(device)
        self._device = device
        self._zero = self.mark()
        if not self.is_of_host:
            self._zero.event.synchronize()

    def mark(self) -> Any:
        """Now. On a device: when its current stream comes to what is queued next."""
        now = time.perf_counter_ns()
        return now if self.is_of_host else DeviceMark(timed_event(self._device), now)

    def ns_of(self, mark: Any) -> int:
        """When ``mark`` was passed; the host waits until it is."""
        if self.is_of_host:
            return int(mark - self._zero)
        mark.event.synchronize()
        return round(self._zero.event.elapsed_time(mark.event) * 1e6)

    def lag_ns(self, mark: Any) -> int:
        """How long after the host had queued ``mark`` the device came to it."""
        return self.ns_of(mark) - (mark.queued_ns - self._zero.queued_ns)


@dataclass(slots=True, eq=False)
class Marked:
    """A span whose ends are marks of a clock.

    ``ends``: of a transfer whose ``end`` is not known, when the collectives in it were over.
    """

    row: str
    name: str
    phase: str
    begin: Any = None
    end: Any = None
    num_bytes: int = 0
    awaits: str | None = None
    ends: list[Any] = field(default_factory=list)

    def span(self, clock: Clock, ended: Any) -> Span:
        """With times; what is still under way ends at the mark ``ended``."""
        start = clock.ns_of(self.begin)
        end = max(self.ends, default=ended) if self.end is None else self.end
        lag = None
        if self.row == COMPUTATION and not clock.is_of_host:
            lag = max(clock.lag_ns(self.begin), clock.lag_ns(end))
        end = max(start, clock.ns_of(end))
        return Span(self.row, self.name, self.phase, start, end, self.num_bytes, self.awaits, lag_ns=lag)


class HeldMemory:
    """What the groups have in memory over time: sampled after each event of a group, of that group alone.

    An event arrives while its group is still changing. So the sample is taken at the next event, and carries
    the time of the first.
    """

    def __init__(self, clock: Clock, groups: Iterable[ParameterGroup]) -> None:
        self._clock = clock
        self._held = {group: self._measure(group) for group in groups}
        self._shards = sum(map(bytes_of_shards, self._held))
        self._touched: dict[ParameterGroup, Any] = {}
        self._samples: list[tuple[Any, tuple[int, ...]]] = [(clock.mark(), self._sums())]

    @staticmethod
    def _measure(group: ParameterGroup) -> tuple[int, int, int, int]:
        return (*bytes_of_unsharded(group), *bytes_of_gradients(group))

    def _sums(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self._held.values(), strict=True)))

    def touch(self, group: ParameterGroup) -> None:
        """What ``group`` holds changes now. Its state is settled at the next event."""
        if group not in self._touched:
            self._touched[group] = self._clock.mark()

    def touch_all(self) -> None:
        """The caller may have changed any."""
        for group in self._held:
            self.touch(group)
        self.settle()

    def settle(self) -> None:
        """Sample those that were touched."""
        touched, self._touched = self._touched, {}
        for group, mark in touched.items():
            before, self._held[group] = self._held[group], self._measure(group)
            if before != self._held[group]:
                self._samples.append((mark, self._sums()))

    def samples(self) -> list[MemorySample]:
        """All samples, in order of time."""
        found = [
            MemorySample(self._clock.ns_of(mark), self._shards, reduced, unsharded, full, kept)
            for mark, (unsharded, kept, full, reduced) in self._samples
        ]
        return sorted(found, key=lambda sample: sample.at_ns)


class Timeline:
    """What happens to the groups of one trace.

    ``names``: the groups, and what they are called. ``phase``: the running pass; empty between passes.
    ``submitting``: the transfer that is being submitted to a stream; see recorder.py.
    """

    def __init__(self, clock: Clock, names: Mapping[ParameterGroup, str]) -> None:
        self.clock = clock
        self.names = names
        self.memory = HeldMemory(clock, names)
        self.phase = ""
        self.is_recording = True
        self.submitting: Marked | None = None
        self.marked: list[Marked] = []
        self._running: list[tuple[str, str | None]] = []  # phase and group; innermost last
        self._computing: Marked | None = None

    def add(self, row: str, name: str, begin: Any, end: Any, awaits: str | None = None) -> None:
        """Add a span of the running phase."""
        self.marked.append(Marked(row, name, self.phase, begin, end, awaits=awaits))

    def begin(self, row: str, name: str) -> Marked:
        """Begin a span of the running phase, which lasts until its ``end`` is set."""
        self.marked.append(Marked(row, name, self.phase, self.clock.mark()))
        return self.marked[-1]

    # --- the computation --------------------------------------------------------------------------

    def begin_pass(self, phase: str) -> None:
        """A forward or a backward begins; empty: it is over, and no module computes."""
        with self.interrupted():
            self._running.clear()
            self.phase = phase

    def enter(self, phase: str, name: str | None) -> None:
        """From now on a module of this group computes; None: one that is not traced."""
        with self.interrupted():
            self._running.append((phase, name))

    def leave(self, name: str | None) -> None:
        """It has run: what it runs inside of goes on."""
        with self.interrupted():
            if self._running and self._running[-1][1] == name and self._running[-1][0] != BACKWARD:
                self._running.pop()

    def backward(self, name: str | None) -> None:
        """From now on backward goes through a module of this group, until it reaches the next."""
        with self.interrupted():
            if self._running and self._running[0][0] == BACKWARD:
                del self._running[0]
            self._running.insert(0, (BACKWARD, name))

    @contextmanager
    def interrupted(self) -> Iterator[list[Any]]:
        """Inside, the computation waits or does something else; the list gets the marks at both ends."""
        ends = [self.clock.mark()]
        if self._computing is not None:
            self._computing.end = ends[0]
        try:
            yield ends
        finally:
            ends.append(self.clock.mark())
            phase, name = self._running[-1] if self._running else ("", None)
            self._computing = None if name is None else Marked(COMPUTATION, name, phase, ends[1])
            if self._computing is not None:
                self.marked.append(self._computing)

    # --- the end ----------------------------------------------------------------------------------

    def spans(self, ended: Any) -> list[Span]:
        """All spans, in order of time; ``ended`` is the mark at which the trace ended."""
        shortest = _SHORTEST_COPY_NS if self.clock.is_of_host else 0
        spans = [marked.span(self.clock, ended) for marked in self.marked]
        spans = [s for s in spans if s.ns >= shortest or s.row != COPIES]
        return sorted((s for s in spans if s.ns or s.num_bytes), key=lambda span: span.start_ns)
