"""A root's setup before its first pass: check the model, then make process groups and streams."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.comm.streams import CommStreams, is_captured
from shardwise.groups.group import ParameterGroup
from shardwise.groups.shards import meta_message
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import Axis
from shardwise.torch_compat import c10d


class LazyInit:
    """Checks the ``groups`` of a root and makes its process groups and streams before the first pass.

    ``groups``: the root's own list, which changes when the tree does; the outermost is the first.
    """

    streams: CommStreams  # made by ``run`` or ``share_streams``

    def __init__(self, device: torch.device, groups: Sequence[ParameterGroup]) -> None:
        self._device = device
        self._groups = groups
        self.is_complete = False
        self.process_groups = ProcessGroups(device)

    def refuse_unfit(self) -> None:
        """Check that the model can run."""
        for group in self._groups:
            group.adopt_replaced()
        names = [name for group in self._groups for name in group.shards.on_meta()]
        if names:
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")
        for group in self._groups:
            if not group.added.is_untouched():
                group.refuse_added(self.module_names())
            group.refuse_open_ties()
            group.refuse_partly_loaded()
            settings = group.settings
            for ahead in (*(settings.forward_prefetch or ()), *(settings.backward_prefetch or ())):
                if ahead not in self._groups:
                    raise RuntimeError(
                        f"{group.name}: it is set to prefetch {ahead.name}, which is not part of the same "
                        "sharded model, so that the two share no root. Call fully_shard on the module around "
                        "both, or choose modules of this model."
                    )

    def module_names(self) -> dict[nn.Module, str]:
        """All modules of the tree, and their names in it."""
        modules = self._groups[0].modules
        return {inner: name for module in modules for name, inner in module.named_modules()}

    def run(self) -> None:
        """Make streams and process groups, after ``refuse_unfit``."""
        if is_captured(self._device):
            raise RuntimeError(
                f"{self._groups[0].name}: a CUDA graph cannot capture the first iteration, nor the first "
                "after a change of settings: it makes streams and process groups, and ranks compare their "
                "plans. Run two or three iterations before the capture, on a side stream."
            )
        self.make_streams()
        channel = 0
        for group in self._groups:
            group.attach(self.streams)
            group.adopt_protocols()
            for bucket in group.buckets:
                axis = bucket.mesh.shard_axis
                bucket.communication.use_channel(channel)
                choices: dict[str, Any] = {
                    "reduce_pg": self.process_groups.for_reductions(group, axis.pg),
                    "post_forward_axis": self.process_groups.of_part(axis, group.settings.ranks_that_keep),
                }
                if bucket.communication.would_change(choices):
                    group.replan(partial(Bucket.communicate, **choices), bucket)
                channel += 1
        self.is_complete = True

    def refuse_capture(self) -> None:
        """Refuse what a CUDA graph cannot capture; CUDA would end the capture without a reason."""
        offloaded = [group.name for group in self._groups if group.shards.are_offloaded]
        if offloaded:
            raise RuntimeError(
                f"{listed(offloaded, 4)}: a CUDA graph cannot capture parameters that are offloaded to the "
                "host, which waits for their gradients, and whose optimizer steps are no work of the device. "
                "Shard without an offload_policy, or run without a graph."
            )

    def share_streams(self, others: "Sequence[LazyInit]") -> None:
        """Communicate on the same streams as ``others``."""
        self.make_streams()
        for other in others:
            other.streams = self.streams
            for group in other._groups if other.is_complete else ():
                group.attach(self.streams)

    def make_streams(self) -> None:
        """Make the streams, if there are none yet."""
        if not hasattr(self, "streams"):
            self.streams = CommStreams(self._device)


class ProcessGroups:
    """Creates each process group at its first use, in an order common to all ranks."""

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

        On NCCL they have their own by default; otherwise all-gathers would wait for them.
        """
        wanted = group.settings.separate_reduce_group
        if pg is None or pg.size() == 1 or wanted is False:
            return None
        if wanted is None and not c10d.is_nccl(pg, self._device):
            return None
        if pg not in self._for_reductions:
            self._for_reductions[pg] = self._make(pg, range(pg.size()), "reduce")
        return self._for_reductions[pg]

    def of_part(self, axis: Axis, world: int | None) -> Axis | None:
        """The ``world`` neighbouring ranks on ``axis`` with which this rank keeps unsharded parameters.

        None if that is the whole axis or only this rank, or if ``world`` does not divide the axis: the
        parameters may be on a different mesh from that of the ``fully_shard`` call.
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

        Called only before forwards with gradients and in backward, so inference alone does not spend their
        memory.
        """
        while self._unconnected:
            c10d.connect(self._unconnected.pop(0), self._device)
