"""Unsharding ahead of use: in which order groups are expected, and which of them come next."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.engine.memory import AHEAD
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import PARTLY, SHARDED

if TYPE_CHECKING:
    from shardwise.engine.root import Root


class Order:
    """A planned sequence of groups, and how far it has been followed."""

    def __init__(self) -> None:
        self._planned: list[ParameterGroup] = []
        self._cursor = 0
        self._is_followed = False

    @property
    def is_planned(self) -> bool:
        """Whether a pass before has shown what comes next."""
        return bool(self._planned)

    def plan(self, sequence: list[ParameterGroup]) -> None:
        """Expect ``sequence`` next."""
        self._planned = sequence
        self.rewind()

    def rewind(self) -> None:
        """Expect the planned sequence again, from its beginning."""
        self._cursor = 0
        self._is_followed = True

    def enter(self, group: ParameterGroup) -> Sequence[ParameterGroup]:
        """``group`` is used now: advance to it. Returns the groups that were planned before it.

        If it does not come any more, the plan is not followed from now on.
        """
        if not self._is_followed:
            return ()
        start = self._cursor
        if start < len(self._planned) and self._planned[start] is group:
            self._cursor += 1
        elif start == 0 or self._planned[start - 1] is not group:
            if group in self._planned[start:]:
                self._cursor = self._planned.index(group, start) + 1
                return self._planned[start : self._cursor - 1]
            self._is_followed = False
        return ()

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


class Prefetch:
    """Unshards groups of ``root`` ahead: those that the caller has chosen, or the next in order."""

    def __init__(self, root: "Root") -> None:
        self._root = root
        self.forward_order = Order()
        self.backward_order = Order()

    def enter_in_forward(self, group: ParameterGroup) -> None:
        """``group`` is used now. Of those left out, what was unsharded ahead gives way to what comes next."""
        memory, skipped = self._root.memory, self.forward_order.enter(group)
        if not skipped or not self.forward_order.upcoming(group.policy.prefetch):
            return
        for each in skipped:
            if each is not group and memory.reason(each) is AHEAD:
                memory.release(each)

    def in_forward(self, group: ParameterGroup) -> None:
        """Begin to unshard what comes after ``group`` in forward."""
        memory = self._root.memory
        for ahead in self._coming(group, group.settings.forward_prefetch, self.forward_order):
            memory.unshard(ahead)
            memory.hold(ahead, AHEAD)

    def in_backward(self, group: ParameterGroup, chosen: Sequence[ParameterGroup] | None) -> None:
        """Begin to unshard what comes after ``group`` in backward: ``chosen``, or by the recorded order."""
        for ahead in self._coming(group, chosen, self.backward_order):
            if ahead.settings.unshard_in_backward:
                ahead.unsharded.unshard_ahead()
                self._root.memory.hold(ahead, AHEAD)

    def _coming(
        self, group: ParameterGroup, chosen: Sequence[ParameterGroup] | None, order: Order
    ) -> Iterator[ParameterGroup]:
        """The sharded ones of those to be used after ``group``, while there may be more in memory."""
        limit, memory = group.policy.max_prefetched, self._root.memory
        for ahead in order.upcoming(group.policy.prefetch) if chosen is None else chosen:
            if chosen is not None and ahead not in self._root.groups:
                raise RuntimeError(
                    f"{group.name}: it was told to prefetch {ahead.name}, which is not part of the same "
                    "sharded model, so that the two share no root. Call fully_shard on the module around "
                    "both, or choose modules of this model."
                )
            if limit is not None and len(memory.held_for(AHEAD)) >= limit:
                break
            if ahead.unsharded.state in (SHARDED, PARTLY):
                yield ahead
