"""The memory of a bucket: one flat shard, and one unsharded buffer that is emptied and refilled.

Buffers of bytes; each parameter sees its own range in its own dtype. Who may free what, and when:

- the flat shard lives as long as the bucket;
- the unsharded buffer has one storage for ever. Tensors that autograd saved point to that storage, so it is
  emptied by resizing it to zero and refilled in place, never replaced;
- in a world of one, where nothing is cast, the unsharded buffer *is* the flat shard and is never emptied;
- where the caller wants its addresses to stay (``set_keep_unsharded_storage``), it keeps its memory;
- on the host, a small one keeps its memory: to free it and to fault its pages in again would cost several
  times the copy into it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from shardwise.layout.slots import Layout, Slot
from shardwise.torch_compat import tensor_impl


class FlatShard:
    """This rank's shards of a bucket's parameters, back to back in one buffer."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, *, is_pinned: bool = False) -> None:
        self.layout = layout
        self.bytes = torch.zeros(layout.shard_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self.views = [with_own_storage(view) for view in local_views(self.bytes, layout, rank)]

    def fill(self, locals_: Sequence[Tensor]) -> None:
        """Copy the local tensors, one for each parameter, into the buffer."""
        for view, local in zip(self.views, locals_, strict=True):
            view.copy_(local)


def buffer_for(layout: Layout, device: torch.device, *, is_filled: bool) -> Tensor:
    """A buffer laid out as a flat shard, with zeros wherever nothing will be written.

    ``is_filled``: every parameter will be written.
    """
    make = torch.empty if is_filled and not layout.has_padding else torch.zeros
    return make(layout.shard_bytes, dtype=torch.uint8, device=device)


KEPT_ON_HOST_BYTES = 1 << 20
"""An unsharded buffer in host memory, of parameters up to this size, is not freed between uses."""


class UnshardedBuffer:
    """The memory of a bucket's unsharded parameters, while they are needed."""

    def __init__(self, layout: Layout, device: torch.device, alias: Tensor | None = None) -> None:
        """``alias``: the flat shard, where it serves as it is."""
        self._num_bytes = layout.unsharded_bytes
        self.is_alias = alias is not None
        is_small = device.type == "cpu" and layout.content_bytes <= KEPT_ON_HOST_BYTES
        self._always_keeps = self.is_alias or is_small
        self.keeps_memory = self._always_keeps
        """Whether ``free`` does nothing."""
        if alias is not None:
            self.bytes = alias
        else:
            self.bytes = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        self._storage = self.bytes.untyped_storage()

    def allocate(self) -> None:
        """Allocate memory; its contents are undefined until the all-gather."""
        if not self.keeps_memory and self._storage.nbytes() == 0:
            self._storage.resize_(self._num_bytes)

    def keep_memory(self, keep: bool) -> None:
        """Whether ``free`` keeps the memory, and with it the addresses of all tensors in it."""
        self.keeps_memory = keep or self._always_keeps

    def free(self) -> None:
        """Free the memory. The tensors over it stay, without contents."""
        if not self.keeps_memory:
            self._storage.resize_(0)

    def holds(self, address: int) -> bool:
        """True if ``address`` lies in the buffer."""
        return 0 <= address - self.bytes.data_ptr() < self._num_bytes

    @property
    def allocated_bytes(self) -> int:
        """The memory that it takes now; none of its own where it is the flat shard."""
        return 0 if self.is_alias else self._storage.nbytes()

    def slot(self, slot: Slot) -> Tensor:
        """The bytes of one parameter's slot."""
        return self.bytes[slot.slot_offset : slot.slot_offset + slot.slot_bytes]

    def unsharded_tensor(self, slot: Slot) -> Tensor:
        """The unsharded parameter in its slot: a tensor of its own, with its own version counter.

        A view would share its base's counter, and every refill of the buffer would look to autograd
        like a change of the weight.
        """
        dtype = dtype_of(slot)
        full = torch.empty(0, dtype=dtype, device=self.bytes.device)
        shape = torch.Size(slot.shape)
        stride = torch.empty(shape, device="meta").stride()
        return full.set_(self._storage, slot.slot_offset // dtype.itemsize, shape, stride)


def with_own_storage(view: Tensor) -> Tensor:
    """A tensor over the same memory, with a storage that ends where the view ends.

    A view that is saved alone drags the whole buffer along. And torch cannot copy (``copy.deepcopy``)
    DTensors whose local tensor does not begin at the start of its storage.
    """
    if view.is_meta or not tensor_impl.has_memory(view):
        return view
    # By a capsule: given the tensor itself, torch asks that its device be the current one.
    return torch.from_dlpack(to_dlpack(view))


def dtype_of(slot: Slot) -> torch.dtype:
    """The dtype that the layout carries as a key."""
    assert isinstance(slot.dtype, torch.dtype)
    return slot.dtype


def typed_range(buffer: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """The bytes [start, end) of ``buffer`` as a 1D tensor of ``dtype``."""
    if start or end != buffer.numel():
        buffer = buffer[start:end]
    return buffer.view(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, for comparisons bit by bit."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def local_views(buffer: Tensor, layout: Layout, rank: int) -> list[Tensor]:
    """The shards of ``rank`` in a buffer laid out as a flat shard, one for each parameter."""
    return [
        _typed(buffer, slot.shard_offset, slot.local_shape(rank), dtype_of(slot)) for slot in layout.slots
    ]


class _EqualViews(NamedTuple):
    """Neighbours of one shape and dtype: the first of ``indices`` lies at ``offset``, counted in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    indices: tuple[int, ...]
    own_stride: tuple[int, ...] | None  # of the only one


class LocalViews:
    """``local_views`` for every step.

    Three views for each parameter cost a quarter of the host time of a reduction. Here it is one, and less
    where neighbours have one shape, as many packed ones have: one view of all of them, unbound.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._num_slots = len(layout.slots)
        self._segments: list[_EqualViews] = []
        for index in layout.direct + layout.packed + layout.strided:
            self._add(index, layout.slots[index], rank)
        self._dtypes = {run.dtype for run in self._segments}

    def _add(self, index: int, slot: Slot, rank: int) -> None:
        dtype, shape = dtype_of(slot), slot.local_shape(rank)
        offset = slot.shard_offset // slot.itemsize
        if self._segments:
            last = self._segments[-1]
            pitch = offset - last.offset if len(last.indices) == 1 else last.stride[0]
            is_next = offset == last.offset + pitch * len(last.indices)
            if is_next and pitch > 0 and (dtype, shape) == (last.dtype, last.shape):
                stride = (pitch, *last.stride[1:])
                indices = (*last.indices, index)
                self._segments[-1] = last._replace(stride=stride, indices=indices, own_stride=None)
                return
        stride = torch.empty(shape, device="meta").stride()
        self._segments.append(_EqualViews(dtype, shape, (0, *stride), offset, (index,), stride))

    def of(self, buffer: Tensor) -> list[Tensor]:
        """The views of a buffer of bytes, in the order of the parameters."""
        typed: dict[torch.dtype, Tensor] = {}
        for dtype in self._dtypes:
            typed[dtype] = buffer.view(dtype)
        found: list[Tensor] = [buffer] * self._num_slots
        for dtype, shape, stride, offset, indices, own_stride in self._segments:
            if own_stride is not None:
                found[indices[0]] = typed[dtype].as_strided(shape, own_stride, offset)
                continue
            together = typed[dtype].as_strided((len(indices), *shape), stride, offset)
            for index, view in zip(indices, together.unbind(), strict=True):
                found[index] = view
        return found


def cast_buffer(source: Tensor, laid_out: Layout, target: Tensor, to: Layout) -> None:
    """Copy a flat shard into another layout of the same parameters: one cast for each kind."""
    for old, new in zip(laid_out.segments, to.segments, strict=True):
        assert isinstance(old.dtype, torch.dtype)
        assert isinstance(new.dtype, torch.dtype)
        typed_range(target, new.start, new.end, new.dtype).copy_(
            typed_range(source, old.start, old.end, old.dtype), non_blocking=True
        )


def _typed(buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numel = torch.Size(shape).numel()
    return typed_range(buffer, start, start + numel * dtype.itemsize, dtype).view(shape)
