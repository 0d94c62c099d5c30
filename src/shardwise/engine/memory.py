"""Which groups are unsharded or being unsharded, and why: one reason each."""

from collections.abc import Iterator
from enum import Enum

from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import GATHERING, PARTLY, UNSHARDED


class Reason(Enum):
    """Why a group is in memory."""

    IN_USE = "a forward or a backward uses it, or the caller has chosen to keep it"
    AHEAD = "it was prefetched"
    CALLER = "the caller has called unshard()"
    FOR_BACKWARD = "the next backward probably begins with it"
    FOR_EARLIER_BACKWARD = "the same, and another forward has begun since"
    INFERENCE = "inference() keeps it"

    __hash__ = object.__hash__  # see groups/states.py


IN_USE, AHEAD, CALLER, FOR_BACKWARD, FOR_EARLIER_BACKWARD, INFERENCE = Reason


class Memory:
    """The groups of one root that are unsharded, being unsharded, or partly kept."""

    def __init__(self) -> None:
        self._reasons: dict[ParameterGroup, Reason] = {}

    def __iter__(self) -> Iterator[ParameterGroup]:
        return iter(list(self._reasons))

    def reason(self, group: ParameterGroup) -> Reason | None:
        """Why ``group`` is in memory; None if it is not."""
        return self._reasons.get(group)

    def hold(self, group: ParameterGroup, reason: Reason) -> None:
        """Keep ``group`` for ``reason``, whatever it was kept for before."""
        self._reasons[group] = reason

    def hold_at_least(self, group: ParameterGroup) -> None:
        """``group`` is about to be unsharded: note that it is in use, unless it has a reason already."""
        self._reasons.setdefault(group, IN_USE)

    def held_for(self, *reasons: Reason) -> list[ParameterGroup]:
        """The groups that are in memory for one of ``reasons``."""
        return [group for group, reason in self._reasons.items() if reason in reasons]

    def release(self, group: ParameterGroup) -> None:
        """Reshard ``group``, after waiting for an all-gather in flight, unless ``inference()`` keeps it."""
        if self._reasons.get(group) is INFERENCE:
            return
        self._reasons.pop(group, None)
        unsharded = group.unsharded
        if unsharded.state is GATHERING:
            unsharded.wait()
        if unsharded.state in (UNSHARDED, PARTLY):
            unsharded.reshard()

    def abandon(self) -> None:
        """After a failure: reshard everything, whatever state it is in."""
        for group in self:
            group.unsharded.abandon()
        self._reasons.clear()
