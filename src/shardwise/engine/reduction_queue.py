"""The reductions in flight of one root: how many, how much memory, and in which order they end."""

from collections import deque

from shardwise.comm.reduction import PartReduction
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import REDUCING


class ReductionQueue:
    """Begins reductions and waits for the oldest where they become too many."""

    def __init__(self, room: float) -> None:
        """``room``: how many bytes gradients that have left in parts may hold."""
        self._room = room
        self._reducing: deque[ParameterGroup] = deque()
        self._shipments: deque[tuple[ParameterGroup, PartReduction]] = deque()
        self._landing: list[ParameterGroup] = []  # whose results are on their way to the host

    def reduce(self, group: ParameterGroup) -> None:
        """Begin to reduce all gradients of ``group`` that are there."""
        if group.gradients.state is REDUCING:
            group.gradients.finish()
        part_reductions = group.gradients.reduce()
        if group.gradients.leave_in_parts:
            self._limit(group, part_reductions)
        for earlier in self._reducing:
            if earlier.gradients.state is REDUCING:  # else a nested backward has begun to add to it
                earlier.gradients.advance()
        self._reducing.append(group)
        while len(self._reducing) > group.max_in_flight:
            self._finish_oldest()

    def send_ready(self, group: ParameterGroup) -> None:
        """Begin to reduce those that need not wait for the rest of ``group``."""
        self._limit(group, group.gradients.send_ready())

    def _limit(self, group: ParameterGroup, new: list[PartReduction]) -> None:
        """Wait for the oldest where the new ones, of ``group``, would fill too much memory."""
        self._shipments += [(group, part_reduction) for part_reduction in new]
        held = sum(part_reduction.num_bytes for _, part_reduction in self._shipments)
        while held > self._room and len(self._shipments) > 1:
            sender, oldest = self._shipments.popleft()
            held -= oldest.num_bytes
            sender.gradients.release_shipment(oldest)

    def _finish_oldest(self) -> None:
        group = self._reducing.popleft()
        gradients = group.gradients
        if gradients.state is not REDUCING:
            return
        if gradients.land_on_host:
            gradients.release()
            self._landing.append(group)
        else:
            gradients.finish()

    def finish(self) -> None:
        """Wait for all of them."""
        while self._reducing:
            self._finish_oldest()
        self._shipments.clear()
        for group in self._landing:
            if group.gradients.state is REDUCING:
                group.gradients.finish()
        self._landing.clear()


def room_for(groups: list[ParameterGroup]) -> float:
    """How many bytes gradients in flight may hold: with the part that is coming into being, as much as the
    unsharded parameters of the largest group, or of as many as the caller has allowed in flight."""
    parts = [part.num_bytes for group in groups for bucket in group.buckets for part in bucket.parts]
    whole = [group.settings.max_reductions * group.unsharded.num_bytes for group in groups]
    return max(whole, default=0) - max(parts, default=0)
