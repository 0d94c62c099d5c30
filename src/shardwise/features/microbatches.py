"""Several microbatches make one step, as in a pipeline: their schedule decides when gradients are reduced.

    begin()   forward  forward  backward  forward  backward  backward   reduce(3)
                                                                        one reduction a group, of a third

Forwards and backwards come in any order. A backward may come in two halves: the gradients of inputs, and
later, perhaps after other microbatches, those of weights::

    whole     output --> block 1 --> block 0 --> input
                            |           |
                         weights     weights        hooks of parameters run, as in any backward
    inputs    output --> block 1 --> block 0 --> input
    weights              block 1     block 0        from the nodes of the first half; no hooks of parameters
                            |           |
                         weights     weights

The second half goes from group to group, in the same order on all ranks, and unshards them again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardwise.comm.streams import nothing
from shardwise.engine.backward import BackwardPass, GraphTask, Guard
from shardwise.engine.calls import Call, Outcome
from shardwise.engine.root import Feature, Root
from shardwise.engine.unsharded_groups import CALLER, IN_USE
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import SHARDED
from shardwise.torch_compat import autograd, dtensor


class Microbatches(Feature):
    """Leaves the reductions of one root to the caller, and keeps groups unsharded for the next microbatch.

    A group with ``reshard_after_forward=False`` stays unsharded from its first forward to the end of the
    step; others are resharded as in any forward and backward.
    """

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self.is_under_way = False
        """True from ``begin`` to ``reduce``."""
        self._others: Sequence[nn.Parameter] = ()
        self._divisor = 1  # of the last step
        self._adds_to_earlier = False  # to gradients that an earlier step has left

    # --- a step -----------------------------------------------------------------------------------

    def begin(self, others: Sequence[nn.Parameter]) -> None:
        """Begin a step; its first forward may find new values in the shards.

        ``others``: parameters that microbatches use and no group has; their gradients are divided as well.
        """
        root = self.root
        root.refuse_at_work("a step of microbatches", root.groups[0], "afterwards")
        if self.is_under_way and any(group.gradients.have_sums_to_reduce for group in root.groups):
            raise RuntimeError(
                f"'{root.name}': the last step of microbatches was not ended, so its gradients are neither "
                "reduced nor divided. If it failed, call zero_grad(). If the schedule was loaded from a "
                "file, it needs a REDUCE_GRAD action for each stage."
            )
        root.unsharded_groups.is_mid_accumulation = False
        self.is_under_way, self._others = True, others
        waiting = self._gradients()
        self._adds_to_earlier = bool(waiting)
        for gradient in waiting:  # already divided; now they join the sum
            gradient.mul_(self._divisor)

    def reduce(self, divisor: int) -> None:
        """Reduce the sums of this step, divided by ``divisor``, and reshard. Ends the step.

        Groups that do not synchronise gradients now keep theirs, divided, for a later step or backward.
        """
        root = self.root
        root.refuse_at_work("the reduction of a step", root.groups[0], "afterwards")
        if self._adds_to_earlier and divisor != self._divisor:
            raise RuntimeError(
                f"'{root.name}': gradients of earlier steps were divided by {self._divisor} microbatches, "
                f"those of this step are to be divided by {divisor}, and they are one sum by now. Accumulate "
                "over steps of as many microbatches, or call zero_grad() before the number changes."
            )
        self._divisor = divisor
        if divisor != 1:
            for gradient in self._gradients():
                gradient.div_(divisor)
        for group in reversed(root.groups):
            settings, gradients = group.settings, group.gradients
            joins = settings.ranks_may_differ and gradients.are_wanted
            if settings.requires_gradient_sync and (gradients.have_sums_to_reduce or joins):
                root.reductions.reduce(group)
        root.finish_reductions()
        root.average_ignored()
        self.is_under_way = root.unsharded_groups.is_mid_accumulation = False
        for group, reason in list(root.unsharded_groups.reasons.items()):
            if reason is not CALLER and group.settings.reshard_after_backward:
                root.unsharded_groups.reshard(group)

    def _params(self) -> list[nn.Parameter]:
        """The parameters as in the graphs of forwards."""
        return [*(p for group in self.root.groups for p in group.unsharded.full_params), *self._others]

    def _gradients(self) -> list[Tensor]:
        """The gradients that wait to be reduced, and those that are never reduced."""
        return [dtensor.plain(p.grad) for p in self._params() if p.grad is not None]

    @property
    def computes_weights(self) -> bool:  # type: ignore[override]
        """In a step, ``compute_weights`` follows each backward of only the inputs."""
        return self.is_under_way

    # --- calls from the root ----------------------------------------------------------------------

    def forward_ended(self, outcome: Outcome) -> None:
        """Let the next forward trust kept groups without communication: no step changes shards."""
        self.root.unsharded_groups.is_mid_accumulation = self.is_under_way

    def is_needed_later(self, group: ParameterGroup) -> bool:
        """Whether ``group`` stays unsharded for the next microbatch."""
        return self.is_under_way and not self.root.reshards_after_forward(group)

    # --- backwards --------------------------------------------------------------------------------

    @contextmanager
    def without_reductions(self) -> Iterator[None]:
        """Let gradients of the backward inside wait for ``reduce``."""
        before = [(group, group.settings.requires_gradient_sync) for group in self.root.groups]
        for group, _ in before:
            group.configure(requires_gradient_sync=False)
        try:
            yield
        finally:
            for group, requires_sync in before:
                group.configure(requires_gradient_sync=requires_sync)

    def weights(self) -> list[Tensor]:
        """The trainable parameters, as in the graphs of forwards."""
        return [weight for weight in self._params() if weight.requires_grad]

    def compute_weights(self, parts: list[dict[str, Any]]) -> None:
        """The second half of a backward, from the ``parts`` of ``autograd.run_backward_of_inputs``: add up
        the gradients of ``weights()``."""
        self.root.recover()
        WeightPass(self.root).run(parts, [other for other in self._others if other.requires_grad])

    # --- unshard ahead ----------------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to unshard the groups that then stay so until ``reshard`` or the end of the step."""
        root, memory = self.root, self.root.unsharded_groups
        if not memory.is_mid_accumulation:  # nothing has run in this step
            memory.reshard_stale(root.groups, root.post_optim_event)
        for group in root.groups:
            if not root.reshards_after_forward(group) and group.unsharded.state is SHARDED:
                root.unshard(group)
                memory.reasons[group] = IN_USE
        memory.is_mid_accumulation = True

    def reshard(self) -> None:
        """Reshard all groups, but keep their sums of gradients; the next use unshards them again."""
        for group, reason in list(self.root.unsharded_groups.reasons.items()):
            if reason is not CALLER:
                self.root.unsharded_groups.reshard(group)


class WeightPass(BackwardPass):
    """The half of a backward that computes gradients of weights: many graph tasks, none announced.

    It decides which groups are unsharded. Hooks only report modules whose forward is recomputed, and outputs
    among the nodes that it begins with.
    """

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._guard = Guard(nothing)
        self.tasks = [GraphTask(-1, self._guard)]

    is_running = True

    def run(self, parts: list[dict[str, Any]], others: Sequence[Tensor]) -> None:
        """Add the gradients that ``parts`` lead to; ``others`` are weights of no group."""
        root = self._root
        self.begin()
        root.backward = self
        try:
            self._run(parts, others)
        except BaseException:
            root.drop_passes()
            root.tell_failed_backward()
            raise
        finally:
            root.backward = None
            for group in root.groups:
                group.gradients.defer_written()
        root.unsharded_groups.end_pass()
        root.unsharded_groups.is_mid_accumulation = True
        root.monitor.phase = ""

    def _run(self, parts: list[dict[str, Any]], others: Sequence[Tensor]) -> None:
        # All ranks unshard the same groups, even if their graphs differ.
        groups = [group for group in reversed(self._root.groups) if group.gradients.are_wanted]
        weights = {
            group: [full for full in group.unsharded.full_params if full.requires_grad] for group in groups
        }
        owner = {get_gradient_edge(full).node: group for group in groups for full in weights[group]}
        owners = [{owner.get(node) for node in autograd.nodes_of_part(part)} for part in parts]
        keeps_graph = any(map(autograd.begins_at_several_nodes, parts))
        done: set[int] = set()
        for place, group in enumerate(groups):
            self._have(group)
            for ahead in groups[place + 1 : place + 1 + min(1, group.policy.prefetch)]:
                self._root.unsharded_groups.unshard_again(ahead)
            own = [i for i, of in enumerate(owners) if group in of and i not in done]
            done.update(own)
            together = {each for i in own for each in owners[i] if each is not None} | {group}
            for each in together - {group}:  # an operation of parameters of several groups
                self._have(each)
            used = [weight for each in together for weight in weights[each]]
            autograd.run_backward_of_weights(
                [*used, *others], [parts[i] for i in own], keeps_graph=keeps_graph
            )
            self._reshard(group)
        for group in groups:
            if group.unsharded.state is not SHARDED:
                self._reshard(group)
        left = [part for i, part in enumerate(parts) if i not in done]
        autograd.run_backward_of_weights(others, left, keeps_graph=keeps_graph)

    def _have(self, group: ParameterGroup) -> None:
        self._root.unsharded_groups.unshard_again(group)
        self.mark_in_use(group)
        group.unsharded.wait()

    # --- calls from hooks -------------------------------------------------------------------------

    def task_of(self, number: int) -> GraphTask:
        """One for all its graph tasks."""
        return self.tasks[0]

    def drop_failed(self) -> None:
        """Do nothing: if a task had failed, ``run`` would have ended."""

    def enter(self, task: GraphTask, call: Call) -> None:
        """One of the first nodes made an output of ``call``."""
        self._have(call.group)

    def enter_recomputation(self, task: GraphTask, group: ParameterGroup, module: nn.Module) -> Call:
        """Activation checkpointing runs a module again, for the tensors that its nodes saved."""
        call = self._root.calls.open(group, module)
        self._have(group)
        return call

    def exit_recomputation(self, task: GraphTask, group: ParameterGroup) -> None:
        """Do nothing: the group is freed with the others."""
