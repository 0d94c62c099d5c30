"""The named points of a training step at which optional features are called."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.groups.group import ParameterGroup

if TYPE_CHECKING:
    from shardwise.engine.backward import Session
    from shardwise.engine.calls import Call, Outcome
    from shardwise.engine.root import Root


class Feature:
    """An optional part of one root. Subclasses override the points that they need; the rest cost nothing."""

    ranks_run_alike = True
    """False while ranks may run different numbers of forwards."""

    def __init__(self, root: "Root") -> None:
        self.root = root

    def tree_changed(self) -> None:
        """Groups were added, or the caller has configured some."""

    def plan_changed(self) -> None:
        """A group's parameters were replaced, frozen or unfrozen, or a setting has changed."""

    def changes_followed(self) -> None:
        """In a pass, a group has adopted changes of the caller, before it communicates."""

    def check(self) -> None:
        """Before anything runs: refuse a model that cannot run. No communication."""

    def agree(self) -> None:
        """Before a forward, and before any other communication."""

    def pass_begins(self, what: str) -> None:
        """Before ``what``, a forward or a backward: refuse it if it must not run now."""

    def connected(self) -> None:
        """Before a forward, once process groups and streams exist."""

    def forward_begins(self) -> None:
        """The outermost forward begins."""

    def forward_ended(self, outcome: "Outcome") -> None:
        """The outermost forward has ended."""

    def unsharding(self, group: ParameterGroup) -> None:
        """``group`` is about to be unsharded, unless it is already."""

    def call_ended(self, call: "Call") -> None:
        """The module of ``call`` has run, or has failed to; in a recomputation too."""

    def instead_of_reshard(self, group: ParameterGroup, outcome: "Outcome") -> bool:
        """``group`` is to be resharded after its forward. True: this feature has kept some or all of it."""
        return False

    def backward_begins(self) -> None:
        """The outermost backward begins."""

    def node_reached(self, session: "Session") -> None:
        """Backward has reached the outputs of a call."""

    def used_in_backward(self, group: ParameterGroup) -> None:
        """Backward uses ``group``, which is unsharded or about to be."""

    def is_needed_later(self, group: ParameterGroup) -> bool:
        """Whether ``group`` has to stay unsharded until the running backward ends."""
        return False

    def backward_ended(self) -> None:
        """The outermost backward and its reductions have ended."""

    def reset(self) -> None:
        """All gradients are about to be dropped."""


_F = TypeVar("_F", bound=Feature)


class Features:
    """The features of one root, and for each point the methods of those that override it."""

    def __init__(self) -> None:
        self._features: list[Feature] = []
        self._collect()

    def find(self, kind: type[_F]) -> _F | None:
        """The feature of class ``kind``, if there is one."""
        return next((feature for feature in self._features if isinstance(feature, kind)), None)

    def add(self, feature: Feature) -> None:
        """Let ``feature`` take part."""
        self._features.append(feature)
        self._collect()

    def remove(self, feature: Feature) -> None:
        """Leave it out again."""
        self._features.remove(feature)
        self._collect()

    def _collect(self) -> None:
        for name in _POINTS:
            setattr(self, name, [getattr(f, name) for f in self._features if _overrides(f, name)])
        self.ranks_run_alike = all(feature.ranks_run_alike for feature in self._features)

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
    call_ended: list[Callable[[Any], None]]
    instead_of_reshard: list[Callable[[ParameterGroup, Any], bool]]
    backward_begins: list[Callable[[], None]]
    node_reached: list[Callable[[Any], None]]
    used_in_backward: list[Callable[[ParameterGroup], None]]
    is_needed_later: list[Callable[[ParameterGroup], bool]]
    backward_ended: list[Callable[[], None]]
    reset: list[Callable[[], None]]


_POINTS = tuple(Features.__annotations__)


def _overrides(feature: Feature, name: str) -> bool:
    return getattr(type(feature), name) is not getattr(Feature, name)
