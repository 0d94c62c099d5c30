"""What drives the groups of one module tree: the state that outlives a forward or a backward.

Root
  groups, group         all of the tree, and the root module's own
  calls                 which sharded modules are running
  memory                which groups are unsharded, and why
  forward, backward     the passes that run now; dropped when they are over, or have failed
  forward_order, ...    what the next pass unshards ahead
  reductions            those in flight
  features              optional parts, each at named points (feature.py)
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.comm.streams import CommStreams
from shardwise.engine.backward import BackwardPass, Session
from shardwise.engine.calls import Call, CallStack, Outcome
from shardwise.engine.feature import Feature, Points
from shardwise.engine.forward import ForwardPass
from shardwise.engine.members import GroupListener, Member, parents_of
from shardwise.engine.memory import (
    AHEAD,
    CALLER,
    FOR_EARLIER_BACKWARD,
    IN_USE,
    INFERENCE,
    Memory,
)
from shardwise.engine.prefetch_order import Order
from shardwise.engine.process_groups import ProcessGroups
from shardwise.engine.reduction_queue import ReductionQueue, room_for
from shardwise.groups.gradients import average_ignored
from shardwise.groups.group import Observer, ParameterGroup, axes_of
from shardwise.groups.shards import meta_message
from shardwise.groups.states import PARTLY, SHARDED, UNSHARDED
from shardwise.layout.mesh import highest_over
from shardwise.params.bucket import Bucket
from shardwise.ranks.failures import relay_of_job
from shardwise.torch_compat import autograd
from shardwise.torch_compat.functorch import outside_transforms

_F = TypeVar("_F", bound=Feature)


class Root:
    """Drives the groups of one module tree. Replaced by its parent's when that is sharded."""

    def __init__(self, device: torch.device, features: Sequence[type[Feature]] = ()) -> None:
        self.device = device
        self.groups: list[ParameterGroup] = []
        self.group: ParameterGroup | None = None
        self.parents: dict[ParameterGroup, ParameterGroup] = {}
        self.observer: Observer | None = None
        self.streams: CommStreams  # made when the first all-gather needs them
        self.process_groups = ProcessGroups(device)
        self.calls = CallStack()
        self.memory = Memory()
        self.forward: ForwardPass | None = None
        self.backward: BackwardPass | None = None
        self.forward_order = Order()
        self.backward_order = Order()
        self.reductions = ReductionQueue(0.0)
        # The clock of each group's first call: BackwardPass._leave reduces it once backward has passed that.
        self.first_entries: dict[ParameterGroup, int] = {}
        # Groups that are unsharded and freed with another, and are part of no order; see optional_blocks.py.
        self.leads: Mapping[ParameterGroup, Sequence[ParameterGroup]] = {}
        self.led: frozenset[ParameterGroup] = frozenset()
        self.ends_by_hand = False  # who ends a backward: the caller; see finalization.py
        self.post_optim_event: Any = None  # of the device's own module
        self._is_ready = False
        self._features: list[Feature] = []
        self.points = Points([])
        self._features = [feature(self) for feature in features]
        self.points = Points(self._features)

    # --- features ---------------------------------------------------------------------------------

    def feature(self, kind: type[_F]) -> _F | None:
        """The feature of class ``kind``, if this root has one."""
        return next((feature for feature in self._features if isinstance(feature, kind)), None)

    def add_feature(self, feature: Feature) -> None:
        """Let ``feature`` take part."""
        self._features.append(feature)
        self.points = Points(self._features)

    def remove_feature(self, feature: Feature) -> None:
        """Leave it out again."""
        self._features.remove(feature)
        self.points = Points(self._features)

    # --- the tree ---------------------------------------------------------------------------------

    def adopt(self, members: Sequence[Member], own: Member) -> None:
        """Take over all groups of a newly sharded module's tree; ``own`` is the module's."""
        self.group = own.group
        self.groups = [member.group for member in members]
        for member in members:
            self._take_from(member)
            member.root = self
        self.parents = parents_of(self.groups, own.group)
        self._tree_changed()
        self.observe(self.observer)

    def _take_from(self, member: Member) -> None:
        group, other = member.group, member.root
        if other is not self:
            self.ends_by_hand |= other.ends_by_hand
            self.process_groups.take_over(other.process_groups)
        group.listener = GroupListener(self, group)
        if group.unsharded.state is not SHARDED:
            self.memory.hold(group, other.memory.reason(group) or IN_USE)

    def _tree_changed(self) -> None:
        for changed in self.points.tree_changed:
            changed()

    @property
    def name(self) -> str:
        """What messages call the model."""
        return "the model" if self.group is None else self.group.name

    @property
    def label(self) -> str:
        """The same, quoted where it is a name."""
        return "the model" if self.name == "the model" else f"'{self.name}'"

    def module_names(self) -> dict[nn.Module, str]:
        """All modules of the tree, and their names in it."""
        modules = () if self.group is None else self.group.modules
        return {inner: name for module in modules for name, inner in module.named_modules()}

    def observe(self, observer: Observer | None) -> None:
        """Report every event of every group to ``observer``, as (event, name)."""
        self.observer = observer
        for group in self.groups:
            group.observer = observer

    def tell(self, event: str, group: ParameterGroup) -> None:
        """Report an event that is not the group's own."""
        if self.observer is not None:
            self.observer(event, group.name)

    # --- before anything runs ---------------------------------------------------------------------

    def refuse_unfit(self) -> None:
        """Once: check that the model can run as it is."""
        if self._is_ready:
            return
        for group in self.groups:
            group.shards.adopt_replaced()
        names = [name for group in self.groups for name in group.shards.on_meta()]
        if names:
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")
        for group in self.groups:
            self.refuse_added(group)
            group.refuse_open_ties()
            group.refuse_partly_loaded()
        for check in self.points.check:
            check()

    def prepare(self) -> None:
        """Once: check the model, make streams and process groups."""
        if self._is_ready:
            return
        self.refuse_unfit()  # a forward has done so; here for calls that come before one, such as unshard()
        self._prepare_streams()
        channel = 0
        for group in self.groups:
            group.attach(self.streams)
            group.shards.follow_protocols()
            for bucket in group.buckets:
                axis = bucket.mesh.shard_axis
                bucket.use_channel(channel)
                choices: dict[str, Any] = {
                    "reduce_pg": self.process_groups.for_reductions(group, axis.pg),
                    "post_forward_axis": self.process_groups.of_part(axis, group.settings.ranks_that_keep),
                }
                if bucket.would_change(choices):
                    group.shards.replan(partial(Bucket.communicate, **choices), bucket)
                channel += 1
        self.reductions = ReductionQueue(room_for(self.groups))
        self._is_ready = True

    def prepare_anew(self) -> None:
        """Look again at what the caller has chosen for the groups, before the next forward."""
        self._is_ready = False
        self._tree_changed()
        self.plan_changed()

    def plan_changed(self) -> None:
        """Ranks must have the same plan, and this one's is another now."""
        for changed in self.points.plan_changed:
            changed()

    def refuse_added(self, group: ParameterGroup) -> None:
        """Refuse what was added to the modules of ``group`` since it was sharded."""
        if not group.added.is_untouched():
            group.refuse_added(self.module_names())

    def share_streams(self, roots: "Sequence[Root]") -> None:
        """Communicate on the same streams as ``roots``."""
        self._prepare_streams()
        for root in roots:
            root.streams = self.streams
            for group in root.groups if root._is_ready else ():
                group.attach(self.streams)

    def _prepare_streams(self) -> None:
        if not hasattr(self, "streams"):
            self.streams = CommStreams(self.device)

    # --- passes -----------------------------------------------------------------------------------

    @outside_transforms
    def enter_forward(self, group: ParameterGroup, module: nn.Module) -> Call:
        """``module`` is about to run: have the parameters of its group unsharded."""
        if autograd.is_in_backward():
            session = self.find_or_begin_session()
            return self.running_backward.enter_recomputation(session, group, module)
        self.calls.forget_interrupted()
        if not self.calls.running:
            forward = ForwardPass(self)
            forward.begin()
            self.forward = forward
        assert self.forward is not None
        call = self.calls.open(group, module)
        self.forward.enter(call)
        return call

    @outside_transforms
    def exit_forward(self, call: Call, outcome: Outcome) -> None:
        """The module of ``call`` has run."""
        self.calls.close(call)
        if autograd.is_in_backward():
            session = self.find_or_begin_session()
            self.running_backward.exit_recomputation(session, call.group)
            return
        assert self.forward is not None
        self.forward.exit(call, outcome)
        if not self.calls.running:
            self.forward.end(outcome)
            self.forward = None

    @outside_transforms
    def enter_backward(self, call: Call) -> None:
        """Gradients of the outputs of ``call`` are there: its group is needed."""
        session = self.find_or_begin_session()
        self.running_backward.enter(session, call)

    @property
    def running_backward(self) -> BackwardPass:
        """The backward that ``find_or_begin_session`` has found or begun."""
        assert self.backward is not None
        return self.backward

    def find_or_begin_session(self) -> Session:
        """The session of the running graph task; at its first event a new one, perhaps of a new backward."""
        task, backward = autograd.current_graph_task_id(), self.backward
        if backward is not None and backward.sessions[-1].graph_task_id == task:
            return backward.sessions[-1]
        self.recover()
        if self.backward is None:
            backward = BackwardPass(self)
            backward.begin()
            session = backward.session_of(task)
            self.backward = backward
            return session
        self.backward.forget_failed()
        return self.backward.session_of(task)

    def freed_by_exit(self, call: Call) -> Sequence[ParameterGroup]:
        """The groups whose unsharded parameters may go when ``call`` is over, or before the next one."""
        if call.is_outermost:
            return tuple(self.memory)
        return (call.group, *self.leads.get(call.group, ()))

    def reshards_after_forward(self, group: ParameterGroup) -> bool:
        """What the caller has chosen for ``group``; by default all are freed but the root's.

        Eager runs keep one more in memory: see last_block.py.
        """
        chosen = group.settings.reshard_after_forward
        return group is not self.group if chosen is None else bool(chosen)

    # --- after a failure --------------------------------------------------------------------------

    def recover(self) -> None:
        """Make good what a failed backward left behind: it is gone without having ended.

        Its gradients are dropped. A failed forward leaves nothing: its hooks ran.
        """
        if self.backward is not None and not self.backward.is_running:
            self.abandon()

    def abandon(self) -> None:
        """Drop the passes that run, and all that they have come to."""
        self.forward = self.backward = None
        self.calls.running.clear()
        self.memory.abandon()
        self.first_entries.clear()
        self.reductions = ReductionQueue(room_for(self.groups))
        for group in self.groups:
            group.gradients.drop_of_backward()

    def reset(self) -> None:
        """Forget the running iteration, whatever it has come to, and all gradients that wait."""
        for reset in self.points.reset:
            reset()
        self.abandon()
        for group in self.groups:
            group.gradients.drop()

    def tell_failed_forward(self) -> None:
        """The exception that is being handled leaves the outermost forward: other ranks wait for this one.

        Not where forwards of ranks may differ, and those that run one alone have nobody waiting: a rank that
        fails inside of ``inference()`` makes good what it owes.
        """
        error = sys.exc_info()[1]
        if error is None or self.calls.running or not self.points.ranks_run_alike:
            return
        if not autograd.is_in_backward():
            relay_of_job().report(error, f"the forward of {self.label}")

    def tell_failed_backward(self) -> None:
        """Autograd has dropped a backward before its end."""
        relay_of_job().report_backward(f"the backward of {self.label}")

    # --- unshard and reshard ----------------------------------------------------------------------

    def unshard(self, group: ParameterGroup) -> None:
        """Begin to unshard ``group``, if it is not yet."""
        if self.memory.reason(group) is FOR_EARLIER_BACKWARD:
            self.memory.release(group)  # not before, since all ranks unshard it now
        for unsharding in self.points.unsharding:
            unsharding(group)
        group.unsharded.unshard()
        self.memory.hold_at_least(group)

    def unshard_again(self, group: ParameterGroup) -> None:
        """For backward, what forward has unsharded before."""
        group.unsharded.unshard_again()
        self.memory.hold_at_least(group)

    def unshard_led(self, group: ParameterGroup) -> None:
        """Begin to unshard the groups that go with ``group``."""
        for led in self.leads.get(group, ()):
            self.unshard(led)

    def prefetch(
        self, group: ParameterGroup, chosen: Sequence[ParameterGroup] | None, *, in_backward: bool
    ) -> None:
        """Begin to unshard what comes after ``group``: ``chosen``, or by the recorded order."""
        order = self.backward_order if in_backward else self.forward_order
        upcoming = order.upcoming(group.policy.prefetch) if chosen is None else chosen
        for ahead in upcoming:
            if chosen is not None and ahead not in self.groups:
                raise RuntimeError(
                    f"{group.name}: it was told to prefetch {ahead.name}, which is not part of the same "
                    "sharded model, so that the two share no root. Call fully_shard on the module around "
                    "both, or choose modules of this model."
                )
            limit = group.policy.max_gathers
            if limit is not None and len(self.memory.held_for(AHEAD)) >= limit:
                break
            is_needed = ahead.settings.unshard_in_backward or not in_backward
            if is_needed and ahead.unsharded.state in (SHARDED, PARTLY):
                if in_backward:
                    ahead.unsharded.unshard_ahead()
                else:
                    self.unshard(ahead)
                self.memory.hold(ahead, AHEAD)

    def free_stale(self, groups: Sequence[ParameterGroup]) -> None:
        """Of ``groups``, free those that were kept unsharded while shards were changed.

        Changed on any rank: the ranks agree, since all of them unshard or none.
        """
        kept = [group for group in groups if group.unsharded.state is UNSHARDED]
        if not kept:
            return
        if self.post_optim_event is not None:
            self.streams.make_compute_wait_for(self.post_optim_event)  # it is about to read the shards
        flags = torch.tensor([g.shards.is_stale() for g in kept], dtype=torch.int32, device=self.device)
        highest_over(flags, axes_of(kept))
        for group, is_stale in zip(kept, flags.tolist(), strict=True):
            if is_stale:
                self.memory.release(group)
            else:
                group.unsharded.follow_versions()

    def hide_kept(self) -> None:
        """Between passes modules show their shards, whatever is kept in memory, but for ``inference()``."""
        for group in self.memory:
            if group.unsharded.state is UNSHARDED and self.memory.reason(group) not in (CALLER, INFERENCE):
                group.unsharded.hide()

    # --- gradients --------------------------------------------------------------------------------

    def finish_reductions(self) -> None:
        """Wait for all that are in flight."""
        self.reductions.finish()
        self.let_host_write()

    def average_ignored(self) -> None:
        """Average the gradients of ignored parameters that the caller wants to be kept equal."""
        for group in self.groups:
            if group.settings.requires_gradient_sync:
                average_ignored(group)

    def joins_by_hand(self, group: ParameterGroup) -> bool:
        """True if ranks that use different parameters reduce them where the caller ends the backward: once,
        however many backwards each of them has run."""
        return self.ends_by_hand and group.settings.ranks_may_differ and group.gradients.are_wanted

    def let_host_write(self) -> None:
        """Wait for copies out of shards in host memory, which the caller may change from now on."""
        if self.streams.are_device_streams and any(
            bucket.is_offloaded for g in self.groups for bucket in g.buckets
        ):
            self.streams.all_gather.synchronize()

    # --- what the caller asks ---------------------------------------------------------------------

    def unshard_for_caller(self, group: ParameterGroup) -> None:
        """Begin to unshard ``group`` until forward has used it, or ``reshard_for_caller``."""
        self.prepare()
        self.streams.wait_for_optimizer(self.post_optim_event)  # which the next forward waits for as well
        if group.unsharded.state is PARTLY:
            self.memory.release(group)
        self.free_stale([group])
        self.unshard(group)
        if self.memory.reason(group) is not INFERENCE:
            self.memory.hold(group, CALLER)

    def reshard_for_caller(self, group: ParameterGroup) -> None:
        """Free it now."""
        if self.memory.reason(group) is INFERENCE:
            raise RuntimeError(f"reshard: {group.name} is kept gathered by inference(). Leave that first.")
        self.memory.release(group)

    def refuse_at_work(self, caller: str, group: ParameterGroup, when: str = "before") -> None:
        """``caller`` is for between passes only; ``when`` to call it instead."""
        self.calls.forget_interrupted()
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

    def free_between_passes(self, group: ParameterGroup, caller: str) -> None:
        """Have nothing of ``group`` unsharded, for ``caller`` to change it."""
        if not self.points.ranks_run_alike:
            raise RuntimeError(f"{caller}: {group.name} is kept gathered by inference(). Leave that first.")
        self.prepare()
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            self.streams.make_compute_wait_for(event)  # and what comes after it is the caller's own work
        self.streams.all_gather.wait_for_compute()
        self.memory.release(group)
