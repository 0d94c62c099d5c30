"""A trace that is being recorded: what it attaches to the groups of a model, and takes away again.

events of the groups   which module computes          hear_events, and the point ``call_ended``
passes                 where they begin and end       points of ``Feature``
streams of the groups  what they communicate          ``TracedStreams``
steps of optimizers    when they begin and end        torch.optim, and buckets/optimizer_steps.py

A group submits all that it communicates to its ``CommStreams``, and issues collectives by calls of its
communicators. A trace puts its own in their place, over the same streams and calls, which tell the timeline,
and takes them away again: nothing else has to know of traces.

On a device a transfer lies between two events on the stream that carries it, casts and unpacking included,
and a wait between two events on the computing stream. On the host a transfer begins where it is issued,
and is over when a thread that waits for it says so, or at the latest where the caller has waited.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.buckets.bucket import Bucket, bucket_and_index
from shardwise.buckets.optimizer_steps import add_step_listener
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
from shardwise.engine.calls import Call, Outcome
from shardwise.engine.module_state import ModuleState
from shardwise.engine.root import Feature, Root
from shardwise.groups.group import ParameterGroup
from shardwise.layout.mesh import ranks_along
from shardwise.observe import CollectiveCounts, count_event, hear_events
from shardwise.ranks.activity import Wait
from shardwise.ranks.model_ranks import own_rank
from shardwise.tracing.records import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    COMPUTATION,
    COPIES,
    FORWARD,
    OPTIMIZER,
    RECOMPUTATION,
    REDUCE_SCATTER,
    Recording,
    TracedGroup,
)
from shardwise.tracing.timeline import Clock, Marked, Timeline

_V = TypeVar("_V")


# --- the streams of the groups --------------------------------------------------------------------


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


# --- the recorder ---------------------------------------------------------------------------------


class Recorder:
    """Records one trace of the groups of ``module_states``."""

    def __init__(self, module_states: Sequence[ModuleState], clock: Clock, *, is_aligned: bool) -> None:
        self._began = time.time()
        self._module_states = module_states
        self._is_aligned = is_aligned
        self.names: dict[ParameterGroup, str] = {}
        for module_state in module_states:
            name = module_state.group.name
            while name in self.names.values():  # of a model beside this one
                name += "'"
            self.names[module_state.group] = name
        self.timeline = Timeline(clock, self.names)
        self.watchers = Watchers()
        self._counts = {group: CollectiveCounts() for group in self.names}
        roots = dict.fromkeys(module_state.root for module_state in module_states)
        self._knew_order = all(root.prefetch.forward_order.planned for root in roots)
        self._features = [TracedRoot(root, self) for root in roots]
        self._buckets = {id(bucket) for group in self.names for bucket in group.buckets}
        self._steps: dict[int, Marked] = {}  # running ones, by optimizers

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the model tells what it does; afterwards it is as it was."""
        with ExitStack() as undo:
            undo.callback(self.watchers.close)
            for feature in self._features:
                feature.root.add(feature)
                undo.callback(feature.detach)
                feature.trace_communication()
            undo.callback(register_optimizer_step_pre_hook(self._step_begins).remove)
            add_step_listener(self)
            undo.enter_context(hear_events(self._module_states, self._hear))
            try:
                yield
            finally:
                self.timeline.is_recording = False

    def recording(self) -> Recording:
        """What was recorded, once it is over."""
        timeline = self.timeline
        ended = timeline.clock.mark()
        timeline.memory.touch_all()
        return Recording(
            rank=own_rank(),
            device=self._module_states[0].group.device.type,
            began=self._began,
            is_aligned=self._is_aligned,
            knew_order=self._knew_order,
            end_ns=timeline.clock.ns_of(ended),
            spans=tuple(timeline.spans(ended)),
            memory=tuple(timeline.memory.samples()),
            groups=tuple(map(self._traced, self.names)),
        )

    def sharers(self) -> dict[tuple[str, str], set[int]]:
        """The ranks that take part in transfers, by their row and the name of the group."""
        found: dict[tuple[str, str], set[int]] = {}
        for group, name in self.names.items():
            for bucket in group.buckets:
                mesh = bucket.mesh
                axes = {REDUCE_SCATTER: mesh.shard_axis, ALL_REDUCE: mesh.replicate_axis}
                if bucket.communication.options.post_forward_axis is None:  # else some are among fewer ranks
                    axes[ALL_GATHER] = mesh.shard_axis
                for row, axis in axes.items():
                    if axis.pg is not None:
                        found.setdefault((row, name), set()).update(ranks_along(axis))
        return found

    def _traced(self, group: ParameterGroup) -> TracedGroup:
        settings, counts = group.settings, self._counts[group]
        is_chosen = settings.forward_prefetch is not None or settings.backward_prefetch is not None
        return TracedGroup(
            name=self.names[group],
            unsharded_bytes=sum(bucket.computed.unsharded_bytes for bucket in group.buckets),
            prefetch=None if is_chosen else group.policy.prefetch,
            unshards=counts.all_gather.total(),
            reductions=max(counts.reduce_scatter.total(), counts.all_reduce.total()),
        )

    # --- events -----------------------------------------------------------------------------------

    def _hear(self, event: str, group: ParameterGroup | None) -> None:
        """An event of a group; None: one that is not traced."""
        name = None if group is None else self.names[group]
        if event in ("forward", "recompute"):
            self.timeline.enter(FORWARD if event == "forward" else RECOMPUTATION, name)
        elif event == "backward":
            self.timeline.backward(name)
        if group is not None:
            self.timeline.memory.settle()
            count_event(self._counts[group], event, group)
            self.timeline.memory.touch(group)

    def _step_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        found = next(filter(None, map(bucket_and_index, params)), None)
        if found is not None and id(found[0]) in self._buckets:
            if (failed := self._steps.pop(id(optimizer), None)) is not None:
                failed.end = failed.begin
            self._steps[id(optimizer)] = self.timeline.begin(OPTIMIZER, type(optimizer).__name__)

    def optimizer_stepped(self, buckets: Iterable[Bucket]) -> None:
        """A step has ended."""
        if self._steps and self.timeline.is_recording and not self._buckets.isdisjoint(map(id, buckets)):
            self._steps.popitem()[1].end = self.timeline.clock.mark()


class TracedRoot(Feature):
    """Tells ``recorder`` of the passes of one root, and of its groups."""

    def __init__(self, root: Root, recorder: Recorder) -> None:
        super().__init__(root)
        self._recorder = recorder
        self._timeline = recorder.timeline
        self._streams: dict[ParameterGroup, TracedStreams] = {}

    def detach(self) -> None:
        """Leave the root and its groups as they were."""
        self.root.remove(self)
        for streams in self._streams.values():
            streams.remove()

    def trace_communication(self) -> None:
        """Once streams exist, have the groups communicate in a way that tells."""
        for group in self.root.groups:
            streams: Any = getattr(group, "streams", None)
            if group not in self._timeline.names or streams is None:
                continue
            traced = self._streams.get(group)
            if traced is None or streams is not traced:
                if traced is not None:
                    traced.remove()
                traced = TracedStreams(group, self._timeline, self._recorder.watchers)
                self._streams[group] = traced
            traced.trace_calls()

    def forward_begins(self) -> None:
        """A forward begins."""
        self.trace_communication()
        self._timeline.memory.touch_all()
        self._timeline.begin_pass(FORWARD)

    def forward_ended(self, outcome: Outcome) -> None:
        """It has ended."""
        self._timeline.begin_pass("")

    def call_ended(self, call: Call) -> None:
        """A module has run."""
        self._timeline.leave(self._timeline.names.get(call.group))

    def backward_begins(self) -> None:
        """A backward begins."""
        self.trace_communication()
        self._timeline.begin_pass(BACKWARD)

    def backward_ended(self) -> None:
        """It has ended."""
        self._timeline.begin_pass("")
        self._timeline.memory.touch_all()

    def reset(self) -> None:
        """Passes are abandoned."""
        self._timeline.begin_pass("")
