"""What cuts a graph of AOTAutograd into forward and backward. Seen on 2.13 and 2.15.

What forward keeps for backward must be tensors first, then objects such as the mesh of a DTensor, then sizes.
Activation checkpointing keeps the states of random generators as well, where these are not of an accelerator
that has another way, and torch puts them after the objects: every graph of a checkpoint with DTensors and a
random operator (dropout, or attention on the CPU) then fails in forward: "expected all
tensors_saved_with_vc_check to be Tensors".
"""

import functools
from typing import Any

import torch
from torch import Tensor

_NOT_OBJECTS = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@functools.cache
def put_random_states_before_objects() -> None:
    """Have random states stand among the tensors in all graphs that are cut from now on.

    Only graphs that could not run change.
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
