"""What the hooks around a forward do: they tell the root, and hook the graph, which announces backward.

The backward of a call begins when autograd reaches a graph node that made one of its outputs, so these nodes
get hooks. Unlike hooks on tensors, they survive operations in place on the output. If an output is a view,
the node of its base gets a hook as well: an operation in place on the view replaces the view's node, and the
graph then goes through the node of the base.
"""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.calls import ANNOUNCED, FAILED, NO_BACKWARD, UNANNOUNCED, Call, Outcome
from shardwise.engine.members import Member
from shardwise.groups.group import ParameterGroup
from shardwise.layout.nested import NotAContainer, find_tensors, map_tensors, replace_tensors
from shardwise.torch_compat import dynamo, functorch, nn_modules, tensor_impl
from shardwise.torch_compat.functorch import with_layers


def before_forward(
    member: Member, after_hook_id: int | None, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Unshard, and move and cast inputs for the computation; None if the inputs stay as they are.

    ``after_hook_id``: the id of our hook after forward; None for a method that the caller registered.
    """
    if after_hook_id is not None:
        nn_modules.put_last(module, after_hook_id)
    group = member.group
    call = member.root.enter_forward(group, module)
    is_moved = call.is_outermost and group.device.type != "cpu"
    if is_moved:
        args, kwargs = map_tensors((args, kwargs), lambda t: t.to(group.device, non_blocking=True))
    cast = group.casts.inputs(args, kwargs)
    if cast is not None:
        args, kwargs = cast
    if torch.is_grad_enabled():
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        call.input_nodes = _nodes_of((*given, *_inside(given)))
    return (args, kwargs) if is_moved else cast


def after_forward(member: Member, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Hook the outputs, which will announce their backward, then reshard."""
    call = member.root.calls.innermost(module)
    if call is None:
        member.root.tell_failed_forward()
        return None  # our hook before forward failed
    outcome = FAILED
    try:
        if sys.exc_info()[1] not in (None, call.handled):
            return None  # called while a new exception is handled: forward raised, or a hook behind it
        output, outcome = _announce(member, call, (*args, *kwargs.values()), output)
        return output
    finally:
        member.root.exit_forward(call, outcome)
        if outcome is FAILED:
            member.root.tell_failed_forward()


def _announce(member: Member, call: Call, inputs: Any, output: Any) -> tuple[Any, Outcome]:
    """Hook the outputs' nodes; return the output, with copies in place of full parameters, and the outcome.

    Tensors that forward puts into its inputs (a list to append to, a cache) are outputs as well.
    """
    group = call.group
    if not group.added.is_untouched():
        group.refuse_added(member.root.module_names())
    output = group.casts.output(output)
    tensors = [output] if isinstance(output, Tensor) else find_tensors(output)
    given = [value for value in inputs if value is not None]
    inside = _inside(given)
    if _may_be_unsharded(inside):
        _refuse_hidden_parameters(group, inside)
    if _may_be_unsharded(tensors):
        groups = member.root.memory.freed_by_exit(call)
        unsharded_outputs = [t for t in tensors if any(each.unsharded.owns(t) for each in groups)]
        if unsharded_outputs:
            copies = {id(t): t.clone() for t in unsharded_outputs}
            output = _replace(output, copies, group.name)
            tensors = [copies.get(id(t), t) for t in tensors]
    if not torch.is_grad_enabled():
        return output, NO_BACKWARD
    # Inputs once more: one that was changed in place has another node now.
    nodes = _nodes_of((*tensors, *group.side_tensors.find(), *given, *inside))
    for node in call.input_nodes:  # nodes of the inputs belong to earlier calls
        nodes.pop(node, None)
    if nodes:
        announce = partial(_before_backward, member, call)
        for node in nodes.values():
            node.register_prehook(announce)
        return output, ANNOUNCED
    if tensors or not group.gradients.are_wanted:
        return output, NO_BACKWARD
    return output, UNANNOUNCED


def _inside(values: Iterable[Any]) -> list[Tensor]:
    """The tensors inside of containers among ``values``."""
    return [t for value in values if not isinstance(value, Tensor) for t in find_tensors(value)]


def _may_be_unsharded(tensors: Iterable[Tensor]) -> bool:
    """False if operations made all of ``tensors``, so that they have memory of their own."""
    return any(t.grad_fn is None or tensor_impl.is_view(t) for t in tensors)


def _refuse_hidden_parameters(group: ParameterGroup, inside: Iterable[Tensor]) -> None:
    """Refuse a parameter of ``group`` inside a container of the caller's: no copy can take its place."""
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
    """The graph nodes of the tensors among ``values``, by id, which is unique as long as the node is held."""
    nodes: dict[int, Any] = {}
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in with_layers(tensors) if functorch.is_in_transform_or_forward_mode() else tensors:
        if tensor.requires_grad:
            _collect_nodes(tensor, nodes)
    return nodes


def _collect_nodes(tensor: Tensor, nodes: dict[int, Any]) -> None:
    node = tensor.grad_fn
    if node is not None:
        nodes[id(node)] = node
    if tensor_impl.is_view(tensor):
        base = tensor_impl.base_of(tensor)
        node = None if base is None else base.grad_fn
        if node is not None:
            nodes[id(node)] = node


def _before_backward(member: Member, call: Call, gradients: Any) -> None:
    member.root.enter_backward(call)


def _replace(output: Any, copies: dict[int, Tensor], name: str) -> Any:
    try:
        return replace_tensors(output, copies)
    except NotAContainer as error:
        raise TypeError(
            f"{name}: forward returned one of its own parameters inside a {error}. The parameter's "
            "memory is freed after forward, so a copy must be returned, but this library does not know "
            "how to put one there. Return parameter.clone()."
        ) from None


dynamo.break_graphs(_before_backward)  # of compiled autograd
