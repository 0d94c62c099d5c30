"""Order is recorded, then replayed: which group comes next, and with which one backward begins."""

from collections.abc import Sequence

import torch

from shardwise.runtime.disagreement import explain_failure
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


class Turn:
    """The group that backward begins with, root aside: if forward freed it, it would be gathered at once.

    Ranks may use groups in different orders, but have to gather the same ones. So they compare, once, how
    their first forward with gradients went, and stay with that; where they differ, ``group`` stays None.
    If later forwards end otherwise, this group is in memory for longer than it needs be, no more.
    """

    _UNKNOWN, _NONE = -2, -1

    def __init__(self) -> None:
        self.group: Group | None = None
        self._has_begun = False
        self._is_settled = False
        self._place = self._UNKNOWN  # of this rank's candidate among all groups

    def begin_forward(self, groups: Sequence[Group], name: str) -> None:
        """One with gradients is about to run, of the root ``name``.

        Collective over all that gather ``groups``, from the second on, until that before failed on no rank.
        """
        if self._is_settled:
            return
        if not self._has_begun:
            self._has_begun = True
            return
        is_unknown = self._place == self._UNKNOWN
        ends = torch.tensor([self._place, -self._place, is_unknown], device=groups[0].device)
        axes = axes_of(groups)
        try:
            highest_over(ends, axes)
        except RuntimeError as error:
            raise explain_failure(error, "first comparison", name, axes) from error
        highest, minus_lowest, somebody_failed = ends.tolist()
        if not somebody_failed:
            self._is_settled = True
            if highest == -minus_lowest != self._NONE:
                self.group = groups[highest]

    def end_forward(self, groups: Sequence[Group], root: Group | None, backward: Sequence[Group]) -> None:
        """One has ended well, and backward will go in this order."""
        if not self._is_settled:
            inner = [group for group in backward if group is not root]
            # One that runs several times would be kept from the first of them on.
            is_one = bool(inner) and inner.count(inner[0]) == 1
            self._place = groups.index(inner[0]) if is_one else self._NONE
