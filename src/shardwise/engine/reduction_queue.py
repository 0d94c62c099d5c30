"""The reductions of one root that are in flight: how many, how much memory, in which order they finish.

A reduction ends in stages, and each stage frees its own memory. With replicas, and shards in host memory::

    groups        reduced now   before          the one before    earlier
    over shards   in flight     over: its unsharded gradients are freed
    replicas                    in flight       over
    to the host                                 in flight         over: sums on the device are freed
"""

from collections import deque
from itertools import islice

from shardwise.comm.reduction import PartReduction
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import REDUCING


class ReductionQueue:
    """Begins reductions, and waits for the oldest when there are too many."""

    def __init__(self, room: float) -> None:
        """``room``: the most bytes that gradients reduced in parts may hold."""
        self.room = room
        self._reducing: deque[ParameterGroup] = deque()
        self._parts: deque[tuple[ParameterGroup, PartReduction]] = deque()
        self._copying_to_host: list[ParameterGroup] = []  # groups whose results are being copied to the host

    def reduce(self, group: ParameterGroup) -> None:
        """Begin to reduce all gradients of ``group`` that are left."""
        if group.gradients.state is REDUCING:
            group.gradients.finish()
        part_reductions = group.gradients.reduce()
        if group.gradients.are_reduced_in_parts:
            self._limit(group, part_reductions)
        for earlier in self._reducing:
            if earlier.gradients.state is REDUCING:  # otherwise a nested backward has already added to it
                earlier.reductions.advance()
        self._reducing.append(group)
        while len(self._reducing) > group.max_in_flight:
            self._finish_oldest()
        over_replicas = max(0, len(self._reducing) - group.settings.max_reductions)
        for earlier in islice(self._reducing, over_replicas):
            if earlier.gradients.state is REDUCING:
                earlier.reductions.release_unsharded()

    def send_ready(self, group: ParameterGroup) -> None:
        """Begin to reduce the parts of ``group`` that need not wait for the rest."""
        self._limit(group, group.gradients.send_ready())

    def _limit(self, group: ParameterGroup, new: list[PartReduction]) -> None:
        """Add the ``new`` parts of ``group``; wait for the oldest while all of them hold too much memory."""
        self._parts += [(group, part_reduction) for part_reduction in new]
        held = sum(part_reduction.num_bytes for _, part_reduction in self._parts)
        while held > self.room and len(self._parts) > 1:
            oldest_group, oldest = self._parts.popleft()
            held -= oldest.num_bytes
            oldest_group.reductions.release_part(oldest)

    def _finish_oldest(self) -> None:
        group = self._reducing.popleft()
        if group.gradients.state is not REDUCING:
            return
        if group.reductions.arrive_on_host:
            group.reductions.release_unsharded()
            for earlier in self._copying_to_host[-1:]:
                if earlier.gradients.state is REDUCING:
                    earlier.reductions.release()  # the copy has had the time of a group's backward
            self._copying_to_host.append(group)
        else:
            group.gradients.finish()

    def finish(self) -> None:
        """Wait for all reductions in flight."""
        while self._reducing:
            self._finish_oldest()
        self._parts.clear()
        for group in self._copying_to_host:
            if group.gradients.state is REDUCING:
                group.gradients.finish()
        self._copying_to_host.clear()


def room_for(groups: list[ParameterGroup]) -> float:
    """How many bytes the gradients in flight may hold, where groups are reduced in parts.

    Together with the part that backward is computing: as much as all gradients of the largest such group,
    times the number of reductions that the caller allows in flight. Both are counted in the dtype of the
    reduction. Groups reduced as a whole do not count: they are limited by number.
    """
    rooms = [0]
    for group in groups:
        parts = [part.num_bytes for bucket in group.buckets for part in bucket.reduction.parts]
        if len(parts) > len(group.buckets):
            rooms.append(group.settings.max_reductions * sum(parts) - max(parts))
    return max(rooms)
