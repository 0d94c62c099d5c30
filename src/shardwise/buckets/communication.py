"""How a bucket communicates."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.communicators import BackendCollectives, Communicator, all_reduce, make_communicator
from shardwise.comm.reducers import AllReduce, Reducer
from shardwise.layout.mesh import Axis, ShardMesh

Make = Callable[[dist.ProcessGroup | None, torch.device], Any]


@dataclass(frozen=True)
class CommOptions:
    """What was chosen for a bucket.

    ``channel`` keeps its messages apart from those of other buckets. ``reduce_pg`` is a process group for
    reductions alone. ``post_forward_axis``: the ranks that together keep the parameters after forward.
    ``make_all_gather`` and ``make_reduce_scatter`` make the caller's own collectives; ``reducer`` replaces
    the whole reduction of gradients, over shards and replicas.
    """

    channel: int = 0
    reduce_pg: dist.ProcessGroup | None = None
    post_forward_axis: Axis | None = None
    make_all_gather: Make | None = None
    make_reduce_scatter: Make | None = None
    reducer: Reducer | None = None
    force_sum: bool = False


class Communication:
    """The communicators of a bucket, made from its options.

    ``all_gather`` and ``reduce_scatter`` connect the ranks that share it, ``post_forward`` the few that keep
    the parameters after forward, if there are any. ``sum_over_replicas``: None where nobody has copies.
    """

    def __init__(self, mesh: ShardMesh) -> None:
        self.mesh = mesh
        self.use(CommOptions())

    def use(self, options: CommOptions) -> None:
        """Make all communicators at once, so that no option undoes another."""
        self.options = options
        pg, device = self.mesh.shard_axis.pg, self.mesh.device
        self.all_gather = (options.make_all_gather or make_communicator)(pg, device)
        make_reduce_scatter = (
            options.reducer.reduce_scatter_communicator
            if options.reducer
            else options.make_reduce_scatter or make_communicator
        )
        self.reduce_scatter = make_reduce_scatter(options.reduce_pg or pg, device)
        replicas = self.mesh.replicate_axis.pg
        self.sum_over_replicas: AllReduce | None = None
        if options.reducer is not None:
            self.sum_over_replicas = options.reducer.all_reduce_function(replicas, device)
        elif replicas is not None and not self.mesh.replicate_axis.is_alone:
            self.sum_over_replicas = partial(all_reduce, replicas)
        self.post_forward: Communicator | None = None
        if options.post_forward_axis is not None:
            self.post_forward = make_communicator(options.post_forward_axis.pg, device)
        self.use_channel(options.channel)
        self.force_sums(options.force_sum)

    def axes(self) -> list[Axis]:
        """All process groups that it uses: those of the mesh, and those that were made beside them."""
        axes, options = self.mesh.axes(), self.options
        if options.reduce_pg is not None:
            axes.append(replace(self.mesh.shard_axis, pg=options.reduce_pg))
        if options.post_forward_axis is not None:
            axes.append(options.post_forward_axis)
        return axes

    def use_channel(self, channel: int) -> None:
        """Keep this bucket's messages apart from those of other buckets. May be called at any time."""
        self.options = replace(self.options, channel=channel)
        for comm in (self.all_gather, self.reduce_scatter, self.post_forward):
            if comm is not None:
                comm.channel = channel

    def force_sums(self, enable: bool) -> None:
        """Have the back end only sum, and divide afterwards. May be called at any time."""
        self.options = replace(self.options, force_sum=enable)
        for comm in (self.all_gather, self.reduce_scatter):
            if isinstance(comm, BackendCollectives):
                comm.force_sum = enable

    def would_change(self, choices: dict[str, Any]) -> bool:
        """Whether these options differ from those of now."""
        return replace(self.options, **choices) != self.options

    @property
    def averages_itself(self) -> bool:
        """True if the caller's reducer divides as well."""
        return self.options.reducer is not None and self.options.reducer.divides
