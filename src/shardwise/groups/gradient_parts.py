"""Which gradients of a group are reduced before all have arrived, in an order common to all ranks.

Back ends match collectives by the order of their calls, and gradients may arrive in different orders on
different ranks. So a part departs (its reduction begins) when all of its gradients have arrived *and* every
part before it has departed:

    parts               [ down ]  [ up ]  [ proj, qkv ]  [ biases and norms ]
    gradients arrive    down: departs.  proj: waits.  up: departs.  qkv: proj and qkv depart.
                        The rest: at the end.

Gradients that arrive in another order than that of the parts depart later, at the latest at the end, as all
gradients of small groups do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.comm.reduce_scatter import GradientPart


@dataclass(frozen=True)
class Departure:
    """A part of the gradients of bucket number ``bucket``; ``indices`` count the parameters of the group."""

    bucket: int
    part: GradientPart
    indices: tuple[int, ...]


class Departures:
    """The parts of one group's gradients, in order, and which have departed in the running backward."""

    def __init__(
        self, parts_of_buckets: Sequence[tuple[int, Sequence[GradientPart]]], trainable: Iterable[int]
    ) -> None:
        """``parts_of_buckets``: for each bucket, the index of its first parameter and its parts."""
        departures = [
            Departure(number, part, tuple(first + index for index in part.indices))
            for number, (first, parts) in enumerate(parts_of_buckets)
            for part in parts
        ]
        # Parameters registered last come first, in whichever bucket; packed parts come last.
        self._all = sorted(
            departures, key=lambda d: (bool(d.part.packed_segments), -max(d.indices, default=0))
        )
        self._trainable = frozenset(trainable)
        self._place_of = {index: place for place, d in enumerate(self._all) for index in d.indices}
        self.begin()

    def begin(self, arrived: Iterable[int] = ()) -> None:
        """Start a backward: nothing has departed, and only the gradients at ``arrived`` are there."""
        there = set(arrived)
        self._missing = [self._trainable.intersection(d.indices) - there for d in self._all]
        self._next = 0
        self.gone: set[int] = set()
        """Indices of parameters whose gradients have departed."""

    def arrive(self, index: int) -> bool:
        """The gradient of one parameter has arrived. True if a part may depart."""
        place = self._place_of[index]
        self._missing[place] = self._missing[place] - {index}
        return self._next < len(self._all) and not self._missing[self._next]

    def leave(self) -> Iterator[Departure]:
        """The parts that may depart now, which then have."""
        while self._next < len(self._all) and not self._missing[self._next]:
            yield self._go()

    def rest(self) -> Iterator[Departure]:
        """All parts that have not departed, complete or not."""
        while self._next < len(self._all):
            yield self._go()

    def _go(self) -> Departure:
        departure = self._all[self._next]
        self._next += 1
        self.gone.update(departure.indices)
        return departure
