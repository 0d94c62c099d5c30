"""The order in which groups are expected to be used, and what to prefetch by it."""

from shardwise.groups.group import ParameterGroup


class Order:
    """A planned sequence of groups, and how far it has been followed."""

    def __init__(self) -> None:
        self._planned: list[ParameterGroup] = []
        self._cursor = 0
        self._is_followed = False

    def plan(self, sequence: list[ParameterGroup]) -> None:
        """Expect ``sequence`` next."""
        self._planned = sequence
        self.rewind()

    def rewind(self) -> None:
        """Expect the planned sequence again, from its beginning."""
        self._cursor = 0
        self._is_followed = True

    def enter(self, group: ParameterGroup) -> None:
        """``group`` is used now: advance, or stop following if another was planned."""
        if not self._is_followed:
            return
        if self._cursor < len(self._planned) and self._planned[self._cursor] is group:
            self._cursor += 1
        elif self._cursor == 0 or self._planned[self._cursor - 1] is not group:
            self._is_followed = False

    def resume_at(self, group: ParameterGroup) -> None:
        """If the plan is not being followed, follow it again from the next place of ``group`` in it."""
        if not self._is_followed:
            places = [i for i, g in enumerate(self._planned) if g is group]
            if places:
                later = [i for i in places if i >= self._cursor]
                self._cursor = (later or places)[0] + 1
                self._is_followed = True

    def upcoming(self, count: int) -> list[ParameterGroup]:
        """The next ``count`` groups of the plan; none if it is not being followed."""
        return self._planned[self._cursor : self._cursor + count] if self._is_followed else []
