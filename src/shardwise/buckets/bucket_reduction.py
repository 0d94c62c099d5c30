"""How the gradients of a bucket are reduced, over the ranks that share it and over those that have copies.

Sums that are not to go on to the replicas yet stay here, and are added to the next ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import or_

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.buckets.communication import Communication
from shardwise.buckets.sharded_gradients import ShardedGradients
from shardwise.comm.buffers import buffer_for, local_views
from shardwise.comm.reduce_scatter import ReduceScatter
from shardwise.comm.reduction import Hook, Reduction, SecondStage
from shardwise.comm.streams import CommStreams
from shardwise.layout.slots import Layout
from shardwise.ranks.activity import Wait


class BucketReduction:
    """The reductions of a bucket's gradients, one after the other.

    ``layout``: of the sums. Results go to ``device``, where the shards are, perhaps to pinned memory.
    """

    def __init__(
        self,
        communication: Communication,
        layout: Layout,
        part_bytes: float | None,
        gradients: ShardedGradients,
        device: torch.device,
        is_pinned: bool,
    ) -> None:
        self._params = gradients.params
        self._communication = communication
        self._mesh = mesh = communication.mesh
        self._layout = layout
        self._reduce_scatter = ReduceScatter(communication.reduce_scatter, layout, mesh.device, part_bytes)
        self.parts = self._reduce_scatter.parts
        """Which gradients are reduced together; indices are those of the parameters."""
        for each in (communication.reduce_scatter, communication.over_replicas):
            if each is not None:
                each.plan_for(layout)
        self._gradients = gradients
        # Copies are made equal behind the last sum: over the shards, or over replicas.
        can_differ, has_replicas = self._can_copies_differ(), not mesh.replicate_axis.is_alone
        self._differ_over_shards = can_differ and not has_replicas
        self._differ_over_replicas = can_differ and has_replicas
        self._averages_itself = communication.averages_itself
        self._own_divisor = 1.0 if self._averages_itself else float(mesh.num_ranks)
        self._to_gradients = SecondStage(gradients.layout, device, is_pinned)
        self.earlier: Tensor | None = None
        """Sums that have yet to be summed over replicas."""
        # Set by close for accumulate: which parameters have a gradient in the reduction or in the earlier
        # sums, and whether the reduction goes on to the replicas.
        self._no_sums = [False] * len(gradients.params)
        self._has_sum = self._no_sums[:]
        self._covers_replicas = True

    def open(
        self, streams: CommStreams, divisor: float | None, awaited: Wait, *, is_filled: bool
    ) -> Reduction:
        """A reduction with nothing sent yet.

        ``divisor``: of the sums over all ranks; None: their number. ``is_filled``: every parameter will have
        a gradient.
        """
        if divisor is None or self._averages_itself:
            divisor = self._own_divisor
        return Reduction(
            self._reduce_scatter,
            divisor,
            streams,
            is_filled=is_filled,
            agree=self._broadcast_copies if self._differ_over_shards else None,
            awaited=awaited,
        )

    def close(self, reduction: Reduction, all_reduces: bool, hook: Hook | None) -> None:
        """All gradients are sent: continue with the replicas, if ``all_reduces``."""
        self._covers_replicas = all_reduces or self._mesh.replicate_axis.is_alone
        self._has_sum = list(map(or_, self._has_sum, reduction.present))
        earlier, self.earlier = self.earlier, None
        replicas, stage = None, self._to_gradients
        if self._covers_replicas:
            replicas = self._communication.over_replicas
        else:
            stage = SecondStage(self._layout, self._mesh.device)
        agree = self._broadcast_copies if self._differ_over_replicas else None
        if replicas is not None or earlier is not None or hook is not None or agree is not None:
            summed = [
                index
                for index, (param, has_sum) in enumerate(zip(self._params, self._has_sum, strict=True))
                if has_sum or param.sharded.requires_grad
            ]
            stage = replace(
                stage,
                summed=frozenset(summed),
                all_reduce=None if replicas is None else replicas.all_reduce,
                earlier=earlier,
                hook=hook if self._covers_replicas else None,
                agree=agree,
            )
        reduction.close(stage)

    def _can_copies_differ(self) -> bool:
        """True if ranks keep the same scalar, but may get different bits for its gradient."""
        if self._mesh.shard_axis.is_alone or not any(slot.is_replicated for slot in self._layout.slots):
            return False
        comm, options = self._communication.reduce_scatter, self._communication.options
        return not comm.sums_are_bitwise_equal or options.make_all_reduce is not None

    def _broadcast_copies(self, output: Tensor, indices: Sequence[int]) -> None:
        """Broadcast the first rank's gradients of what all ranks keep of these parameters."""
        slots = [self._layout.slots[index] for index in indices]
        copies = [
            output[slot.shard_offset : slot.shard_offset + slot.itemsize]
            for slot in slots
            if slot.is_replicated
        ]
        if not copies:
            return
        flat = torch.cat(copies)
        pg = self._communication.options.reduce_pg or self._mesh.shard_axis.pg
        dist.broadcast(flat, group=pg, group_src=0)
        for copy, agreed in zip(copies, flat.split([len(copy) for copy in copies]), strict=True):
            copy.copy_(agreed)

    def accumulate(self, reduction: Reduction, *, without_hooks: bool) -> bool:
        """Wait for the result and add it to ``.grad`` of the sharded parameters; True: it waits for replicas.

        ``without_hooks``: no sharded parameter has gradient hooks or a deferred gradient.
        """
        output = reduction.finish()
        if not self._covers_replicas:
            self.earlier = output
            return True
        has_sum, self._has_sum = self._has_sum, self._no_sums[:]
        if not (without_hooks and all(has_sum) and self._gradients.accumulate_all(output)):
            self._gradients.accumulate(output, has_sum)
        return False

    # --- sums that wait for the replicas ----------------------------------------------------------

    def carry_earlier(self, before: "BucketReduction") -> None:
        """Take over the waiting sums of ``before``, made for the same parameters and perhaps other dtypes."""
        if before.earlier is None:
            return
        self.earlier = buffer_for(self._layout, self._mesh.device, is_filled=False)
        self._has_sum = before._has_sum
        rank = self._mesh.shard_axis.rank
        views, old = (
            local_views(self.earlier, self._layout, rank),
            local_views(before.earlier, before._layout, rank),
        )
        for view, sums in zip(views, old, strict=True):
            view.copy_(sums)

    def has_earlier_for(self, index: int) -> bool:
        """True while the sum of this parameter waits to be summed over replicas."""
        return self.earlier is not None and self._has_sum[index]

    def drop_earlier(self, index: int) -> None:
        """Drop the waiting sums of one parameter."""
        assert self.earlier is not None
        self._has_sum[index] = False
        slot = self._layout.slots[index]
        self.earlier[slot.shard_offset : slot.shard_offset + slot.padded_bytes].zero_()
        if not any(self._has_sum):
            self.earlier = None

    def drop_all_earlier(self) -> None:
        """Drop all waiting sums, and what was in flight."""
        self.earlier = None
        self._has_sum = self._no_sums[:]
