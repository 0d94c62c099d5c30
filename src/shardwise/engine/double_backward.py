"""Gathering for graphs that a backward makes: ``create_graph=True``.

Such a backward computes gradients with full parameters and saves them in the nodes that it creates. It
frees its groups like any other backward. A later backward of those gradients then needs them again:

    forward            x --[mm W0]--> h --[mm W1]--> y
    create_graph=True  gx <--[mm W0]-- gh <--[mm W1]-- gy     created: last the nodes that use W0
    its backward       comes to the created nodes first, in the order of forward: W0, then W1

While a backward makes a graph, each node it runs has a hook after it. The hook marks what that node has
created with the groups that were gathered then, and hooks the nodes that follow. A marked node has a hook
before it, which gathers those groups. Marks live in the graph and die with it: nothing is kept in memory
for its sake, and any number of other passes may come in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.engine.group import Group
from shardwise.torch_compat import autograd, dynamo, functorch
from shardwise.torch_compat.functorch import with_layers


@dataclass(eq=False, frozen=True, slots=True)
class Mark:
    """What the nodes computed with that a backward created at one time. ``next`` comes up after it."""

    groups: tuple[Group, ...]
    next: "Mark | None"


class Marker(Protocol):
    """Who knows which groups are gathered, and gathers them again."""

    def mark(self) -> Mark:
        """For the nodes that the running backward has just created."""

    def enter_created(self, mark: Mark) -> None:
        """A node with ``mark`` is about to run."""


def follow_graph(marker: Marker) -> None:
    """Mark what the running backward creates from its current node on."""
    _follow(marker, autograd.current_node())


def _follow(marker: Marker, node: Any) -> None:
    # What is written on a node lives as long as the node; its Python object may come and go.
    if (marker, "followed") not in node.metadata:
        node.metadata[marker, "followed"] = True
        node.register_hook(partial(_has_run, marker))


def _has_run(marker: Marker, gradients: Sequence[Tensor | None], _outputs: Any) -> None:
    if not torch.is_grad_enabled():
        return  # another backward through a graph that was retained
    made = [gradient for gradient in gradients if gradient is not None]
    if functorch.is_in_transform_or_forward_mode():
        made = with_layers(made)
    created: list[Any] = [gradient.grad_fn for gradient in made if gradient.grad_fn is not None]
    unmarked = [node for node in created if (marker, "marked") not in node.metadata]
    if unmarked:
        before = partial(_is_about_to_run, marker, marker.mark())
        for node in unmarked:
            node.metadata[marker, "marked"] = True
            node.register_prehook(before)
    for node, _ in autograd.current_node().next_functions:
        if node is not None and node.next_functions:  # not where gradients are accumulated
            _follow(marker, node)


def _is_about_to_run(marker: Marker, mark: Mark, _gradients: Any) -> None:
    marker.enter_created(mark)


dynamo.break_graphs(_has_run)  # of compiled autograd
dynamo.break_graphs(_is_about_to_run)
