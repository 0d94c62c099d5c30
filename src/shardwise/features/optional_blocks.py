"""``set_may_be_unused()``: a block that some ranks may skip is unsharded with the group around it.

All ranks run that group, so they unshard the block at the same point. The block's gradients are reduced at
the end of backward, with zeros from ranks that have none.
"""

from torch import nn

from shardwise.engine.feature import Feature
from shardwise.engine.root import Root
from shardwise.groups.group import ParameterGroup


class OptionalBlocks(Feature):
    """Tells the root which groups are unsharded and resharded together with which."""

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._parents: dict[ParameterGroup, ParameterGroup] = {}

    def tree_changed(self) -> None:
        """Find again which groups go together."""
        root = self.root
        optional = [group for group in root.groups if group.settings.may_be_unused]
        self._parents = _parents_of(root.groups, root.group) if optional and root.group is not None else {}
        leads: dict[ParameterGroup, list[ParameterGroup]] = {}
        for group in optional:
            if (around := self._goes_with(group)) is not None:
                leads.setdefault(around, []).append(group)
        root.memory.leads = leads
        root.memory.led = frozenset(optional)

    def check(self) -> None:
        """Refuse a group that may be unused if no group around it is run by all ranks."""
        for group in self.root.groups:
            if group.settings.may_be_unused and self._goes_with(group) is None:
                raise RuntimeError(
                    f"{group.name}: set_may_be_unused() was called on it, but no sharded module around it is "
                    "run by all ranks, with which it could be unsharded. Call fully_shard on the module "
                    "around it."
                )

    def _goes_with(self, optional: ParameterGroup) -> ParameterGroup | None:
        """The innermost group around ``optional`` that all ranks run."""
        around = self._parents.get(optional)
        while around is not None and around.settings.may_be_unused:
            around = self._parents.get(around)
        return around


def _parents_of(groups: list[ParameterGroup], root: ParameterGroup) -> dict[ParameterGroup, ParameterGroup]:
    """For each group, that of the sharded module right around its own."""
    group_of = {module: group for group in groups for module in group.modules}
    parents: dict[ParameterGroup, ParameterGroup] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, around: ParameterGroup) -> None:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            own = group_of.get(child, around)
            if own is not around:
                parents.setdefault(own, around)
            visit(child, own)

    for module in root.modules:
        visit(module, root)
    return parents
