"""The named points of a step, where optional parts of the runtime take part."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.groups.group import ParameterGroup

if TYPE_CHECKING:
    from shardwise.engine.backward import Session
    from shardwise.engine.calls import Outcome
    from shardwise.engine.root import Root


class Feature:
    """An optional part of one root. It overrides the points at which it takes part; others cost nothing."""

    ranks_run_alike = True
    """False while ranks may run different numbers of forwards."""

    def __init__(self, root: "Root") -> None:
        self.root = root

    def tree_changed(self) -> None:
        """Groups have come, or the caller has configured some."""

    def plan_changed(self) -> None:
        """Parameters of a group are others, or trained otherwise, or a setting has changed."""

    def changes_followed(self) -> None:
        """In a pass, a group has followed what the caller changed; nothing was communicated yet."""

    def check(self) -> None:
        """Before anything runs: refuse what cannot run. No communication."""

    def agree(self) -> None:
        """Before a forward, and before anything else is communicated."""

    def pass_begins(self, what: str) -> None:
        """Before a forward or a backward, as ``what`` says: refuse what is out of turn."""

    def connected(self) -> None:
        """Before a forward, when process groups and streams are there."""

    def forward_begins(self) -> None:
        """The outermost forward begins."""

    def forward_ended(self, outcome: "Outcome") -> None:
        """The outermost forward has ended."""

    def unsharding(self, group: ParameterGroup) -> None:
        """``group`` is about to be unsharded, or is already."""

    def instead_of_reshard(self, group: ParameterGroup, outcome: "Outcome") -> bool:
        """After its forward ``group`` is to be freed; True: something of it is kept, and this has done so."""
        return False

    def backward_begins(self) -> None:
        """The outermost backward begins."""

    def node_reached(self, session: "Session") -> None:
        """Backward has come to the outputs of a call."""

    def used_in_backward(self, group: ParameterGroup) -> None:
        """Backward uses ``group``, which is unsharded or on its way."""

    def is_needed_later(self, group: ParameterGroup) -> bool:
        """Whether ``group`` has to stay until the running backward ends."""
        return False

    def backward_ended(self) -> None:
        """The outermost backward has ended, and its reductions."""

    def reset(self) -> None:
        """All gradients are dropped."""


class Points:
    """The methods that the features of a root override, by point."""

    def __init__(self, features: "list[Feature]") -> None:
        for name in _POINTS:
            setattr(self, name, [getattr(f, name) for f in features if _overrides(f, name)])
        self.ranks_run_alike = all(feature.ranks_run_alike for feature in features)

    tree_changed: list[Callable[[], None]]
    plan_changed: list[Callable[[], None]]
    changes_followed: list[Callable[[], None]]
    check: list[Callable[[], None]]
    agree: list[Callable[[], None]]
    pass_begins: list[Callable[[str], None]]
    connected: list[Callable[[], None]]
    forward_begins: list[Callable[[], None]]
    forward_ended: list[Callable[[Any], None]]
    unsharding: list[Callable[[ParameterGroup], None]]
    instead_of_reshard: list[Callable[[ParameterGroup, Any], bool]]
    backward_begins: list[Callable[[], None]]
    node_reached: list[Callable[[Any], None]]
    used_in_backward: list[Callable[[ParameterGroup], None]]
    is_needed_later: list[Callable[[ParameterGroup], bool]]
    backward_ended: list[Callable[[], None]]
    reset: list[Callable[[], None]]


_POINTS = tuple(Points.__annotations__)


def _overrides(feature: Feature, name: str) -> bool:
    return getattr(type(feature), name) is not getattr(Feature, name)
