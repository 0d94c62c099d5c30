"""A trace that is being recorded: what it attaches to the groups of a model, and takes away again.

events of the groups   which module computes          hear_events, and the point ``call_ended``
passes                 where they begin and end       points of ``Feature``
streams of the groups  what they communicate          streams.py
steps of optimizers    when they begin and end        torch.optim, and buckets/optimizer_steps.py
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.buckets.bucket import Bucket, bucket_and_index
from shardwise.buckets.optimizer_steps import add_step_listener
from shardwise.engine.calls import Call, Outcome
from shardwise.engine.module_state import ModuleState
from shardwise.engine.root import Feature, Root
from shardwise.groups.group import ParameterGroup
from shardwise.layout.mesh import ranks_along
from shardwise.observe.collectives import CollectiveCounts, count_event, hear_events
from shardwise.ranks.model_ranks import own_rank
from shardwise.tracing.records import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTATION,
    REDUCE_SCATTER,
    Recording,
    TracedGroup,
)
from shardwise.tracing.streams import TracedStreams, Watchers
from shardwise.tracing.timeline import Clock, Marked, Timeline


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
