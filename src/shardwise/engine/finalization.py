"""``finalize_backward``: the caller, instead of autograd, decides when a backward ends."""

from collections.abc import Callable


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
