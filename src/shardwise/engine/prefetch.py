"""Unsharding ahead of use: the expected order of groups, and which groups come next."""

from collections.abc import Sequence

from shardwise.engine.unsharded_groups import AHEAD, UnshardedGroups
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import PARTLY, SHARDED


class Order:
    """A planned sequence of groups, and how far it has been followed."""

    def __init__(self) -> None:
        self.planned: list[ParameterGroup] = []
        """Set at the end of each pass, empty before the first; the next pass begins with ``rewind``."""
        self.cursor = 0
        self.is_followed = False
        """Whether groups have followed the plan so far."""

    def rewind(self) -> None:
        """Expect the planned sequence again, from its beginning."""
        self.cursor = 0
        self.is_followed = True

    def enter(self, group: ParameterGroup) -> Sequence[ParameterGroup]:
        """``group`` is used now: advance to it. Returns the groups that were planned before it.

        If it does not come later in the plan, the plan is no longer followed.
        """
        if not self.is_followed:
            return ()
        start = self.cursor
        if start < len(self.planned) and self.planned[start] is group:
            self.cursor += 1
        elif start == 0 or self.planned[start - 1] is not group:
            if group in self.planned[start:]:
                self.cursor = self.planned.index(group, start) + 1
                return self.planned[start : self.cursor - 1]
            self.is_followed = False
        return ()

    def resume_at(self, group: ParameterGroup) -> None:
        """If the plan is not being followed, follow it again from the next occurrence of ``group``."""
        if not self.is_followed:
            places = [i for i, g in enumerate(self.planned) if g is group]
            if places:
                later = [i for i in places if i >= self.cursor]
                self.cursor = (later or places)[0] + 1
                self.is_followed = True

    def upcoming(self, count: int) -> list[ParameterGroup]:
        """The next ``count`` groups of the plan; none if it is not being followed."""
        return self.planned[self.cursor : self.cursor + count] if self.is_followed else []


class Prefetch:
    """Chooses the groups to unshard ahead: the caller's choice, or the next in order."""

    def __init__(self, held: UnshardedGroups) -> None:
        self._held = held
        self.forward_order = Order()
        self.backward_order = Order()

    def reshard_skipped(self, skipped: Sequence[ParameterGroup], group: ParameterGroup) -> None:
        """Reshard prefetched groups that ``group`` has ``skipped``, if others are to be prefetched."""
        if self.forward_order.upcoming(group.policy.prefetch):
            for each in skipped:
                if each is not group and self._held.reasons.get(each) is AHEAD:
                    self._held.reshard(each)

    def coming(
        self, group: ParameterGroup, chosen: Sequence[ParameterGroup] | None, order: Order
    ) -> list[ParameterGroup]:
        """The groups to unshard ahead after ``group``, within the limit on groups in memory.

        ``chosen``: the caller's choice; None: the next in ``order``.
        """
        policy, found = group.policy, list[ParameterGroup]()
        if chosen is None:  # order.upcoming, inlined to save a call
            at = order.cursor
            chosen = order.planned[at : at + policy.prefetch] if order.is_followed else ()
        for each in chosen:
            if each.unsharded.state is SHARDED or each.unsharded.state is PARTLY:
                found.append(each)
        if found and policy.max_prefetched is not None:
            num_ahead = list(self._held.reasons.values()).count(AHEAD)
            del found[max(0, policy.max_prefetched - num_ahead) :]
        return found
