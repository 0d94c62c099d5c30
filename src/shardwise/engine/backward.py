"""One backward: what is unsharded again and freed as it goes, and when gradients are reduced.

Freeing. Autograd runs the nodes of a graph from the latest made to the earliest, gradient accumulation aside.
So when the outputs of one call come up in backward, every call that was *entered after* that call had
*exited* is over, frozen weights included; its group may be freed. A clock that ticks at every enter and exit
orders the calls.

    forward    [ root [ a ] [ b ] ]         backward   root's outputs, b's outputs, a's outputs
    clock      1     2   3 4   5   6        a's outputs (exit 3) come up: b (enter 4) is over,
                                            root (enter 1) is not

Gradients. A group reduces when the gradients of all its trainable parameters are in, one at a time in flight
beside the group being computed; groups with unused parameters when backward has passed their first call, or
at its end.

Sessions. One session is one running graph task of autograd; reentrant checkpointing nests them. Autograd
holds a callback with a token until that task has ended. If it failed, both are gone, but
the session was never ended: this is how a failure is seen.
"""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.engine.calls import Call
from shardwise.engine.memory import AHEAD, CALLER, FOR_BACKWARD, FOR_EARLIER_BACKWARD, IN_USE
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import DEFERRED, EMPTY, PENDING, UNSHARDED
from shardwise.ranks.failures import relay_of_job
from shardwise.torch_compat import autograd
from shardwise.torch_compat.functorch import outside_transforms

if TYPE_CHECKING:
    from shardwise.engine.root import Root

RUNNING = -1.0  # a module whose forward is being recomputed: never over
RECOMPUTED = math.inf  # a module whose forward has been recomputed: over when another begins


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
    """One graph task of autograd. ``active`` holds the groups it uses and the clock of their call.

    ``notes``: what features remember until it ends.
    """

    def __init__(self, graph_task_id: int, token: _Token) -> None:
        self.graph_task_id = graph_task_id
        self.active: dict[ParameterGroup, float] = {}
        self.notes: dict[Any, Any] = {}
        self._token = weakref.ref(token)

    @property
    def is_running(self) -> bool:
        """False once autograd has dropped the backward, ended or failed.

        Not the session's own life is asked for, but the token's: a traceback that somebody holds keeps
        sessions alive.
        """
        return self._token() is not None


class BackwardPass:
    """A backward of ``root``, from its first session's beginning to that one's end."""

    def __init__(self, root: "Root") -> None:
        self._root = root
        self.sessions: list[Session] = []
        self._reduced: set[ParameterGroup] = set()

    # --- sessions ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have everything in order before the first group is unsharded."""
        root = self._root
        relay_of_job().begin()
        if autograd.is_autograd_compiled():
            raise RuntimeError(
                f"{root.name}: compiled autograd runs its backward and does not say when that ends, so that "
                "gradients would be lost. Leave it off, or compile a function that calls the model "
                "(torch.compile(lambda x: model(x))), not the model: its hooks are then in the graph, and "
                "none are left for autograd to run."
            )
        for begins in root.points.backward_begins:
            begins()
        for pass_begins in root.points.pass_begins:
            pass_begins("a backward")
        root.prepare()
        root.process_groups.connect()
        for group in root.groups:
            group.gradients.drop_cleared()
        root.streams.all_gather.wait_for_compute()
        root.backward_order.rewind()

    def session_of(self, graph_task_id: int) -> Session:
        """The session of a graph task; a new one at its first event."""
        for session in self.sessions:
            if session.graph_task_id == graph_task_id:
                return session
        token = _Token(self._root.tell_failed_backward)
        session = Session(graph_task_id, token)
        self.sessions.append(session)
        autograd.queue_end_of_backward(partial(self._end_session, session, token))
        return session

    @property
    def is_running(self) -> bool:
        """False once autograd has dropped all of it."""
        return any(session.is_running for session in self.sessions)

    def forget_failed(self) -> None:
        """Of nested sessions, those that autograd has dropped."""
        self.sessions = [session for session in self.sessions if session.is_running]

    @outside_transforms
    def _end_session(self, session: Session, token: _Token) -> None:
        session.notes.clear()
        if len(self.sessions) > 1:  # a nested backward: the outer one has gradients yet to come
            for group in list(session.active):
                if group not in self._root.led:
                    self._free(group)
            self.sessions.remove(session)
        else:
            self._end()
            self._root.backward = None  # last: if the end has failed, the session tells so
        token.on_failure = None

    def _end(self) -> None:
        """The outermost backward has ended: nothing more will come."""
        root = self._root
        for group in root.groups:
            self._settle(group)
        for group in self._reduced:
            group.gradients.were_reduced = True
        root.finish_reductions()
        if not root.ends_by_hand:
            root.average_ignored()
        for ended in root.points.backward_ended:
            ended()
        running = root.calls.groups()  # a forward may run a backward of its own
        for group in root.memory:
            if root.memory.reason(group) is not CALLER and group not in running:
                self._free(group)
        if not running:
            root.hide_kept()
        root.first_entries.clear()

    # --- unshard and reshard ----------------------------------------------------------------------

    def enter(self, session: Session, call: Call) -> None:
        """Gradients of the outputs of ``call`` are there: its group is needed."""
        root, group = self._root, call.group
        for reached in root.points.node_reached:
            reached(session)
        if session.active.get(group) == call.enter and group.unsharded.state is UNSHARDED:
            return  # another output of the same call
        self._leave_those_over(session, call.exit, group)
        session.active[group] = call.enter
        self._unshard(group)
        root.tell("backward", group)
        around = call.parent
        while around is not None and session.active.get(around.group) is None:
            # Its own outputs are not part of this backward, but what ran before this call may be.
            session.active[around.group] = around.enter
            root.unshard(around.group)
            self.use(around.group)
            around.group.unsharded.wait()
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
        """It has run."""
        if session.active.get(group) == RUNNING:
            session.active[group] = RECOMPUTED

    def _unshard(self, group: ParameterGroup) -> None:
        root, settings = self._root, group.settings
        if group not in root.led:
            root.backward_order.enter(group)
            root.backward_order.find(group)
        if settings.unshard_in_backward:
            root.unshard_again(group)
        self.use(group)
        root.unshard_led(group)
        if settings.backward_prefetch is not None or group.policy.backward_prefetch == "before":
            root.prefetch(group, settings.backward_prefetch, in_backward=True)
        if settings.unshard_in_backward or group.unsharded.state is UNSHARDED:
            group.unsharded.wait()

    def use(self, group: ParameterGroup) -> None:
        """Let autograd find what has changed in a group that was kept, as if it were unsharded anew."""
        memory, unsharded = self._root.memory, group.unsharded
        reason = memory.reason(group)
        if reason in (FOR_BACKWARD, FOR_EARLIER_BACKWARD):
            unsharded.follow_versions()
            memory.hold(group, IN_USE)
        elif unsharded.are_shards and unsharded.state is UNSHARDED and unsharded.shards_changed_since():
            unsharded.follow_versions()
        if reason is AHEAD:
            memory.hold(group, IN_USE)

    def _leave_those_over(self, session: Session, exit_clock: int, current: ParameterGroup) -> None:
        """Leave the groups whose calls are over, as a call that exited at ``exit_clock`` comes up."""
        over = [g for g, clock in session.active.items() if clock > exit_clock and g is not current]
        for group in over:
            self._leave(session, group, exit_clock)

    def _leave(self, session: Session, group: ParameterGroup, clock: int) -> None:
        root, settings = self._root, group.settings
        del session.active[group]
        if group in root.led:
            return  # it goes with the group around it
        # Groups that join with zeros do so at the end of backward, in an order that all ranks have in common.
        has_gradients = group.gradients.state is PENDING and not settings.zeros_for_unused
        if has_gradients and settings.requires_gradient_sync and group.gradients.are_wanted:
            first = root.first_entries.get(group)
            if first is not None and first > clock:
                self.reduce(group)  # some parameters were not used
        self._free(group)
        for led in root.leads.get(group, ()):
            self._free(led)

    def _free(self, group: ParameterGroup) -> None:
        if not group.settings.reshard_after_backward or self._is_used_around(group):
            return
        if not any(needs(group) for needs in self._root.points.is_needed_later):
            self._root.memory.release(group)

    def _is_used_around(self, group: ParameterGroup) -> bool:
        """True if a forward that runs, or a session around the running one, has yet to use ``group``.

        A forward may run a backward of its own, also where it is recomputed, and a backward a nested one.
        """
        outer = self.sessions[:-1]
        return any(group in s.active for s in outer) or group in self._root.calls.groups()

    # --- gradients --------------------------------------------------------------------------------

    def gradient_came(self, group: ParameterGroup) -> None:
        """The first gradient of ``group`` is in."""
        if len(self.sessions) > 1:
            group.gradients.come_nested = True

    def gradients_complete(self, group: ParameterGroup) -> None:
        """The gradients of all trainable parameters of ``group`` are in."""
        settings = group.settings
        # Where ranks differ in what they use, they reduce at a moment that they have in common.
        if settings.requires_gradient_sync and not settings.ranks_may_differ:
            self.reduce(group)
        if settings.backward_prefetch is None and group.policy.backward_prefetch == "after":
            if self._is_over_once_complete(group):
                self._free(group)
            self._root.prefetch(group, None, in_backward=True)

    def _is_over_once_complete(self, group: ParameterGroup) -> bool:
        """True if nothing will use ``group`` again in this backward, once all its gradients are there.

        Not so where parts inside are recomputed by nested backwards, which add to complete gradients.
        Nothing announces these: a group's first backward shows whether it has any.
        """
        gradients = group.gradients
        is_plain = gradients.are_all_wanted and group is not self._root.group and group not in self._root.led
        return is_plain and gradients.were_reduced and not gradients.come_nested

    def reduce(self, group: ParameterGroup) -> None:
        """Begin to reduce what is there of the gradients of ``group``."""
        self._root.reductions.reduce(group)
        self._reduced.add(group)

    def _settle(self, group: ParameterGroup) -> None:
        """Reduce what is left of a group's gradients, or leave it for a later backward, or for the caller."""
        gradients = group.gradients
        if not group.settings.requires_gradient_sync or self._root.joins_by_hand(group):
            if gradients.state is PENDING:
                gradients.defer()
        elif gradients.state is PENDING or self._joins_anyway(group) or gradients.have_sums_to_reduce:
            self.reduce(group)

    def _joins_anyway(self, group: ParameterGroup) -> bool:
        """True if other ranks may have gradients for a group that has none here."""
        return (
            group.settings.ranks_may_differ
            and group.gradients.are_wanted
            and group not in self._reduced
            and group.gradients.state in (EMPTY, DEFERRED)
        )
