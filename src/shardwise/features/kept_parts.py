"""``reshard_after_forward=N``: N ranks keep the unsharded parameters together until backward."""

from shardwise.engine.calls import ANNOUNCED, Outcome
from shardwise.engine.feature import Feature
from shardwise.engine.memory import CALLER
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import PARTLY, UNSHARDED


class KeptParts(Feature):
    """After forward, keeps this rank's part of a group instead of freeing all of it."""

    def forward_begins(self) -> None:
        """Free what an earlier forward has kept: it is not needed any more."""
        for group in self.root.memory:
            if group.unsharded.state is PARTLY:
                self.root.memory.release(group)

    def instead_of_reshard(self, group: ParameterGroup, outcome: Outcome) -> bool:
        """Keep this rank's part if the caller has asked for it and a backward will come."""
        keeps = (
            group.settings.ranks_that_keep is not None
            and outcome is ANNOUNCED
            and group.unsharded.state is UNSHARDED
            and self.root.memory.reason(group) is not CALLER
        )
        if keeps:
            group.unsharded.keep_part()
        return keeps
