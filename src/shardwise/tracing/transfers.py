"""What groups communicate while a trace records: when it was issued, when it was over, who waited for it.

On a device a transfer lies between two events on the stream that carries it, casts and unpacking included,
and a wait between two events on the computing stream. On the host a transfer begins where it is issued,
and is over when a thread that waits for it says so (completions.py), or at the latest where the caller has
waited.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from shardwise.comm.streams import Finish, WaitThen, in_two_steps
from shardwise.tracing.completions import Completion, Watcher
from shardwise.tracing.records import ALL_REDUCE, COMPUTATION, COPIES, TRANSFERS
from shardwise.tracing.timeline import Marked, Timeline

_V = TypeVar("_V")


class Touched(Protocol):
    """What is told when the memory of a group may have changed."""

    def touch(self, name: str) -> None:
        """It changes now."""
        ...

    def settle(self) -> None:
        """It has changed."""
        ...


@dataclass(slots=True, eq=False)
class Work:
    """What was submitted to a stream at once."""

    row: str
    group: str
    span: Marked | None = None
    num_bytes: int = 0
    began: Any = None
    completions: list[Completion] = field(default_factory=list)
    waited: list[Any] = field(default_factory=list)  # marks behind waits that no thread makes


class Transfers:
    """All that the groups of one trace communicate; ``replicas``: for each group the ranks with copies."""

    def __init__(self, timeline: Timeline, replicas: dict[str, int], memory: Touched) -> None:
        self._timeline = timeline
        self._replicas = replicas
        self._memory = memory
        self._watchers = {row: Watcher(row) for row in TRANSFERS}
        self._submitting: Work | None = None
        self._spans: list[tuple[Marked, Work]] = []

    # --- what is submitted ------------------------------------------------------------------------

    def begin(self, row: str, group: str) -> Work:
        """``group`` is about to submit work to the stream of ``row``."""
        self._submitting = work = Work(row, group)
        return work

    def start(self, work: Work, start: Finish) -> Finish:
        """Start the work, on its stream; returns its ``finish``."""
        if not self._timeline.is_recording:
            return start()  # type: ignore[no-any-return]
        if self._timeline.clock.is_of_host:
            with self._timeline.interrupted() as ends:
                finish = start()
            self._timeline.add(COPIES, work.group, *ends)
            return finish  # type: ignore[no-any-return]
        work.began = self._timeline.clock.mark()
        finish = start()

        def finish_on_stream() -> None:
            finish()
            self._add(work, work.began, self._timeline.clock.mark())

        return finish_on_stream

    def submitted(self, work: Work) -> None:
        """All its collectives are issued."""
        self._submitting = None
        if self._timeline.is_recording:
            if self._timeline.clock.is_of_host and work.began is not None:
                self._add(work, work.began, None)
            self._memory.touch(work.group)

    def _add(self, work: Work, begin: Any, end: Any) -> None:
        if work.num_bytes:
            work.span = self._timeline.add(work.row, work.group, begin, end, num_bytes=work.num_bytes)
            if self._timeline.clock.is_of_host:
                self._spans.append((work.span, work))
        else:
            self._timeline.add(COPIES, work.group, begin, end)

    def issue(self, call: Callable[..., Finish], *args: Any) -> Finish:
        """Issue one collective of the work that is being submitted."""
        work = self._submitting
        if work is None or not self._timeline.is_recording:
            return call(*args)
        work.num_bytes += self._bytes_of(work, args)
        if not self._timeline.clock.is_of_host:
            return call(*args)
        if work.began is None:
            work.began = self._timeline.clock.mark()
        finish = call(*args)
        steps = in_two_steps(finish)
        if steps is None:
            return partial(self._note, work, finish)
        wait, then = steps
        completion = self._watchers[work.row].watch(wait)
        work.completions.append(completion)
        return WaitThen(completion.wait, then)

    def _note(self, work: Work, finish: Finish) -> None:
        finish()
        work.waited.append(self._timeline.clock.mark())

    def _bytes_of(self, work: Work, args: Sequence[Any]) -> int:
        if work.row == ALL_REDUCE:
            ranks = self._replicas[work.group]
            return 2 * _num_bytes(args[0]) * (ranks - 1) // ranks
        outputs, inputs = args[:2]
        return abs(_num_bytes(outputs) - _num_bytes(inputs))

    # --- what is waited for -----------------------------------------------------------------------

    def wait(self, work: Work, wait: Finish) -> None:
        """Have the computation wait for ``work``."""
        timeline = self._timeline
        if not timeline.is_recording:
            wait()
            return
        self._memory.settle()
        with timeline.interrupted() as ends:
            wait()
        begin, end = ends
        over = end
        if timeline.clock.is_of_host and (own := self._completed(work)) is not None:
            over = min(max(begin, own), end)
        if work.num_bytes:
            timeline.add(COMPUTATION, work.group, begin, over, awaits=work.row)
        else:
            over = begin
        if timeline.clock.is_of_host:
            timeline.add(COPIES, work.group, over, end)
        self._memory.touch(work.group)

    def _completed(self, work: Work) -> Any:
        """When the last of its collectives was over, by the host's clock; None if nobody knows."""
        known = [*(c.at for c in work.completions if c.at is not None), *work.waited]
        return max(known, default=None)

    def copy(self, group: str, copy: Callable[[], _V]) -> _V:
        """Copy from the host's memory, on the current stream."""
        if not self._timeline.is_recording:
            return copy()
        begin = self._timeline.clock.mark()
        result = copy()
        self._timeline.add(COPIES, group, begin, self._timeline.clock.mark())
        return result

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """The trace is over: say when transfers ended, and let the threads end."""
        for span, work in self._spans:
            span.end = self._completed(work)
        for watcher in self._watchers.values():
            watcher.close()


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
