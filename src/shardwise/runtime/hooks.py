"""Module hooks and autograd hooks: they tell the schedule what happens, and do nothing else.

Entering and leaving forward are seen by module hooks. The beginning of a call's backward is seen by
hooks on the graph nodes that made its outputs: unlike hooks on tensors, they stay when an output is
changed in place. Where an output is a view, its base's node carries one as well: an operation in
place on the view replaces the view's node, and the base's then stands in the graph instead.
"""

import sys
from collections.abc import Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from shardwise.runtime import compat, traced
from shardwise.runtime.group import Group, State
from shardwise.runtime.outputs import NotAContainer, find_tensors, map_tensors, replace_tensors
from shardwise.runtime.schedule import ANNOUNCED, FAILED, NO_BACKWARD, UNANNOUNCED, Call, Member, Outcome
from shardwise.runtime.transforms import with_layers

_WRAPPED = "_shardwise_methods"


def install_hooks(member: Member) -> None:
    """Drive the group of ``member`` by the forwards of its modules.

    Our hook before forward is the first, and the one after it the last, also among those registered later:
    the caller's own hooks see full parameters, and what they return is what backward is announced by. The
    latter runs after an exception as well.
    """
    for module in member.group.modules:
        after = module.register_forward_hook(
            partial(_after_forward, member), with_kwargs=True, always_call=True
        )
        before = partial(_before_forward, member, after.id)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_load_state_dict_pre_hook(partial(_before_load, member))
        module.register_load_state_dict_post_hook(partial(_after_load, member))


def _before_load(member: Member, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Full tensors in a state dict become shards: each rank takes its part."""
    if member.group.state is State.LENT:
        return  # full parameters are what is loaded into
    names = {inner: name for name, inner in module.named_modules(prefix=prefix.rstrip("."))}
    for param in member.group.params:
        for site in param.sites:
            key = ".".join(part for part in (names.get(site.module), site.name) if part)
            if site.module in names and param.is_full_value(state.get(key)):
                state[key] = param.as_shard(state[key])


def _after_load(member: Member, module: nn.Module, incompatible_keys: Any) -> None:
    """Shards that ``load_state_dict(assign=True)`` put in place move into the buffer at once."""
    member.group.follow_changes()
    if not incompatible_keys.missing_keys:
        member.group.partly_loaded = None


def wrap_method(module: nn.Module, name: str, member: Member) -> None:
    """Let ``module.<name>(...)`` gather and free as ``module(...)`` does."""
    method = getattr(module, name)

    @wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _before_forward(member, None, module, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception:
            _after_forward(member, module, args, kwargs, None)
            raise
        changed = _after_forward(member, module, args, kwargs, output)
        return output if changed is None else changed

    # Compiled by itself, it would have one hook inside of a graph and one outside.
    compat.skip_frame(gathered)
    setattr(module, name, gathered)
    module.__dict__.setdefault(_WRAPPED, set()).add(name)


def wrapped_methods(module: nn.Module) -> set[str]:
    """Names of the methods of ``module`` that were wrapped so."""
    return module.__dict__.get(_WRAPPED, set())


def _before_forward(
    member: Member, after: int | None, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Gather, and bring inputs to the device and dtype of the computation; None: they stay as they are.

    ``after``: the id of our hook after forward; None for a method of the caller's.
    """
    if is_dynamo_compiling():
        return traced.before_forward(member, module, args, kwargs)
    if after is not None:
        compat.put_last(module, after)
    group = member.group
    call = member.schedule.enter_forward(group, module)
    is_moved = call.is_outermost and group.device.type != "cpu"
    if is_moved:
        args, kwargs = map_tensors((args, kwargs), lambda t: t.to(group.device, non_blocking=True))
    cast = group.casts.inputs(args, kwargs)
    if cast is not None:
        args, kwargs = cast
    if torch.is_grad_enabled():
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        call.given = _nodes_of((*given, *_inside(given)))
    return (args, kwargs) if is_moved else cast


def _after_forward(member: Member, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Free the group, once the outputs carry what will announce their backward."""
    if is_dynamo_compiling():
        return traced.after_forward(member, module, output)
    call = member.schedule.current_call(module)
    if call is None:
        member.schedule.tell_failed_forward()
        return None  # the hook before forward had failed
    outcome = FAILED
    try:
        if output is None and sys.exc_info()[1] not in (None, call.handled):
            return None  # called from the handler of an exception that is new: forward has raised
        output, outcome = _announce(member, call, (*args, *kwargs.values()), output)
        return output
    finally:
        member.schedule.exit_forward(call, outcome)
        if outcome is FAILED:
            member.schedule.tell_failed_forward()


def _announce(member: Member, call: Call, inputs: Any, output: Any) -> tuple[Any, Outcome]:
    """Hook the outputs' nodes; the output, with copies in place of raw parameters, and the outcome.

    Tensors that forward has put into what it was given (a list to append to, a cache) are outputs as well.
    """
    group = call.group
    member.schedule.refuse_added(group)
    output = group.casts.output(output)
    tensors = [output] if isinstance(output, Tensor) else find_tensors(output)
    given = [value for value in inputs if value is not None]
    inside = _inside(given)
    if _may_be_raw(inside):
        _refuse_hidden_parameters(group, inside)
    if _may_be_raw(tensors):
        owners = member.schedule.freed_by_exit(call)
        raw = [t for t in tensors if any(owner.owns(t) for owner in owners)]
        if raw:
            copies = {id(t): t.clone() for t in raw}
            output = _replace(output, copies, group.name)
            tensors = [copies.get(id(t), t) for t in tensors]
    if not torch.is_grad_enabled():
        return output, NO_BACKWARD
    # Inputs anew: what was changed in place has another node now.
    nodes = _nodes_of((*tensors, *group.side_tensors(), *given, *inside))
    for node in call.given:  # handed on: of calls before this one
        nodes.pop(node, None)
    if nodes:
        announce = partial(_before_backward, member, call)
        for node in nodes.values():
            node.register_prehook(announce)
        return output, ANNOUNCED
    if tensors or not group.is_trainable:
        return output, NO_BACKWARD
    return output, UNANNOUNCED


def _inside(values: Iterable[Any]) -> list[Tensor]:
    """The tensors inside of containers among ``values``."""
    return [t for value in values if not isinstance(value, Tensor) for t in find_tensors(value)]


def _may_be_raw(tensors: Iterable[Tensor]) -> bool:
    """False if all of ``tensors`` have memory of their own, for an operation has made them."""
    return any(t.grad_fn is None or t._is_view() for t in tensors)


def _refuse_hidden_parameters(group: Group, inside: Iterable[Tensor]) -> None:
    """No parameter of ``group`` may be in what the caller gave to forward: no copy can take its place."""
    if len(group.modules) > 1:
        return  # another module of the group may have handed it over
    for tensor in inside:
        if group.owns(tensor):
            raise TypeError(
                f"{group.name}: forward has put one of its own parameters, of shape {tuple(tensor.shape)}, "
                "into a container that it was given. The parameter's memory is freed after forward. Put "
                "parameter.clone() there."
            )


def _nodes_of(values: Iterable[Any]) -> dict[int, Any]:
    """The graph nodes of the tensors among ``values``, by id: their own as long as they are held."""
    nodes: dict[int, Any] = {}
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in with_layers(tensors) if compat.is_in_transform_or_forward_mode() else tensors:
        if tensor.requires_grad:
            _collect_nodes(tensor, nodes)
    return nodes


def _collect_nodes(tensor: Tensor, nodes: dict[int, Any]) -> None:
    node = tensor.grad_fn
    if node is not None:
        nodes[id(node)] = node
    if tensor._is_view():
        base = tensor._base
        node = None if base is None else base.grad_fn
        if node is not None:
            nodes[id(node)] = node


def _before_backward(member: Member, call: Call, gradients: Any) -> None:
    member.schedule.enter_backward(call)


def _replace(output: Any, copies: dict[int, Tensor], name: str) -> Any:
    try:
        return replace_tensors(output, copies)
    except NotAContainer as error:
        raise TypeError(
            f"{name}: forward returned one of its own parameters inside a {error}. The parameter's "
            "memory is freed after forward, so a copy must be returned, but this library does not know "
            "how to put one there. Return parameter.clone()."
        ) from None


for _hook in (_before_forward, _after_forward):
    compat.run_outside_graphs(_hook)
compat.break_graphs(_before_backward)  # of compiled autograd
