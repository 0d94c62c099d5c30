"""Process groups of a root's own: for reductions, and for ranks that keep parameters together."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from shardwise.groups.group import ParameterGroup
from shardwise.layout.mesh import Axis
from shardwise.torch_compat import c10d


class ProcessGroups:
    """Made when they are first asked for, in an order that all ranks have in common."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._for_reductions: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._of_parts: dict[tuple[dist.ProcessGroup, int], Axis] = {}
        self._unconnected: list[dist.ProcessGroup] = []

    def take_over(self, other: "ProcessGroups") -> None:
        """Use those of ``other`` as well."""
        self._of_parts.update(other._of_parts)
        self._for_reductions.update(other._for_reductions)
        self._unconnected += [pg for pg in other._unconnected if pg not in self._unconnected]

    def for_reductions(self, group: ParameterGroup, pg: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """On NCCL, reductions have a process group of their own: else all-gathers wait for them."""
        wanted = group.settings.separate_reduce_group
        if pg is None or pg.size() == 1 or wanted is False:
            return None
        if wanted is None and c10d.backend_name(pg, self._device) != "nccl":
            return None
        if pg not in self._for_reductions:
            self._for_reductions[pg] = self._make(pg, range(pg.size()), "reduce")
        return self._for_reductions[pg]

    def of_part(self, axis: Axis, world: int | None) -> Axis | None:
        """The ``world`` neighbours of this rank on ``axis`` that keep unsharded parameters together.

        None where that would be all of them, or none, or they do not come out even: parameters on another
        mesh than that of the call.
        """
        if world is None or axis.pg is None or not 1 < world < axis.world or axis.world % world:
            return None
        if (axis.pg, world) not in self._of_parts:
            first = axis.rank // world * world
            pg = self._make(axis.pg, range(first, first + world), "part")
            self._of_parts[axis.pg, world] = Axis(pg, world, axis.rank - first)
        return self._of_parts[axis.pg, world]

    def _make(self, pg: dist.ProcessGroup, members: Iterable[int], purpose: str) -> dist.ProcessGroup:
        made = c10d.subgroup(pg, members, self._device, purpose)
        self._unconnected.append(made)
        return made

    def connect(self) -> None:
        """Have new process groups connect before a backward needs them.

        Not before there is gradient to come: a model that only infers is spared their memory.
        """
        while self._unconnected:
            c10d.connect(self._unconnected.pop(0), self._device)
