"""How a bucket communicates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.reducers import Reducer
from shardwise.layout.mesh import Axis

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
