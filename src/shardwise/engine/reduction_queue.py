"""The reductions of one root that are in flight: how many, how much memory, in which order they finish."""

from collections import deque

from shardwise.comm.reduction import PartReduction
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import REDUCING


class ReductionQueue:
    """Begins reductions, and waits for the oldest when there are too many."""

    def __init__(self, room: float) -> None:
        """``room``: the most bytes that gradients reduced in parts may hold."""
        self._room = room
        self._reducing: deque[ParameterGroup] = deque()
        self._shipments: deque[tuple[ParameterGroup, PartReduction]] = deque()
        self._landing: list[ParameterGroup] = []  # groups whose results are being copied to the host

    def reduce(self, group: ParameterGroup) -> None:
        """Begin to reduce all gradients of ``group`` that are left."""
        if group.gradients.state is REDUCING:
            group.gradients.finish()
        part_reductions = group.gradients.reduce()
        if group.gradients.leave_in_parts:
            self._limit(group, part_reductions)
        for earlier in self._reducing:
            if earlier.gradients.state is REDUCING:  # otherwise a nested backward has already added to it
                earlier.gradients.advance()
        self._reducing.append(group)
        while len(self._reducing) > group.max_in_flight:
            self._finish_oldest()

    def send_ready(self, group: ParameterGroup) -> None:
        """Begin to reduce the parts of ``group`` that need not wait for the rest."""
        self._limit(group, group.gradients.send_ready())

    def _limit(self, group: ParameterGroup, new: list[PartReduction]) -> None:
        """Add the ``new`` parts of ``group``; wait for the oldest while all of them hold too much memory."""
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
        """Wait for all reductions in flight."""
        while self._reducing:
            self._finish_oldest()
        self._shipments.clear()
        for group in self._landing:
            if group.gradients.state is REDUCING:
                group.gradients.finish()
        self._landing.clear()


def room_for(groups: list[ParameterGroup]) -> float:
    """How many bytes the gradients in flight may hold.

    Together with the part that backward is computing: as much as the unsharded parameters of the largest
    group, times the number of reductions that the caller allows in flight.
    """
    parts = [part.num_bytes for group in groups for bucket in group.buckets for part in bucket.parts]
    whole = [group.settings.max_reductions * group.unsharded.num_bytes for group in groups]
    return max(whole, default=0) - max(parts, default=0)
