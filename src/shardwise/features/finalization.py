"""``finalize_backward``: the caller, instead of autograd, decides when a backward ends."""

from collections.abc import Callable

from shardwise.comm.streams import nothing
from shardwise.engine.feature import Feature
from shardwise.engine.root import Root
from shardwise.groups.gradients import average_ignored
from shardwise.groups.group import ParameterGroup


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
        """Make ``wait`` fail from now on, for the gradients were dropped."""
        self._is_void = self.is_pending
        self._finish = None


class ManualFinalization(Feature):
    """Lets the caller end the backwards of one root (``root.ends_by_hand``)."""

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._is_due = False  # a backward has run since the caller last ended one
        self._handle: GradientReductionHandle | None = None

    def end_by_hand(self, group: ParameterGroup, by_hand: bool) -> None:
        """Choose whether the caller ends backwards from now on."""
        caller, root = "set_manual_backward_finalization", self.root
        if by_hand == root.ends_by_hand:
            return
        root.requests.refuse_at_work(caller, group)
        self.pass_begins(f"{caller}()")
        if self._is_due:
            raise RuntimeError(
                f"{caller}: {root.name} has run a backward that was not finalized. Call "
                "finalize_backward(), or reset_iter_state() to drop its gradients, before changing who ends "
                "a backward."
            )
        root.ends_by_hand = by_hand

    def finalize(self, group: ParameterGroup) -> GradientReductionHandle:
        """Begin to reduce the gradients that earlier backwards left to the caller."""
        root = self.root
        self.pass_begins("finalize_backward()")
        if not root.calls.clock:  # before the first forward
            return GradientReductionHandle(nothing)
        if not root.ends_by_hand:
            raise RuntimeError(
                f"finalize_backward: {root.name} ends its backwards by itself, and their gradients are "
                "complete. Call set_manual_backward_finalization(True) before forward, or leave this call "
                "out."
            )
        root.requests.refuse_at_work("finalize_backward", group, "afterwards")
        for each in root.groups:
            wants = each.gradients.have_sums_to_reduce or root.joins_by_hand(each)
            if each.settings.requires_gradient_sync and wants:
                root.reductions.reduce(each)
        self._is_due = False
        self._handle = GradientReductionHandle(self._finish)
        return self._handle

    def _finish(self) -> None:
        self.root.finish_reductions()
        average_ignored(self.root.groups)

    def pass_begins(self, what: str) -> None:
        """Refuse ``what`` while nobody has waited for the handle of the last ``finalize_backward``."""
        if self._handle is not None and self._handle.is_pending:
            raise RuntimeError(
                f"{self.root.name}: {what} while gradients are still being reduced: "
                "finalize_backward(async_op=True) returned a handle, and nobody has called its wait(). Call "
                "it before."
            )
        self._handle = None

    def backward_ended(self) -> None:
        """Remember that the caller has a backward to end."""
        self._is_due = self.root.ends_by_hand

    def reset(self) -> None:
        """Forget the backward to end, and void the handle: the gradients were dropped."""
        self._is_due = False
        if self._handle is not None:
            self._handle.drop()
            self._handle = None
