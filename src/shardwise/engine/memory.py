"""Which groups are unsharded or being unsharded, and why: one reason each."""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from shardwise.engine.calls import Call
from shardwise.engine.feature import Features
from shardwise.groups.group import ParameterGroup, axes_of
from shardwise.groups.states import GATHERING, PARTLY, UNSHARDED
from shardwise.layout.mesh import highest_over


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

    def __init__(self, features: Features) -> None:
        self._features = features
        self._reasons: dict[ParameterGroup, Reason] = {}
        # Groups that are unsharded and freed with another, and are part of no order; see optional_blocks.py.
        self.leads: Mapping[ParameterGroup, Sequence[ParameterGroup]] = {}
        self.led: frozenset[ParameterGroup] = frozenset()

    # --- reasons ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ParameterGroup]:
        return iter(list(self._reasons))

    def reason(self, group: ParameterGroup) -> Reason | None:
        """Why ``group`` is in memory; None if it is not."""
        return self._reasons.get(group)

    def hold(self, group: ParameterGroup, reason: Reason) -> None:
        """Keep ``group`` for ``reason``, whatever it was kept for before."""
        self._reasons[group] = reason

    def held_for(self, *reasons: Reason) -> list[ParameterGroup]:
        """The groups that are in memory for one of ``reasons``."""
        return [group for group, reason in self._reasons.items() if reason in reasons]

    # --- unshard ----------------------------------------------------------------------------------

    def unshard(self, group: ParameterGroup) -> None:
        """Begin to unshard ``group``, if it is not yet."""
        if self._reasons.get(group) is FOR_EARLIER_BACKWARD:
            self.release(group)  # not before, since all ranks unshard it now
        for unsharding in self._features.unsharding:
            unsharding(group)
        group.unsharded.unshard()
        self._reasons.setdefault(group, IN_USE)

    def unshard_again(self, group: ParameterGroup) -> None:
        """For backward, what forward has unsharded before."""
        group.unsharded.unshard_again()
        self._reasons.setdefault(group, IN_USE)

    def unshard_led(self, group: ParameterGroup) -> None:
        """Begin to unshard the groups that go with ``group``."""
        for led in self.leads.get(group, ()):
            self.unshard(led)

    # --- reshard ----------------------------------------------------------------------------------

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

    def release_stale(self, groups: Sequence[ParameterGroup], optimizer: Any) -> None:
        """Of ``groups``, reshard those that were kept unsharded while shards were changed.

        Changed on any rank: the ranks agree, since all of them unshard or none. ``optimizer``: the event
        after which it has written the shards, if the caller has given one.
        """
        kept = [group for group in groups if group.unsharded.state is UNSHARDED]
        if not kept:
            return
        if optimizer is not None:
            kept[0].streams.make_compute_wait_for(optimizer)  # it is about to read the shards
        flags = torch.tensor([g.shards.is_stale() for g in kept], dtype=torch.int32, device=kept[0].device)
        highest_over(flags, axes_of(kept))
        for group, is_stale in zip(kept, flags.tolist(), strict=True):
            if is_stale:
                self.release(group)
            else:
                group.unsharded.versions.follow()

    def abandon(self) -> None:
        """After a failure: reshard everything, whatever state it is in."""
        for group in self:
            group.unsharded.abandon()
        self._reasons.clear()

    def hide_kept(self) -> None:
        """Between passes modules show their shards, whatever is kept in memory, but for ``inference()``."""
        for group, reason in self._reasons.items():
            if group.unsharded.state is UNSHARDED and reason not in (CALLER, INFERENCE):
                group.unsharded.hide()

    def freed_by_exit(self, call: Call) -> Sequence[ParameterGroup]:
        """The groups whose unsharded parameters may go when ``call`` is over, or before the next one."""
        if call.is_outermost:
            return tuple(self._reasons)
        return (call.group, *self.leads.get(call.group, ()))
