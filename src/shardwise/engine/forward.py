"""One forward of the outermost module: the work of the hooks around each sharded module.

Before a module runs, its group is unsharded. The order is recorded, then replayed: a forward records the
groups that it enters. In the next forward, entering a group prefetches the group that came after it, whose
all-gather overlaps with the computation. Every step checks the record. If a forward skips some groups,
prefetch resumes behind them; if the order differs otherwise, prefetch stops until the next forward, which
follows the new order.

After a module has run, its outputs are hooked, and its group is resharded. The backward of a call begins when
autograd reaches a graph node that made one of its outputs, so these nodes get hooks. Unlike hooks on tensors,
they survive in-place operations on the output. If an output is a view, the node of its base gets a hook as
well: an in-place operation on the view replaces the view's node, and the graph then goes through the base's.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from shardwise.comm.streams import is_captured
from shardwise.engine.backward import graph_task
from shardwise.engine.calls import ANNOUNCED, FAILED, NO_BACKWARD, UNANNOUNCED, Call, Outcome
from shardwise.engine.module_state import ModuleState
from shardwise.engine.root import Root
from shardwise.engine.unsharded_groups import (
    AHEAD,
    CALLER,
    FOR_BACKWARD,
    FOR_EARLIER_BACKWARD,
    IN_USE,
)
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import PARTLY, SHARDED, SUMMONED, UNSHARDED, UNSHARDING
from shardwise.layout.fqns import listed
from shardwise.layout.nested import NotAContainer, find_tensors, is_not_none, map_tensors, replace_tensors
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat import autograd, dynamo, nn_modules, tensor_impl
from shardwise.torch_compat.autograd import with_layers

# --- the pass -----------------------------------------------------------------------------------------


class ForwardPass:
    """A forward of ``root``; lives as long as the outermost module runs."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._entered: list[ParameterGroup] = []
        self._exited: list[ParameterGroup] = []
        self._has_run: dict[ParameterGroup, set[nn.Module]] = {}

    def begin(self) -> None:
        """Check and prepare everything before the first group is unsharded. Collective."""
        root, held, is_ready = self._root, self._root.unsharded_groups, self._root.lazy_init.is_complete
        if root.monitor is None:
            root.monitor = monitor_of_job()
        root.monitor.begin()
        root.monitor.phase = "forward"
        if autograd.is_recorded():
            raise RuntimeError(
                f"{root.name}: make_fx, which torch.func.linearize uses, records what forward computes, "
                "with the full parameters as constants. They are freed after forward, so that the program "
                "would read memory that is gone. Use torch.func.jvp or vjp, which compute anew."
            )
        if not is_ready:
            root.refuse_unfit()  # first; then ranks compare plans, and only then make process groups
        if torch.is_grad_enabled() and not root.plan_check.is_agreed:
            root.plan_check.agree()
            root.lazy_init.separate_messages(root.plan_check.numbers)
        if root.finalization.handle is not None:
            root.finalization.refuse_pending(root.name, "a forward")
        if not is_ready:
            root.make_ready()
        streams = root.lazy_init.streams
        if streams.are_device_streams:
            if captured := is_captured(root.device):
                root.lazy_init.refuse_capture()
            if captured is not held.is_captured:
                root.post_optim_event = None  # of the other side, whose work is over
                held.change_sides(captured, streams)
        streams.are_labelled = autograd.profiler_is_on()
        if torch.is_grad_enabled():
            root.lazy_init.process_groups.connect()
            if not root.plan_check.has_compared:
                root.plan_check.compare_initial_values()
        if root.backward is not None:  # no backward is running now, even if one was never ended
            root.drop_passes()
        root.drop_cleared_gradients()
        if held.reasons:
            self._wait_for_unused()
        for feature in root.features:
            feature.forward_begins()
        if held.reasons:
            self._drop_kept()
        if root.ranks_run_alike:
            held.is_mid_accumulation = False
        held.awaits_backward = True
        if streams.are_device_streams:
            root.wait_for_optimizer()
        root.post_optim_event = None
        root.prefetch.forward_order.rewind()

    def _wait_for_unused(self) -> None:
        """Wait for groups that were unsharded but not used, perhaps only on some ranks."""
        for group in self._root.unsharded_groups.reasons:
            if group.unsharded.state is UNSHARDING:
                group.unsharded.wait()

    def _drop_kept(self) -> None:
        """Reshard groups that earlier passes have kept and this one cannot use."""
        root, held = self._root, self._root.unsharded_groups
        may_use_parts = root.ranks_run_alike and torch.is_grad_enabled() and not held.is_captured
        for group, reason in list(held.reasons.items()):
            is_for_next = group.unsharded.keeps_until_changed and may_use_parts
            if group.unsharded.state is PARTLY and not is_for_next:
                held.reshard(group)  # kept by an earlier forward, and no longer needed
            elif reason is FOR_BACKWARD:  # kept by an earlier forward, and stale in this one
                held.reasons[group] = FOR_EARLIER_BACKWARD
        if root.ranks_run_alike:
            kept = [g for g in root.groups if held.reasons.get(g) is not FOR_EARLIER_BACKWARD]
            held.reshard_stale(kept, root.post_optim_event)

    def enter(self, group: ParameterGroup, module: nn.Module) -> Call:
        """``module`` is about to run: unshard its group."""
        root, held, prefetch = self._root, self._root.unsharded_groups, self._root.prefetch
        call = root.calls.open(group, module)
        if group not in held.accompanying:
            if skipped := prefetch.forward_order.enter(group):
                prefetch.reshard_skipped(skipped, group)
            self._entered.append(group)
        held.claim(group, IN_USE)  # not held.unshard, to save a call before the all-gather
        if group.unsharded.state is not SHARDED and not group.shards.are_as(group.unsharded.versions):
            self._adopt_changes(group)
        group.unsharded.unshard()
        for other in held.unsharded_with.get(group, ()):
            held.unshard(other, held.reasons.get(other) or IN_USE)
        for ahead in prefetch.coming(group, group.settings.forward_prefetch, prefetch.forward_order):
            held.claim(ahead, AHEAD)
            ahead.unsharded.unshard()
        group.unsharded.wait()
        if root.observer is not None:
            root.observer("forward", group.name)
        return call

    def _adopt_changes(self, group: ParameterGroup) -> None:
        """Forward has changed, replaced or frozen shards of ``group`` after it was unsharded."""
        held = self._root.unsharded_groups
        if group.unsharded.state is SUMMONED:
            return  # full parameters are registered, and to unshard is refused
        group.adopt_freezing()
        replaced = group.shards.replaced()
        if group.unsharded.are_shards and not replaced:
            group.unsharded.sync_versions()
        elif changed := replaced or group.unsharded.shards_changed():
            if group in held.accompanying or not self._root.ranks_run_alike:
                raise RuntimeError(
                    f"{listed(changed, 4)}: changed by a forward after '{group.name}' was unsharded. Not all "
                    "ranks may use it now (inference(), set_may_be_unused()), so that it cannot be unsharded "
                    "again. Change weights between forwards."
                )
            held.reshard(group)
            held.claim(group, IN_USE)

    def exit(self, call: Call, outcome: Outcome) -> None:
        """The module of ``call`` has run: reshard its group, unless it is kept."""
        root, group = self._root, call.group
        if outcome is ANNOUNCED:
            root.calls.first_entries.setdefault(group, call.enter)
        if group not in root.unsharded_groups.accompanying:
            # Without grad mode this may be the first forward of a reentrant checkpoint, whose backward is to
            # come.
            if outcome is not NO_BACKWARD or not torch.is_grad_enabled():
                self._exited.append(group)
            if self._is_over(call, outcome):
                self._reshard(group, outcome)
        if not root.calls.running:
            self.end(outcome)
            root.forward = None

    def _is_over(self, call: Call, outcome: Outcome) -> bool:
        """Whether to reshard the group now that ``call`` has ended."""
        group = call.group
        if outcome is not FAILED:  # otherwise the parent module may catch the error and continue
            if len(group.modules) > 1:
                has_run = self._has_run.setdefault(group, set())
                has_run.add(call.module)
                if len(has_run) < len(group.modules):
                    return False
            if outcome is UNANNOUNCED or not self._root.reshards_after_forward(group):
                return False
        return not self._root.calls.runs(group)

    def _reshard(self, group: ParameterGroup, outcome: Outcome) -> None:
        """Reshard ``group`` and its accompanying groups, or keep it for the coming backward."""
        held = self._root.unsharded_groups
        if outcome is ANNOUNCED and group.settings.ranks_that_keep and self._keeps_part(group):
            group.unsharded.keep_part()
        elif outcome is ANNOUNCED and group is self._root.last and self._keeps_last(group):
            group.unsharded.hide()
            held.reasons[group] = FOR_BACKWARD
        else:
            held.reshard(group)
        for other in held.unsharded_with.get(group, ()):
            held.reshard(other)

    def _keeps_part(self, group: ParameterGroup) -> bool:
        """True if a few ranks can keep ``group`` together, as ``reshard_after_forward=n`` requests."""
        is_here = group.unsharded.state is UNSHARDED
        return is_here and self._root.unsharded_groups.reasons.get(group) is not CALLER

    def _keeps_last(self, group: ParameterGroup) -> bool:
        """True if the caller leaves us the choice to keep the last group. If resharded, it would be unsharded
        again at once.
        """
        return (
            group.settings.reshard_after_forward is None
            and group.settings.unshard_in_backward
            and self._root.ranks_run_alike
            and not group.unsharded.changed_in_place()
        )

    def end(self, outcome: Outcome) -> None:
        """The outermost module has run: record the order, and reshard groups that no backward will use."""
        root, held = self._root, self._root.unsharded_groups
        root.monitor.phase = ""
        if outcome is not FAILED:
            root.prefetch.forward_order.planned = self._entered
        for feature in root.features:
            feature.forward_ended(outcome)
        if torch.is_grad_enabled():
            root.prefetch.backward_order.planned = self._exited[::-1]
        if torch.is_grad_enabled() and (outcome is ANNOUNCED or outcome is UNANNOUNCED):
            if self._has_run:
                self._reshard_partly_run()
            held.end_pass(AHEAD)
        else:
            held.end_pass(AHEAD, IN_USE, FOR_BACKWARD)  # no backward will come that needs them
        for group in held.reasons:  # what forward has changed itself
            if group.unsharded.are_shards and group.unsharded.shards_changed():
                group.unsharded.sync_versions()
        if outcome is FAILED:
            held.awaits_backward = False
        if root.lazy_init.streams.are_device_streams:
            root.let_host_write()

    def _reshard_partly_run(self) -> None:
        """Reshard groups of several modules if only some have run."""
        for group, modules in self._has_run.items():
            if len(modules) < len(group.modules) and group.settings.reshard_after_forward:
                self._root.unsharded_groups.reshard(group)


def _pass_of_call(root: Root) -> Callable[[ParameterGroup, nn.Module], Call]:
    """How a pass enters a module of ``root`` now: a forward, begun here if none is running, or a backward
    that recomputes the module."""
    if autograd.current_graph_task_id() != -1:
        task = graph_task(root)
        return partial(root.backward.enter_recomputation, task)
    root.calls.drop_interrupted()
    if not root.calls.running:
        forward = ForwardPass(root)
        forward.begin()
        root.forward = forward
    return root.forward.enter  # type: ignore[no-any-return]


# --- the hooks of modules -----------------------------------------------------------------------------


def before_forward(
    module_state: ModuleState, after_hook_id: int | None, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Unshard, and move and cast inputs for the computation; None if inputs are unchanged.

    ``after_hook_id``: the id of our hook after forward; None for a method that the caller registered.
    """
    if is_dynamo_compiling():
        return module_state.in_graphs.before_forward(module_state, module, args, kwargs)  # type: ignore[no-any-return]
    if after_hook_id is not None:
        nn_modules.put_last(module, after_hook_id)
    group, root = module_state.group, module_state.root
    if autograd.is_in_transform():
        with autograd.without_transforms():
            call = _pass_of_call(root)(group, module)
    else:
        call = _pass_of_call(root)(group, module)
    is_moved = call.parent is None and group.device.type != "cpu"
    if is_moved:
        args, kwargs = map_tensors((args, kwargs), lambda t: t.to(group.device, non_blocking=True))
    cast = group.casts.inputs(args, kwargs) if group.casts.casts_inputs else None
    if cast is not None:
        args, kwargs = cast
    if torch.is_grad_enabled():
        given = list(filter(is_not_none, (*args, *kwargs.values())))
        inside = () if set(map(type, given)) == _ONLY_TENSORS else _inside(given)
        call.input_nodes = _nodes_of((*given, *inside))
    return (args, kwargs) if is_moved else cast


def after_forward(module_state: ModuleState, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Hook the outputs, which announce their backward, then reshard."""
    if is_dynamo_compiling():
        return module_state.in_graphs.after_forward(module_state, module, output)
    call = module_state.root.calls.innermost(module)
    if call is None:
        module_state.root.tell_failed_forward()
        return None  # our hook before forward failed
    outcome = FAILED
    try:
        if sys.exc_info()[1] not in (None, call.handled):
            return None  # a new exception is handled: forward or a later hook raised it
        output, outcome = _announce(module_state, call, (*args, *kwargs.values()), output)
        return output
    finally:
        if autograd.is_in_transform():
            with autograd.without_transforms():
                _exit(module_state.root, call, outcome)
        else:
            _exit(module_state.root, call, outcome)
        if outcome is FAILED:
            module_state.root.tell_failed_forward()


def _exit(root: Root, call: Call, outcome: Outcome) -> None:
    root.calls.close(call)
    for feature in root.features:
        feature.call_ended(call)
    if autograd.current_graph_task_id() != -1:
        root.backward.exit_recomputation(graph_task(root), call.group)
    else:
        root.forward.exit(call, outcome)


def _announce(module_state: ModuleState, call: Call, inputs: Any, output: Any) -> tuple[Any, Outcome]:
    """Hook the outputs' nodes; return the output, with copies in place of full parameters, and the outcome.

    Tensors that forward puts into its inputs (a list that it appends to, a cache) are outputs as well.
    """
    group = call.group
    if not group.added.is_untouched():
        group.refuse_added(module_state.root.lazy_init.module_names())
    if group.casts.casts_output:
        output = group.casts.output(output)
    is_one = type(output) is Tensor or isinstance(output, Tensor)
    tensors = [output] if is_one else find_tensors(output)
    given = list(filter(is_not_none, inputs))
    inside = () if set(map(type, given)) == _ONLY_TENSORS else _inside(given)
    if inside and _may_be_unsharded(inside):
        _refuse_hidden_parameters(group, inside)
    if _may_be_unsharded(tensors):
        groups = module_state.root.unsharded_groups.freed_by_exit(call)
        unsharded_outputs = [t for t in tensors if any(each.unsharded.owns(t) for each in groups)]
        if unsharded_outputs:
            copies = {id(t): t.clone() for t in unsharded_outputs}
            output = _replace(output, copies, group.name)
            tensors = [copies.get(id(t), t) for t in tensors]
    if not torch.is_grad_enabled():
        return output, NO_BACKWARD
    # Inputs again: one that was changed in place has a new node.
    nodes = _nodes_of((*tensors, *group.side_tensors.find(), *given, *inside))
    for node in call.input_nodes or ():  # nodes of the inputs belong to earlier calls
        nodes.pop(node, None)
    if nodes:
        announce = partial(_before_backward, module_state, call)
        for node in nodes.values():
            node.register_prehook(announce)
        return output, ANNOUNCED
    if tensors or not group.gradients.are_wanted:
        return output, NO_BACKWARD
    return output, UNANNOUNCED


def _before_backward(module_state: ModuleState, call: Call, gradients: Any) -> None:
    """Backward has reached the outputs of ``call``: its group is needed."""
    root = module_state.root
    if autograd.is_in_transform():
        with autograd.without_transforms():
            task = graph_task(root)
            root.backward.enter(task, call)
    else:
        task = graph_task(root)
        root.backward.enter(task, call)


dynamo.break_graphs(_before_backward)  # of compiled autograd
for _hook in (before_forward, after_forward):
    dynamo.run_outside_graphs(_hook)


# --- tensors and their nodes --------------------------------------------------------------------------


_ONLY_TENSORS = {Tensor}


def _inside(values: Sequence[Any]) -> list[Tensor]:
    """The tensors inside containers among ``values``."""
    found: list[Tensor] = []
    for value in values:
        if not isinstance(value, Tensor):
            found += find_tensors(value)
    return found


_grad_fn = attrgetter("grad_fn")


def _may_be_unsharded(tensors: Sequence[Tensor]) -> bool:
    """False if operations made all of ``tensors``, which then have separate memory."""
    return any(map(is_, map(_grad_fn, tensors), repeat(None))) or any(map(tensor_impl.is_view, tensors))


def _refuse_hidden_parameters(group: ParameterGroup, inside: Iterable[Tensor]) -> None:
    """Refuse a parameter of ``group`` inside a caller's container: no copy can take its place."""
    if len(group.modules) > 1:
        return  # another module of the group may have passed it
    for tensor in inside:
        if group.unsharded.owns(tensor):
            raise TypeError(
                f"{group.name}: forward has put one of its own parameters, of shape {tuple(tensor.shape)}, "
                "into a container that it was given. The parameter's memory is freed after forward. Put "
                "parameter.clone() there."
            )


def _nodes_of(values: Iterable[Any]) -> dict[int, Any]:
    """The graph nodes of the tensors among ``values``, by id, which is unique while the node is held."""
    nodes: dict[int, Any] = {}
    if autograd.is_in_transform_or_forward_mode():
        values = with_layers([value for value in values if isinstance(value, Tensor)])
    for tensor in values:
        if type(tensor) is not Tensor and not isinstance(tensor, Tensor):
            continue
        if not tensor.requires_grad:
            continue
        node = tensor.grad_fn
        if node is not None:
            nodes[id(node)] = node
        if tensor_impl.is_view(tensor):
            base = tensor_impl.base_of(tensor)
            node = None if base is None else base.grad_fn
            if node is not None:
                nodes[id(node)] = node
    return nodes


def _replace(output: Any, copies: dict[int, Tensor], name: str) -> Any:
    try:
        return replace_tensors(output, copies)
    except NotAContainer as error:
        raise TypeError(
            f"{name}: forward returned one of its own parameters somewhere inside a {error}. The parameter's "
            "memory is freed after forward, so a copy must be returned, but this library does not know "
            "how to put one there. Return parameter.clone()."
        ) from None
