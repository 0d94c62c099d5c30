"""The unsharded parameters of a bucket: their memory, and the all-gather that fills it."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.comm.all_gather import AllGather, InPlaceAllGather
from shardwise.comm.buffers import UnshardedBuffer, bytes_of, cast_buffer, local_views
from shardwise.comm.communicators import Communicator
from shardwise.comm.custom import PooledCollectives
from shardwise.comm.quantized import Int8AllGather
from shardwise.comm.streams import CommStream, Finish, nothing
from shardwise.layout.chunks import shard_of
from shardwise.layout.slots import Layout
from shardwise.params.changes import all_start_at

if TYPE_CHECKING:
    from shardwise.buckets.bucket import Bucket


class UnshardedBucket:
    """The unsharded parameters of ``bucket``, the same objects until it is laid out anew.

    Where sharded parameters are stored in another dtype than they are computed in, or in host memory, the
    flat shard is first copied into a buffer to send from: one cast, one copy, for all parameters together.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self._bucket = bucket
        self._device = bucket.mesh.device
        self._post_forward: PostForwardShard | None = None
        self.buffer = self._make_params()
        self.params = [param.unsharded for param in bucket.params if param.unsharded is not None]

    def _make_params(self) -> UnshardedBuffer:
        """Make them, and all that it takes to fill and check them; returns their memory."""
        bucket, slots = self._bucket, self._bucket.computed.slots
        self._is_alone = bucket.mesh.shard_axis.is_alone
        # Whether the flat shard itself is the input of the all-gather.
        self._sends_flat_shard = bucket.computed is bucket.stored and not bucket.is_offloaded
        flat = bucket.flat_shard.bytes if self._sends_flat_shard else None
        buffer = UnshardedBuffer(bucket.computed, self._device, flat if self._is_alone else None)
        for param, slot in zip(bucket.params, slots, strict=True):
            param.make_unsharded(buffer.unsharded_tensor(slot))
        self._all_gather = None if self._is_alone else self._make_all_gather(buffer)
        self._pieces: list[Tensor] | None = None
        in_place = isinstance(self._all_gather, InPlaceAllGather)
        if self._all_gather is not None and flat is not None and not in_place:
            self._pieces = self._all_gather.cut(flat)
        comm, axis = bucket.communication.post_forward, bucket.communication.options.post_forward_axis
        if comm is not None and axis is not None:
            layout = bucket.post_forward_layout(axis)
            self._post_forward = PostForwardShard(comm, axis.rank, layout, buffer, self._device)
        self._placed = [param for param, slot in zip(bucket.params, slots, strict=True) if slot.slot_bytes]
        self._contents = [param.unsharded_data() for param in self._placed]
        self._offsets = [slot.slot_offset for slot in slots if slot.slot_bytes]
        self._choose_start()
        return buffer

    def _make_all_gather(self, buffer: UnshardedBuffer) -> AllGather:
        comm, layout = self._bucket.communication.all_gather, self._bucket.computed
        if (quantized := self._bucket.policy.quantized_all_gather) is None:
            if isinstance(comm, PooledCollectives):
                return InPlaceAllGather(comm, layout, buffer, self._bucket.mesh.shard_axis.rank)
            return AllGather(comm, layout, buffer)
        return Int8AllGather(comm, layout, buffer, quantized.block_size)

    def start_all_gather(self, stream: CommStream) -> Finish:
        """Allocate the buffer and start to fill it; returns the function that waits.

        ``_choose_start`` replaces it on the instance where the flat shard can be sent as it is: mostly.
        """
        self.buffer.allocate()
        flat = self._on_device(stream)
        if self._all_gather is None:  # a single rank
            if not self._sends_flat_shard:
                self._cast(flat, self.buffer.bytes)
            return nothing
        if isinstance(self._all_gather, InPlaceAllGather):
            return self._all_gather.start_from(partial(self._cast, flat))
        if self._bucket.computed is self._bucket.stored:
            return self._all_gather.start(stream, self._all_gather.cut(flat))
        num_bytes = self._bucket.computed.shard_bytes
        scratch = stream.acquire(num_bytes, self._device)
        send = scratch.bytes[:num_bytes]
        self._cast(flat, send)
        wait = self._all_gather.start(stream, self._all_gather.cut(send))

        def finish() -> None:
            wait()
            stream.release(scratch)

        return finish

    def _choose_start(self) -> None:
        """Begin from the post-forward shard while there is one; else from the flat shard, if it can be sent
        as it is."""
        vars(self).pop("start_all_gather", None)
        if self._post_forward is not None and self._post_forward.has_contents:
            self.start_all_gather = self._post_forward.start_all_gather  # type: ignore[method-assign]
        elif self._all_gather is not None and self._pieces is not None:
            self.start_all_gather = partial(self._all_gather.start, inputs=self._pieces)  # type: ignore[method-assign]

    def _on_device(self, stream: CommStream) -> Tensor:
        """The flat shard on the computing device, in the dtypes that are stored."""
        flat = self._bucket.flat_shard.bytes
        if not self._bucket.is_offloaded:
            return flat
        return stream.copy_in(
            lambda: torch.empty_like(flat, device=self._device).copy_(flat, non_blocking=True)
        )

    def _cast(self, flat: Tensor, target: Tensor) -> None:
        """Copy the flat shard to ``target``, in the dtypes that are computed with."""
        cast_buffer(flat, self._bucket.stored, target, self._bucket.computed)

    def keep_post_forward_shard(self) -> None:
        """Keep this rank's post-forward shard, if there is a post-forward axis."""
        if self._post_forward is not None:
            self._post_forward.keep()
            self._choose_start()

    def drop_post_forward_shard(self) -> None:
        """Free the post-forward shard."""
        if self._post_forward is not None:
            self._post_forward.drop()
            self._choose_start()

    # --- questions --------------------------------------------------------------------------------

    @property
    def can_be_compared(self) -> bool:
        """False if the parameters are only close to the shards, or the caller has replaced or frozen some."""
        bucket = self._bucket
        return not bucket.is_quantized and all(param.is_untouched() for param in bucket.params)

    def differs(self) -> Tensor:
        """Whether this rank's sharded parameters have changed since the all-gather: a bool on the device.

        Compares them with its own part of the buffer: versions do not tell, since foreach and fused
        optimizers, and changes through ``.data``, do not count on a DTensor. Waits for nothing.
        """
        bucket, slots = self._bucket, self._bucket.computed.slots
        answer = torch.zeros((), dtype=torch.bool, device=self._device)
        if self._is_alone and self._sends_flat_shard:
            return answer
        for param, slot in zip(bucket.params, slots, strict=True):
            part = shard_of(param.unsharded_data().detach(), slot, bucket.mesh.shard_axis.rank)
            now = param.local.detach().to(part.device, part.dtype)
            if now.numel():
                answer |= torch.ne(bytes_of(now), bytes_of(part)).any()
        return answer

    def relocated_params(self) -> list[str]:
        """Names of unsharded parameters that were given other memory (``param.data = ...``)."""
        start = self.buffer.bytes.data_ptr()
        if all_start_at(self._contents, self._offsets, start):
            return []
        rows = zip(self._placed, self._contents, self._offsets, strict=True)
        return [param.fqn for param, content, offset in rows if content.data_ptr() != start + offset]

    def allocated_bytes(self) -> tuple[int, int]:
        """The memory that the buffer takes now, and the post-forward shard."""
        part = 0 if self._post_forward is None else self._post_forward.allocated_bytes
        return self.buffer.allocated_bytes, part


class PostForwardShard:
    """One rank's post-forward shard of a bucket: its part of every unsharded parameter, as computed with.

    ``comm`` connects the few ranks that keep the parameters together between forward and backward.
    """

    def __init__(
        self, comm: Communicator, rank: int, layout: Layout, buffer: UnshardedBuffer, device: torch.device
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._buffer = buffer
        self._device = device
        self._all_gather = AllGather(comm, layout, buffer)
        self._bytes: Tensor | None = None

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
