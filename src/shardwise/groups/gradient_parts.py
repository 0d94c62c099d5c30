"""When the gradients of a group leave: large ones before all are there, in an order common to all ranks.

Back ends match collectives by the order of their calls, and ranks may come by their gradients in different
orders. So a part leaves when all of its gradients are in *and* every part before it has left:

    parts            [ down ]  [ up ]  [ proj, qkv ]  [ biases and norms ]
    gradients come   down: leaves.  proj: waits.  up: leaves.  qkv: proj and qkv leave.  The rest: at the end.

Where gradients come in another order than that of the parts, they leave later: at the end, as all gradients
of small groups do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.comm.reduce_scatter import GradientPart


@dataclass(frozen=True)
class Departure:
    """A part of the gradients of bucket number ``bucket``; ``indices`` count the group's parameters."""

    bucket: int
    part: GradientPart
    indices: tuple[int, ...]


class Departures:
    """The parts of one group's gradients, in order, and which of them have left in the running backward."""

    def __init__(
        self, parts_of_buckets: Sequence[tuple[int, Sequence[GradientPart]]], trainable: Iterable[int]
    ) -> None:
        """``parts_of_buckets``: the index of each bucket's first parameter, and its parts."""
        departures = [
            Departure(number, part, tuple(first + index for index in part.indices))
            for number, (first, parts) in enumerate(parts_of_buckets)
            for part in parts
        ]
        # Modules registered last come first, whatever bucket they are in; packed parts come last.
        self._all = sorted(
            departures, key=lambda d: (bool(d.part.packed_segments), -max(d.indices, default=0))
        )
        self._trainable = frozenset(trainable)
        self._place_of = {index: place for place, d in enumerate(self._all) for index in d.indices}
        self.begin()

    def begin(self, arrived: Iterable[int] = ()) -> None:
        """Nothing has left; the gradients at ``arrived`` are there."""
        there = set(arrived)
        self._missing = [self._trainable.intersection(d.indices) - there for d in self._all]
        self._next = 0
        self.gone: set[int] = set()
        """Indices of parameters whose gradients have left."""

    def arrive(self, index: int) -> bool:
        """The gradient of one parameter is in. True if a part may leave."""
        place = self._place_of[index]
        self._missing[place] = self._missing[place] - {index}
        return self._next < len(self._all) and not self._missing[self._next]

    def leave(self) -> Iterator[Departure]:
        """Those that may leave now."""
        while self._next < len(self._all) and not self._missing[self._next]:
            yield self._go()

    def rest(self) -> Iterator[Departure]:
        """All that have not left, complete or not."""
        while self._next < len(self._all):
            yield self._go()

    def _go(self) -> Departure:
        departure = self._all[self._next]
        self._next += 1
        self.gone.update(departure.indices)
        return departure
