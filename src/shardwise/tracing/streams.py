"""What a group communicates through while a trace records: it does the same work, and tells the timeline.

A group submits all that it communicates to its ``CommStreams``, and issues collectives by calls of its
communicators. A trace puts its own in their place, over the same streams and calls, and takes them away
again: nothing else has to know of traces.

On a device a transfer lies between two events on the stream that carries it, casts and unpacking included,
and a wait between two events on the computing stream. On the host a transfer begins where it is issued,
and is over when a thread that waits for it says so, or at the latest where the caller has waited.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch

from shardwise.comm.communicators import Communicator
from shardwise.comm.streams import (
    CommStream,
    CommStreams,
    CommWork,
    Finish,
    StartWork,
    WaitThen,
    in_two_steps,
)
from shardwise.groups.group import ParameterGroup
from shardwise.ranks.activity import Wait
from shardwise.tracing.records import ALL_GATHER, ALL_REDUCE, COMPUTATION, COPIES, REDUCE_SCATTER
from shardwise.tracing.timeline import Marked, Timeline

_V = TypeVar("_V")


class Watchers:
    """Threads that wait in place of the caller's, and note when the back end was done.

    On the host a collective ends while the caller computes, and gloo sends no signal: only a thread that
    waits notices. So a thread for each kind of collective waits for them in the order in which they were
    issued, and the caller waits for that thread. The thread does nothing else, so that the numbers and the
    memory are those of a run without a trace. An error is raised where the caller waits.
    """

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[tuple[Finish, list[Any], Future[None]] | None]] = {}

    def watch(self, kind: str, wait: Finish, ends: list[Any]) -> Finish:
        """Have a thread call ``wait``, after all others of the same kind, and add the time to ``ends``.

        Returns what waits for the thread.
        """
        if kind not in self._queues:
            self._queues[kind] = SimpleQueue()
            name, run = f"shardwise trace: {kind}", partial(self._run, self._queues[kind])
            threading.Thread(target=run, name=name, daemon=True).start()
        done: Future[None] = Future()
        self._queues[kind].put((wait, ends, done))
        return done.result

    @staticmethod
    def _run(queue: SimpleQueue[tuple[Finish, list[Any], Future[None]] | None]) -> None:
        while (watched := queue.get()) is not None:
            wait, ends, done = watched
            try:
                wait()
            except BaseException as error:  # of any kind: it belongs to the caller
                done.set_exception(error)
            else:
                ends.append(time.perf_counter_ns())
                done.set_result(None)

    def close(self) -> None:
        """End the threads, once what is still under way is over."""
        for queue in self._queues.values():
            queue.put(None)


class TracedStream:
    """``inner``, as one group uses it for the collectives of ``row``."""

    def __init__(self, inner: CommStream, row: str, group: ParameterGroup, timeline: Timeline) -> None:
        self.inner = inner
        self._row = row
        self._group = group
        self._name = timeline.names[group]
        self._timeline = timeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, start: StartWork, users: Sequence[Any] = (), awaited: Wait | None = None) -> CommWork:
        """As of ``inner``; the work tells when it is waited for."""
        timeline = self._timeline
        if not timeline.is_recording:
            return self.inner.submit(start, users, awaited)
        work = timeline.submitting = Marked(self._row, self._name, timeline.phase)
        run = self._start_on_host if timeline.clock.is_of_host else self._start_on_stream
        submitted = self.inner.submit(partial(run, work, start), users, awaited)
        timeline.submitting = None
        if work.begin is not None:
            work.row = self._row if work.num_bytes else COPIES
            timeline.marked.append(work)
        self._timeline.memory.touch(self._group)
        return CommWork(partial(self._wait, work, submitted.wait), submitted.end)

    def _start_on_host(self, work: Marked, start: StartWork) -> Finish:
        with self._timeline.interrupted() as ends:
            finish = start()
        self._timeline.add(COPIES, self._name, *ends)
        if not work.num_bytes:
            work.begin = None  # nothing travels
        return finish

    def _start_on_stream(self, work: Marked, start: StartWork) -> Finish:
        work.begin = self._timeline.clock.mark()
        finish = start()

        def finish_on_stream() -> None:
            finish()
            work.end = self._timeline.clock.mark()

        return finish_on_stream

    def _wait(self, work: Marked, wait: Finish) -> None:
        """Have the computation wait for ``work``."""
        timeline = self._timeline
        if not timeline.is_recording:
            wait()
            return
        self._timeline.memory.settle()
        with timeline.interrupted() as ends:
            wait()
        begin, end = ends
        over = end
        if timeline.clock.is_of_host and work.ends:
            over = min(max(begin, *work.ends), end)
        if not work.num_bytes:
            over = begin
        timeline.add(COMPUTATION, self._name, begin, over, self._row)
        if timeline.clock.is_of_host:
            timeline.add(COPIES, self._name, over, end)
        self._timeline.memory.touch(self._group)

    def copy_in(self, copy: Callable[[], _V]) -> _V:
        """As of ``inner``; tells when."""

        def traced() -> _V:
            if not self._timeline.is_recording:
                return copy()
            begin = self._timeline.clock.mark()
            result = copy()
            self._timeline.add(COPIES, self._name, begin, self._timeline.clock.mark())
            return result

        return self.inner.copy_in(traced)


class TracedStreams:
    """The streams of ``group``, as it uses them while a trace records, and the calls of its communicators."""

    def __init__(self, group: ParameterGroup, timeline: Timeline, watchers: Watchers) -> None:
        inner = self.inner = group.streams
        self._group = group
        self._timeline = timeline
        self._watchers = watchers
        self._calls: list[tuple[Communicator, str]] = []

        def traced(stream: CommStream, row: str) -> TracedStream:
            return TracedStream(stream, row, group, timeline)

        self.all_gather = traced(inner.all_gather, ALL_GATHER)
        self.reduce_scatter = traced(inner.reduce_scatter, REDUCE_SCATTER)
        self.all_reduce = traced(inner.all_reduce, ALL_REDUCE)
        group.use_streams(cast(CommStreams, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def trace_calls(self) -> None:
        """Have the collectives of the buckets tell; these may have been given other communicators since."""
        found: list[tuple[Communicator | None, str]] = []
        for own in [bucket.communication for bucket in self._group.buckets]:
            found += [(own.all_gather, "all_gather"), (own.post_forward, "all_gather")]
            found += [(own.reduce_scatter, "reduce_scatter"), (own.over_replicas, "all_reduce")]
        calls = [(comm, name) for comm, name in found if comm is not None]
        if calls != self._calls:
            self._untrace_calls()
            self._calls = calls
            for comm, name in calls:
                setattr(comm, name, partial(self._issue, getattr(comm, name)))

    def _untrace_calls(self) -> None:
        for comm, name in self._calls:
            delattr(comm, name)

    def remove(self) -> None:
        """Put the group's own back."""
        self._untrace_calls()
        if cast(Any, self._group.streams) is self:
            self._group.use_streams(self.inner)

    def _issue(self, call: Callable[..., Finish], *args: Any) -> Finish:
        """Issue one collective of the work that is being submitted."""
        work, clock = self._timeline.submitting, self._timeline.clock
        if work is None:
            return call(*args)
        work.num_bytes += self._bytes_of(work, args)
        if not clock.is_of_host:
            return call(*args)
        if work.begin is None:
            work.begin = clock.mark()
        finish = call(*args)
        steps = in_two_steps(finish)
        if steps is None:

            def finish_and_tell() -> None:
                finish()
                work.ends.append(clock.mark())

            return finish_and_tell
        wait, then = steps
        return WaitThen(self._watchers.watch(work.row, wait, work.ends), then)

    def _bytes_of(self, work: Marked, args: Sequence[Any]) -> int:
        if work.row == ALL_REDUCE:
            ranks = max(bucket.mesh.replicate_axis.world for bucket in self._group.buckets)
            return 2 * _num_bytes(args[0]) * (ranks - 1) // ranks
        outputs, inputs = args[:2]
        return abs(_num_bytes(outputs) - _num_bytes(inputs))


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
