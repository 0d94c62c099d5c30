"""A trace that is being recorded: what it attaches to the groups of a model, and takes away again.

events of the groups   which module computes          Root.observe, and the point ``call_ended``
passes                 where they begin and end       points of ``Feature``
streams of the groups  what they communicate          streams.py
hooks of optimizers    their steps                    torch.optim
"""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.buckets.bucket import bucket_and_index
from shardwise.engine.calls import Call, Outcome
from shardwise.engine.module_state import ModuleState
from shardwise.engine.root import Feature, Root
from shardwise.groups.group import ParameterGroup
from shardwise.groups.unsharded import Observer
from shardwise.observe.memory import bytes_of_gradients, bytes_of_shards, bytes_of_unsharded
from shardwise.ranks.model_ranks import own_rank
from shardwise.tracing.clocks import Clock
from shardwise.tracing.records import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTATION,
    MemorySample,
    Recording,
    TracedGroup,
)
from shardwise.tracing.streams import TracedCalls, TracedStreams
from shardwise.tracing.timeline import Marked, Timeline
from shardwise.tracing.transfers import Transfers


class HeldMemory:
    """What the groups have in memory over time: sampled after each event of a group, of that group alone.

    An event is told while a group changes, so that a sample is taken when the next thing happens, and bears
    the time of the event.
    """

    def __init__(self, clock: Clock, groups: dict[str, ParameterGroup]) -> None:
        self._clock = clock
        self._groups = groups
        self._held = {name: self._measure(group) for name, group in groups.items()}
        self._shards = sum(map(bytes_of_shards, groups.values()))
        self._touched: dict[str, Any] = {}
        self._samples: list[tuple[Any, tuple[int, ...]]] = [(clock.mark(), self._sums())]

    @staticmethod
    def _measure(group: ParameterGroup) -> tuple[int, int, int, int]:
        return (*bytes_of_unsharded(group), *bytes_of_gradients(group))

    def _sums(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self._held.values(), strict=True)))

    def touch(self, name: str) -> None:
        """What the group of this name holds changes now. Its state is settled at the next event."""
        if name in self._groups and name not in self._touched:
            self._touched[name] = self._clock.mark()

    def touch_all(self) -> None:
        """The caller may have changed any."""
        for name in self._groups:
            self.touch(name)
        self.settle()

    def settle(self) -> None:
        """Sample those that were touched."""
        touched, self._touched = self._touched, {}
        for name, mark in touched.items():
            before, self._held[name] = self._held[name], self._measure(self._groups[name])
            if before != self._held[name]:
                self._samples.append((mark, self._sums()))

    def samples(self) -> list[MemorySample]:
        """All samples, in order of time."""
        self.settle()
        found = [
            MemorySample(self._clock.ns_of(mark), self._shards, reduced, unsharded, full, kept)
            for mark, (unsharded, kept, full, reduced) in self._samples
        ]
        return sorted(found, key=lambda sample: sample.at_ns)


class Recorder:
    """Records one trace of the groups of ``module_states``, from ``attach`` to ``detach``."""

    def __init__(self, module_states: Sequence[ModuleState], clock: Clock, *, is_aligned: bool) -> None:
        self._began = time.time()
        self._is_aligned = is_aligned
        self.clock = clock
        self.groups = {module_state.group.name: module_state.group for module_state in module_states}
        roots = dict.fromkeys(module_state.root for module_state in module_states)
        self._features = [TracedRoot(root, self) for root in roots]
        self._knew_order = all(feature.knows_order for feature in self._features)
        self.timeline = Timeline(clock)
        self.memory = HeldMemory(clock, self.groups)
        replicas = {
            name: max((bucket.mesh.replicate_axis.world for bucket in group.buckets), default=1)
            for name, group in self.groups.items()
        }
        self.transfers = Transfers(self.timeline, replicas, self.memory)
        self.unshards: Counter[str] = Counter()
        self.reductions: Counter[str] = Counter()
        self._buckets = {id(bucket) for group in self.groups.values() for bucket in group.buckets}
        self._optimizer_hooks: list[Any] = []
        self._steps: dict[int, Marked] = {}

    # --- attach and detach ------------------------------------------------------------------------

    def attach(self) -> None:
        """Begin to record."""
        for feature in self._features:
            feature.attach()
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ended),
        ]

    def detach(self) -> None:
        """Leave the model as it was."""
        self.timeline.stop()
        for hook in self._optimizer_hooks:
            hook.remove()
        for feature in self._features:
            feature.detach()
        self.transfers.close()

    def recording(self) -> Recording:
        """What was recorded, once it is over."""
        ended = self.clock.mark()
        self.memory.touch_all()
        spans = self.timeline.spans(ended)
        return Recording(
            rank=own_rank(),
            device=next(iter(self.groups.values())).device.type,
            began=self._began,
            is_aligned=self._is_aligned,
            knew_order=self._knew_order,
            end_ns=self.clock.ns_of(ended),
            spans=tuple(spans),
            memory=tuple(self.memory.samples()),
            groups=tuple(map(self._traced, self.groups.values())),
        )

    def _traced(self, group: ParameterGroup) -> TracedGroup:
        settings = group.settings
        is_chosen = settings.forward_prefetch is not None or settings.backward_prefetch is not None
        return TracedGroup(
            name=group.name,
            unsharded_bytes=sum(bucket.computed.unsharded_bytes for bucket in group.buckets),
            prefetch=None if is_chosen else group.policy.prefetch,
            unshards=self.unshards[group.name],
            reductions=self.reductions[group.name],
        )

    # --- what is told -----------------------------------------------------------------------------

    def hear(self, others: Observer | None, event: str, name: str) -> None:
        """An event of a group; ``others`` heard them before."""
        if others is not None:
            others(event, name)
        group = self.groups.get(name)
        known = None if group is None else name
        if event == "forward":
            self.timeline.enter(FORWARD, known)
        elif event == "recompute":
            self.timeline.enter(RECOMPUTATION, known)
        elif event == "backward":
            self.timeline.backward(known)
        if group is None:
            return
        self.memory.settle()
        if event == "unshard":
            self.unshards[name] += any(not bucket.mesh.shard_axis.is_alone for bucket in group.buckets)
        elif event == "reduce":
            self.reductions[name] += any(not axis.is_alone for axis in group.all_axes())
        self.memory.touch(name)

    def _step_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_traced(optimizer):
            began = self.clock.mark()
            self._steps[id(optimizer)] = Marked(OPTIMIZER, type(optimizer).__name__, "", began)

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = self._steps.pop(id(optimizer), None)
        if step is not None:
            self.timeline.add(OPTIMIZER, step.name, step.begin, self.clock.mark())

    def _is_traced(self, optimizer: torch.optim.Optimizer) -> bool:
        for param_group in optimizer.param_groups:
            for param in param_group["params"]:
                found = bucket_and_index(param)
                if found is not None:
                    return id(found[0]) in self._buckets
        return False


class TracedRoot(Feature):
    """Tells ``recorder`` of the passes of one root, and of its groups."""

    def __init__(self, root: Root, recorder: Recorder) -> None:
        super().__init__(root)
        self._recorder = recorder
        self._observer_before: Observer | None = None
        self._calls: dict[ParameterGroup, TracedCalls] = {}

    @property
    def knows_order(self) -> bool:
        """Whether a forward has recorded which group comes next."""
        return bool(self.root.prefetch.forward_order.planned)

    def attach(self) -> None:
        """Begin to tell."""
        root = self.root
        self._observer_before = root.observer
        root.observe(partial(self._recorder.hear, root.observer))
        root.add(self)
        self._trace_communication()

    def detach(self) -> None:
        """End it."""
        root = self.root
        root.remove(self)
        root.observe(self._observer_before)
        for calls in self._calls.values():
            calls.remove()
        for group in root.groups:
            streams = getattr(group, "streams", None)
            if isinstance(streams, TracedStreams):
                group.use_streams(streams.inner)

    def _trace_communication(self) -> None:
        """Once streams exist, have the groups communicate in a way that tells."""
        own = self._recorder.groups
        for group in self.root.groups:
            streams = getattr(group, "streams", None)
            if own.get(group.name) is not group or streams is None:
                continue
            if not isinstance(streams, TracedStreams):
                group.use_streams(TracedStreams(streams, group.name, self._recorder.transfers))
            calls = self._calls.get(group)
            if calls is None or not calls.covers(group.buckets):
                if calls is not None:
                    calls.remove()
                self._calls[group] = TracedCalls(group.buckets, self._recorder.transfers)

    def forward_begins(self) -> None:
        """A forward begins."""
        self._trace_communication()
        self._recorder.memory.touch_all()
        self._recorder.timeline.begin_pass(FORWARD)

    def forward_ended(self, outcome: Outcome) -> None:
        """It has ended."""
        self._recorder.timeline.end_pass()

    def call_ended(self, call: Call) -> None:
        """A module has run."""
        name = call.group.name
        self._recorder.timeline.leave(name if self._recorder.groups.get(name) is call.group else None)

    def backward_begins(self) -> None:
        """A backward begins."""
        self._trace_communication()
        self._recorder.timeline.begin_pass(BACKWARD)

    def backward_ended(self) -> None:
        """It has ended."""
        self._recorder.timeline.end_pass()
        self._recorder.memory.touch_all()

    def reset(self) -> None:
        """Passes are abandoned."""
        self._recorder.timeline.end_pass()
