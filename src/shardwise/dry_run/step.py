"""One step of a sharded model on fake tensors, with a log of its memory and of what it sends.

The last of two steps counts, or of three: optimizers have their state then, prefetch knows the order, and
what is kept from step to step knows of the optimizer.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.communicators import BackendCollectives, GlooExchange, unless_alone
from shardwise.comm.streams import HostStream
from shardwise.dry_run.fakes import fake_world, make_fake, meta_copy, without_computation
from shardwise.dry_run.memory_log import (
    ACTIVATIONS,
    COMMUNICATION,
    FULL_GRADIENTS,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATE,
    TEMPORARY,
    UNSHARDED,
    MemoryLog,
    Moment,
    RecordingMode,
    moments,
)
from shardwise.engine.module_state import sharded_module_states
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import SHARDED
from shardwise.torch_compat import dtensor, tensor_impl

Call = Callable[[nn.Module], Tensor]
"""Runs a model's forward on a fake batch; returns its loss."""

PHASES = ("forward", "backward", "optimizer")


Optimizers = Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]
"""Makes what steps a list of parameters."""


@dataclass(frozen=True)
class Training:
    """What is trained.

    ``call`` makes what runs forward; None: no computation, so that no activations are known. ``on_host``:
    communication is gloo's, of training on the host.
    """

    model: nn.Module
    call: Callable[[], Call] | None
    optimizers: Optimizers
    on_host: bool


@dataclass
class Step:
    """What a step has held on this rank and sent, in bytes.

    ``marks``: at which time what began; phases first, then groups. ``sent``: by mesh dimension. ``flops``: of
    forward and backward; ``recomputed_flops``: of what backward runs again.
    ``largest_shards``: of the group that has most. ``shards_are_whole``: each rank keeps whole parameters,
    and computes with them where they are.
    """

    timeline: list[Moment]
    marks: list[tuple[int, str]]
    sent: dict[str, int]
    flops: int = 0
    recomputed_flops: int = 0
    groups: list[str] = field(default_factory=list)
    largest_shards: int = 0
    shards_are_whole: bool = False

    def phase(self, name: str) -> tuple[int, int]:
        """When a phase begins and ends."""
        begins = [time for time, mark in self.marks if mark in PHASES]
        index = PHASES.index(name)
        return begins[index], (*begins, self.timeline[-1].time)[index + 1]

    def peak(self, name: str) -> Moment:
        """The moment of a phase at which most is in memory."""
        begin, end = self.phase(name)
        before = [moment for moment in self.timeline if moment.time <= begin][-1:]
        inside = [moment for moment in self.timeline if begin < moment.time <= end]
        return max([*before, *inside], key=lambda moment: moment.num_bytes)

    def highest(self) -> tuple[Moment, str]:
        """The moment at which most is in memory, and in which phase, of which group, that is."""
        phase = max(PHASES, key=lambda each: self.peak(each).num_bytes)
        moment = self.peak(phase)
        group = self.where(moment.time)
        return moment, phase if group in PHASES else f"{phase} of {group}"

    def with_host_shards(self) -> "Step":
        """The same step as its device sees it where shards, gradients and the optimizer are on the host.

        The shards of two groups are on the device beside that, of the one that is unsharded and the next; and
        reduced gradients of three, until they are copied. Whole parameters are taken to stay for the step.
        """
        begin, end = self.phase("forward")[0], self.phase("backward")[1]
        timeline = []
        for moment in self.timeline:
            by_kind = moment.by_kind | dict.fromkeys((PARAMETERS, GRADIENTS, STATE, TEMPORARY), 0)
            if begin <= moment.time < end:
                by_kind[COMMUNICATION] += 2 * self.largest_shards
                by_kind[GRADIENTS] = min(moment.by_kind[GRADIENTS], 3 * self.largest_shards)
                by_kind[UNSHARDED] += moment.by_kind[PARAMETERS] if self.shards_are_whole else 0
            timeline.append(Moment(moment.time, by_kind))
        return replace(self, timeline=timeline)

    def where(self, time: int) -> str:
        """In which group the step was."""
        inside = [mark for begin, mark in self.marks if begin <= time]
        return inside[-1].removeprefix("forward ").removeprefix("backward ") if inside else ""


def dry_run(training: Training, shape: dict[str, int], shard: Callable[[nn.Module, DeviceMesh], Any]) -> Step:
    """Have ``shard`` shard a copy of the model that takes no memory, and run a step of it.

    ``shape``: of the mesh, sizes of its dimensions by name.
    """
    log, sent, model = MemoryLog(), Counter[str](), meta_copy(training.model)

    def tell(dimension: str, num_bytes: int, tensors: Sequence[Tensor]) -> None:
        log.look()
        sent[dimension] += num_bytes
        log.set_kind(tensors, COMMUNICATION)

    with (  # the caller may have switched any of these on or off
        fake_world(shape, tell) as mesh,
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch's, about fake tensors
        shard(model, mesh)
        module_states = sharded_module_states(model)
        groups = [module_state.group for module_state in module_states]
        if training.on_host:
            _use_gloo(groups)
        else:
            _use_parts_of_devices(groups)
        if training.call is None:
            without_computation(model, groups)
        keeps_after_backward = any(not group.settings.reshard_after_backward for group in groups)
        with tensor_impl.fake_tensors(), RecordingMode(log):
            make_fake(model)
            rehearsal = _Rehearsal(model, groups, training, log)
            for root in dict.fromkeys(module_state.root for module_state in module_states):
                root.observe(rehearsal.observe)
            for _ in range(1 + keeps_after_backward):
                rehearsal.run()
            if not training.on_host:
                _free_as_devices_do(groups)
            log.marks.clear()
            sent.clear()
            log.flops = log.recomputed_flops = 0
            rehearsal.run()
            log.look()
    return Step(
        list(moments(log.allocations, log.marks[0][0], log.now)),
        log.marks,
        dict(sent),
        rehearsal.flops,
        log.recomputed_flops,
        [group.name for group in groups],
        max(sum(bucket.flat_shard.bytes.nbytes for bucket in group.buckets) for group in groups),
        any(unsharded.buffer.is_alias for group in groups for unsharded in group.unsharded.buckets),
    )


def _use_gloo(groups: Sequence[ParameterGroup]) -> None:
    make = unless_alone(lambda pg, device: GlooExchange(pg))
    for group in groups:
        for bucket in group.buckets:
            bucket.communicate(make_all_gather=make, make_reduce_scatter=make)
        group.take_stock()


def _use_parts_of_devices(groups: Sequence[ParameterGroup]) -> None:
    """Reduce gradients in the parts that a device does: the fake process group is one of the host.

    A rank that is alone sends nothing, and has the same parts everywhere.
    """
    for group in groups:
        for bucket in group.buckets:
            axis = bucket.mesh.shard_axis
            if bucket.policy.part_bytes is None and not axis.is_alone:
                least = BackendCollectives.smallest_part_on(torch.device("cuda"), axis.world)
                bucket.policy = replace(bucket.policy, part_bytes=int(least))
                bucket.rebuild_flat_shard()
        group.take_stock()


def _free_as_devices_do(groups: Sequence[ParameterGroup]) -> None:
    """Keep no buffers between uses, which on the host saves page faults."""
    for group in groups:
        for stream in (group.streams.all_gather, group.streams.reduce_scatter, group.streams.all_reduce):
            cast(HostStream, stream).keep_nothing()
        for bucket in group.buckets:
            bucket.reduction.reuse_nothing()
        for unsharded in group.unsharded.buckets:
            unsharded.buffer.keep_no_small_memory()
            if group.unsharded.state is SHARDED:
                unsharded.buffer.free()


class _Rehearsal:
    """Runs steps, and tells the log what memory is for."""

    def __init__(
        self, model: nn.Module, groups: Sequence[ParameterGroup], training: Training, log: MemoryLog
    ) -> None:
        self._model = model
        self._groups = {group.name: group for group in groups}
        self._log = log
        self._watched: set[int] = set()
        self._call: Call = (
            training.call()
            if training.call
            else lambda model: model(torch.zeros(2, requires_grad=True)).sum()
        )
        self._params = list(dict.fromkeys(model.parameters()))
        self._trained = [param for param in self._params if param.requires_grad]
        self._locals = [nn.Parameter(dtensor.plain(param.detach())) for param in self._trained]
        self._optimizers = training.optimizers(self._locals)
        self._told = torch.optim.SGD(self._trained, lr=0.0)

    def run(self) -> None:
        """A step."""
        log = self._log
        log.unknown = ACTIVATIONS
        log.set_kind(self._params, PARAMETERS)
        log.set_kind(self._model.buffers(), OTHER)
        log.mark("forward")
        loss = self._call(self._model)
        log.mark("backward")
        log.is_in_backward = True
        loss.backward()
        log.is_in_backward = False
        self.flops = log.flops
        del loss
        log.set_kind((param.grad for param in self._params), GRADIENTS)
        log.mark("optimizer")
        log.unknown = TEMPORARY
        self._step()

    def _step(self) -> None:
        """The optimizer's. It sees this rank's shards as plain tensors: only their sizes matter."""
        for local, param in zip(self._locals, self._trained, strict=True):
            local.grad = None if param.grad is None else dtensor.plain(param.grad)
        for optimizer in self._optimizers:
            optimizer.step()
            state = [value for values in optimizer.state.values() for value in values.values()]
            self._log.set_kind((value for value in state if isinstance(value, Tensor)), STATE)
        for local in self._locals:
            local.grad = None
        self._model.zero_grad()
        self._told.step()  # has no gradients; what is kept unsharded has to know that the shards changed

    def observe(self, event: str, name: str) -> None:
        """An event of a group: its buffers and gradients can be found now."""
        group = self._groups[name]
        for bucket in group.buckets:
            self._log.set_kind([bucket.flat_shard.bytes], PARAMETERS)
        for unsharded in group.unsharded.buckets:
            whole = unsharded.buffer.bytes
            key = tensor_impl.storage_key(whole.untyped_storage())
            if not unsharded.buffer.is_alias and key not in self._watched:
                self._watched.add(key)
                self._log.watch(whole)
                self._log.set_kind([whole], UNSHARDED)
        for reduction in group.gradients.in_flight():
            self._log.set_kind(reduction.gradients, FULL_GRADIENTS)
        self._log.set_kind((full.grad for full in group.unsharded.full_params), FULL_GRADIENTS)
        if event in ("forward", "backward"):
            self._log.mark(f"{event} {name}")
        else:
            self._log.look()
