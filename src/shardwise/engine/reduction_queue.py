"""The reductions of one root in flight: their number, memory and the order in which they finish.

A reduction ends in stages, and each stage frees its memory. With replicas, and shards in host memory::

    groups        reduced now   before          the one before    earlier
    over shards   in flight     over: its unsharded gradients are freed
    replicas                    in flight       over
    to the host                                 in flight         over: sums on the device are freed

With ``finalize_backward`` the caller, instead of autograd, decides when a backward ends.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from shardwise.comm.reduction import Reduction
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import REDUCING


class ReductionQueue:
    """Begins reductions, and waits for the oldest when there are too many."""

    def __init__(self, room: float) -> None:
        """``room``: the largest number of bytes that gradients reduced in parts may hold."""
        self.room = room
        self._reducing: deque[ParameterGroup] = deque()
        self._in_parts: deque[Reduction] = deque()
        self._copying_to_host: list[ParameterGroup] = []  # groups whose results are being copied to the host

    def reduce(self, group: ParameterGroup) -> None:
        """Begin to reduce all remaining gradients of ``group``."""
        gradients, reducing = group.gradients, self._reducing
        gradients.reduce()
        if gradients.part_queue is not None:
            self._limit(gradients.in_flight())
        for earlier in reducing:
            if earlier.gradients.state is REDUCING:  # otherwise a nested backward has already added to it
                earlier.gradients.advance()
        reducing.append(group)
        most = group.max_in_flight
        while len(reducing) > most:
            self._finish_oldest()
        over_replicas = len(reducing) - group.settings.max_reductions
        if over_replicas > 0:
            for earlier in islice(reducing, over_replicas):
                if earlier.gradients.state is REDUCING:
                    earlier.gradients.release_unsharded()

    def send_ready(self, group: ParameterGroup) -> None:
        """Begin to reduce the parts of ``group`` that are ready."""
        group.gradients.send_ready()
        self._limit(group.gradients.in_flight())

    def _limit(self, reductions: Iterable[Reduction]) -> None:
        """Parts of ``reductions`` were sent; wait for the oldest while all together hold too much memory."""
        begun = dict.fromkeys((*self._in_parts, *reductions))
        self._in_parts = deque([each for each in begun if each.held_bytes])  # others were waited for
        while self.num_parts > 1 and sum(sum(each.held_bytes) for each in self._in_parts) > self.room:
            self._in_parts[0].release_part()
            if not self._in_parts[0].held_bytes:
                self._in_parts.popleft()

    @property
    def num_parts(self) -> int:
        """The number of parts that hold gradients, of groups that are reduced in parts."""
        return sum(len(each.held_bytes) for each in self._in_parts)

    def _finish_oldest(self) -> None:
        group = self._reducing.popleft()
        if group.gradients.state is not REDUCING:
            return
        if group.gradients.arrive_on_host:
            group.gradients.release_unsharded()
            for earlier in self._copying_to_host[-1:]:
                if earlier.gradients.state is REDUCING:
                    earlier.gradients.release()  # the copy has had a group's backward to finish
            self._copying_to_host.append(group)
        else:
            group.gradients.finish()

    def finish(self) -> None:
        """Wait for all reductions in flight."""
        while self._reducing:
            self._finish_oldest()
        self._in_parts.clear()
        for group in self._copying_to_host:
            if group.gradients.state is REDUCING:
                group.gradients.finish()
        self._copying_to_host.clear()


def room_for(groups: list[ParameterGroup]) -> float:
    """How many bytes gradients in flight may hold if groups are reduced in parts.

    Together with the part that backward is computing, they may hold the gradients of the largest such group
    times the number of reductions that the caller allows in flight, both counted in the dtype of the
    reduction. Groups reduced as a whole do not count: they are limited by number.
    """
    rooms = [0]
    for group in groups:
        parts = [part.num_bytes for bucket in group.buckets for part in bucket.reduction.parts]
        if len(parts) > len(group.buckets):
            rooms.append(group.settings.max_reductions * sum(parts) - max(parts))
    return max(rooms)


class GradientReductionHandle:
    """Reductions in flight, returned by ``finalize_backward(async_op=True)``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._is_void = False

    def wait(self) -> None:
        """Wait for the reductions; from then on ``.grad`` of the parameters is complete.

        Frees the full gradients. A second call does nothing.

        Raises:
            RuntimeError: ``reset_iter_state()`` has dropped the gradients, or a collective failed, usually
                because another rank did.

        Example::

            model.set_manual_backward_finalization(True)
            model(batch).sum().backward()
            handle = model.finalize_backward(async_op=True)
            learning_rate = schedule(step)  # the reductions run meanwhile
            handle.wait()
            optimizer.step()
        """
        if self._is_void:
            raise RuntimeError(
                "GradientReductionHandle.wait: reset_iter_state() was called after finalize_backward() and "
                "has dropped the gradients that this handle stands for. Run the iteration again."
            )
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    @property
    def is_pending(self) -> bool:
        """True until ``wait`` was called."""
        return self._finish is not None

    def drop(self) -> None:
        """Make ``wait`` fail from now on: the gradients were dropped."""
        self._is_void = self.is_pending
        self._finish = None


class Finalization:
    """Whether autograd or the caller (``by_hand``) ends the backwards of one root."""

    def __init__(self) -> None:
        self.by_hand = False
        self.is_due = False
        """Whether a backward has run since the caller last ended one."""
        self.handle: GradientReductionHandle | None = None
        """From the last ``finalize_backward``, until the next pass."""

    def begin(self, finish: Callable[[], None]) -> GradientReductionHandle:
        """The caller ends a backward: reductions are in flight, and ``finish`` waits for them."""
        self.is_due = False
        self.handle = GradientReductionHandle(finish)
        return self.handle

    def refuse_pending(self, name: str, what: str) -> None:
        """Refuse ``what`` until the caller has waited for ``handle``."""
        if self.handle is not None and self.handle.is_pending:
            raise RuntimeError(
                f"{name}: {what} while gradients are still being reduced: finalize_backward(async_op=True) "
                "returned a handle whose wait() was not called. Call it first."
            )
        self.handle = None

    def drop(self) -> None:
        """No backward is left to end, and the handle is void: the gradients were dropped."""
        self.is_due = False
        if self.handle is not None:
            self.handle.drop()
            self.handle = None
