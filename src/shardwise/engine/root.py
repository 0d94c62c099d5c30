"""The root drives the groups of one module tree. It holds the state that outlives a pass.

Root
  groups, group         all groups of the tree, and the root module's own
  lazy_init             process groups and streams, made once, before the first pass
  plan_check            whether all ranks have the same plan
  calls                 which sharded modules are running
  unsharded_groups      which groups are unsharded, and why
  prefetch              which groups the next pass unshards ahead
  reductions            those in flight
  finalization          whether autograd or the caller ends a backward
  forward, backward     the running passes; dropped when they end or fail
  features              optional parts, called at the points of Feature

The root only knows whether passes run and what to drop; forward.py and backward.py know the root.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.comm.streams import CommStreams, current_stream, is_captured, nothing
from shardwise.engine.calls import Call, CallStack, Outcome
from shardwise.engine.plan_check import PlanCheck, ranks_on
from shardwise.engine.reduction_queue import Finalization, GradientReductionHandle, ReductionQueue, room_for
from shardwise.engine.unsharded_groups import CALLER, INFERENCE, Prefetch, UnshardedGroups
from shardwise.groups.group import ParameterGroup
from shardwise.groups.shards import meta_message
from shardwise.groups.states import DEFERRED, PARTLY
from shardwise.groups.unsharded import Observer
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import Axis
from shardwise.params.parameter import Param
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat import autograd, c10d

# --- the setup before the first pass --------------------------------------------------------------


_MOST_BUCKETS = 4093  # of a model; a prime, so that numbers of models do not repeat in the tags of gloo


class LazyInit:
    """Checks the ``groups`` of a root and makes its process groups and streams before the first pass.

    ``groups``: the root's own list, which changes when the tree does; the outermost is the first.
    """

    streams: CommStreams  # made by ``run`` or ``share_streams``

    def __init__(self, device: torch.device, groups: Sequence[ParameterGroup]) -> None:
        self._device = device
        self._groups = groups
        self.is_complete = False
        self.process_groups = ProcessGroups(device)
        self._numbers: Mapping[tuple[int, ...], int] = {}

    def refuse_unfit(self) -> None:
        """Check that the model can run."""
        for group in self._groups:
            group.adopt_replaced()
        names = [name for group in self._groups for name in group.shards.on_meta()]
        if names:
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")
        for group in self._groups:
            if not group.added.is_untouched():
                group.refuse_added(self.module_names())
            group.refuse_open_ties()
            group.refuse_partly_loaded()
            settings = group.settings
            for ahead in (*(settings.forward_prefetch or ()), *(settings.backward_prefetch or ())):
                if ahead not in self._groups:
                    raise RuntimeError(
                        f"{group.name}: it is set to prefetch {ahead.name}, which is not part of the same "
                        "sharded model, so that the two share no root. Call fully_shard on the module around "
                        "both, or choose modules of this model."
                    )

    def module_names(self) -> dict[nn.Module, str]:
        """All modules of the tree, and their names in it."""
        modules = self._groups[0].modules
        return {inner: name for module in modules for name, inner in module.named_modules()}

    def run(self) -> None:
        """Make streams and process groups, after ``refuse_unfit``."""
        if is_captured(self._device):
            raise RuntimeError(
                f"{self._groups[0].name}: a CUDA graph cannot capture the first iteration, nor the first "
                "after a change of settings: it makes streams and process groups, and ranks compare their "
                "plans. Run two or three iterations before the capture, on a side stream."
            )
        self.make_streams()
        for group in self._groups:
            group.attach(self.streams)
            group.adopt_protocols()
            for bucket in group.buckets:
                axis = bucket.mesh.shard_axis
                choices: dict[str, Any] = {
                    "reduce_pg": self.process_groups.for_reductions(group, axis.pg),
                    "post_forward_axis": self.process_groups.of_part(axis, group.settings.ranks_that_keep),
                }
                if bucket.communication.would_change(choices):
                    group.replan(partial(Bucket.communicate, **choices), bucket)
        self._use_channels()
        self.is_complete = True

    def separate_messages(self, numbers: Mapping[tuple[int, ...], int]) -> None:
        """Separate messages from those of other models, with other ``numbers``: ranks may run them in any
        order."""
        self._numbers = numbers
        if self.is_complete:
            self._use_channels()

    def _use_channels(self) -> None:
        buckets = [bucket for group in self._groups for bucket in group.buckets]
        for index, bucket in enumerate(buckets):
            number = self._numbers.get(ranks_on(bucket.mesh.mesh), 0)
            bucket.communication.use_channel(number * _MOST_BUCKETS + index)

    def refuse_capture(self) -> None:
        """Refuse what a CUDA graph cannot capture; CUDA would end the capture without a reason."""
        offloaded = [group.name for group in self._groups if group.shards.are_offloaded]
        if offloaded:
            raise RuntimeError(
                f"{listed(offloaded, 4)}: a CUDA graph cannot capture parameters that are offloaded to the "
                "host, which waits for their gradients, and whose optimizer steps are no work of the device. "
                "Shard without an offload_policy, or run without a graph."
            )

    def share_streams(self, others: "Sequence[LazyInit]") -> None:
        """Communicate on the same streams as ``others``."""
        self.make_streams()
        for other in others:
            other.streams = self.streams
            for group in other._groups if other.is_complete else ():
                group.attach(self.streams)

    def make_streams(self) -> None:
        """Make the streams, if there are none yet."""
        if not hasattr(self, "streams"):
            self.streams = CommStreams(self._device)


class ProcessGroups:
    """Creates each process group at its first use, in an order common to all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._for_reductions: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._of_parts: dict[tuple[dist.ProcessGroup, int], Axis] = {}
        self._unconnected: list[dist.ProcessGroup] = []

    def take_over(self, other: "ProcessGroups") -> None:
        """Take over the process groups of ``other``."""
        self._of_parts.update(other._of_parts)
        self._for_reductions.update(other._for_reductions)
        self._unconnected += [pg for pg in other._unconnected if pg not in self._unconnected]

    def for_reductions(self, group: ParameterGroup, pg: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The process group for reductions; None if they share ``pg``, or this rank is alone.

        On NCCL they have their own by default; otherwise all-gathers would wait for them.
        """
        wanted = group.settings.separate_reduce_group
        if pg is None or pg.size() == 1 or wanted is False:
            return None
        if wanted is None and not c10d.is_nccl(pg, self._device):
            return None
        if pg not in self._for_reductions:
            self._for_reductions[pg] = self._make(pg, range(pg.size()), "reduce")
        return self._for_reductions[pg]

    def of_part(self, axis: Axis, world: int | None) -> Axis | None:
        """The ``world`` neighbouring ranks on ``axis`` with which this rank keeps unsharded parameters.

        None if that is the whole axis or only this rank, or if ``world`` does not divide the axis: the
        parameters may be on a different mesh from that of the ``fully_shard`` call.
        """
        if world is None or axis.pg is None or not 1 < world < axis.world or axis.world % world:
            return None
        if (axis.pg, world) not in self._of_parts:
            first = axis.rank // world * world
            pg = self._make(axis.pg, range(first, first + world), "part")
            self._of_parts[axis.pg, world] = Axis(pg, world, axis.rank - first)
        return self._of_parts[axis.pg, world]

    def _make(self, pg: dist.ProcessGroup, members: Iterable[int], purpose: str) -> dist.ProcessGroup:
        made = c10d.subgroup(pg, members, self._device, purpose)
        self._unconnected.append(made)
        return made

    def connect(self) -> None:
        """Connect new process groups before a backward needs them.

        Called only before forwards with gradients and in backward, so inference alone does not spend their
        memory.
        """
        while self._unconnected:
            c10d.connect(self._unconnected.pop(0), self._device)


class Feature:
    """An optional part of one root, which most users never turn on. Subclasses override what they need."""

    def __init__(self, root: "Root") -> None:
        self.root = root

    def forward_begins(self) -> None:
        """The outermost forward begins: process groups and streams exist, and nothing is unsharded yet."""

    def call_ended(self, call: Call) -> None:
        """The module of ``call`` has run or failed, perhaps in a recomputation."""

    def forward_ended(self, outcome: Outcome) -> None:
        """The outermost forward has ended."""

    def backward_begins(self) -> None:
        """The outermost backward begins."""

    def is_needed_later(self, group: ParameterGroup) -> bool:
        """Whether ``group`` must stay unsharded when the running backward is done with it."""
        return False

    def backward_ended(self) -> None:
        """The outermost backward and its reductions have ended."""

    def reset(self) -> None:
        """All gradients are about to be dropped."""

    computes_weights = False
    """Whether it computes the gradients of weights after a backward of only the inputs."""


_F = TypeVar("_F", bound=Feature)


class Root:
    """Drives the groups of one module tree. When a parent module is sharded, its root replaces this one."""

    group: ParameterGroup  # of the outermost module; set by ``drive``

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.groups: list[ParameterGroup] = []
        self.last: ParameterGroup | None = None
        """The last group of the tree. It stays unsharded from forward to backward, which probably begins with
        it. Read from the tree, not observed in a forward: which groups a rank unshards in backward must not
        depend on what it has run. None if the caller chooses what backward prefetches: all ranks unshard
        that, even if gradients flow differently on them."""
        self.observer: Observer | None = None
        self.features: tuple[Feature, ...] = ()
        self.ranks_run_alike = True
        """False while ranks may run different numbers of forwards: inside ``inference()``."""
        self.lazy_init = LazyInit(device, self.groups)
        self.plan_check = PlanCheck(device, self.groups)
        self.calls = CallStack()
        self.unsharded_groups = UnshardedGroups()
        self.prefetch = Prefetch(self.unsharded_groups)
        self.reductions = ReductionQueue(0.0)
        self.finalization = Finalization()
        self.forward: Any = None
        self.backward: Any = None
        self.created_nodes: Any = None  # by backwards with create_graph=True; see backward.py
        self.monitor: Any = None  # of this rank's failures, from the first pass on
        self.post_optim_event: Any = None
        """Behind the optimizer's step, until a forward has waited for it: ``set_post_optim_event``."""
        self._versions_at_event: list[list[int]] = []
        self._incomplete: list[Param] = []  # whose unreduced sums lack microbatches: a backward failed

    # --- the tree ---------------------------------------------------------------------------------

    def tree_changed(self) -> None:
        """Groups were added, or the caller has configured some."""
        inner = [g for g in self.groups if g is not self.group and not g.settings.may_be_unused]
        chooses = any(group.settings.backward_prefetch is not None for group in self.groups)
        self.last = inner[-1] if inner and not chooses else None
        self.unsharded_groups.arrange(self.groups, self.group)

    def start_over(self) -> None:
        """Read the caller's choices for the groups again, before the next forward."""
        self.lazy_init.is_complete = False
        self.tree_changed()
        self.plan_check.plan_changed()

    @property
    def name(self) -> str:
        """The name of the model in messages."""
        return self.group.name

    def observe(self, observer: Observer | None) -> None:
        """Report every event of every group to ``observer``, as (event, name)."""
        self.observer = observer
        for group in self.groups:
            group.observe(observer)

    def find(self, kind: type[_F]) -> _F | None:
        """The feature of class ``kind``, if any."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def add(self, feature: Feature) -> None:
        """Add ``feature``."""
        self.features = (*self.features, feature)

    def remove(self, feature: Feature) -> None:
        """Remove ``feature``."""
        self.features = tuple(each for each in self.features if each is not feature)

    # --- before a pass ----------------------------------------------------------------------------

    def refuse_unfit(self) -> None:
        """Check that the model can run. No communication."""
        self.lazy_init.refuse_unfit()
        self.unsharded_groups.refuse_alone(self.groups)

    def make_ready(self) -> None:
        """Make streams and process groups, after ``refuse_unfit``."""
        self.lazy_init.run()
        self.reductions.room = room_for(self.groups)

    def ensure_ready(self) -> None:
        """If not done yet, check the model, and make streams and process groups."""
        if not self.lazy_init.is_complete:
            self.refuse_unfit()
            self.make_ready()

    def drop_cleared_gradients(self) -> None:
        """Drop deferred gradients whose ``.grad`` the caller has cleared; refuse sums that are incomplete."""
        for group in self.groups:
            if group.gradients.state is DEFERRED:
                group.gradients.drop_cleared()
        if self._incomplete:
            self._refuse_incomplete()

    def _refuse_incomplete(self) -> None:
        """Refuse a pass while sums that a failed backward left incomplete wait to be reduced."""
        self._incomplete = [param for param in self._incomplete if param.is_deferred]
        if self._incomplete:
            names = listed((param.fqn for param in self._incomplete), 4)
            raise RuntimeError(
                f"{names}: a backward failed while gradients of earlier ones without synchronisation waited "
                "to be reduced. Some parameters have lost these, others still have them, so that their sums "
                "would be of different microbatches. Call zero_grad(), and begin this step again."
            )

    def reshards_after_forward(self, group: ParameterGroup) -> bool:
        """The caller's choice for ``group``; by default all groups are freed except the root's.

        Eager runs also keep ``last`` in memory.
        """
        chosen = group.settings.reshard_after_forward
        return group is not self.group if chosen is None else bool(chosen)

    # --- after a failure --------------------------------------------------------------------------

    def recover(self) -> None:
        """Clean up after a failed backward: drop its gradients.

        A failed forward needs no cleanup: its hooks ran.
        """
        if self.backward is not None and not self.backward.is_running:
            self.drop_passes()

    def drop_passes(self) -> None:
        """Drop the running passes and their results."""
        if self.backward is not None and self.backward.has_gradients():
            params = [param for group in self.groups for param in group.shards.params]
            self._incomplete = [param for param in params if param.is_deferred]
        self.forward = self.backward = None
        self.calls.running.clear()
        self.unsharded_groups.reshard_after_failure()
        self.calls.first_entries.clear()
        self.reductions = ReductionQueue(room_for(self.groups))
        for group in self.groups:
            group.gradients.drop_of_backward()

    def reset(self) -> None:
        """Drop the running iteration and all gradients that wait."""
        self.finalization.drop()
        for feature in self.features:
            feature.reset()
        self.drop_passes()
        for group in self.groups:
            group.gradients.drop()

    def tell_failed_forward(self) -> None:
        """Report the exception that leaves the outermost forward: other ranks wait for this one.

        Not if ranks may run different forwards: perhaps none is waiting, and a rank that fails inside
        ``inference()`` catches up on missed collectives when the context ends.
        """
        error = sys.exc_info()[1]
        if error is None or self.calls.running or not self.ranks_run_alike:
            return
        if not autograd.is_in_backward():
            monitor_of_job().report(error, f"the forward of '{self.name}'")

    def tell_failed_backward(self) -> None:
        """Report that autograd has dropped a backward before its end."""
        self.monitor.phase = ""
        self.monitor.report_backward(f"the backward of '{self.name}'")

    # --- gradients --------------------------------------------------------------------------------

    def finish_reductions(self) -> None:
        """Wait for all reductions in flight."""
        self.reductions.finish()
        if self.lazy_init.streams.are_device_streams:
            self.let_host_write()

    def average_ignored(self) -> None:
        """Average the gradients of ignored parameters, in groups that are set to."""
        for group in self.groups:
            if group.settings.averages_ignored:
                group.average_ignored()

    def joins_by_hand(self, group: ParameterGroup) -> bool:
        """True if ranks that use different parameters reduce them when the caller ends the backward: once,
        however many backwards each of them has run."""
        by_hand = self.finalization.by_hand
        return by_hand and group.settings.ranks_may_differ and group.gradients.are_wanted

    # --- calls between passes ---------------------------------------------------------------------

    def unshard(self, group: ParameterGroup) -> None:
        """Begin to unshard ``group`` until forward has used it, or ``reshard``."""
        held = self.unsharded_groups
        may_move = not self.lazy_init.is_complete or not group.shards.are_untouched(())
        self.ensure_ready()
        self.wait_for_optimizer()
        if group.unsharded.state is PARTLY:
            held.reshard(group)
        held.reshard_stale([group], self.post_optim_event)
        held.unshard(group, CALLER)
        if may_move and self.lazy_init.streams.are_device_streams:
            # Shards may have been moved on a stream for which no other one waits.
            current_stream(self.device).synchronize()

    def expect(self, event: Any) -> None:
        """The optimizer's step ends with ``event``."""
        self.post_optim_event = event
        self._versions_at_event = self._versions()

    def _versions(self) -> list[list[int]]:
        return [group.shards.versions() for group in self.groups]

    def wait_for_optimizer(self) -> None:
        """Order all-gathers behind what wrote the shards: the event, if that was the optimizer alone."""
        streams, event = self.lazy_init.streams, self.post_optim_event
        streams.wait_for_optimizer(event)
        if event is not None and self._versions() != self._versions_at_event:
            streams.wait_for_optimizer()

    def make_compute_wait_for_optimizer(self) -> None:
        """Order what is computed from the shards between passes behind the event, if there is one."""
        if self.post_optim_event is not None:
            self.lazy_init.make_streams()
            self.lazy_init.streams.make_compute_wait_for(self.post_optim_event)

    def reshard(self, group: ParameterGroup) -> None:
        """Reshard ``group`` now."""
        if self.unsharded_groups.reasons.get(group) is INFERENCE:
            raise RuntimeError(f"reshard: {group.name} is kept unsharded by inference(). Leave that first.")
        self.unsharded_groups.reshard(group)

    def refuse_at_work(self, caller: str, group: ParameterGroup, when: str = "before") -> None:
        """Refuse ``caller`` during a pass; ``when``: when to call it instead."""
        self.calls.drop_interrupted()
        is_in_backward = autograd.is_in_backward() or (self.backward is not None and self.backward.is_running)
        if self.calls.running or is_in_backward:
            raise RuntimeError(
                f"{caller}: {group.name} is part of a model whose "
                f"{'backward' if is_in_backward else 'forward'} is running, and that needs its parameters "
                f"and gradients as they are. Call it {when}."
            )
        self.recover()
        for each in self.groups:
            each.gradients.drop_cleared()

    def hand_over(self, group: ParameterGroup, caller: str) -> None:
        """Reshard ``group``, so that ``caller`` can change it, after ``compute_after_optimizer``."""
        if not self.ranks_run_alike:
            raise RuntimeError(f"{caller}: {group.name} is kept unsharded by inference(). Leave that first.")
        self.ensure_ready()
        self.lazy_init.streams.all_gather.wait_for_compute()
        self.unsharded_groups.reshard(group)

    def let_host_write(self) -> None:
        """Wait for copies from shards in host memory, which the caller may change from now on."""
        self.lazy_init.streams.all_gather.wait_until_host_was_read()

    # --- finalize_backward ------------------------------------------------------------------------

    def end_by_hand(self, group: ParameterGroup, by_hand: bool) -> None:
        """Choose whether the caller ends backwards from now on."""
        caller, finalization = "set_manual_backward_finalization", self.finalization
        if by_hand == finalization.by_hand:
            return
        self.refuse_at_work(caller, group)
        finalization.refuse_pending(self.name, f"{caller}()")
        if finalization.is_due:
            raise RuntimeError(
                f"{caller}: {self.name} has run a backward that was not finalized. Call "
                "finalize_backward(), or reset_iter_state() to drop its gradients, before changing who ends "
                "a backward."
            )
        finalization.by_hand = by_hand

    def finalize(self, group: ParameterGroup) -> GradientReductionHandle:
        """Begin to reduce the gradients that earlier backwards left to the caller."""
        self.finalization.refuse_pending(self.name, "finalize_backward()")
        if not self.calls.clock:  # before the first forward
            return GradientReductionHandle(nothing)
        if not self.finalization.by_hand:
            raise RuntimeError(
                f"finalize_backward: {self.name} ends its backwards by itself, and their gradients are "
                "complete. Call set_manual_backward_finalization(True) before forward, or leave this call "
                "out."
            )
        self.refuse_at_work("finalize_backward", group, "afterwards")
        for each in self.groups:
            wants = each.gradients.have_sums_to_reduce or self.joins_by_hand(each)
            if each.settings.requires_gradient_sync and wants:
                self.reductions.reduce(each)
        return self.finalization.begin(self._finish_by_hand)

    def _finish_by_hand(self) -> None:
        self.finish_reductions()
        self.average_ignored()
