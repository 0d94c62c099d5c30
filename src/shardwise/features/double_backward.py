"""Unsharding for graphs that a backward creates: ``create_graph=True``.

Such a backward computes gradients with full parameters, which the nodes that it creates save. Like any other
backward, it reshards its groups. A later backward through the created nodes then needs them again:

    forward            x --[mm W0]--> h --[mm W1]--> y
    create_graph=True  gx <--[mm W0]-- gh <--[mm W1]-- gy     the nodes that use W0 are created last
    its backward       runs the created nodes first, in the order of forward: W0, then W1

While a backward creates a graph, each node that it runs gets a hook after it. The hook marks the nodes that
were created with the groups that were unsharded then, and hooks the nodes that run next. A marked node has a
hook before it, which unshards those groups. Marks live in the graph and die with it: they keep nothing
unsharded, and any number of other passes may run in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.backward import Session
from shardwise.engine.feature import Feature
from shardwise.engine.memory import AHEAD
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import UNSHARDED
from shardwise.torch_compat import autograd, dynamo, functorch
from shardwise.torch_compat.functorch import outside_transforms, with_layers


@dataclass(eq=False, frozen=True, slots=True)
class Mark:
    """The groups that were unsharded when a backward created some nodes. ``next``: those needed next."""

    groups: tuple[ParameterGroup, ...]
    next: "Mark | None"


class DoubleBackward(Feature):
    """Marks the nodes that the backwards of a root create, and unshards what these nodes need later."""

    def node_reached(self, session: Session) -> None:
        """Mark what the running backward creates from its current node on, if it creates a graph."""
        if torch.is_grad_enabled():
            _follow(self, autograd.current_node())

    def is_needed_later(self, group: ParameterGroup) -> bool:
        """True in a backward through created nodes.

        Autograd has a thread for each device, so the order of these nodes does not tell when a group is over.
        """
        backward = self.root.backward
        return backward is not None and any(_CREATED in session.notes for session in backward.sessions)

    def mark(self) -> Mark:
        """The mark for nodes that were just created: the groups that the running backward computes with."""
        notes, memory = self.root.find_or_begin_session().notes, self.root.memory
        groups = tuple(g for g in memory if g.unsharded.state is UNSHARDED and memory.reason(g) is not AHEAD)
        last: Mark | None = notes.get(_MARK)
        if last is None or last.groups != groups:
            last = notes[_MARK] = Mark(groups, last)
        return last

    @outside_transforms
    def enter_created(self, mark: Mark) -> None:
        """Unshard the groups of a node that an earlier backward created, until this backward ends."""
        session = self.root.find_or_begin_session()
        self.node_reached(session)
        if mark is session.notes.get(_CREATED):
            return
        session.notes[_CREATED] = mark
        for group in mark.groups:
            self.root.memory.unshard_again(group)
            self.root.running_backward.take_kept(group)
        self._prefetch(mark)
        for group in mark.groups:
            group.unsharded.wait()

    def _prefetch(self, mark: Mark) -> None:
        if mark.next is not None and mark.groups and mark.groups[-1].policy.backward_prefetch is not None:
            last = mark.groups[-1]
            ahead = [group for group in mark.next.groups if group not in mark.groups]
            self.root.prefetch.in_backward(last, ahead[: last.policy.prefetch])


_MARK = object()  # key in a session's notes: the mark of what it creates
_CREATED = object()  # the same: the mark of the created node that it has reached last


def _follow(marker: "DoubleBackward", node: Any) -> None:
    # Metadata lives as long as the node in C++; its Python object may not.
    if (marker, "followed") not in node.metadata:
        node.metadata[marker, "followed"] = True
        node.register_hook(partial(_has_run, marker))


def _has_run(marker: "DoubleBackward", gradients: Sequence[Tensor | None], _outputs: Any) -> None:
    if not torch.is_grad_enabled():
        return  # another backward through a retained graph
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


def _is_about_to_run(marker: "DoubleBackward", mark: Mark, _gradients: Any) -> None:
    marker.enter_created(mark)


dynamo.break_graphs(_has_run)  # of compiled autograd
dynamo.break_graphs(_is_about_to_run)
