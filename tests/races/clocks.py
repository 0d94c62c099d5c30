"""Vector clocks: what each lane knows to be over in every other lane.

A lane does one thing after another: the host, a stream, the threads of a process group. Each counts what it has done.
It knows how far another lane was when it last waited for it; what lies behind that may still be in progress.

    all-gather   1 2 3 (event)          the computation waits for the event: it knows 3 of the all-gathers
    computing    1 2 ........ 3         its third operation may use what they wrote
"""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(eq=False)
class Lane:
    """Something that does one thing after another. Two are equal only if they are the same."""

    name: str

    def __str__(self) -> str:
        return self.name


Reached = dict[Lane, int]
"""How far each lane is known to be."""


class Clocks:
    """How far each lane knows every lane to be."""

    def __init__(self) -> None:
        self._known: dict[Lane, Reached] = defaultdict(dict)

    def advance(self, lane: Lane) -> int:
        """`lane` does one more thing; returns its number."""
        known = self._known[lane]
        known[lane] = known.get(lane, 0) + 1
        return known[lane]

    def snapshot(self, lane: Lane) -> Reached:
        return dict(self._known[lane])

    def join(self, lane: Lane, reached: Reached) -> None:
        """What `lane` is given from now on begins after `reached`."""
        known = self._known[lane]
        for other, time in reached.items():
            if time > known.get(other, 0):
                known[other] = time

    def wait(self, lane: Lane, other: Lane) -> None:
        """What `lane` is given from now on begins after all that `other` was given."""
        self.join(lane, self._known[other])

    def lanes(self) -> list[Lane]:
        """All that have done something or waited."""
        return list(self._known)

    def is_over(self, other: Lane, time: int, before: Lane) -> bool:
        """Whether what `other` did at `time` is over before the next thing that `before` does."""
        return other is before or time <= self._known[before].get(other, 0)
