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
    """What the nodes computed with that a backward created at one time. ``next`` comes up after it."""

    groups: tuple[ParameterGroup, ...]
    next: "Mark | None"


class DoubleBackward(Feature):
    """Marks what the backwards of a root create, and unshards again what created nodes need."""

    def node_reached(self, session: Session) -> None:
        """Mark what the running backward creates from its current node on, if it makes a graph."""
        if torch.is_grad_enabled():
            _follow(self, autograd.current_node())

    def is_needed_later(self, group: ParameterGroup) -> bool:
        """Where devices have threads of their own, created nodes come in no order that would tell when a
        group is over."""
        backward = self.root.backward
        return backward is not None and any(_CREATED in session.notes for session in backward.sessions)

    def mark(self) -> Mark:
        """The groups that the running backward computes with, for the nodes that it has just created."""
        notes, memory = self.root.session().notes, self.root.memory
        groups = tuple(g for g in memory if g.unsharded.state is UNSHARDED and memory.reason(g) is not AHEAD)
        last: Mark | None = notes.get(_MARK)
        if last is None or last.groups != groups:
            last = notes[_MARK] = Mark(groups, last)
        return last

    @outside_transforms
    def enter_created(self, mark: Mark) -> None:
        """A node that an earlier backward created comes up: what it was created with is needed, until this
        backward ends."""
        session = self.root.session()
        self.node_reached(session)
        if mark is session.notes.get(_CREATED):
            return
        session.notes[_CREATED] = mark
        for group in mark.groups:
            self.root.unshard_again(group)
            self.root.running_backward.use(group)
        self._prefetch(mark)
        for group in mark.groups:
            group.unsharded.wait()

    def _prefetch(self, mark: Mark) -> None:
        if mark.next is not None and mark.groups and mark.groups[-1].policy.backward_prefetch is not None:
            last = mark.groups[-1]
            ahead = [group for group in mark.next.groups if group not in mark.groups]
            self.root.prefetch(last, ahead[: last.policy.prefetch], in_backward=True)


_MARK = object()  # in the notes of a session: of what it creates
_CREATED = object()  # and of what it came to that an earlier backward has created


def _follow(marker: "DoubleBackward", node: Any) -> None:
    # What is written on a node lives as long as the node; its Python object may come and go.
    if (marker, "followed") not in node.metadata:
        node.metadata[marker, "followed"] = True
        node.register_hook(partial(_has_run, marker))


def _has_run(marker: "DoubleBackward", gradients: Sequence[Tensor | None], _outputs: Any) -> None:
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


def _is_about_to_run(marker: "DoubleBackward", mark: Mark, _gradients: Any) -> None:
    marker.enter_created(mark)


dynamo.break_graphs(_has_run)  # of compiled autograd
dynamo.break_graphs(_is_about_to_run)
