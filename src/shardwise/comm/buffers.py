"""The memory of a bucket, one flat shard and one unsharded buffer that is emptied and refilled; and the
all-gather that fills it.

Buffers of bytes; each parameter sees its own range in its own dtype. What may be freed, and when:

- the flat shard lives as long as the bucket;
- the unsharded buffer keeps one storage forever. Tensors that autograd saved point to that storage, so it is
  emptied by resizing it to zero and refilled in place, never replaced;
- in a world of one, if nothing is cast, the unsharded buffer *is* the flat shard and is never emptied;
- if the caller wants fixed addresses (``set_keep_unsharded_storage``), it keeps its memory;
- on the host, a small one keeps its memory: to free it and fault its pages in again would cost several times
  the copy into it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_, sub
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from shardwise.comm.communicators import Communicator
from shardwise.comm.streams import BufferPool, CommStream, Finish, Scratch, nothing
from shardwise.layout.slots import Layout, Slot
from shardwise.torch_compat import foreach, tensor_impl


@dataclass(frozen=True)
class ShardStorage:
    """Where sharded parameters and their gradients are stored."""

    device: torch.device
    is_pinned: bool = False


class FlatShard:
    """This rank's shards of a bucket's parameters, back to back in one buffer."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, *, is_pinned: bool = False) -> None:
        self.layout = layout
        self.bytes = torch.zeros(layout.shard_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self.views = [with_own_storage(view) for view in LocalViews(layout, rank).of(self.bytes)]

    def holds(self, locals_: Sequence[Tensor]) -> bool:
        """True if these are the local tensors of its parameters."""
        return len(locals_) == len(self.views) and all(map(is_, locals_, self.views))

    def fill(self, locals_: Sequence[Tensor]) -> None:
        """Copy the local tensors, one for each parameter, into the buffer."""
        for view, local in zip(self.views, locals_, strict=True):
            view.copy_(local)


def buffer_for(layout: Layout, device: torch.device) -> Tensor:
    """A buffer laid out as a flat shard, for every parameter to be written, with zeros in between."""
    make = torch.zeros if layout.has_gaps else torch.empty
    return make(layout.shard_bytes, dtype=torch.uint8, device=device)


class ReusedBuffer:
    """A buffer laid out as a flat shard, for each step: that of an earlier step if nothing refers to it.

    For host memory. Its allocator returns large buffers to the system, and faulting in new pages takes longer
    than writing to them. The allocator of a device keeps its memory.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._storage: torch.UntypedStorage | None = None

    def take(self) -> Tensor:
        """The memory, with undefined contents; other memory while tensors still refer to it."""
        if self._storage is None or self._storage.nbytes() != self._layout.shard_bytes:  # it was resized
            made = buffer_for(self._layout, self._device)
            self._storage = made.untyped_storage()
            return made
        # Callers may also hold the object of the storage. Torch 2.11 to 2.14 let that have one reference more
        # while there are tensors, so that the second count shows both; but it is the first that says so.
        if tensor_impl.num_references(self._storage) > 1 or getrefcount(self._storage) > 2:
            return buffer_for(self._layout, self._device)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._storage)


KEPT_ON_HOST_BYTES = 1 << 20
"""In host memory, an unsharded buffer of parameters up to this size is not freed between uses."""


class UnshardedBuffer:
    """The memory of a bucket's unsharded parameters."""

    def __init__(self, layout: Layout, device: torch.device, alias: Tensor | None = None) -> None:
        """``alias``: the flat shard, if it serves as the unsharded buffer."""
        self._num_bytes = layout.unsharded_bytes
        self.is_alias = alias is not None
        is_small = device.type == "cpu" and layout.content_bytes <= KEPT_ON_HOST_BYTES
        self.keeps_memory = self._always_keeps = self.is_alias or is_small
        """Whether ``free`` does nothing."""
        new = torch.empty(self._num_bytes, dtype=torch.uint8, device=device) if alias is None else alias
        self.bytes, self._storage = new, new.untyped_storage()

    def allocate(self) -> None:
        """Allocate memory; its contents are undefined until the all-gather."""
        if not self.keeps_memory and self._storage.nbytes() == 0:
            self._storage.resize_(self._num_bytes)

    def keep_memory(self, keep: bool) -> None:
        """Choose whether ``free`` keeps the memory, and so the addresses of all tensors in it."""
        self.keeps_memory = keep or self._always_keeps

    def keep_no_small_memory(self) -> None:
        """Let ``free`` free small memory too, as on a device."""
        self.keeps_memory = self._always_keeps = self.is_alias

    def free(self) -> None:
        """Free the memory. The tensors over it stay, without contents."""
        if not self.keeps_memory:
            self._storage.resize_(0)

    def holds(self, address: int) -> bool:
        """True if ``address`` lies in the buffer."""
        return 0 <= address - self.bytes.data_ptr() < self._num_bytes

    @property
    def allocated_bytes(self) -> int:
        """The memory that it takes now; none if it is the flat shard."""
        return 0 if self.is_alias else self._storage.nbytes()

    def slot(self, slot: Slot) -> Tensor:
        """The bytes of one parameter's slot."""
        return self.bytes[slot.slot_offset : slot.slot_offset + slot.slot_bytes]

    def unsharded_tensor(self, slot: Slot) -> Tensor:
        """The unsharded parameter in its slot: a separate tensor, with its own version counter.

        A view would share its base's counter, and autograd would take every refill of the buffer for a change
        of the weight.
        """
        full = torch.empty(0, dtype=slot.dtype, device=self.bytes.device)
        shape = torch.Size(slot.shape)
        stride = torch.empty(shape, device="meta").stride()
        return full.set_(self._storage, slot.slot_offset // slot.itemsize, shape, stride)


def with_own_storage(view: Tensor) -> Tensor:
    """A tensor over the same memory, with a storage that ends where the view ends.

    Saving a view saves the whole buffer. And torch cannot copy (``copy.deepcopy``) DTensors whose local
    tensor does not begin at the start of its storage.
    """
    if view.is_meta or not tensor_impl.has_memory(view):
        return view
    # By a capsule: given the tensor, torch requires its device to be the current one.
    return torch.from_dlpack(to_dlpack(view))


def typed_range(buffer: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """The bytes [start, end) of ``buffer`` as a 1D tensor of ``dtype``."""
    if start or end != buffer.numel():
        buffer = buffer[start:end]
    return buffer.view(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, for bitwise comparisons."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def in_equal_steps(
    keys: Sequence[Hashable], offsets: Sequence[tuple[int, ...]]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Runs of equal keys whose offsets grow by equal steps: the first, past the last, and the steps."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for index, (key, own) in enumerate(zip(keys, offsets, strict=True)):
        if found and key == keys[index - 1]:
            start, end, steps = found[-1]
            step = tuple(map(sub, own, offsets[index - 1]))
            if min(step) > 0 and (step == steps or end - start == 1):
                found[-1] = start, index + 1, step
                continue
        found.append((index, index + 1, (0,) * len(own)))
    return found


class LocalViews:
    """The shards of a rank in buffers laid out as a flat shard.

    Slicing and viewing bytes for each parameter cost a quarter of the host time of a reduction. Here each
    costs one view. Neighbours of one shape, common among packed ones, even share one, which is unbound.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._num_slots = len(layout.slots)
        order = layout.direct + layout.packed + layout.strided
        slots = [layout.slots[index] for index in order]
        keys = [(slot.dtype, slot.local_shape(rank)) for slot in slots]
        offsets = [(slot.shard_offset // slot.itemsize,) for slot in slots]
        self._views: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]] = []
        """Dtype, shape, stride, offset, and the parameters, along the first dim if several."""
        for start, end, steps in in_equal_steps(keys, offsets):
            dtype, shape = keys[start]
            stride = torch.empty(shape, device="meta").stride()
            if end - start > 1:
                shape, stride = (end - start, *shape), (*steps, *stride)
            self._views.append((dtype, shape, stride, *offsets[start], order[start:end]))
        self._dtypes = {slot.dtype for slot in slots}

    def of(self, buffer: Tensor) -> list[Tensor]:
        """The views of a buffer of bytes, in the order of the parameters."""
        typed: dict[torch.dtype, Tensor] = {}
        for dtype in self._dtypes:
            typed[dtype] = buffer.view(dtype)
        found: list[Tensor] = [buffer] * self._num_slots
        for dtype, shape, stride, offset, indices in self._views:
            view = typed[dtype].as_strided(shape, stride, offset)
            if len(indices) == 1:
                found[indices[0]] = view
                continue
            for index, each in zip(indices, view.unbind(), strict=True):
                found[index] = each
        return found


def cast_buffer(source: Tensor, laid_out: Layout, target: Tensor, to: Layout) -> None:
    """Copy a flat shard into another layout of the same parameters: one cast for each kind."""
    cast_segments(typed_segments(source, laid_out), typed_segments(target, to))


def typed_segments(flat: Tensor, layout: Layout) -> list[Tensor]:
    """The segments of a flat shard, each in its dtype."""
    return [typed_range(flat, each.start, each.end, each.dtype) for each in layout.segments]


def cast_segments(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy segments, each with one cast."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def strided_pieces(slot: Slot, rows: Tensor, origin: int, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank's shard of a strided parameter, twice: in ``rows`` and in ``full``.

    Row r of ``rows`` holds the bytes of rank r's shard buffer, from the offset ``origin`` on.
    """
    if not slot.chunk_bytes:
        return
    start = slot.shard_offset - origin
    dim = slot.dim
    columns = rows[:, start : start + slot.chunk_bytes].view(slot.dtype)
    if slot.is_even:
        parts = full.unflatten(dim, (slot.world, slot.chunk_size)).movedim(dim, 0)
        yield columns.unflatten(1, slot.local_shape(0)), parts
        return
    for rank in range(slot.world):
        first, end = slot.index_range(rank)
        if end > first:
            shape = slot.local_shape(rank)
            yield columns[rank, : torch.Size(shape).numel()].view(shape), full.narrow(dim, first, end - first)


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
