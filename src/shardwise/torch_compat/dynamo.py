"""What ``torch.compile`` traces and what it must leave alone, and its graphs. Seen on 2.11 to 2.15."""

import functools
from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_C = TypeVar("_C", bound=Callable[..., Any])

functional_collectives: Any = torch.ops._c10d_functional
"""Collectives as operators of a graph. Those of ``torch.distributed`` cannot be part of an operator of ours,
and ``torch.distributed._functional_collectives`` is not public either."""


def run_outside_graphs(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` leave alone the frame of ``function`` and of all that it calls.

    Where it is called from a frame that is being traced, it is traced as well.
    """
    _set_frame_action(function, inside="SKIP")


def break_graphs(function: Callable[..., Any]) -> None:
    """As ``run_outside_graphs``, and break the graph of a traced frame that calls ``function``.

    As ``torch.compiler.disable`` does, by the marks that it leaves; but that puts a wrapper around the
    function, which costs 1 to 3 us a call, and imports dynamo.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "shardwise unshards, frees and reduces here"
    run_outside_graphs(function)


def call_while_tracing(function: _C) -> _C:
    """Have dynamo call ``function``, a method without arguments, while it traces; the result is a constant.

    As ``torch.compiler.assume_constant_result`` does, by the mark that it leaves; but that imports dynamo.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def skip_frame(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` skip the frame of ``function``, but not what it calls."""
    _set_frame_action(function, inside="DEFAULT")


def _set_frame_action(function: Callable[..., Any], inside: str) -> None:
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, getattr(actions, inside))
    frames.set_code_exec_strategy(function.__code__, strategy)


# torch 2.11 cannot trace that an entry of ``module.__dict__`` is removed. There the unsharded tensor takes
# the place of the registered parameter in graphs, where only the graph sees it: what is traced does not
# happen to the module. But what is put back stays there, so it must be what was registered before.
RESTORES_ALL_IN_GRAPHS = not torch.__version__.startswith(("2.11.", "2.12."))


def shadow_in_graph(module: nn.Module, name: str, full: Tensor) -> None:
    """Let what is traced next see ``full`` as ``module.<name>``."""
    if RESTORES_ALL_IN_GRAPHS:
        module.__dict__[name] = full
    else:
        module._parameters[name] = full  # type: ignore[assignment]


def unshadow_in_graph(module: nn.Module, name: str, sharded: nn.Parameter) -> None:
    """Let what is traced next see the parameter."""
    if RESTORES_ALL_IN_GRAPHS:
        module.__dict__.pop(name)
    else:
        module._parameters[name] = sharded


def is_shadowed(module: nn.Module, name: str) -> bool:
    """True if ``module.<name>`` is not the registered parameter."""
    return name in module.__dict__


def allowed_in_checkpoints(function: Callable[..., None], *args: Any) -> None:
    """While tracing, call ``function``, which changes modules and will have changed them back.

    Inside activation checkpointing dynamo refuses all changes of objects from outside, also where nothing
    remains of them. It lets torch's own pass by this function; there is no public one.
    """
    torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function, *args)


def refuse_graph(reason: str) -> None:
    """While tracing, break the graph; with ``fullgraph=True`` an error that gives the reason."""
    torch._dynamo.graph_break(msg=reason)


# --- AOTAutograd: graphs that are cut into forward and backward -------------------------------------

_NOT_OBJECTS = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@functools.cache
def put_random_states_before_objects() -> None:
    """Have random states stand among the tensors in all graphs that are cut from now on.

    What forward keeps for backward must be tensors first, then objects such as the mesh of a DTensor, then
    sizes. Activation checkpointing keeps the states of random generators as well, where these are not of an
    accelerator that has another way, and torch puts them after the objects (2.13 and 2.15): every graph of a
    checkpoint with DTensors and a random operator (dropout, or attention on the CPU) then fails in forward:
    "expected all tensors_saved_with_vc_check to be Tensors". Only graphs that could not run change.
    """
    from torch._functorch import partitioners  # here, since it takes long and only graphs need it

    module: Any = partitioners
    functionalize = getattr(module, "functionalize_rng_ops", None)
    if functionalize is None:  # private: a torch without it cuts graphs in another way
        return

    @functools.wraps(functionalize)
    def ordered(joint: Any, forward: Any, backward: Any, num_sizes: int) -> tuple[Any, Any]:
        inputs = backward.graph.find_nodes(op="placeholder")
        first_tangent = next((i for i, node in enumerate(inputs) if "tangent" in node.name), len(inputs))
        objects = [node for node in inputs[:first_tangent] if _is_object(node)]
        # What is counted here stays last in what forward returns.
        forward, backward = functionalize(joint, forward, backward, num_sizes + len(objects))
        for node in backward.graph.find_nodes(op="placeholder"):
            if objects and node.name.startswith("rng_state_output"):
                objects[0].prepend(node)
        backward.recompile()
        return forward, backward

    module.functionalize_rng_ops = ordered


def _is_object(node: Any) -> bool:
    return "val" in node.meta and not isinstance(node.meta["val"], _NOT_OBJECTS)


# --- Inductor's schedule --------------------------------------------------------------------------
#
# Its steps have no public interface, but its configuration asks for passes over them
# (``reorder_for_compute_comm_overlap_passes``), and torch's own passes use these attributes.


made_by: Callable[[Any], Iterable[str]] = methodcaller("get_buffer_names")
"""Names of the buffers that a step writes."""


def needed_by(step: Any) -> tuple[list[str], list[str]]:
    """Names of the buffers that a step reads, and of those whose steps it only has to follow.

    Each in an order that is the same on all ranks.
    """
    needed: dict[bool, set[str]] = {False: set(), True: set()}
    for dep in step.unmet_dependencies:
        needed[getattr(dep, "is_fake", False)].add(dep.name)
    return sorted(needed[False]), sorted(needed[True] - needed[False])


def without_later_moves() -> dict[str, bool]:
    """The options of Inductor with which collectives stay where a pass of ours has put them.

    Since 2.14, a pass of torch moves them again after all others: all-gathers behind sums over replicas, and
    these right before they are waited for.
    """
    from torch._inductor import config

    name = "enable_simple_overlap"
    known = hasattr(config.aten_distributed_optimizations, name)
    return {f"aten_distributed_optimizations.{name}": False} if known else {}


def collective_of(step: Any) -> str | None:
    """Which functional collective a step begins ("all_gather_into_tensor"), or "wait_tensor"."""
    from torch._inductor.utils import is_collective, is_wait

    if is_wait(step.node):
        return "wait_tensor"
    if not is_collective(step.node):
        return None
    name = str(step.node.op_overload).split(".")[1]
    return name.removesuffix("_out").removesuffix("_")  # all_reduce_ sums in place
