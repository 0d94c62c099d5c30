"""What happens while a trace records, in the order in which it happens; marks become times at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwise.tracing.clocks import Clock
from shardwise.tracing.records import BACKWARD, COMPUTATION, COPIES, Span

_SHORTEST_COPY_NS = 20_000
"""Copies in the computing thread that take less are part of the computation."""


@dataclass(slots=True)
class Marked:
    """A span whose ends are marks of a clock."""

    row: str
    name: str
    phase: str
    begin: Any
    end: Any = None
    num_bytes: int = 0
    awaits: str | None = None

    def span(self, clock: Clock, ended: Any) -> Span:
        """With times; what is still under way ends at the mark ``ended``."""
        start = clock.ns_of(self.begin)
        end = max(start, clock.ns_of(ended if self.end is None else self.end))
        return Span(self.row, self.name, self.phase, start, end, self.num_bytes, self.awaits)


class Timeline:
    """The spans of one trace. ``phase``: the running pass; empty between passes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.phase = ""
        self.is_recording = True
        self._marked: list[Marked] = []
        self._running: list[tuple[str, str | None]] = []  # phase and group; innermost last
        self._computing: Marked | None = None

    def add(self, row: str, name: str, begin: Any, end: Any = None, **more: Any) -> Marked:
        """Add a span of the running phase."""
        marked = Marked(row, name, self.phase, begin, end, **more)
        self._marked.append(marked)
        return marked

    # --- the computation --------------------------------------------------------------------------

    def enter(self, phase: str, name: str | None) -> None:
        """From now on a module of this group computes; None: one that is not traced."""
        self._stop(mark := self.clock.mark())
        self._running.append((phase, name))
        self._go_on(mark)

    def leave(self, name: str | None) -> None:
        """It has run: what it runs inside of goes on."""
        self._stop(mark := self.clock.mark())
        if self._running and self._running[-1][1] == name and self._running[-1][0] != BACKWARD:
            self._running.pop()
        self._go_on(mark)

    def backward(self, name: str | None) -> None:
        """From now on backward goes through a module of this group, until it reaches the next."""
        self._stop(mark := self.clock.mark())
        if self._running and self._running[0][0] == BACKWARD:
            del self._running[0]
        self._running.insert(0, (BACKWARD, name))
        self._go_on(mark)

    def begin_pass(self, phase: str) -> None:
        """A forward or a backward begins."""
        self.end_pass()
        self.phase = phase

    def end_pass(self) -> None:
        """It is over: no module computes."""
        self._stop(self.clock.mark())
        self._running.clear()
        self.phase = ""

    @contextmanager
    def interrupted(self) -> Iterator[list[Any]]:
        """Inside, the computation waits or does something else; the list gets the marks at both ends."""
        ends = [self.clock.mark()]
        self._stop(ends[0])
        try:
            yield ends
        finally:
            ends.append(self.clock.mark())
            self._go_on(ends[1])

    def _stop(self, mark: Any) -> None:
        if self._computing is not None:
            self._computing.end = mark
            self._computing = None

    def _go_on(self, mark: Any) -> None:
        phase, name = self._running[-1] if self._running else ("", None)
        if name is not None:
            self._computing = Marked(COMPUTATION, name, phase, mark)
            self._marked.append(self._computing)

    # --- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Record nothing from now on."""
        self.is_recording = False

    def spans(self, ended: Any) -> list[Span]:
        """All spans, in order of time; ``ended`` is the mark at which the trace ended."""
        self.clock.finish()
        spans = [marked.span(self.clock, ended) for marked in self._marked]
        is_host = self.clock.is_of_host
        kept = [
            span for span in spans if not (is_host and span.row == COPIES and span.ns < _SHORTEST_COPY_NS)
        ]
        return sorted((span for span in kept if span.ns or span.num_bytes), key=lambda span: span.start_ns)
