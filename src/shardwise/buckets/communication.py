"""How a bucket communicates."""

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from shardwise.comm.communicators import Communicator, Make, SingleRank, make_communicator
from shardwise.layout.mesh import Axis, ShardMesh


@dataclass(frozen=True)
class CommOptions:
    """The choices for a bucket.

    ``channel`` separates its messages from those of other buckets. ``reduce_pg`` is a process group only for
    reductions. ``post_forward_axis``: the ranks that together keep the parameters after forward.
    ``make_all_gather``, ``make_reduce_scatter`` and, over replicas, ``make_all_reduce`` make the caller's
    collectives.
    """

    channel: int = 0
    reduce_pg: dist.ProcessGroup | None = None
    post_forward_axis: Axis | None = None
    make_all_gather: Make | None = None
    make_reduce_scatter: Make | None = None
    make_all_reduce: Make | None = None
    force_sum: bool = False


class Communication:
    """The communicators of a bucket, made from its options.

    ``all_gather`` and ``reduce_scatter`` connect the ranks that share it, ``post_forward`` the few that keep
    the parameters after forward, if any. ``over_replicas``: None without replicas.
    """

    def __init__(self, mesh: ShardMesh) -> None:
        self.mesh = mesh
        self.use(CommOptions())

    def use(self, options: CommOptions) -> None:
        """Make all communicators at once, so that no option undoes another."""
        self.options = options
        pg, device = self.mesh.shard_axis.pg, self.mesh.device
        self.all_gather = (options.make_all_gather or make_communicator)(pg, device)
        self.reduce_scatter = (options.make_reduce_scatter or make_communicator)(
            options.reduce_pg or pg, device
        )
        self.over_replicas: Communicator | None = None
        replicas = self.mesh.replicate_axis
        if options.make_all_reduce is not None or not replicas.is_alone:
            over_replicas = (options.make_all_reduce or make_communicator)(replicas.pg, device)
            self.over_replicas = None if isinstance(over_replicas, SingleRank) else over_replicas
        self.post_forward: Communicator | None = None
        if options.post_forward_axis is not None:
            self.post_forward = make_communicator(options.post_forward_axis.pg, device)
        self.use_channel(options.channel)
        self.force_sums(options.force_sum)

    def axes(self) -> list[Axis]:
        """All process groups that it uses: those of the mesh, and those made in addition."""
        axes, options = self.mesh.axes(), self.options
        if options.reduce_pg is not None:
            axes.append(replace(self.mesh.shard_axis, pg=options.reduce_pg))
        if options.post_forward_axis is not None:
            axes.append(options.post_forward_axis)
        return axes

    def use_channel(self, channel: int) -> None:
        """Separate this bucket's messages from those of other buckets. May be called at any time."""
        self.options = replace(self.options, channel=channel)
        for comm in (self.all_gather, self.reduce_scatter, self.post_forward):
            if comm is not None:
                comm.channel = channel

    def force_sums(self, enable: bool) -> None:
        """Let the back end only sum, and divide afterwards. May be called at any time."""
        self.options = replace(self.options, force_sum=enable)
        self.reduce_scatter.force_sum = enable

    def would_change(self, choices: dict[str, Any]) -> bool:
        """Whether these options differ from the current ones."""
        return replace(self.options, **choices) != self.options

    @property
    def averages_itself(self) -> bool:
        """True if the caller's reduction divides as well."""
        return any(comm is not None and comm.averages for comm in (self.reduce_scatter, self.over_replicas))
