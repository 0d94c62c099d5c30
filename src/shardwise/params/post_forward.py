"""Post-forward shards: parameters that a few ranks keep together between forward and backward."""

import torch
from torch import Tensor

from shardwise.comm.all_gather import AllGather
from shardwise.comm.buffers import UnshardedBuffer, local_views
from shardwise.comm.communicators import Communicator
from shardwise.comm.streams import CommStream, Finish
from shardwise.layout.chunks import shard_of
from shardwise.layout.slots import Layout


class PostForwardShard:
    """One rank's post-forward shard of a bucket: its part of every unsharded parameter, as computed with.

    ``comm`` connects the few ranks that share it.
    """

    def __init__(
        self, comm: Communicator, rank: int, layout: Layout, buffer: UnshardedBuffer, device: torch.device
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._buffer = buffer
        self._device = device
        self._comm = comm
        self._all_gather = AllGather(comm, layout, buffer)
        self._bytes: Tensor | None = None

    def use_channel(self, channel: int) -> None:
        """Keep these messages apart from those of other buckets."""
        self._comm.channel = channel

    @property
    def has_contents(self) -> bool:
        """True between ``keep`` and ``drop``."""
        return self._bytes is not None

    @property
    def allocated_bytes(self) -> int:
        """The memory that it takes now."""
        return 0 if self._bytes is None else self._bytes.numel()

    def keep(self) -> None:
        """Copy this rank's part out of the unsharded buffer."""
        self._bytes = torch.zeros(self._layout.shard_bytes, dtype=torch.uint8, device=self._device)
        views = local_views(self._bytes, self._layout, self._rank)
        for view, slot in zip(views, self._layout.slots, strict=True):
            view.copy_(shard_of(self._buffer.unsharded_tensor(slot), slot, self._rank))

    def drop(self) -> None:
        """Free what was kept."""
        self._bytes = None

    def start_all_gather(self, stream: CommStream) -> Finish:
        """Fill the unsharded buffer again, from these ranks alone."""
        assert self._bytes is not None
        return self._all_gather.start(stream, self._all_gather.cut(self._bytes))
