"""The end of a backward that the caller brings about: ``finalize_backward``."""

from collections.abc import Callable


class GradientReductionHandle:
    """Returned by ``finalize_backward(async_op=True)``; ``wait`` until gradients may be used."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._is_void = False

    def wait(self) -> None:
        """Wait for the reductions. From then on ``.grad`` of the parameters is complete; once is enough.

        Raises:
            RuntimeError: ``reset_iter_state()`` has dropped the gradients.
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
        """True until somebody has waited."""
        return self._finish is not None

    def drop(self) -> None:
        """What it stands for will not come."""
        self._is_void = self.is_pending
        self._finish = None


class Finalization:
    """Who ends a backward of one module tree: the library, or the caller.

    ``is_manual``: the caller. ``is_due``: a backward has run since the caller last ended one.
    """

    def __init__(self) -> None:
        self.is_manual = False
        self.is_due = False
        self._handle: GradientReductionHandle | None = None

    def begin(self, finish: Callable[[], None]) -> GradientReductionHandle:
        """Reductions are under way; ``finish`` waits for them."""
        self.is_due = False
        self._handle = GradientReductionHandle(finish)
        return self._handle

    def refuse_pending(self, name: str, what: str) -> None:
        """The caller has to wait for the last one before ``what``."""
        if self._handle is not None and self._handle.is_pending:
            raise RuntimeError(
                f"{name}: {what} while gradients are still being reduced: finalize_backward(async_op=True) "
                "returned a handle, and nobody has called its wait(). Call it before."
            )
        self._handle = None

    def drop(self) -> None:
        """The gradients are dropped."""
        self.is_due = False
        if self._handle is not None:
            self._handle.drop()
            self._handle = None
