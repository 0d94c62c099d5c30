"""Stop all ranks at the same step when a signal ends the job: from a scheduler, torchrun or a person.

The signal reaches ranks at different times, and some not at all. So a flag is reduced over all ranks. Ranks
read the reduction of one step in the next one: it costs no waiting, and the answer is one step late.

    step                    5                  6                  7
    rank 0    requested()   sends no           sends no           reads 6: yes, stop
    rank 1    SIGTERM here: sends no           sends yes          reads 6: yes, stop
"""

import signal
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from shardwise.ranks.failures import monitor_of_job
from shardwise.ranks.model_ranks import axes_of_given
from shardwise.torch_compat import c10d


class StopSignal:
    """Whether a signal has asked the job to end, with the same answer on all ranks. Use it in ``with``.

    Inside, signals are only recorded, however often they come; afterwards their previous handlers are
    restored. torchrun passes SIGTERM on to its workers, and kills them 30 seconds later, or after its
    ``--shutdown-timeout`` (which torch 2.11 lacks): a step and a save must fit into that time.
    docs/guides/machines.md has a Slurm job that stops and resumes.

    Args:
        signals: the signals that end the job. torchrun passes on only those of its ``--signals-to-handle``.
        every: communicate only in every ``every``-th call of :meth:`requested`. The answer is that many
            calls late.

    Raises:
        RuntimeError: entered outside the main thread, which is the only one that can handle signals.
        ValueError: ``every`` is below 1.

    Costs an all-reduce of one number between CPUs each time it communicates; no rank waits for it.

    Example::

        with StopSignal() as stop:
            for step in range(first_step, num_steps):
                train_step()
                if stop.requested():
                    save_checkpoint(f"run/step-{step}", model, optimizer, shared={"step": step})
                    break
    """

    def __init__(self, *, signals: Sequence[signal.Signals] = (signal.SIGTERM,), every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"StopSignal: every is {every!r}; pass a number of calls from 1 on.")
        self._signals, self._every = tuple(signals), every
        self._before: dict[signal.Signals, Any] = {}
        self._was_told = False  # this rank
        self._answer = False  # all ranks
        self._num_calls = 0
        self._pg: dist.ProcessGroup | None = None
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> "StopSignal":
        """Record signals from here on. Collective."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "StopSignal: entered in a thread, and Python handles signals in the main thread only. Enter "
                "it there, around what starts the thread."
            )
        with _call():
            self._pg = _group_of_all()
        for each in self._signals:
            self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the handlers. Does not wait after an error: other ranks may not have sent their flags."""
        for each, handler in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        if self._sent is not None:
            if kind is None:
                with _call():
                    self._sent[0].wait()
            else:
                c10d.keep_until_exit(self._sent)
        self._sent = None

    def requested(self) -> bool:
        """Whether to stop now. Collective: all ranks must call it equally often, for example once a step.

        Once True, it remains True and stops communicating.
        """
        if not self._before:
            raise RuntimeError("StopSignal: requested() was called outside of `with StopSignal() as stop:`.")
        self._num_calls += 1
        if self._answer or self._num_calls % self._every:
            return self._answer
        if self._pg is None:
            self._answer = self._was_told
            return self._answer
        with _call():
            if self._sent is not None:
                work, told = self._sent
                work.wait()
                self._answer, self._sent = bool(told.item()), None
            if not self._answer:
                told = torch.tensor([int(self._was_told)], dtype=torch.int32)
                work = dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._pg, async_op=True)
                assert work is not None
                self._sent = work, told
        return self._answer

    def _note(self, *_: Any) -> None:
        self._was_told = True


def _call() -> AbstractContextManager[None]:
    return monitor_of_job().call("StopSignal", lambda: axes_of_given(None))


def _group_of_all() -> dist.ProcessGroup | None:
    """All ranks over CPUs, in a new group: other threads may use existing groups, and after an error an
    earlier group of this kind may have a pending collective that not all ranks have issued."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    return c10d.subgroup(world, range(world.size()), torch.device("cpu"), "stop", backend="gloo")
