"""``set_may_be_unused()``: a block that some ranks may skip is unsharded with the group around it.

All ranks run that group, so they unshard the block at the same point. The block's gradients are reduced at
the end of backward, with zeros from ranks that have none.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from shardwise.groups.group import ParameterGroup

Together = Mapping[ParameterGroup, Sequence[ParameterGroup]]


def unsharded_together(groups: Sequence[ParameterGroup], root: ParameterGroup | None) -> Together:
    """For groups of a tree those that are unsharded and resharded with them; ``root``: the outermost."""
    optional = [group for group in groups if group.settings.may_be_unused]
    if not optional or root is None:
        return {}
    parents, together = _parents_of(groups, root), dict[ParameterGroup, list[ParameterGroup]]()
    for group in optional:
        around = parents.get(group)
        while around is not None and around.settings.may_be_unused:  # not all ranks may run that one
            around = parents.get(around)
        if around is not None:
            together.setdefault(around, []).append(group)
    return together


def refuse_alone(groups: Sequence[ParameterGroup], together: Together) -> None:
    """Refuse a group that may be unused if no group around it is run by all ranks."""
    accompanied = {group for inside in together.values() for group in inside}
    for group in groups:
        if group.settings.may_be_unused and group not in accompanied:
            raise RuntimeError(
                f"{group.name}: set_may_be_unused() was called on it, but no sharded module around it is "
                "run by all ranks, with which it could be unsharded. Call fully_shard on the module "
                "around it."
            )


def _parents_of(
    groups: Sequence[ParameterGroup], root: ParameterGroup
) -> dict[ParameterGroup, ParameterGroup]:
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
