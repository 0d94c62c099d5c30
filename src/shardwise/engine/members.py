"""What a sharded module knows: its parameter group, and the root that drives it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.groups.group import Listener, ParameterGroup
from shardwise.torch_compat import dynamo

if TYPE_CHECKING:
    from shardwise.engine.root import Root

_MEMBER = "_shardwise_member"


@dataclass(eq=False, slots=True)
class Member:
    """A group and the root that drives it now: what a sharded module knows."""

    group: ParameterGroup
    root: "Root"

    @dynamo.call_while_tracing
    def names_of_reduce_groups(self) -> str:
        """For each bucket a line: the name of the process group for reductions, empty if it has none.

        For graphs that are compiled before any eager forward has made the process groups.
        """
        preparation = self.root.preparation
        groups = [
            preparation.process_groups.for_reductions(self.group, bucket.mesh.shard_axis.pg)
            for bucket in self.group.buckets
        ]
        return "".join("\n" if pg is None else f"{pg.group_name}\n" for pg in groups)


def set_member(module: nn.Module, member: Member) -> None:
    """Store on a sharded module which group it belongs to."""
    module.__dict__[_MEMBER] = member


def is_member(module: nn.Module) -> bool:
    """True if ``module`` itself was given to ``fully_shard``."""
    return _MEMBER in module.__dict__


def sharded_members(module: nn.Module) -> list[Member]:
    """The members of ``module`` and of all sharded modules inside it, each once, outermost first."""
    members = [m.__dict__[_MEMBER] for m in module.modules() if _MEMBER in m.__dict__]
    return list({id(member): member for member in members}.values())


def member_of(module: Any) -> Member:
    """The member of a sharded module itself."""
    return module.__dict__[_MEMBER]


@dataclass(eq=False, slots=True)
class GroupListener(Listener):
    """Tells a root what happens to one of its groups."""

    root: "Root"
    group: ParameterGroup

    def gradient_arrived(self) -> None:
        """A gradient has arrived; it may be the first of a backward that nothing has announced."""
        self.root.find_or_begin_session()
        self.root.running_backward.gradient_arrived(self.group)

    def part_complete(self) -> None:
        """All gradients of a part are there: it may be reduced."""
        settings = self.group.settings
        if settings.requires_gradient_sync and not settings.ranks_may_differ:
            self.root.reductions.send_ready(self.group)

    def gradients_complete(self) -> None:
        """All gradients are there."""
        self.root.running_backward.gradients_complete(self.group)

    def plan_changed(self) -> None:
        """Ranks have to compare their plans again."""
        self.root.preparation.plan_changed()

    def changes_followed(self) -> None:
        """Changes of the caller, to shards or settings, have been followed."""
        for followed in self.root.features.changes_followed:
            followed()
