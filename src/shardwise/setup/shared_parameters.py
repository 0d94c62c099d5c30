"""Tied parameters whose places were given to different ``fully_shard`` calls.

The first call takes the parameter. A later one that meets it again leaves a note. The first call whose
module contains all places takes it over: the lowest common group owns it.

    fully_shard(embed)   takes the weight
    fully_shard(head)    finds it taken: a Tie
    fully_shard(model)   contains both: the weight moves here, and stands at both places
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.engine.module_state import sharded_module_states
from shardwise.groups.group import ParameterGroup, Tie
from shardwise.groups.states import EMPTY, SHARDED
from shardwise.layout.fqns import clean, joined
from shardwise.layout.mesh import ShardMesh
from shardwise.params.parameter import Param, Site
from shardwise.setup.discovery import Found


@dataclass(frozen=True)
class Move:
    """A parameter of a group inside, tied to one of another, that moves to the group of the call."""

    param: Param
    owner: ParameterGroup
    ties: list[Tie]
    mesh: ShardMesh  # of the call
    modules: list[nn.Module]  # of the call

    @property
    def sites(self) -> list[Site]:
        """All places of the parameter."""
        return [*self.param.sites, *(tie.site for tie in self.ties)]

    def places(self, names: Mapping[nn.Module, str]) -> list[tuple[str, nn.Module]]:
        """The parameter's names in the call, whose modules have ``names``, and the modules registering it."""
        return [(joined(names[site.module], site.name), site.module) for site in self.sites]

    def check(self) -> None:
        """Refuse what cannot move."""
        names = " and ".join(_full_names(self.modules, self.sites))
        own = self.param.mesh
        if (own.mesh, own.roles) != (self.mesh.mesh, self.mesh.roles):
            raise ValueError(
                f"{names} are tied, but one was sharded over the mesh {own.mesh} ({', '.join(own.roles)}), "
                f"and this fully_shard call has {self.mesh.mesh} ({', '.join(self.mesh.roles)}). Shard both "
                "over one mesh, or untie them."
            )
        if self.owner.unsharded.state is not SHARDED or self.owner.gradients.state is not EMPTY:
            raise RuntimeError(
                f"{names} are tied, but the group '{self.owner.name}' has run already and holds unsharded "
                "parameters or gradients. Call fully_shard on all modules before the first forward."
            )

    def apply(self, group: ParameterGroup, precision_for: Any, bucket_for: Callable[[Param], Bucket]) -> None:
        """Take the parameter out of its group and into ``group``."""
        self.owner.give_up(self.param)
        self.param.take_over([tie.site for tie in self.ties], self.mesh, precision_for)
        group.take_in(self.param, bucket_for)


def resolve_ties(modules: list[nn.Module], found: Found, mesh: ShardMesh) -> list[Move]:
    """Which parameters of groups inside move to the group of this call, as the lowest that contains all
    their places."""
    inner = list(
        dict.fromkeys(
            module_state.group for module in modules for module_state in sharded_module_states(module)
        )
    )
    ties = found.ties + [tie for group in inner for tie in group.ties]
    moves: list[Move] = []
    for group in inner:
        for param in group.shards.params:
            own = [tie for tie in ties if param.was_made_from(tie.original)]
            if own:
                moves.append(Move(param, group, own, mesh, modules))
    for move in moves:
        move.check()
    return moves


def leave_ties(group: ParameterGroup, ties: list[Tie], moves: list[Move]) -> None:
    """Leave what could not be resolved to a later call, and forget what was."""
    resolved = {tie for move in moves for tie in move.ties}
    group.ties = [tie for tie in ties if tie not in resolved]
    for module in group.modules:
        for module_state in sharded_module_states(module):
            module_state.group.ties = [tie for tie in module_state.group.ties if tie not in resolved]


def _full_names(modules: list[nn.Module], sites: list[Site]) -> list[str]:
    """All names of a tied parameter, also where one module stands in two places."""
    found: dict[str, None] = {}
    for root in modules:
        for prefix, module in root.named_modules(remove_duplicate=False):
            found |= dict.fromkeys(joined(clean(prefix), s.name) for s in sites if s.module is module)
    return list(found)
