"""The all-gather of a layout."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.buffers import UnshardedBuffer, in_equal_steps, strided_pieces
from shardwise.comm.communicators import Communicator
from shardwise.comm.streams import BufferPool, CommStream, Finish, Scratch, nothing
from shardwise.layout.slots import Layout
from shardwise.torch_compat import foreach


class Staging(NamedTuple):
    """Views of a buffer that a packed all-gather fills: flat, by rank, its unstrided columns, by ranges."""

    flat: Tensor
    rows: Tensor
    packed: Tensor
    ranges: list[Tensor]


class AllGather:
    """The all-gather of one bucket, planned once and issued many times."""

    def __init__(self, comm: Communicator, layout: Layout, buffer: UnshardedBuffer) -> None:
        self._comm = comm
        self._buffer = buffer
        self._layout = layout
        self._world = layout.world
        dtypes = {run.dtype for run in layout.segments}
        self._dtype: Any = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._outputs = [buffer.slot(layout.slots[i]) for i in layout.direct]
        self._packed_bytes = layout.packed_bytes
        self._staging_bytes = self._world * self._packed_bytes
        self._device = buffer.bytes.device
        if self._packed_bytes:
            self._plan_unpacking(layout, buffer)

    def start(self, stream: CommStream, inputs: Sequence[Tensor]) -> Finish:
        """Fill the unsharded buffer from ``inputs``, made by ``cut``; return the function that waits."""
        if not self._buffer.keeps_memory:
            self._buffer.allocate()
        if not self._packed_bytes:
            return self._comm.all_gather(self._outputs, inputs)
        pool: BufferPool = self._comm.pool or stream
        scratch = pool.acquire(self._staging_bytes, self._device, self._dtype)
        key = self._staging_key
        staging: Staging = scratch.views.get(key) or scratch.make_view(key, self._stage)
        wait = self._comm.all_gather([*self._outputs, staging.flat], inputs)
        return partial(self._end, wait, staging, pool, scratch)

    def _end(self, wait: Finish, staging: Staging, pool: BufferPool, scratch: Scratch) -> None:
        wait()
        if self._homes:
            foreach.copy_(self._homes, staging.ranges)
        elif self._sizes:
            torch.split_with_sizes_copy(staging.packed, self._sizes, dim=1, out=self._targets)
        for slot, full in self._strided:
            for piece, part in strided_pieces(slot, staging.rows, self._layout.packed_start, full):
                part.copy_(piece)
        pool.release(scratch)

    def cut(self, send: Tensor) -> list[Tensor]:
        """The inputs of the all-gather: pieces of ``send``, laid out as a flat shard."""
        slots = [self._layout.slots[i] for i in self._layout.direct]
        pieces = [send[s.shard_offset : s.shard_offset + s.chunk_bytes] for s in slots]
        if self._layout.packed_bytes:
            pieces.append(send[self._layout.packed_start :])
        return pieces

    def _plan_unpacking(self, layout: Layout, buffer: UnshardedBuffer) -> None:
        """Columns of the staging buffer and their targets; padding in between is discarded."""
        self._ranges: list[tuple[int, int, int, int]] = []
        """The number of columns of one size, and their bytes, pitch and start."""
        self._homes: list[Tensor] = []
        self._sizes: list[int] = []
        self._targets: list[Tensor] = []
        slots = [layout.slots[index] for index in layout.packed if layout.slots[index].chunk_bytes]
        if self._device.type == "cpu":  # one copy unpacks all parameters of one size
            sizes = [slot.chunk_bytes for slot in slots]
            offsets = [(slot.shard_offset - layout.packed_start, slot.slot_offset) for slot in slots]
            for first, end, (pitch, slot_pitch) in in_equal_steps(sizes, offsets):
                length, num_bytes, (start, slot_start) = end - first, sizes[first], offsets[first]
                self._ranges.append((length, num_bytes, pitch, start))
                shape, stride = (length, self._world, num_bytes), (slot_pitch, num_bytes, 1)
                self._homes.append(buffer.bytes.as_strided(shape, stride, slot_start))
        for slot in slots:  # for one kernel that unpacks all; on the host, dry runs count the memory
            self._sizes.append(slot.chunk_bytes)
            self._targets.append(buffer.slot(slot).view(self._world, -1))
            if padding := slot.padded_bytes - slot.chunk_bytes:
                self._sizes.append(padding)
                self._targets.append(buffer.bytes.new_empty(self._world, padding))
        self._strided = [(layout.slots[i], buffer.unsharded_tensor(layout.slots[i])) for i in layout.strided]
        # Everything that `_stage` depends on: buckets of other layouts use the same buffers.
        self._staging_key = (
            "gather", self._world, layout.packed_bytes, sum(self._sizes), tuple(self._ranges)
        )  # fmt: skip

    def _stage(self, buffer: Tensor) -> Staging:
        """The views of a staging buffer that bytes are copied to and from."""
        flat = buffer[: self._world * self._layout.packed_bytes]
        rows = flat.view(self._world, -1)
        ranges = [
            flat.as_strided((length, self._world, num_bytes), (pitch, rows.stride(0), 1), start)
            for length, num_bytes, pitch, start in self._ranges
        ]
        return Staging(flat, rows, rows[:, : sum(self._sizes)], ranges)


class InPlaceAllGather(AllGather):
    """The all-gather of a fully packed bucket, in memory from the communicator's pool.

    This rank's shard is copied, or cast, into its own place among the shards of all ranks:

        staging on rank 1   | shard 0 | shard 1 | shard 2 | ...
                                       ^ input of the all-gather; the output is all of it

    So the back end reads and writes only memory of its own allocator. This lets NCCL gather without internal
    copies, or by the copy engines.
    """

    def __init__(self, comm: Communicator, layout: Layout, buffer: UnshardedBuffer, rank: int) -> None:
        super().__init__(comm, layout, buffer)
        self._rank = rank

    def start_from(self, fill: Callable[[Tensor], Any]) -> Finish:
        """All-gather the contents that ``fill`` writes to a buffer laid out as a flat shard."""
        self._buffer.allocate()
        if not self._packed_bytes:
            return nothing
        pool = self._comm.pool
        assert pool is not None
        scratch = pool.acquire(self._staging_bytes, self._device, self._dtype)
        key = self._staging_key
        staging: Staging = scratch.views.get(key) or scratch.make_view(key, self._stage)
        own = staging.rows[self._rank]
        fill(own)
        wait = self._comm.all_gather([staging.flat], [own])
        return partial(self._end, wait, staging, pool, scratch)
