"""Order is recorded, then replayed: which group comes next, and with which one backward begins."""

from collections.abc import Sequence

import torch

from shardwise.runtime.group import Group, axes_of
from shardwise.runtime.mesh import highest_over


class Order:
    """A planned sequence of groups and how far it was followed."""

    def __init__(self) -> None:
        self._planned: list[Group] = []
        self._cursor = 0
        self._is_followed = False

    def plan(self, sequence: list[Group]) -> None:
        """Expect ``sequence`` next."""
        self._planned = sequence
        self.rewind()

    def rewind(self) -> None:
        """Expect the planned sequence from its beginning."""
        self._cursor = 0
        self._is_followed = True

    def enter(self, group: Group) -> None:
        """Note that ``group`` comes up now; stop following if another was planned."""
        if not self._is_followed:
            return
        if self._cursor < len(self._planned) and self._planned[self._cursor] is group:
            self._cursor += 1
        elif self._cursor == 0 or self._planned[self._cursor - 1] is not group:
            self._is_followed = False

    def find(self, group: Group) -> None:
        """Go on from the next place of ``group`` in the plan, wherever that is."""
        if not self._is_followed:
            places = [i for i, g in enumerate(self._planned) if g is group]
            if places:
                later = [i for i in places if i >= self._cursor]
                self._cursor = (later or places)[0] + 1
                self._is_followed = True

    def upcoming(self, count: int) -> list[Group]:
        """The next groups of the plan; none if it is not being followed."""
        return self._planned[self._cursor : self._cursor + count] if self._is_followed else []

    @property
    def planned(self) -> Sequence[Group]:
        """All groups of the plan; none before the first."""
        return self._planned


class Turn:
    """The group that backward begins with, root aside: if forward freed it, it would be gathered at once.

    Ranks may use groups in different orders, but have to gather the same ones. So they compare, once, how
    their first forward with gradients went, and stay with that; where they differ, ``group`` stays None.
    If later forwards end otherwise, this group is in memory for longer than it needs be, no more.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        self._num_forwards = 0

    def begin_forward(self, groups: Sequence[Group], root: Group | None, backward: Order) -> None:
        """One with gradients is about to run; collective over all that gather ``groups`` before the second.

        ``backward`` is the order that the one before has led to.
        """
        self._num_forwards += 1
        if self._num_forwards != 2:
            return
        inner = [group for group in backward.planned if group is not root]
        # One that runs several times would be kept from the first of them on.
        first = inner[0] if inner and inner.count(inner[0]) == 1 else None
        place = -1 if first is None else groups.index(first)
        ends = torch.tensor([place, -place], device=groups[0].device)
        highest_over(ends, axes_of(groups))
        highest, minus_lowest = ends.tolist()
        self.group = first if highest == -minus_lowest else None
