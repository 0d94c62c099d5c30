"""One backward: which groups are unsharded and resharded as it proceeds, and when gradients are reduced.

Resharding. Autograd runs the nodes of a graph from the latest created to the earliest, except for gradient
accumulation. So when backward reaches the outputs of a call, every call that was *entered after* that call
*exited* is over, frozen weights included, and its group may be resharded. A clock that ticks at every enter
and exit orders the calls.

    forward    [ root [ a ] [ b ] ]         backward   root's outputs, b's outputs, a's outputs
    clock      1     2   3 4   5   6        at a's outputs (exit 3): b (enter 4) is over,
                                            root (enter 1) is not

Gradients. A group reduces as soon as the gradients of all its trainable parameters are complete. Large ones
are reduced earlier, in parts (groups/gradients.py). If ranks may use different parameters, it reduces at the
end of backward. ``ParameterGroup.max_in_flight`` limits the reductions in flight besides the group in
backward. A group with unused parameters reduces when backward has passed its first call, or at its end.

Graph tasks. Reentrant checkpointing nests backwards: each is a graph task of autograd, which holds a callback
with a guard until the task ends. If the task fails, autograd drops both without calling the callback, which
shows that the backward failed.

Graphs that a backward creates (``create_graph=True``). Such a backward computes with full parameters, which
the nodes that it creates save. Like any backward, it reshards its groups. A later backward through the
created nodes needs the groups again:

    forward            x --[mm W0]--> h --[mm W1]--> y
    create_graph=True  gx <--[mm W0]-- gh <--[mm W1]-- gy     the nodes that use W0 are created last
    its backward       runs the created nodes first, in the order of forward: W0, then W1

While a backward creates a graph, each node that it runs gets a hook that runs after it. The hook marks the
created nodes with the groups unsharded at that time, and hooks the nodes that run next. A marked node has a
hook that runs before it, which unshards those groups. Marks live in the graph and die with it: they keep
nothing unsharded, and any number of other passes may run in between.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.calls import Call
from shardwise.engine.root import Root
from shardwise.engine.unsharded_groups import AHEAD, CALLER, FOR_BACKWARD, FOR_EARLIER_BACKWARD, IN_USE
from shardwise.groups.gradients import Listener
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import DEFERRED, PENDING, REDUCING, UNSHARDED
from shardwise.layout.fqns import listed
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat import autograd, dynamo
from shardwise.torch_compat.autograd import outside_transforms, with_layers

# --- marks in graphs that a backward creates ------------------------------------------------------


@dataclass(eq=False, frozen=True, slots=True)
class Mark:
    """The groups that were unsharded when a backward created some nodes. ``next``: those needed next."""

    groups: tuple[ParameterGroup, ...]
    next: "Mark | None"


@dataclass(eq=False, frozen=True)
class CreatedNodes:
    """The nodes that the backwards of one root create.

    ``mark`` makes the mark for nodes that were just created: the groups that the running backward computes
    with. ``enter`` is called before a node with that mark runs, in any later backward.
    """

    mark: Callable[[], Mark]
    enter: Callable[[Mark], None]

    def track(self, node: Any) -> None:
        """Mark the nodes that the running backward creates from ``node`` on."""
        # Metadata lives as long as the node in C++; its Python object may not.
        if (self, "tracked") not in node.metadata:
            node.metadata[self, "tracked"] = True
            node.register_hook(partial(_has_run, self))


def _has_run(nodes: CreatedNodes, gradients: Sequence[Tensor | None], _outputs: Any) -> None:
    if not torch.is_grad_enabled():
        return  # another backward through a retained graph
    made = [gradient for gradient in gradients if gradient is not None]
    if any(map(autograd.is_batched, made)) and (groups := nodes.mark().groups):
        raise NotImplementedError(
            f"{listed([group.name for group in groups], 4)}: a backward with create_graph=True "
            "and batched gradients (is_grads_batched=True, or vectorize=True of torch.autograd.functional) "
            "hides the nodes that it creates, whose parameters would be freed. Use vectorize=False, or "
            "torch.func.jacrev."
        )
    if autograd.is_in_transform_or_forward_mode():
        made = with_layers(made)
    created: list[Any] = [gradient.grad_fn for gradient in made if gradient.grad_fn is not None]
    unmarked = [node for node in created if (nodes, "marked") not in node.metadata]
    if unmarked:
        before = partial(_is_about_to_run, nodes, nodes.mark())
        for node in unmarked:
            node.metadata[nodes, "marked"] = True
            node.register_prehook(before)
    for node, _ in autograd.current_node().next_functions:
        if node is not None and node.next_functions:  # not where gradients are accumulated
            nodes.track(node)


def _is_about_to_run(nodes: CreatedNodes, mark: Mark, _gradients: Any) -> None:
    nodes.enter(mark)


dynamo.break_graphs(_has_run)  # of compiled autograd
dynamo.break_graphs(_is_about_to_run)


_synchronizes = attrgetter("settings.requires_gradient_sync")

RUNNING = -1.0  # clock of a module whose forward is being recomputed: not over
RECOMPUTED = math.inf  # clock of a module whose forward was recomputed: over when another begins


# --- one backward ---------------------------------------------------------------------------------


class Guard:
    """Owned only by autograd, through the callback at the end of a backward.

    If it dies before that callback runs, the backward has failed, and it calls ``on_failure``.
    """

    __slots__ = ("__weakref__", "on_failure")

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.on_failure: Callable[[], None] | None = on_failure

    def __del__(self) -> None:
        if self.on_failure is not None:
            self.on_failure()


class GraphTask:
    """One graph task of autograd.

    ``active``: the groups that it uses, each with the clock at which its call was entered. ``made``: the mark
    of the nodes that it creates. ``reached``: the mark of the last created node that it has reached.
    """

    def __init__(self, number: int, guard: Guard) -> None:
        self.number = number
        self.active: dict[ParameterGroup, float] = {}
        self.made: Mark | None = None
        self.reached: Mark | None = None
        self._guard = weakref.ref(guard)

    @property
    def is_running(self) -> bool:
        """False once autograd has dropped this graph task, whether it ended or failed.

        Checks whether the guard is alive, since a traceback may keep the task alive.
        """
        return self._guard() is not None


class BackwardPass:
    """A backward of ``root``, from the beginning of its outermost graph task to its end."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.tasks: list[GraphTask] = []
        self.reduced: set[ParameterGroup] = set()

    # --- graph tasks ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Check and prepare everything before the first group is unsharded."""
        root = self._root
        if root.monitor is None:
            root.monitor = monitor_of_job()
        root.monitor.begin()
        root.monitor.steps += 1
        root.monitor.phase = "backward"
        if autograd.is_autograd_compiled():
            raise RuntimeError(
                f"{root.name}: compiled autograd is on. It does not report the end of backward, so gradients "
                "would be lost. Leave it off, or compile a function that calls the model "
                "(torch.compile(lambda x: model(x))), not the model: its hooks are then in the graph, and "
                "none are left for autograd to run."
            )
        for feature in root.features:
            feature.backward_begins()
        if root.finalization.handle is not None:
            root.finalization.refuse_pending(root.name, "a backward")
        if not root.lazy_init.is_complete:
            root.ensure_ready()
        streams = root.lazy_init.streams
        streams.are_labelled = autograd.profiler_is_on()
        root.lazy_init.process_groups.connect()
        root.drop_cleared_gradients()
        root.unsharded_groups.awaits_backward = False
        streams.all_gather.wait_for_compute()
        root.prefetch.backward_order.rewind()

    def task_of(self, number: int) -> GraphTask:
        """The graph task with this number; begins it at its first event."""
        for task in self.tasks:
            if task.number == number:
                return task
        guard = Guard(self._root.tell_failed_backward)
        task = GraphTask(number, guard)
        self.tasks.append(task)
        autograd.queue_end_of_backward(partial(self._end_task, task, guard))
        return task

    @property
    def is_running(self) -> bool:
        """False once autograd has dropped all its graph tasks."""
        return any(task.is_running for task in self.tasks)

    def has_gradients(self) -> bool:
        """True once some group has gradients."""
        return bool(self.reduced) or any(g.gradients.state in (PENDING, REDUCING) for g in self._root.groups)

    def drop_failed(self) -> None:
        """Drop nested graph tasks that failed."""
        self.tasks = [task for task in self.tasks if task.is_running]

    @outside_transforms
    def _end_task(self, task: GraphTask, guard: Guard) -> None:
        task.made = task.reached = None
        if len(self.tasks) > 1:  # a nested backward: the outer one expects more gradients
            for group in list(task.active):
                if group not in self._root.unsharded_groups.accompanying:
                    self._reshard(group)
            self.tasks.remove(task)
        else:
            self._end()
            self._root.backward = None  # last: if the end fails, the task must still show the failure
        guard.on_failure = None

    def _end(self) -> None:
        """End the outermost backward: reduce the remaining gradients, and reshard."""
        root, held = self._root, self._root.unsharded_groups
        for group in root.groups:
            state = group.gradients.state
            if state is PENDING or state is DEFERRED or group.settings.ranks_may_differ:
                self._settle(group)
        for group in self.reduced:
            group.gradients.were_reduced = True
        root.finish_reductions()
        if not root.finalization.by_hand:
            root.average_ignored()
        root.finalization.is_due = root.finalization.by_hand
        for feature in root.features:
            feature.backward_ended()
        if autograd.keeps_graph() and autograd.backward_of_inputs_runs():
            self._refuse_half()
        for group, reason in list(held.reasons.items()):
            if reason is not CALLER:
                self._reshard(group)
        is_inside = bool(root.calls.running)  # a forward may run a backward inside
        if not is_inside:
            held.end_pass()
            held.is_mid_accumulation = not any(map(_synchronizes, root.groups))
        root.calls.first_entries.clear()
        root.monitor.phase = "forward" if is_inside else ""

    def _refuse_half(self) -> None:
        """Refuse the first half of a split backward if the second would compute nothing.

        Zero-bubble schedules of torch's pipelines compute the gradients of a stage's inputs first, and those
        of its weights later. torch's stage looks for the weights among ``module.parameters()``. These are the
        shards, which are in no graph, so ``.grad`` would silently stay None. For our own stage,
        microbatches.py computes the weights. The first half keeps its graph; few other backwards do.
        """
        root = self._root
        if any(feature.computes_weights for feature in root.features):
            return
        if any(group.gradients.are_wanted for group in root.groups):
            raise RuntimeError(
                f"'{root.name}': a pipeline schedule computes the gradients of this stage's inputs apart "
                "from those of its weights, as zero-bubble schedules do. torch's PipelineStage would look "
                "for the weights among the shards, which are in no graph, and leave .grad None. Build the "
                "stage as shardwise.interop.PipelineStage, which accepts the same arguments."
            )

    # --- unshard and reshard ----------------------------------------------------------------------

    def enter(self, task: GraphTask, call: Call) -> None:
        """Backward has reached the outputs of ``call``: unshard its group."""
        root, group = self._root, call.group
        if torch.is_grad_enabled():  # create_graph=True
            created_nodes(root).track(autograd.current_node())
        active = task.active
        if active.get(group) == call.enter and group.unsharded.state is UNSHARDED:
            return  # another output of the same call
        self._leave_those_over(task, call.exit, group)
        active[group] = call.enter
        self._unshard(group)
        if root.observer is not None:
            root.observer("backward", group.name)
        around = call.parent
        while around is not None and active.get(around.group) is None:
            # Its outputs are not part of this backward, but its work before this call may be.
            active[around.group] = around.enter
            self._unshard_around(around.group)
            around = around.parent

    def enter_recomputation(self, task: GraphTask, group: ParameterGroup, module: nn.Module) -> Call:
        """Activation checkpointing runs a module again inside backward."""
        call = self._root.calls.open(group, module)
        for other in [g for g, clock in task.active.items() if clock == RECOMPUTED and g is not group]:
            self._leave(task, other, call.enter)
        if task.active.get(group, RECOMPUTED) == RECOMPUTED:
            task.active[group] = RUNNING
        self._unshard(group)
        if self._root.observer is not None:
            self._root.observer("recompute", group.name)
        return call

    def exit_recomputation(self, task: GraphTask, group: ParameterGroup) -> None:
        """The recomputed module has run."""
        if task.active.get(group) == RUNNING:
            task.active[group] = RECOMPUTED

    def _unshard(self, group: ParameterGroup) -> None:
        held, prefetch, chosen = self._root.unsharded_groups, self._root.prefetch, group.settings
        order = prefetch.backward_order
        if group not in held.accompanying:
            order.enter(group)
            if not order.is_followed:
                order.resume_at(group)
        if chosen.unshard_in_backward:
            held.unshard_again(group)
        self.mark_in_use(group)
        for other in held.unsharded_with.get(group, ()):
            held.unshard(other, held.reasons.get(other) or IN_USE)
        if chosen.backward_prefetch is not None or group.policy.backward_prefetch == "before":
            for ahead in prefetch.coming(group, chosen.backward_prefetch, order):
                if ahead.settings.unshard_in_backward:  # unshard_ahead, inlined to save a call
                    ahead.unsharded.unshard_ahead()
                    held.reasons[ahead] = AHEAD
        if chosen.unshard_in_backward or group.unsharded.state is UNSHARDED:
            group.unsharded.wait()

    def unshard_ahead(self, group: ParameterGroup) -> None:
        """Begin to unshard ``group``, which comes next."""
        if group.settings.unshard_in_backward:
            group.unsharded.unshard_ahead()
            self._root.unsharded_groups.reasons[group] = AHEAD

    def _unshard_around(self, group: ParameterGroup) -> None:
        if group.settings.unshard_in_backward:
            self._root.unsharded_groups.unshard_again(group)
        self.mark_in_use(group)
        if group.settings.unshard_in_backward or group.unsharded.state is UNSHARDED:
            group.unsharded.wait()

    def mark_in_use(self, group: ParameterGroup) -> None:
        """``group`` is used from now on. If it was kept since forward, refuse shards that have changed.

        For groups that are unsharded again, autograd detects changes by versions, but names no parameter.
        """
        held, unsharded = self._root.unsharded_groups, group.unsharded
        reason = held.reasons.get(group)
        if reason is FOR_BACKWARD or reason is FOR_EARLIER_BACKWARD:
            unsharded.refuse_changed_shards()
            held.reasons[group] = IN_USE
        elif unsharded.state is UNSHARDED and unsharded.are_shards:
            unsharded.refuse_changed_shards()
        if reason is AHEAD:
            held.reasons[group] = IN_USE

    def _leave_those_over(self, task: GraphTask, exit_clock: int, current: ParameterGroup) -> None:
        """Leave the groups whose calls are over, given that backward has reached a call with this exit."""
        for group, clock in list(task.active.items()):
            if clock > exit_clock and group is not current:
                self._leave(task, group, exit_clock)

    def _leave(self, task: GraphTask, group: ParameterGroup, clock: int) -> None:
        root, settings = self._root, group.settings
        del task.active[group]
        if group in root.unsharded_groups.accompanying:
            return  # it is resharded with the group around it
        # Groups that may contribute zeros do so at the end of backward, in an order common to all ranks.
        if group.gradients.state is PENDING and settings.requires_gradient_sync:
            first = root.calls.first_entries.get(group)
            is_over = first is not None and first > clock
            if is_over and not settings.ranks_may_differ and group.gradients.are_wanted:
                self.reduce(group)  # some parameters were not used
        self._reshard(group)
        for other in root.unsharded_groups.unsharded_with.get(group, ()):
            self._reshard(other)

    def _reshard(self, group: ParameterGroup) -> None:
        """Reshard ``group``, unless it is kept, or used around the running graph task, or needed later."""
        root = self._root
        if not group.settings.reshard_after_backward:
            return
        # A forward, even a recomputed one, may run a backward inside, and a backward may run a nested one.
        if root.calls.running and root.calls.runs(group):
            return
        for task in self.tasks:
            is_around = task is not self.tasks[-1] and group in task.active
            # Autograd has a thread for each device, so the order of nodes that an earlier backward created
            # does not show when a group is over.
            if is_around or task.reached is not None:
                return
        for feature in root.features:
            if feature.is_needed_later(group):
                return
        if group.settings.ranks_that_keep and not group.settings.requires_gradient_sync:
            root.unsharded_groups.keep_for_next(group)
        else:
            root.unsharded_groups.reshard(group)

    # --- gradients --------------------------------------------------------------------------------

    def _is_over_once_complete(self, group: ParameterGroup) -> bool:
        """True if nothing in this backward will use ``group`` again once its gradients are complete.

        Nested backwards that recompute parts of a group add to gradients that were complete. Nothing
        announces them, so the group's first backward must show whether they occur.
        """
        root, gradients = self._root, group.gradients
        is_inner = group is not root.group and group not in root.unsharded_groups.accompanying
        return is_inner and gradients.are_all_wanted and gradients.were_reduced and not gradients.come_nested

    def prefetch_after(self, group: ParameterGroup) -> None:
        """With ``backward_prefetch="after"``: the gradients of ``group`` are complete.

        Reshard it if backward is done with it, and prefetch the next groups.
        """
        if self._is_over_once_complete(group):
            self._reshard(group)
        prefetch = self._root.prefetch
        for ahead in prefetch.coming(group, None, prefetch.backward_order):
            self.unshard_ahead(ahead)

    def reduce(self, group: ParameterGroup) -> None:
        """Begin to reduce the gradients that ``group`` has."""
        self._root.reductions.reduce(group)
        self.reduced.add(group)

    def _settle(self, group: ParameterGroup) -> None:
        """Reduce the remaining gradients of ``group``, or defer them to a later backward or a call."""
        gradients, settings = group.gradients, group.settings
        if not settings.requires_gradient_sync or self._root.joins_by_hand(group):
            if gradients.state is PENDING:
                gradients.defer()
        elif (
            gradients.state is PENDING
            or gradients.have_sums_to_reduce
            # It has no gradients on this rank, but may have some on others.
            or (settings.ranks_may_differ and gradients.are_wanted)
        ):
            self.reduce(group)


# --- events of autograd -------------------------------------------------------------------------------


def graph_task(root: Root) -> GraphTask:
    """The running graph task, made at its first event, perhaps with a new backward of ``root``."""
    number, backward = autograd.current_graph_task_id(), root.backward
    if backward is not None and backward.tasks[-1].number == number:
        return backward.tasks[-1]  # type: ignore[no-any-return]
    root.recover()
    if root.backward is None:
        backward = BackwardPass(root)
        backward.begin()
        task = backward.task_of(number)
        root.backward = backward
        return task
    root.backward.drop_failed()
    return root.backward.task_of(number)  # type: ignore[no-any-return]


class GradientListener(Listener):
    """Tells the backward of ``root`` when gradients of ``group`` arrive."""

    def __init__(self, root: Root, group: ParameterGroup) -> None:
        self._root = root
        self._group = group

    def arrived(self) -> None:
        """Begin a backward that nothing has announced; note a nested one."""
        backward = self._root.backward
        if backward is None or backward.tasks[-1].number != autograd.current_graph_task_id():
            graph_task(self._root)  # only now, to save a call
        if self._group.policy.backward_prefetch == "after" and len(self._root.backward.tasks) > 1:
            self._group.gradients.come_nested = True

    def part_complete(self) -> None:
        """Reduce the part."""
        self._root.reductions.send_ready(self._group)

    def complete(self) -> None:
        """Reduce now; if ranks may use different parameters, at the end of backward, which all reach."""
        root, group, settings = self._root, self._group, self._group.settings
        if settings.requires_gradient_sync and not settings.ranks_may_differ:
            root.reductions.reduce(group)  # BackwardPass.reduce, inlined to save a call
            root.backward.reduced.add(group)
        if settings.backward_prefetch is None and group.policy.backward_prefetch == "after":
            root.backward.prefetch_after(group)


# --- nodes that a backward creates --------------------------------------------------------------------


def created_nodes(root: Root) -> CreatedNodes:
    """The nodes that backwards of ``root`` create with ``create_graph=True``."""
    if root.created_nodes is None:
        root.created_nodes = CreatedNodes(partial(_mark_created, root), partial(_enter_created, root))
    return root.created_nodes  # type: ignore[no-any-return]


def _mark_created(root: Root) -> Mark:
    task, held = graph_task(root), root.unsharded_groups
    groups = tuple(
        group
        for group, reason in held.reasons.items()
        if group.unsharded.state is UNSHARDED and reason is not AHEAD
    )
    if task.made is None or task.made.groups != groups:
        task.made = Mark(groups, task.made)
    return task.made


@outside_transforms
def _enter_created(root: Root, mark: Mark) -> None:
    """Unshard the groups of a node that an earlier backward created, until this backward ends."""
    task = graph_task(root)
    if torch.is_grad_enabled():
        created_nodes(root).track(autograd.current_node())
    if mark is task.reached:
        return
    task.reached = mark
    for group in mark.groups:
        root.unsharded_groups.unshard_again(group)
        root.backward.mark_in_use(group)
    if mark.next is not None and mark.groups and mark.groups[-1].policy.backward_prefetch is not None:
        last = mark.groups[-1]
        coming = [group for group in mark.next.groups if group not in mark.groups]
        order = root.prefetch.backward_order
        for ahead in root.prefetch.coming(last, coming[: last.policy.prefetch], order):
            root.backward.unshard_ahead(ahead)
    for group in mark.groups:
        group.unsharded.wait()
