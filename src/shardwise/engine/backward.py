"""One backward: which groups are unsharded and resharded as it proceeds, and when gradients are reduced.

Resharding. Autograd runs the nodes of a graph from the latest created to the earliest, except for gradient
accumulation. So when backward reaches the outputs of one call, every call that was *entered after* that call
*exited* is over, frozen weights included, and its group may be resharded. A clock that ticks at every enter
and exit orders the calls.

    forward    [ root [ a ] [ b ] ]         backward   root's outputs, b's outputs, a's outputs
    clock      1     2   3 4   5   6        at a's outputs (exit 3): b (enter 4) is over,
                                            root (enter 1) is not

Gradients. A group reduces as soon as the gradients of all its trainable parameters are there.
``ParameterGroup.max_in_flight`` says how many reductions may be in flight beside the group in backward. A
group with unused parameters reduces when backward has passed its first call, or at the end of backward.

Sessions. A session is one running graph task of autograd; reentrant checkpointing nests them. Autograd holds
a callback with a token until the task ends. If the task fails, autograd drops both without calling the
callback, and this shows that the backward failed.
"""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.engine.calls import Call
from shardwise.engine.memory import AHEAD, CALLER, FOR_BACKWARD, FOR_EARLIER_BACKWARD, IN_USE
from shardwise.groups.gradients import average_ignored
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import DEFERRED, EMPTY, PENDING, REDUCING, UNSHARDED
from shardwise.ranks.failures import relay_of_job
from shardwise.torch_compat import autograd
from shardwise.torch_compat.functorch import outside_transforms

if TYPE_CHECKING:
    from shardwise.engine.root import Root

RUNNING = -1.0  # clock of a module whose forward is being recomputed: it is not over
RECOMPUTED = math.inf  # clock of a module whose forward was recomputed: it is over when another begins


class Token:
    """Owned by autograd only, through the callback at the end of a backward.

    If it dies before that callback has run, the backward has failed, and it calls ``on_failure``.
    """

    __slots__ = ("__weakref__", "on_failure")

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.on_failure: Callable[[], None] | None = on_failure

    def __del__(self) -> None:
        if self.on_failure is not None:
            self.on_failure()


class Session:
    """One graph task of autograd.

    ``active``: the groups that it uses, each with the clock at which its call was entered. ``notes``: what
    features remember until it ends.
    """

    def __init__(self, graph_task_id: int, token: Token) -> None:
        self.graph_task_id = graph_task_id
        self.active: dict[ParameterGroup, float] = {}
        self.notes: dict[Any, Any] = {}
        self._token = weakref.ref(token)

    @property
    def is_running(self) -> bool:
        """False once autograd has dropped this graph task, whether it ended or failed.

        Asks whether the token is alive, not the session: a traceback may keep a session alive.
        """
        return self._token() is not None


class BackwardPass:
    """A backward of ``root``, from the beginning of its outermost session to its end."""

    def __init__(self, root: "Root") -> None:
        self._root = root
        self.sessions: list[Session] = []
        self._reduced: set[ParameterGroup] = set()

    # --- sessions ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Check and prepare everything before the first group is unsharded."""
        root, relay = self._root, relay_of_job()
        relay.begin()
        relay.enter_backward()
        if autograd.is_autograd_compiled():
            raise RuntimeError(
                f"{root.name}: compiled autograd runs its backward and does not say when that ends, so that "
                "gradients would be lost. Leave it off, or compile a function that calls the model "
                "(torch.compile(lambda x: model(x))), not the model: its hooks are then in the graph, and "
                "none are left for autograd to run."
            )
        for begins in root.features.backward_begins:
            begins()
        for pass_begins in root.features.pass_begins:
            pass_begins("a backward")
        root.preparation.complete()
        root.preparation.process_groups.connect()
        for group in root.groups:
            group.gradients.drop_cleared()
        root.refuse_incomplete()
        root.memory.awaits_backward = False
        root.preparation.streams.all_gather.wait_for_compute()
        root.prefetch.backward_order.rewind()

    def session_of(self, graph_task_id: int) -> Session:
        """The session of a graph task; creates it at the task's first event."""
        for session in self.sessions:
            if session.graph_task_id == graph_task_id:
                return session
        token = Token(self._root.tell_failed_backward)
        session = Session(graph_task_id, token)
        self.sessions.append(session)
        autograd.queue_end_of_backward(partial(self._end_session, session, token))
        return session

    @property
    def is_running(self) -> bool:
        """False once autograd has dropped all its sessions."""
        return any(session.is_running for session in self.sessions)

    def has_gradients(self) -> bool:
        """True once there are gradients of some group."""
        return bool(self._reduced) or any(g.gradients.state in (PENDING, REDUCING) for g in self._root.groups)

    def forget_failed(self) -> None:
        """Forget nested sessions that failed."""
        self.sessions = [session for session in self.sessions if session.is_running]

    @outside_transforms
    def _end_session(self, session: Session, token: Token) -> None:
        session.notes.clear()
        if len(self.sessions) > 1:  # a nested backward: the outer one expects more gradients
            for group in list(session.active):
                if group not in self._root.memory.led:
                    self._free(group)
            self.sessions.remove(session)
        else:
            self._end()
            self._root.backward = None  # last: if the end fails, the session must still show it
        token.on_failure = None

    def _end(self) -> None:
        """End the outermost backward: reduce what is left, and reshard."""
        root = self._root
        for group in root.groups:
            self._settle(group)
        for group in self._reduced:
            group.gradients.were_reduced = True
        root.finish_reductions()
        if not root.ends_by_hand:
            average_ignored(root.groups)
        for ended in root.features.backward_ended:
            ended()
        running = root.calls.groups()  # a forward may run a backward inside
        for group in root.memory:
            if root.memory.reason(group) is not CALLER and group not in running:
                self._free(group)
        if not running:
            root.memory.hide_kept()
            root.memory.accumulates = not any(group.settings.requires_gradient_sync for group in root.groups)
        root.calls.first_entries.clear()
        relay_of_job().leave("forward" if running else "")

    # --- unshard and reshard ----------------------------------------------------------------------

    def enter(self, session: Session, call: Call) -> None:
        """Backward has reached the outputs of ``call``: have the parameters of its group unsharded."""
        root, group = self._root, call.group
        for reached in root.features.node_reached:
            reached(session)
        if session.active.get(group) == call.enter and group.unsharded.state is UNSHARDED:
            return  # another output of the same call
        self._leave_those_over(session, call.exit, group)
        session.active[group] = call.enter
        self._unshard(group)
        root.tell("backward", group)
        around = call.parent
        while around is not None and session.active.get(around.group) is None:
            # Its outputs are not part of this backward, but what it ran before this call may be.
            session.active[around.group] = around.enter
            self._begin_to_unshard(around.group)
            self._wait_for(around.group)
            around = around.parent

    def enter_recomputation(self, session: Session, group: ParameterGroup, module: nn.Module) -> Call:
        """Activation checkpointing runs a module again inside backward."""
        call = self._root.calls.open(group, module)
        for other in [g for g, clock in session.active.items() if clock == RECOMPUTED and g is not group]:
            self._leave(session, other, call.enter)
        if session.active.get(group, RECOMPUTED) == RECOMPUTED:
            session.active[group] = RUNNING
        self._unshard(group)
        self._root.tell("recompute", group)
        return call

    def exit_recomputation(self, session: Session, group: ParameterGroup) -> None:
        """The recomputed module has run."""
        if session.active.get(group) == RUNNING:
            session.active[group] = RECOMPUTED

    def _unshard(self, group: ParameterGroup) -> None:
        memory, prefetch, settings = self._root.memory, self._root.prefetch, group.settings
        if group not in memory.led:
            prefetch.backward_order.enter(group)
            prefetch.backward_order.resume_at(group)
        self._begin_to_unshard(group)
        memory.unshard_led(group)
        if settings.backward_prefetch is not None or group.policy.backward_prefetch == "before":
            prefetch.in_backward(group, settings.backward_prefetch)
        self._wait_for(group)

    def _begin_to_unshard(self, group: ParameterGroup) -> None:
        if group.settings.unshard_in_backward:
            self._root.memory.unshard_again(group)
        self.take_kept(group)

    def _wait_for(self, group: ParameterGroup) -> None:
        if group.settings.unshard_in_backward or group.unsharded.state is UNSHARDED:
            group.unsharded.wait()

    def take_kept(self, group: ParameterGroup) -> None:
        """If ``group`` was kept since forward, refuse shards that were changed in between.

        Where groups are unsharded again, autograd detects this by the versions, and names no parameter.
        """
        memory, unsharded = self._root.memory, group.unsharded
        reason = memory.reason(group)
        if reason in (FOR_BACKWARD, FOR_EARLIER_BACKWARD):
            unsharded.refuse_changed_shards()
            memory.hold(group, IN_USE)
        elif unsharded.are_shards and unsharded.state is UNSHARDED:
            unsharded.refuse_changed_shards()
        if reason is AHEAD:
            memory.hold(group, IN_USE)

    def _leave_those_over(self, session: Session, exit_clock: int, current: ParameterGroup) -> None:
        """Leave the groups whose calls are over, as backward has reached a call that exited at that clock."""
        over = [g for g, clock in session.active.items() if clock > exit_clock and g is not current]
        for group in over:
            self._leave(session, group, exit_clock)

    def _leave(self, session: Session, group: ParameterGroup, clock: int) -> None:
        root, settings = self._root, group.settings
        del session.active[group]
        if group in root.memory.led:
            return  # it is resharded with the group around it
        # Groups that take part with zeros do so at the end of backward, in an order common to all ranks.
        has_gradients = group.gradients.state is PENDING and not settings.ranks_may_differ
        if has_gradients and settings.requires_gradient_sync and group.gradients.are_wanted:
            first = root.calls.first_entries.get(group)
            if first is not None and first > clock:
                self.reduce(group)  # some parameters were not used
        self._free(group)
        for led in root.memory.leads.get(group, ()):
            self._free(led)

    def _free(self, group: ParameterGroup) -> None:
        if not group.settings.reshard_after_backward or self._is_used_around(group):
            return
        if not any(needs(group) for needs in self._root.features.is_needed_later):
            self._root.memory.release(group)

    def _is_used_around(self, group: ParameterGroup) -> bool:
        """True if a running forward, or a session around the innermost one, may still use ``group``.

        A forward may run a backward inside, also when it is recomputed, and a backward a nested one.
        """
        outer = self.sessions[:-1]
        return any(group in s.active for s in outer) or group in self._root.calls.groups()

    # --- gradients --------------------------------------------------------------------------------

    def gradient_arrived(self, group: ParameterGroup) -> None:
        """A gradient of ``group`` has arrived."""
        if len(self.sessions) > 1:
            group.gradients.come_nested = True

    def gradients_complete(self, group: ParameterGroup) -> None:
        """The gradients of all trainable parameters of ``group`` have arrived."""
        settings = group.settings
        # Ranks that use different parameters reduce at a point common to all of them: the end of backward.
        if settings.requires_gradient_sync and not settings.ranks_may_differ:
            self.reduce(group)
        if settings.backward_prefetch is None and group.policy.backward_prefetch == "after":
            if self._is_over_once_complete(group):
                self._free(group)
            self._root.prefetch.in_backward(group, None)

    def _is_over_once_complete(self, group: ParameterGroup) -> bool:
        """True if nothing in this backward will use ``group`` again once its gradients are complete.

        Nested backwards that recompute parts of a group add to gradients that were complete. Nothing
        announces them, so the group's first backward has to show whether there are any.
        """
        root, gradients = self._root, group.gradients
        is_plain = gradients.are_all_wanted and group is not root.group and group not in root.memory.led
        return is_plain and gradients.were_reduced and not gradients.come_nested

    def reduce(self, group: ParameterGroup) -> None:
        """Begin to reduce the gradients of ``group`` that are there."""
        self._root.reductions.reduce(group)
        self._reduced.add(group)

    def _settle(self, group: ParameterGroup) -> None:
        """Reduce the gradients of ``group`` that are left, or defer them to a later backward or a call."""
        gradients = group.gradients
        if not group.settings.requires_gradient_sync or self._root.joins_by_hand(group):
            if gradients.state is PENDING:
                gradients.defer()
        elif gradients.state is PENDING or self._joins_anyway(group) or gradients.have_sums_to_reduce:
            self.reduce(group)

    def _joins_anyway(self, group: ParameterGroup) -> bool:
        """True if ``group`` has no gradients on this rank, but other ranks may have some."""
        return (
            group.settings.ranks_may_differ
            and group.gradients.are_wanted
            and group not in self._reduced
            and group.gradients.state in (EMPTY, DEFERRED)
        )
