"""Which gradients of a group are reduced before all have arrived, in an order common to all ranks.

Back ends match collectives by the order of their calls, but gradients may arrive in different orders on
different ranks. So a part is sent (its reduction begins) when all of its gradients have arrived *and* every
part before it has been sent:

    parts               [ down ]  [ up ]  [ proj, qkv ]  [ biases and norms ]
    gradients arrive    down: sent.  proj: waits.  up: sent.  qkv: proj and qkv are sent.
                        The rest: at the end.

Gradients that arrive in a different order are sent later, at the latest at the end, like all gradients of
small groups.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.comm.reduction import GradientPart


@dataclass(frozen=True)
class QueuedPart:
    """A part of the gradients of bucket number ``bucket``; ``indices`` count the parameters of the group."""

    bucket: int
    part: GradientPart
    indices: tuple[int, ...]


class PartQueue:
    """The parts of one group's gradients, in order, and which the running backward has sent."""

    def __init__(
        self, parts_of_buckets: Sequence[tuple[int, Sequence[GradientPart]]], trainable: Iterable[int]
    ) -> None:
        """``parts_of_buckets``: for each bucket, the index of its first parameter and its parts."""
        parts = [
            QueuedPart(number, part, tuple(first + index for index in part.indices))
            for number, (first, own) in enumerate(parts_of_buckets)
            for part in own
        ]
        # Parameters registered last come first, in whichever bucket; packed parts come last.
        self._all = sorted(parts, key=lambda p: (bool(p.part.packed_segments), -max(p.indices, default=0)))
        self._trainable = frozenset(trainable)
        self._place_of = {index: place for place, part in enumerate(self._all) for index in part.indices}
        self.begin()

    def begin(self, arrived: Iterable[int] = ()) -> None:
        """Start a backward: nothing has been sent, and only the gradients at ``arrived`` exist."""
        there = set(arrived)
        self._missing = [set(part.indices) & self._trainable - there for part in self._all]
        self._next = 0
        self.sent: set[int] = set()
        """Indices of parameters whose gradients have been sent."""

    def arrive(self, index: int) -> bool:
        """The gradient of one parameter has arrived. True if a part may be sent."""
        place = self._place_of[index]
        self._missing[place].discard(index)
        return self._next < len(self._all) and not self._missing[self._next]

    def take_ready(self) -> Iterator[QueuedPart]:
        """The parts that may be sent now. They count as sent."""
        while self._next < len(self._all) and not self._missing[self._next]:
            yield self._take()

    def take_rest(self) -> Iterator[QueuedPart]:
        """All parts that have not been sent, complete or not. They count as sent."""
        while self._next < len(self._all):
            yield self._take()

    def _take(self) -> QueuedPart:
        part = self._all[self._next]
        self._next += 1
        self.sent.update(part.indices)
        return part
