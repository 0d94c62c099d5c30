"""The process groups that a root creates: for reductions, and for ranks that keep parameters together."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from shardwise.groups.group import ParameterGroup
from shardwise.layout.mesh import Axis
from shardwise.torch_compat import c10d


class ProcessGroups:
    """Creates each process group when it is first asked for, in an order common to all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._for_reductions: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._of_parts: dict[tuple[dist.ProcessGroup, int], Axis] = {}
        self._unconnected: list[dist.ProcessGroup] = []

    def take_over(self, other: "ProcessGroups") -> None:
        """Take over the process groups of ``other``."""
        self._of_parts.update(other._of_parts)
        self._for_reductions.update(other._for_reductions)
        self._unconnected += [pg for pg in other._unconnected if pg not in self._unconnected]

    def for_reductions(self, group: ParameterGroup, pg: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The process group for reductions; None if they share ``pg``, or this rank is alone.

        On NCCL they have their own by default, or else all-gathers would wait for them.
        """
        wanted = group.settings.separate_reduce_group
        if pg is None or pg.size() == 1 or wanted is False:
            return None
        if wanted is None and c10d.backend_name(pg, self._device) != "nccl":
            return None
        if pg not in self._for_reductions:
            self._for_reductions[pg] = self._make(pg, range(pg.size()), "reduce")
        return self._for_reductions[pg]

    def of_part(self, axis: Axis, world: int | None) -> Axis | None:
        """The ``world`` neighbouring ranks on ``axis`` with which this rank keeps unsharded parameters.

        None if that would be all ranks of the axis or only this one, or if ``world`` does not divide the
        axis: the parameters may be on another mesh than that of the ``fully_shard`` call.
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
        """Connect new process groups before a backward needs them.

        Called only before forwards with gradients and in backward, so a model that only runs inference does
        not spend their memory.
        """
        while self._unconnected:
            c10d.connect(self._unconnected.pop(0), self._device)
