"""``set_may_be_unused()``: a block that some ranks may skip is unsharded with the group around it.

All ranks run that group, so they unshard the block at the same point. The block's gradients are reduced at
the end of backward, with zeros from ranks that have none.
"""

from shardwise.engine.feature import Feature
from shardwise.groups.group import ParameterGroup


class OptionalBlocks(Feature):
    """Tells the root which groups are unsharded and resharded together with which."""

    def tree_changed(self) -> None:
        """Find again which groups go together."""
        root = self.root
        leads: dict[ParameterGroup, list[ParameterGroup]] = {}
        for group in root.groups:
            if group.settings.may_be_unused and (around := self._goes_with(group)) is not None:
                leads.setdefault(around, []).append(group)
        root.leads = leads
        root.led = frozenset(group for group in root.groups if group.settings.may_be_unused)

    def check(self) -> None:
        """Refuse a group that may be unused if no group around it is run by all ranks."""
        for group in self.root.groups:
            if group.settings.may_be_unused and self._goes_with(group) is None:
                raise RuntimeError(
                    f"{group.name}: set_may_be_unused() was called on it, but no sharded module around it is "
                    "run by all ranks, with which it could be gathered. Call fully_shard on the module "
                    "around it."
                )

    def _goes_with(self, optional: ParameterGroup) -> ParameterGroup | None:
        """The innermost group around ``optional`` that all ranks run."""
        around = self.root.parents.get(optional)
        while around is not None and around.settings.may_be_unused:
            around = self.root.parents.get(around)
        return around
