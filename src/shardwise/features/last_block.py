"""The last group of the tree stays unsharded from forward to backward, which probably begins with it.

If it were resharded, it would be unsharded again at once. The last group is read from the tree, not observed
in a forward: what ranks unshard in backward must not depend on what each of them has run.
"""

from shardwise.engine.calls import ANNOUNCED, Outcome
from shardwise.engine.feature import Feature
from shardwise.engine.memory import FOR_BACKWARD, FOR_EARLIER_BACKWARD
from shardwise.engine.root import Root
from shardwise.groups.group import ParameterGroup


class LastBlock(Feature):
    """Keeps the last group, unless the caller has chosen otherwise."""

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._last: ParameterGroup | None = None

    def tree_changed(self) -> None:
        """Find the last group again."""
        root = self.root
        inner = [g for g in root.groups if g is not root.group and not g.settings.may_be_unused]
        self._last = inner[-1] if inner else None

    def forward_begins(self) -> None:
        """Mark a group that an earlier forward has kept: it is stale in this one."""
        for group in self.root.memory.held_for(FOR_BACKWARD):
            self.root.memory.hold(group, FOR_EARLIER_BACKWARD)

    def instead_of_reshard(self, group: ParameterGroup, outcome: Outcome) -> bool:
        """Keep the last group, hidden from its modules."""
        keeps = group is self._last and outcome is ANNOUNCED and self._is_wanted(group)
        if keeps:
            group.unsharded.hide()
            self.root.memory.hold(group, FOR_BACKWARD)
        return keeps

    def _is_wanted(self, group: ParameterGroup) -> bool:
        """True if the caller has left the choice to us.

        Nothing is kept if the caller chooses what backward prefetches: all ranks unshard that, even if
        gradients flow differently in them.
        """
        return (
            group.settings.reshard_after_forward is None
            and group.settings.unshard_in_backward
            and all(each.settings.backward_prefetch is None for each in self.root.groups)
            and self.root.features.ranks_run_alike
            and not group.unsharded.changed_in_place()
        )
