"""When the groups of a module tree gather, reduce and free: the root's view.

Forward. Order is recorded, then replayed: the groups a forward enters are written down, and the next
forward, on entering a group, first issues the gather of the one that came after it. It travels during
the computation. The record is checked at every step; where the order differs, prefetch stops until
the next forward, and the new order is what counts. Backward prefetches against the order in which the
last forward left the groups.

Freeing in backward. Autograd runs the nodes of a graph from the latest made to the earliest, gradient
accumulation aside. So when the outputs of one call come up in backward, every call that was *entered
after* that call had *exited* is over, frozen weights included; its group may be freed. A clock that
ticks at every enter and exit orders the calls.

    forward    [ root [ a ] [ b ] ]         backward   root's outputs, b's outputs, a's outputs
    clock      1     2   3 4   5   6        a's outputs (exit 3) come up: b (enter 4) is over,
                                            root (enter 1) is not

Gradients. A group reduces when the gradients of all its trainable parameters are in, one at a time
in flight beside the group being computed; groups with unused parameters when backward has passed
their first call, or at its end.

Sessions. One session is one running backward (a graph task of autograd); reentrant checkpointing
nests them. Autograd holds a callback with a token until that backward has ended. If it failed, the
callback and its token are gone, but the session was never ended: this is how a failure is seen.
"""

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.reduction import PartReduction
from shardwise.comm.streams import CommStreams, nothing
from shardwise.engine.double_backward import Mark, follow_graph
from shardwise.engine.finalization import Finalization, GradientReductionHandle
from shardwise.engine.group import (
    DEFERRED,
    EMPTY,
    GATHERED,
    GATHERING,
    PARTLY,
    PENDING,
    REDUCING,
    SHARDED,
    Group,
    Observer,
    axes_of,
    meta_message,
)
from shardwise.engine.inference import Inference
from shardwise.engine.order import Order
from shardwise.engine.plan_check import PlanCheck
from shardwise.layout.mesh import Axis, highest_over
from shardwise.params.bucket import Bucket
from shardwise.params.initial_values import refuse_unequal_initial_values
from shardwise.ranks.failures import relay_of_job
from shardwise.torch_compat import autograd, c10d, functorch
from shardwise.torch_compat.functorch import outside_transforms


@dataclass(eq=False, slots=True)
class Call:
    """One call of a module of ``group``: when it was entered, and when it exited."""

    group: Group
    module: nn.Module
    enter: int
    parent: "Call | None"
    exit: int = 0
    given: dict[int, Any] = field(default_factory=dict)  # graph nodes of its inputs, while it runs
    frame: FrameType | None = None  # of the outermost call: whether it still runs
    handled: BaseException | None = None  # what was being handled when it was entered

    @property
    def is_outermost(self) -> bool:
        """True where nothing sharded has called it."""
        return self.parent is None


class Outcome(Enum):
    """How a call ended, as far as its backward is concerned."""

    FAILED = "raised an exception"
    NO_BACKWARD = "no gradient will flow through it"
    ANNOUNCED = "its outputs will announce its backward"
    UNANNOUNCED = "gradients may come, but nothing announces them"


FAILED, NO_BACKWARD, ANNOUNCED, UNANNOUNCED = Outcome  # quicker than attributes, see group.py


@dataclass(eq=False, slots=True)
class Member:
    """A group and the schedule that drives it now: what a sharded module knows."""

    group: Group
    schedule: "Schedule"


class _Token:
    """Held by autograd alone, through the callback at the end of a backward.

    Where it goes before that has been called, ``on_failure`` is: the backward has failed.
    """

    __slots__ = ("__weakref__", "on_failure")

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.on_failure: Callable[[], None] | None = on_failure

    def __del__(self) -> None:
        if self.on_failure is not None:
            self.on_failure()


class Session:
    """One running backward. ``active`` holds the groups it uses and the clock of their call."""

    def __init__(self, graph_task_id: int, token: _Token) -> None:
        self.graph_task_id = graph_task_id
        self.active: dict[Group, float] = {}
        self.last_mark: Mark | None = None  # of what it creates
        self.last_created: Mark | None = None  # of what it came to that an earlier backward has created
        self._token = weakref.ref(token)

    @property
    def is_running(self) -> bool:
        """False once autograd has dropped the backward, ended or failed.

        Not the session's own life is asked for, but the token's: a traceback that somebody holds keeps
        sessions alive.
        """
        return self._token() is not None


_NO_GROUPS: list[Group] = []
_group_of = attrgetter("group")
RUNNING = -1.0  # a module whose forward is being recomputed: never over
RECOMPUTED = math.inf  # a module whose forward has been recomputed: over when another begins


class Schedule:
    """Drives the groups of one module tree. Replaced by its parent's when that is sharded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.groups: list[Group] = []
        self.root: Group | None = None
        self.observer: Observer | None = None
        self._lanes: CommStreams  # made when the first gather needs them
        self._reduce_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._part_axes: dict[tuple[dist.ProcessGroup, int], Axis] = {}
        self._unconnected: list[dist.ProcessGroup] = []  # of these two, in the order they were made
        self._parents: dict[Group, Group] = {}
        self._optionals: dict[Group, list[Group]] | None = None  # found again when asked for
        self.finalization = Finalization()
        self.post_optim_event: Any = None  # of the device's own module; see wait_for_optimizer
        self._inference: Inference | None = None
        self._order_outside = Order()
        self._landing: list[Group] = []  # reductions whose results are on their way to the host
        self._is_ready = False
        self._plan_check = PlanCheck(device)
        self._is_agreed = False  # on the plan as it is known now
        self._has_compared = False  # what parameters begin with

        self._clock = 0
        self._running: list[Call] = []  # calls of the running forward, outermost first
        self._entered: list[Group] = []
        self._exited: list[Group] = []
        self._forward_order = Order()
        self._backward_order = Order()
        self._last: Group | None = None  # of the tree: backward is likely to begin with it
        self._kept_for_backward: Group | None = None  # that group, from its forward to its backward
        self._kept_before: Group | None = None  # the same, of an earlier forward than the one that runs
        self._first_enter: dict[Group, int] = {}
        self._held: dict[Group, None] = {}  # groups that are gathered or on their way
        self._ahead: set[Group] = set()  # prefetched and not yet entered
        self._kept_by_caller: set[Group] = set()
        self._has_run: dict[Group, set[nn.Module]] = {}
        self._sessions: list[Session] = []
        self._reducing: deque[Group] = deque()
        self._shipments: deque[tuple[Group, PartReduction]] = (
            deque()
        )  # of groups whose gradients leave in parts
        self._room_for_shipments = 0.0
        self._reduced: set[Group] = set()  # in the running backward
        self._has_reduced: set[Group] = set()  # in an earlier one
        self._recomputes: set[Group] = set()  # whose gradients have come in nested backwards

    # --- the tree ---------------------------------------------------------------------------------

    def adopt(self, members: Sequence[Member], root: Member) -> None:
        """Take over all groups of a newly sharded module's tree; ``root`` is its own."""
        self.root = root.group
        self.groups = [member.group for member in members]
        for member in members:
            self._take_from(member)
            member.schedule = self
        self._parents = _parents(self.groups, root.group)
        self._optionals = None
        self.observe(self.observer)

    def _take_from(self, member: Member) -> None:
        group = member.group
        if member.schedule is not self:
            self.finalization.is_manual |= member.schedule.finalization.is_manual
            self._part_axes.update(member.schedule._part_axes)
            self._reduce_groups.update(member.schedule._reduce_groups)
            self._unconnected += [pg for pg in member.schedule._unconnected if pg not in self._unconnected]
        group.on_gradient = self._gradient_came
        group.on_part = self._part_complete
        group.on_complete = self._gradients_complete
        group.on_new_plan = self.plan_changed
        group.on_followed = self._agree_within
        if group is member.schedule._kept_for_backward:
            self._kept_for_backward = group
        if group.state is not SHARDED:
            self._held[group] = None
            if group in member.schedule._kept_by_caller:
                self._kept_by_caller.add(group)

    @property
    def _name(self) -> str:
        """What messages call the model."""
        return "the model" if self.root is None else self.root.name

    def observe(self, observer: Observer | None) -> None:
        """Report every event of every group to ``observer``, as (event, name)."""
        self.observer = observer
        for group in self.groups:
            group.observer = observer

    def _refuse_unfit(self) -> None:
        """Once, before anything runs: check that the model can run as it is."""
        if self._is_ready:
            return
        for group in self.groups:
            group.adopt_replaced()
        names = [name for group in self.groups for name in group.meta_parameters()]
        if names:
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")
        for group in self.groups:
            self.refuse_added(group)
            group.refuse_open_ties()
            group.refuse_partly_loaded()
            if group.may_be_unused and self._goes_with(group) is None:
                raise RuntimeError(
                    f"{group.name}: set_may_be_unused() was called on it, but no sharded module around it is "
                    "run by all ranks, with which it could be gathered. Call fully_shard on the module "
                    "around it."
                )

    def _prepare(self) -> None:
        """Once, before anything runs: check the model, make lanes and process groups."""
        if self._is_ready:
            return
        self._refuse_unfit()
        self._prepare_lanes()
        channel = 0
        for group in self.groups:
            group.attach(self._lanes)
            group.follow_protocols()
            for bucket in group.buckets:
                axis = bucket.mesh.shard
                bucket.use_channel(channel)
                choices: dict[str, Any] = {
                    "reduce_pg": self._reduce_group(group, axis.pg),
                    "post_forward_axis": self._part_axis(axis, _part_world(group)),
                }
                if bucket.would_change(choices):
                    group.replan(partial(Bucket.communicate, **choices), bucket)
                channel += 1
        self._plan_room()
        inner = [group for group in self.groups if group is not self.root and not group.may_be_unused]
        self._last = inner[-1] if inner else None
        self._is_ready = True

    def refuse_added(self, group: Group) -> None:
        """Refuse what was added to the modules of ``group`` since it was sharded."""
        if not group.modules_watch.is_untouched():
            group.refuse_added(self.names())

    def names(self) -> dict[nn.Module, str]:
        """All modules of the tree, and their names in it."""
        modules = () if self.root is None else self.root.modules
        return {inner: name for module in modules for name, inner in module.named_modules()}

    def _plan_room(self) -> None:
        """How much gradients in flight may hold: with the part that is coming into being, as much as the
        full parameters of the largest group, or of as many as the caller has allowed in flight."""
        parts = [part.num_bytes for group in self.groups for b in group.buckets for part in b.parts]
        whole = [group.max_reductions * group.gathered_bytes for group in self.groups]
        self._room_for_shipments = max(whole, default=0) - max(parts, default=0)

    def prepare_anew(self) -> None:
        """Look again at what the caller has chosen for the groups, before the next forward."""
        self._is_ready = False
        self._optionals = None
        self.plan_changed()

    def reset(self) -> None:
        """Forget the running iteration, whatever it has come to, and all gradients that wait."""
        self.finalization.drop()
        self._running.clear()
        self._abandon_backward()
        for group in self.groups:
            group.drop_gradients()

    def share_lanes(self, schedules: "Sequence[Schedule]") -> None:
        """Communicate on the same streams as ``schedules``."""
        self._prepare_lanes()
        for schedule in schedules:
            schedule._lanes = self._lanes
            for group in schedule.groups if schedule._is_ready else ():
                group.attach(self._lanes)

    def _prepare_lanes(self) -> None:
        if not hasattr(self, "_lanes"):
            self._lanes = CommStreams(self._device)

    def _reduce_group(self, group: Group, pg: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """On NCCL, reductions have a process group of their own: else gathers wait for them."""
        wanted = group.separate_reduce_group
        if pg is None or pg.size() == 1 or wanted is False:
            return None
        if wanted is None and c10d.backend_name(pg, self._device) != "nccl":
            return None
        if pg not in self._reduce_groups:
            self._reduce_groups[pg] = self._subgroup(pg, range(pg.size()), "reduce")
        return self._reduce_groups[pg]

    def _part_axis(self, axis: Axis, world: int | None) -> Axis | None:
        """The ``world`` neighbours of this rank on ``axis`` that keep full parameters together.

        None where that would be all of them, or none, or they do not come out even: parameters on another
        mesh than that of the call.
        """
        if world is None or axis.pg is None or not 1 < world < axis.world or axis.world % world:
            return None
        if (axis.pg, world) not in self._part_axes:
            first = axis.rank // world * world
            pg = self._subgroup(axis.pg, range(first, first + world), "part")
            self._part_axes[axis.pg, world] = Axis(pg, world, axis.rank - first)
        return self._part_axes[axis.pg, world]

    def _subgroup(self, pg: dist.ProcessGroup, members: Iterable[int], purpose: str) -> dist.ProcessGroup:
        made = c10d.subgroup(pg, members, self._device, purpose)
        self._unconnected.append(made)
        return made

    def _connect(self) -> None:
        """Have new process groups connect before a backward needs them, in an order that all ranks have.

        Not before there is gradient to come: a model that only infers is spared their memory.
        """
        while self._unconnected:
            c10d.connect(self._unconnected.pop(0), self._device)

    # --- what the caller asks ---------------------------------------------------------------------

    def unshard_for_caller(self, group: Group) -> None:
        """Begin a gather that lasts until forward has used it, or ``reshard_for_caller``."""
        self._prepare()
        self._lanes.wait_for_optimizer(self.post_optim_event)  # which the next forward waits for as well
        if group.state is PARTLY:
            self._release(group)
        self._free_stale([group])
        self._gather(group)
        self._kept_by_caller.add(group)
        self._forget_kept(group)

    def reshard_for_caller(self, group: Group) -> None:
        """Free the full parameters now."""
        if self._inference is not None and group in self._inference.kept:
            raise RuntimeError(f"reshard: {group.name} is kept gathered by inference(). Leave that first.")
        self._release(group)

    def refuse_at_work(self, caller: str, group: Group, when: str = "before") -> None:
        """``caller`` is for between passes only; ``when`` to call it instead."""
        self._forget_interrupted()
        is_in_backward = autograd.current_graph_task_id() != -1 or any(s.is_running for s in self._sessions)
        if self._running or is_in_backward:
            raise RuntimeError(
                f"{caller}: {group.name} is part of a model whose "
                f"{'backward' if is_in_backward else 'forward'} is running, and that needs its parameters "
                f"and gradients as they are. Call it {when}."
            )
        self._recover()
        for each in self.groups:
            each.drop_cleared()

    def finalize_by_hand(self, group: Group, is_manual: bool) -> None:
        """Whether the caller ends backwards from now on."""
        caller = "set_manual_backward_finalization"
        if is_manual == self.finalization.is_manual:
            return
        self.refuse_at_work(caller, group)
        self.finalization.refuse_pending(self._name, f"{caller}()")
        if self.finalization.is_due:
            raise RuntimeError(
                f"{caller}: {self._name} has run a backward that was not finalized. Call "
                "finalize_backward(), or reset_iter_state() to drop its gradients, before changing who ends "
                "a backward."
            )
        self.finalization.is_manual = is_manual

    def finalize_backward(self, group: Group) -> GradientReductionHandle:
        """Begin to reduce what backwards have left to the caller's call."""
        self.finalization.refuse_pending(self._name, "finalize_backward()")
        if not self._clock:  # before the first forward
            return GradientReductionHandle(nothing)
        if not self.finalization.is_manual:
            raise RuntimeError(
                f"finalize_backward: {self._name} ends its backwards by itself, and their gradients are "
                "complete. Call set_manual_backward_finalization(True) before forward, or leave this call "
                "out."
            )
        self.refuse_at_work("finalize_backward", group, "afterwards")
        for each in self.groups:
            if each.requires_gradient_sync and (each.has_sums_to_reduce or self._joins_by_hand(each)):
                self._reduce(each)
        return self.finalization.begin(self._finish_reductions)

    def free_between_passes(self, group: Group, caller: str) -> None:
        """Have nothing of ``group`` gathered, for ``caller`` to change it."""
        if self._inference is not None:
            raise RuntimeError(f"{caller}: {group.name} is kept gathered by inference(). Leave that first.")
        self._prepare()
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            self._lanes.make_compute_wait_for(event)  # and what comes after it is the caller's own work
        self._lanes.all_gather.wait_for_compute()
        self._release(group)

    @property
    def is_in_inference(self) -> bool:
        """True inside of ``inference()``."""
        return self._inference is not None

    def begin_inference(self, groups: Sequence[Group], budget: float) -> int:
        """Keep the groups gathered that ``budget`` bytes have room for; returns the bytes taken."""
        if self._inference is not None:
            raise RuntimeError(
                f"inference: {groups[0].name} is in another inference() already, which would end with this "
                "one. Leave it first."
            )
        self._prepare()
        kept: list[Group] = []
        taken = 0
        for group in groups:
            if taken + group.gathered_bytes <= budget:
                kept.append(group)
                taken += group.gathered_bytes
        self._lanes.wait_for_optimizer(self.post_optim_event)
        for group in self.groups:
            self._release(group)  # what was kept from before may be stale
        for group in kept:
            self._gather(group)
        for group in kept:
            group.wait()
        self._inference = Inference(self.groups, groups, set(kept))
        # Ranks may run different numbers of forwards: what they learn from them is forgotten afterwards.
        self._order_outside, self._forward_order = self._forward_order, Order()
        return taken

    def end_inference(self) -> None:
        """Take part in what other ranks still run, then free everything."""
        assert self._inference is not None
        inference = self._inference
        with ExitStack() as stack:
            for group in inference.kept:
                stack.callback(self._release, group)
            stack.callback(setattr, self, "_inference", None)
            stack.callback(setattr, self, "_forward_order", self._order_outside)
            inference.make_good(self._play)
            inference.serve(self._play)

    def _play(self, groups: Sequence[Group]) -> None:
        """Gather for the sake of other ranks; all at once, since they may go in another order."""
        pending: list[Group] = []
        for group in [*groups, None]:
            if group is None or group in pending:  # it is gathered once more
                for each in pending:
                    each.wait()
                    each.reshard()
                pending.clear()
            if group is not None:
                group.unshard()
                pending.append(group)

    # --- forward ----------------------------------------------------------------------------------

    @outside_transforms
    def enter_forward(self, group: Group, module: nn.Module) -> Call:
        """``module`` is about to run: have the full parameters of its group in place."""
        if autograd.current_graph_task_id() != -1:
            return self._enter_recomputation(group, module)
        self._forget_interrupted()
        if not self._running:
            self._begin_forward()
        call = self._open_call(group, module)
        if not group.may_be_unused:
            self._forward_order.enter(group)
            self._entered.append(group)
        self._kept_by_caller.discard(group)
        self._gather(group)
        self._ahead.discard(group)
        self._gather_optional(group)
        self._prefetch(group.forward_prefetch, self._forward_order, group)
        group.wait()
        self._tell("forward", group)
        return call

    def current_call(self, module: nn.Module) -> Call | None:
        """The innermost running call of ``module``; None if it never got to run."""
        for call in reversed(self._running):
            if call.module is module:
                return call
        return None

    def freed_by_exit(self, call: Call) -> Sequence[Group]:
        """The groups whose full parameters may go when ``call`` is over, or before the caller's next one."""
        if call.is_outermost:
            return tuple(self._held)
        return (call.group, *self._optional(call.group))

    @outside_transforms
    def exit_forward(self, call: Call, outcome: Outcome) -> None:
        """The module of ``call`` has run."""
        self._close_call(call)
        group = call.group
        if autograd.current_graph_task_id() != -1:
            self._exit_recomputation(group)
            return
        if not group.may_be_unused and (outcome is not NO_BACKWARD or not torch.is_grad_enabled()):
            self._exited.append(group)
        if outcome is ANNOUNCED:
            self._first_enter.setdefault(group, call.enter)
        if outcome is FAILED:
            self._release(group)
        elif not group.may_be_unused and self._frees_after(call, outcome):
            self._release_after_forward(group, outcome)
            for optional in self._optional(group):
                self._release(optional)
        if not self._running:
            self._end_forward(outcome)

    def plan_changed(self, _group: Group | None = None) -> None:
        """Compare the plan again, if it is another, before the next forward with gradients."""
        self._is_agreed = False

    def _agree(self) -> None:
        """Before training: the ranks have the same plan.

        Collective, unless this was agreed before. Not where gradients are off: there, ranks that keep copies
        may run forwards that others do not, such as a dry run on one rank.
        """
        if not self._is_agreed and torch.is_grad_enabled():
            self._plan_check.run(self._name, self.groups)
            self._is_agreed = True

    def _compare_starts(self) -> None:
        """Once, before training: ranks begin with the same weights, and keep equal copies. Collective."""
        if not self._has_compared and torch.is_grad_enabled():
            refuse_unequal_initial_values(
                [param for group in self.groups for param in group.params], self._device
            )
            self._has_compared = True

    def _agree_within(self, _group: Group) -> None:
        """In a pass, a group has followed what the caller changed: before it communicates, the ranks agree.

        They all come here at the same group.
        """
        if self._is_agreed or not self._has_compared:
            return
        self._plan_check.look(self.groups)
        if torch.is_grad_enabled() or autograd.current_graph_task_id() != -1:
            self._plan_check.run(self._name, self.groups)
            self._is_agreed = True

    def _begin_forward(self) -> None:
        relay_of_job().begin()
        if functorch.is_recorded():
            raise RuntimeError(
                f"{self._name}: make_fx, which torch.func.linearize uses, records what forward computes, "
                "with the full parameters as constants. They are freed after forward, so that the program "
                "would read memory that is gone. Use torch.func.jvp or vjp, which compute anew."
            )
        self._refuse_unfit()
        self._agree()
        self.finalization.refuse_pending(self._name, "a forward")
        self._prepare()
        if torch.is_grad_enabled():
            self._connect()
        self._compare_starts()
        if self._sessions:  # no backward is running now, whatever still holds on to one
            self._abandon_backward()
        for group in self.groups:
            group.drop_cleared()
        for group in [group for group in self._held if group.state is PARTLY]:
            self._release(group)
        self._kept_before = self._kept_for_backward
        for group in self.groups:
            if group.state is GATHERING:  # asked for and not used: on some ranks, perhaps
                group.wait()
        if self._inference is None:
            kept = [group for group in self.groups if group.state is GATHERED]
            self._free_stale([group for group in kept if group is not self._kept_before])
        else:
            self._inference.make_good(self._play)
            self._inference.check_weights()
            self._inference.begin_forward()
        event, self.post_optim_event = self.post_optim_event, None
        self._lanes.wait_for_optimizer(event)
        self._forward_order.rewind()
        self._entered, self._exited = [], []
        self._has_run.clear()

    def _end_forward(self, outcome: Outcome) -> None:
        """The outermost module has run."""
        if outcome is not FAILED:
            self._forward_order.plan(self._entered)
            if self._inference is not None:
                self._inference.end_forward()
        if torch.is_grad_enabled():
            self._backward_order.plan(self._exited[::-1])
        if outcome in (ANNOUNCED, UNANNOUNCED) and torch.is_grad_enabled():
            unneeded = [*self._ahead, *self._partly_run()]
        else:
            # No backward will come for whose sake a group could be kept.
            others = (*self._kept_by_caller, self._kept_before)  # which an earlier forward has left
            unneeded = [group for group in self._held if group not in others]
        for group in unneeded:
            self._release(group)
        self._hide_kept()
        if not torch.is_grad_enabled():
            self._let_host_write()

    def _let_host_write(self) -> None:
        """Wait for copies out of shards in host memory, which the caller may change from now on."""
        if self._lanes.are_device_streams and any(
            bucket.is_offloaded for g in self.groups for bucket in g.buckets
        ):
            self._lanes.all_gather.synchronize()

    def _hide_kept(self) -> None:
        """Between passes modules show their shards, whatever is kept in memory, but for ``inference()``."""
        shown = set() if self._inference is None else self._inference.kept
        for group in self._held:
            if group.state is GATHERED and group not in self._kept_by_caller and group not in shown:
                group.hide()

    def _frees_after(self, call: Call, outcome: Outcome) -> bool:
        """Whether the group is freed now that ``call`` is over."""
        group = call.group
        has_run = self._has_run.setdefault(group, set())
        has_run.add(call.module)
        if len(has_run) < len(group.modules) or outcome is UNANNOUNCED:
            return False
        if group in map(_group_of, self._running):
            return False
        return self.reshards_after_forward(group)

    def reshards_after_forward(self, group: Group) -> bool:
        """What the caller has chosen for ``group``; by default all are freed but the root's.

        Eager runs keep one more in memory: see ``_is_needed_at_once``.
        """
        chosen = group.reshard_after_forward
        return group is not self.root if chosen is None else bool(chosen)

    def _is_needed_at_once(self, group: Group) -> bool:
        """True if backward probably begins with ``group``: freed, it would be gathered again at once.

        Which one that is was not observed but is read from the tree: what ranks gather in backward must not
        depend on what each of them has seen. Nor is anything kept where the caller says what backward gathers
        ahead: ranks gather that also where gradients flow differently in them.
        """
        return (
            group is self._last
            and group.reshard_after_forward is None
            and group.unshard_in_backward
            and all(each.backward_prefetch is None for each in self.groups)
            and self._inference is None
            and not group.changed_in_place()
        )

    def _release_after_forward(self, group: Group, outcome: Outcome) -> None:
        """Free a group, or leave it, or a part of it, for backward where that is wanted."""
        if outcome is ANNOUNCED and self._is_needed_at_once(group):
            group.hide()
            self._kept_for_backward = group
        elif (
            _part_world(group) is not None
            and outcome is ANNOUNCED
            and group.state is GATHERED
            and group not in self._kept_by_caller
        ):
            group.keep_part()
        else:
            self._release(group)

    def _optional(self, group: Group) -> list[Group]:
        """The groups inside ``group`` that some ranks may not use, and that go with it therefore."""
        if self._optionals is None:
            self._optionals = {}
            for optional in self.groups:
                if optional.may_be_unused and (around := self._goes_with(optional)) is not None:
                    self._optionals.setdefault(around, []).append(optional)
        return self._optionals.get(group, _NO_GROUPS)

    def _goes_with(self, optional: Group) -> Group | None:
        """The innermost group around ``optional`` that all ranks use."""
        around = self._parents.get(optional)
        while around is not None and around.may_be_unused:
            around = self._parents.get(around)
        return around

    def _gather_optional(self, group: Group) -> None:
        for optional in self._optional(group):
            self._gather(optional)

    def _partly_run(self) -> list[Group]:
        """Groups of several modules of which not all have run, and that need not be kept."""
        return [
            group
            for group, modules in self._has_run.items()
            if len(modules) < len(group.modules) and group.reshard_after_forward
        ]

    def _open_call(self, group: Group, module: nn.Module) -> Call:
        self._clock += 1
        parent = self._running[-1] if self._running else None
        call = Call(group, module, self._clock, parent, handled=sys.exc_info()[1])
        if parent is None:
            call.frame = _frame_of_call()
        self._running.append(call)
        return call

    def _forget_interrupted(self) -> None:
        """Forget a forward that an interrupt ended, which runs no hooks: its frame no longer runs."""
        if self._running and self._running[0].frame is not None:
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame is not self._running[0].frame:
                frame = frame.f_back
            if frame is None:
                self._running.clear()

    def _close_call(self, call: Call) -> None:
        self._clock += 1
        call.exit = self._clock
        # Calls inside it that never closed had failed.
        while self._running and self._running.pop() is not call:
            pass
        call.frame = call.handled = None
        call.given = {}

    # --- backward ---------------------------------------------------------------------------------

    @outside_transforms
    def enter_backward(self, call: Call) -> None:
        """Gradients of the outputs of ``call`` are there: its group is needed."""
        group = call.group
        session = self._session()
        if torch.is_grad_enabled():
            follow_graph(self)
        if session.active.get(group) == call.enter and group.state is GATHERED:
            return  # another output of the same call
        self._free_before(session, call.exit, group)
        session.active[group] = call.enter
        self._gather_for_backward(group)
        self._tell("backward", group)
        around = call.parent
        while around is not None and session.active.get(around.group) is None:
            # Its own outputs are not part of this backward, but what ran before this call may be.
            session.active[around.group] = around.enter
            self._gather(around.group)
            self._take_up(around.group)
            around.group.wait()
            around = around.parent

    def mark(self) -> Mark:
        """The groups that the running backward computes with, for the graph that it makes."""
        session = self._session()
        groups = tuple(g for g in self._held if g.state is GATHERED and g not in self._ahead)
        if session.last_mark is None or session.last_mark.groups != groups:
            session.last_mark = Mark(groups, session.last_mark)
        return session.last_mark

    @outside_transforms
    def enter_created(self, mark: Mark) -> None:
        """A node that an earlier backward created comes up: what it was created with is needed.

        Until this backward ends. Where devices have threads of their own, such nodes come in no order that
        would tell when a group is over.
        """
        session = self._session()
        if torch.is_grad_enabled():
            follow_graph(self)
        if mark is session.last_created:
            return
        session.last_created = mark
        for group in mark.groups:
            self._gather_again(group)
            self._take_up(group)
            self._ahead.discard(group)
        self._prefetch_created(mark)
        for group in mark.groups:
            group.wait()

    def _prefetch_created(self, mark: Mark) -> None:
        if mark.next is not None and mark.groups and mark.groups[-1].policy.backward_prefetch is not None:
            ahead = [group for group in mark.next.groups if group not in mark.groups]
            self._prefetch(ahead[: mark.groups[-1].policy.prefetch], self._backward_order, mark.groups[-1])

    def _take_up(self, group: Group) -> None:
        """Let autograd find what has changed in the group that was kept, as if it were gathered anew."""
        if group is self._kept_for_backward:
            group.follow_versions()
            self._forget_kept(group)
        elif group.computes_on_shards and group.state is GATHERED and group.changed_since_gather():
            group.follow_versions()

    def _forget_kept(self, group: Group) -> None:
        """``group`` is no longer kept for a backward only, if it was."""
        if group is self._kept_for_backward:
            self._kept_for_backward = self._kept_before = None

    def _enter_recomputation(self, group: Group, module: nn.Module) -> Call:
        """Activation checkpointing runs a module again inside backward."""
        session = self._session()
        call = self._open_call(group, module)
        for other in [g for g, clock in session.active.items() if clock == RECOMPUTED and g is not group]:
            self._leave_backward(session, other, call.enter)
        if session.active.get(group, RECOMPUTED) == RECOMPUTED:
            session.active[group] = RUNNING
        self._gather_for_backward(group)
        self._tell("recompute", group)
        return call

    def _exit_recomputation(self, group: Group) -> None:
        session = self._session()
        if session.active.get(group) == RUNNING:
            session.active[group] = RECOMPUTED

    def _gather_for_backward(self, group: Group) -> None:
        if not group.may_be_unused:
            self._backward_order.enter(group)
            self._backward_order.find(group)
        if group.unshard_in_backward:
            self._gather_again(group)
        self._take_up(group)
        self._ahead.discard(group)
        self._gather_optional(group)
        if group.backward_prefetch is not None or group.policy.backward_prefetch == "before":
            self._prefetch(group.backward_prefetch, self._backward_order, group)
        if group.unshard_in_backward or group.state is GATHERED:
            group.wait()

    def _free_before(self, session: Session, exit_clock: int, current: Group) -> None:
        """Free the groups whose calls are over, as a call that exited at ``exit_clock`` comes up."""
        over = [g for g, clock in session.active.items() if clock > exit_clock and g is not current]
        for group in over:
            self._leave_backward(session, group, exit_clock)

    def _leave_backward(self, session: Session, group: Group, clock: int) -> None:
        del session.active[group]
        if group.may_be_unused:
            return  # it goes with the group around it
        # Groups that join with zeros do so at the end of backward, in an order that all ranks have in common.
        has_gradients = group.gradient_state is PENDING and not group.zeros_for_unused
        if has_gradients and group.requires_gradient_sync and group.is_trainable:
            first = self._first_enter.get(group)
            if first is not None and first > clock:
                self._reduce(group)  # some parameters were not used
        self._release_after_backward(group)
        for optional in self._optional(group):
            self._release_after_backward(optional)

    def _gradient_came(self, group: Group) -> None:
        self._session()
        if len(self._sessions) > 1:
            self._recomputes.add(group)

    def _gradients_complete(self, group: Group) -> None:
        # Where ranks differ in what they use, they reduce at a moment that they have in common.
        if group.requires_gradient_sync and not (group.zeros_for_unused or group.may_be_unused):
            self._reduce(group)
        if group.backward_prefetch is None and group.policy.backward_prefetch == "after":
            if self._is_over_once_complete(group):
                self._release_after_backward(group)
            self._prefetch(None, self._backward_order, group)

    def _is_over_once_complete(self, group: Group) -> bool:
        """True if nothing will use ``group`` again in this backward, once all its gradients are there.

        Not so where parts inside are recomputed by nested backwards, which add to complete gradients.
        Nothing announces these: a group's first backward shows whether it has any.
        """
        is_plain = group.is_all_trainable and group is not self.root and not group.may_be_unused
        return is_plain and group in self._has_reduced and group not in self._recomputes

    def _part_complete(self, group: Group) -> None:
        """Some large gradients of a group are in, all that there will be of them: they need not wait."""
        if group.requires_gradient_sync and not (group.zeros_for_unused or group.may_be_unused):
            self._limit_shipments(group, group.send_ready())

    def _limit_shipments(self, group: Group, new: list[PartReduction]) -> None:
        """Wait for the oldest reductions where the new ones, of ``group``, would fill too much memory."""
        self._shipments += [(group, part_reduction) for part_reduction in new]
        held = sum(part_reduction.num_bytes for _, part_reduction in self._shipments)
        while held > self._room_for_shipments and len(self._shipments) > 1:
            sender, oldest = self._shipments.popleft()
            held -= oldest.num_bytes
            sender.release_shipment(oldest)

    def _reduce(self, group: Group) -> None:
        if group.gradient_state is REDUCING:
            group.finish_reduce()
        part_reductions = group.reduce()
        if group.leaves_in_parts:
            self._limit_shipments(group, part_reductions)
        self._reduced.add(group)
        for earlier in self._reducing:
            if earlier.gradient_state is REDUCING:  # else a nested backward has begun to add to it
                earlier.advance_reduce()
        self._reducing.append(group)
        while len(self._reducing) > group.max_in_flight:
            self._finish_oldest_reduction()

    def _finish_oldest_reduction(self) -> None:
        group = self._reducing.popleft()
        if group.gradient_state is not REDUCING:
            return
        if group.lands_on_host:
            group.release_gradients()
            self._landing.append(group)
        else:
            group.finish_reduce()

    def _release_after_backward(self, group: Group) -> None:
        if not group.reshard_after_backward or self._is_used_around(group):
            return
        if not any(session.last_created for session in self._sessions):
            self._release(group)

    def _is_used_around(self, group: Group) -> bool:
        """True if a forward that runs, or a backward around the running one, has yet to use ``group``.

        A forward may run a backward of its own, also where it is recomputed, and a backward a nested one.
        """
        outer = self._sessions[:-1]
        return any(group in s.active for s in outer) or group in map(_group_of, self._running)

    # --- sessions ---------------------------------------------------------------------------------

    def _session(self) -> Session:
        """The session of the running backward; a new one at its first event."""
        task = autograd.current_graph_task_id()
        if self._sessions and self._sessions[-1].graph_task_id == task:
            return self._sessions[-1]
        self._recover()
        self._sessions = [session for session in self._sessions if session.is_running]
        for session in self._sessions:
            if session.graph_task_id == task:
                return session
        if not self._sessions:
            self._begin_backward()
        token = _Token(self._tell_failed_backward)
        session = Session(task, token)
        self._sessions.append(session)
        autograd.queue_end_of_backward(partial(self._end_session, session, token))
        return session

    def _begin_backward(self) -> None:
        relay_of_job().begin()
        if autograd.is_autograd_compiled():
            raise RuntimeError(
                f"{self._name}: compiled autograd runs its backward and does not say when that ends, so that "
                "gradients would be lost. Leave it off, or compile a function that calls the model "
                "(torch.compile(lambda x: model(x))), not the model: its hooks are then in the graph, and "
                "none are left for autograd to run."
            )
        if self._inference is not None:
            raise RuntimeError(
                f"{self._name}: a backward inside inference(), "
                "which keeps full parameters whose gradients nobody reduces. Train outside of it."
            )
        self.finalization.refuse_pending(self._name, "a backward")
        self._prepare()
        self._connect()
        for group in self.groups:
            group.drop_cleared()
        self._lanes.all_gather.wait_for_compute()
        self._backward_order.rewind()
        self._reduced.clear()

    @outside_transforms
    def _end_session(self, session: Session, token: _Token) -> None:
        session.last_mark = session.last_created = None
        if len(self._sessions) > 1:  # a nested backward: the outer one has gradients yet to come
            for group in list(session.active):
                if not group.may_be_unused:  # it goes with the group around it
                    self._release_after_backward(group)
        else:
            self._end_backward()
        self._sessions.remove(session)  # last: if this failed, the session tells so
        token.on_failure = None

    def _end_backward(self) -> None:
        """The outermost backward has ended: nothing more will come."""
        for group in self.groups:
            self._settle_gradients(group)
        self._has_reduced |= self._reduced
        self._finish_reductions(is_end=not self.finalization.is_manual)
        self.finalization.is_due = self.finalization.is_manual
        running = {call.group for call in self._running}  # a forward may run a backward of its own
        for group in list(self._held):
            if group not in self._kept_by_caller and group not in running:
                self._release_after_backward(group)
        if not running:
            self._hide_kept()
        self._first_enter.clear()

    def _finish_reductions(self, is_end: bool = True) -> None:
        """Wait for all reductions. ``is_end``: no more will come of this backward."""
        while self._reducing:
            self._finish_oldest_reduction()
        self._shipments.clear()
        for group in self._landing:
            if group.gradient_state is REDUCING:
                group.finish_reduce()
        self._landing.clear()
        self._let_host_write()
        if is_end:
            self._average_ignored()

    def _settle_gradients(self, group: Group) -> None:
        """Reduce what is left of a group's gradients, or leave it for a later backward, or for the caller."""
        state = group.gradient_state
        if not group.requires_gradient_sync or self._joins_by_hand(group):
            if state is PENDING:
                group.defer()
        elif state is PENDING or self._joins_anyway(group) or group.has_sums_to_reduce:
            self._reduce(group)

    def _joins_by_hand(self, group: Group) -> bool:
        """True if ranks that use different parameters reduce them where the caller ends the backward: once,
        however many backwards each of them has run."""
        joins = group.zeros_for_unused or group.may_be_unused
        return self.finalization.is_manual and joins and group.is_trainable

    def _joins_anyway(self, group: Group) -> bool:
        """True if other ranks may have gradients for a group that has none here."""
        return (
            (group.zeros_for_unused or group.may_be_unused)
            and group.is_trainable
            and group not in self._reduced
            and group.gradient_state in (EMPTY, DEFERRED)
        )

    def _average_ignored(self) -> None:
        """Average the gradients of ignored parameters that the caller wants to be kept equal."""
        for group in self.groups:
            if group.requires_gradient_sync:
                group.average_ignored()

    # --- after a failure --------------------------------------------------------------------------

    def tell_failed_forward(self) -> None:
        """The exception that is being handled leaves the outermost forward: other ranks wait for this one.

        Not where forwards of ranks may differ, and those that run one alone have nobody waiting: a rank that
        fails inside of ``inference()`` makes good what it owes.
        """
        error = sys.exc_info()[1]
        if error is None or self._running or self._inference is not None:
            return
        if autograd.current_graph_task_id() == -1:
            relay_of_job().report(error, f"the forward of {self._label}")

    def _tell_failed_backward(self) -> None:
        relay_of_job().report_backward(f"the backward of {self._label}")

    @property
    def _label(self) -> str:
        return "the model" if self._name == "the model" else f"'{self._name}'"

    def _recover(self) -> None:
        """Make good what a failed backward left behind: its session is gone without having ended.

        Its gradients are dropped. A failed forward leaves nothing: its hooks ran.
        """
        if self._sessions and not any(session.is_running for session in self._sessions):
            self._abandon_backward()

    def _abandon_backward(self) -> None:
        self._sessions = []
        for group in list(self._held):
            group.abandon()
        for group in self.groups:
            if group.gradient_state in (PENDING, REDUCING):
                group.drop_gradients()
        self._reducing.clear()
        self._shipments.clear()
        self._landing.clear()
        self._held.clear()
        self._ahead.clear()
        self._kept_by_caller.clear()
        self._kept_for_backward = self._kept_before = None
        self._first_enter.clear()
        self._running.clear()

    # --- gathered groups --------------------------------------------------------------------------

    def _gather(self, group: Group) -> None:
        if group is self._kept_before:
            self._release(group)  # of an earlier forward; not before, since all ranks gather it now
        if self._inference is not None and group.state is SHARDED:
            self._inference.note(group)
        group.unshard()
        self._held[group] = None

    def _gather_again(self, group: Group) -> None:
        """For backward, what forward has gathered before."""
        group.unshard_again()
        self._held[group] = None

    def _release(self, group: Group) -> None:
        """Free a group, wherever its gather stands."""
        if self._inference is not None and group in self._inference.kept:
            return
        self._kept_by_caller.discard(group)
        self._ahead.discard(group)
        self._held.pop(group, None)
        self._forget_kept(group)
        if group.state is GATHERING:
            group.wait()
        if group.state in (GATHERED, PARTLY):
            group.reshard()

    def _free_stale(self, kept: Sequence[Group]) -> None:
        """Free groups that were kept gathered while shards were changed, to gather them anew.

        Changed on any rank: the ranks agree, since all of them gather or none.
        """
        kept = [group for group in kept if group.state is GATHERED]
        if not kept:
            return
        if self.post_optim_event is not None:
            self._lanes.make_compute_wait_for(self.post_optim_event)  # it is about to read the shards
        flags = torch.tensor([group.is_stale() for group in kept], dtype=torch.int32, device=self._device)
        highest_over(flags, axes_of(kept))
        for group, is_stale in zip(kept, flags.tolist(), strict=True):
            if is_stale:
                self._release(group)
            else:
                group.follow_versions()

    def _prefetch(self, chosen: list[Group] | None, order: Order, group: Group) -> None:
        is_backward = order is self._backward_order
        upcoming = order.upcoming(group.policy.prefetch) if chosen is None else chosen
        for ahead in upcoming:
            if chosen is not None and ahead not in self.groups:
                raise RuntimeError(
                    f"{group.name}: it was told to prefetch {ahead.name}, which is not part of the same "
                    "sharded model, so that the two share no schedule. Call fully_shard on the module around "
                    "both, or choose modules of this model."
                )
            limit = group.policy.max_gathers
            if limit is not None and len(self._ahead) >= limit:
                break
            is_needed = ahead.unshard_in_backward or not is_backward
            if is_needed and ahead.state in (SHARDED, PARTLY):
                if is_backward:
                    ahead.unshard_ahead()
                    self._held[ahead] = None
                else:
                    self._gather(ahead)
                self._ahead.add(ahead)

    def _tell(self, event: str, group: Group) -> None:
        if self.observer is not None:
            self.observer(event, group.name)


def _part_world(group: Group) -> int | None:
    """How many ranks keep the full parameters together after forward, if that was asked for."""
    asked = group.reshard_after_forward
    return asked if isinstance(asked, int) and not isinstance(asked, bool) else None


def _parents(groups: list[Group], root: Group) -> dict[Group, Group]:
    """For each group, that of the sharded module right around its own."""
    owners = {module: group for group in groups for module in group.modules}
    parents: dict[Group, Group] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, around: Group) -> None:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            own = owners.get(child, around)
            if own is not around:
                parents.setdefault(own, around)
            visit(child, own)

    for module in root.modules:
        visit(module, root)
    return parents


def _frame_of_call() -> FrameType | None:
    """The frame of ``nn.Module.__call__`` (or of a registered method) that is being entered."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in ("_call_impl", "gathered"):
        frame = frame.f_back
    return frame
