"""What drives the groups of one module tree: the state that outlives a forward or a backward.

Root
  groups, group         all of the tree, and the root module's own
  features              optional parts, each at named points (feature.py)
  preparation           what is made once, before anything runs
  calls                 which sharded modules are running
  memory                which groups are unsharded, and why
  prefetch              what the next pass unshards ahead
  reductions            those in flight
  forward, backward     the passes that run now; dropped when they are over, or have failed
  requests              what the caller asks outside of passes
"""

import sys
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.engine.backward import BackwardPass, Session
from shardwise.engine.calls import Call, CallStack, Outcome
from shardwise.engine.feature import Feature, Features
from shardwise.engine.forward import ForwardPass
from shardwise.engine.members import GroupListener, Member
from shardwise.engine.memory import IN_USE, Memory
from shardwise.engine.prefetch import Prefetch
from shardwise.engine.preparation import Preparation
from shardwise.engine.reduction_queue import ReductionQueue, room_for
from shardwise.engine.requests import Requests
from shardwise.groups.group import Observer, ParameterGroup
from shardwise.groups.states import SHARDED
from shardwise.layout.fqns import listed
from shardwise.params.parameter import Param
from shardwise.ranks.failures import relay_of_job
from shardwise.torch_compat import autograd
from shardwise.torch_compat.functorch import outside_transforms


class Root:
    """Drives the groups of one module tree. Replaced by its parent's when that is sharded."""

    def __init__(self, device: torch.device, features: Sequence[type[Feature]] = ()) -> None:
        self.device = device
        self.groups: list[ParameterGroup] = []
        self.group: ParameterGroup | None = None
        self.observer: Observer | None = None
        self.features = Features()
        self.preparation = Preparation(self)
        self.calls = CallStack()
        self.memory = Memory(self.features)
        self.prefetch = Prefetch(self)
        self.reductions = ReductionQueue(0.0)
        self.forward: ForwardPass | None = None
        self.backward: BackwardPass | None = None
        self.requests = Requests(self)
        self._incomplete: list[Param] = []  # whose unreduced sums lack microbatches: a backward failed
        self.ends_by_hand = False  # who ends a backward: the caller; see finalization.py
        for feature in features:
            self.features.add(feature(self))

    # --- the tree ---------------------------------------------------------------------------------

    def adopt(self, members: Sequence[Member], own: Member) -> None:
        """Take over all groups of a newly sharded module's tree; ``own`` is the module's."""
        self.group = own.group
        self.groups = [member.group for member in members]
        for member in members:
            self._take_from(member)
            member.root = self
        self.tree_changed()
        self.observe(self.observer)

    def _take_from(self, member: Member) -> None:
        group, other = member.group, member.root
        if other is not self:
            self.ends_by_hand |= other.ends_by_hand
            self.preparation.process_groups.take_over(other.preparation.process_groups)
        group.listener = GroupListener(self, group)
        if group.unsharded.state is not SHARDED:
            self.memory.hold(group, other.memory.reason(group) or IN_USE)

    def tree_changed(self) -> None:
        """Groups were added, or the caller has configured some."""
        for changed in self.features.tree_changed:
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
        for ended in self.features.call_ended:
            ended(call)
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

    def reshards_after_forward(self, group: ParameterGroup) -> bool:
        """What the caller has chosen for ``group``; by default all are freed but the root's.

        Eager runs keep one more in memory: see last_block.py.
        """
        chosen = group.settings.reshard_after_forward
        return group is not self.group if chosen is None else bool(chosen)

    # --- after a failure --------------------------------------------------------------------------

    def recover(self) -> None:
        """Clean up after a backward that failed before it reached its end: drop its gradients.

        A failed forward leaves nothing: its hooks ran.
        """
        if self.backward is not None and not self.backward.is_running:
            self.abandon()

    def abandon(self) -> None:
        """Drop the passes that run, and all that they have come to."""
        if self.backward is not None and self.backward.has_gradients():
            params = [param for group in self.groups for param in group.shards.params]
            self._incomplete = [param for param in params if param.gradient.is_deferred]
        self.forward = self.backward = None
        self.calls.running.clear()
        self.memory.abandon()
        self.calls.first_entries.clear()
        self.reductions = ReductionQueue(room_for(self.groups))
        for group in self.groups:
            group.gradients.drop_of_backward()

    def refuse_incomplete(self) -> None:
        """Refuse a pass while sums wait to be reduced that a failed backward has made incomplete."""
        self._incomplete = [param for param in self._incomplete if param.gradient.is_deferred]
        if self._incomplete:
            names = listed((param.fqn for param in self._incomplete), 4)
            raise RuntimeError(
                f"{names}: a backward failed while gradients of earlier ones without synchronisation waited "
                "to be reduced. Some parameters have lost these, others still have them, so that their sums "
                "would be of different microbatches. Call zero_grad(), and begin this step again."
            )

    def reset(self) -> None:
        """Forget the running iteration, whatever it has come to, and all gradients that wait."""
        for reset in self.features.reset:
            reset()
        self.abandon()
        for group in self.groups:
            group.gradients.drop()

    def tell_failed_forward(self) -> None:
        """The exception that is being handled leaves the outermost forward: other ranks wait for this one.

        Not where ranks may run different forwards: nobody may be waiting, and a rank that fails inside of
        ``inference()`` takes part in what it has missed when the context ends.
        """
        error = sys.exc_info()[1]
        if error is None or self.calls.running or not self.features.ranks_run_alike:
            return
        if not autograd.is_in_backward():
            relay_of_job().report(error, f"the forward of {self.label}")

    def tell_failed_backward(self) -> None:
        """Autograd has dropped a backward before its end."""
        relay_of_job().leave()
        relay_of_job().report_backward(f"the backward of {self.label}")

    # --- gradients --------------------------------------------------------------------------------

    def finish_reductions(self) -> None:
        """Wait for all that are in flight."""
        self.reductions.finish()
        self.requests.let_host_write()

    def joins_by_hand(self, group: ParameterGroup) -> bool:
        """True if ranks that use different parameters reduce them where the caller ends the backward: once,
        however many backwards each of them has run."""
        return self.ends_by_hand and group.settings.ranks_may_differ and group.gradients.are_wanted
