"""Unsharding for graphs that a backward creates: ``create_graph=True``.

Such a backward computes with full parameters, which the nodes that it creates save. Like any backward, it
reshards its groups. A later backward through the created nodes needs the groups again:

    forward            x --[mm W0]--> h --[mm W1]--> y
    create_graph=True  gx <--[mm W0]-- gh <--[mm W1]-- gy     the nodes that use W0 are created last
    its backward       runs the created nodes first, in the order of forward: W0, then W1

While a backward creates a graph, each node that it runs gets a hook that runs after it. The hook marks the
created nodes with the groups unsharded at that time, and hooks the nodes that run next. A marked node has a
hook that runs before it, which unshards those groups. Marks live in the graph and die with it: they keep
nothing unsharded, and any number of other passes may run in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.groups.group import ParameterGroup
from shardwise.torch_compat import autograd, dynamo, functorch
from shardwise.torch_compat.functorch import with_layers


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
    if functorch.is_in_transform_or_forward_mode():
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
