"""The memory of a group: one flat shard, and one gathered buffer that is emptied and refilled.

Buffers of bytes; each parameter sees its own stretch under its own dtype. Who may free what, when:

- the shard lives as long as the group;
- the gathered buffer has one storage for ever. Tensors that autograd saved point at that storage, so
  it is emptied by resizing it to nothing and refilled in place, never replaced;
- in a world of one, the gathered buffer *is* the shard and is never emptied;
- on the host, a small one keeps its memory: giving it back and faulting its pages in again would cost
  several times the copy into it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.runtime.layout import Layout, Slot


class FlatShard:
    """This rank's shards of a group's parameters, back to back in one buffer."""

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self.layout = layout
        self.bytes = torch.zeros(layout.shard_bytes, dtype=torch.uint8, device=device)
        self.views = [
            _typed(self.bytes, slot.shard_offset, slot.local_shape(rank), dtype_of(slot))
            for slot in layout.slots
        ]

    def fill(self, locals_: Sequence[Tensor]) -> None:
        """Copy the local tensors, one a parameter, into their places."""
        for view, local in zip(self.views, locals_, strict=True):
            view.copy_(local)

    def chunk(self, slot: Slot) -> Tensor:
        """The bytes that a rank sends of one parameter, padding included."""
        return self.bytes[slot.shard_offset : slot.shard_offset + slot.chunk_bytes]


KEPT_ON_HOST_BYTES = 1 << 20
"""A gathered buffer in host memory up to this size is not given back between uses."""


class GatheredBuffer:
    """The full parameters of a group, while they are needed."""

    def __init__(self, layout: Layout, shard: FlatShard, device: torch.device) -> None:
        self._num_bytes = layout.gathered_bytes
        self._is_alias = layout.world == 1
        self._keeps_memory = self._is_alias or (
            device.type == "cpu" and self._num_bytes <= KEPT_ON_HOST_BYTES
        )
        if self._is_alias:
            self.bytes = shard.bytes
        else:
            self.bytes = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        self._storage = self.bytes.untyped_storage()

    def allocate(self) -> None:
        """Get memory for the full parameters; their contents are undefined until gathered."""
        if not self._keeps_memory and self._storage.nbytes() == 0:
            self._storage.resize_(self._num_bytes)

    def free(self) -> None:
        """Give the memory back. The tensors over it stay, without contents."""
        if not self._keeps_memory:
            self._storage.resize_(0)

    def addresses(self) -> range | None:
        """Where the contents lie that ``free`` takes away; None if it takes nothing away."""
        if self._is_alias:
            return None
        start = self.bytes.data_ptr()
        return range(start, start + self._num_bytes)

    def slot(self, slot: Slot) -> Tensor:
        """The bytes of one parameter's slot."""
        return self.bytes[slot.slot_offset : slot.slot_offset + slot.slot_bytes]

    def full_tensor(self, slot: Slot) -> Tensor:
        """The full parameter in its slot: a tensor of its own, with a version counter of its own.

        A view would share its base's counter, and every refill of the buffer would look to autograd
        like a change of the weight.
        """
        dtype = dtype_of(slot)
        full = torch.empty(0, dtype=dtype, device=self.bytes.device)
        shape = torch.Size(slot.entry.shape)
        stride = torch.empty(shape, device="meta").stride()
        return full.set_(self._storage, slot.slot_offset // dtype.itemsize, shape, stride)


def dtype_of(slot: Slot) -> torch.dtype:
    """The dtype that the layout carries as a key."""
    assert isinstance(slot.entry.kind, torch.dtype)
    return slot.entry.kind


def typed_stretch(buffer: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """The bytes [start, end) of ``buffer`` as a 1D tensor of ``dtype``."""
    return buffer[start:end].view(dtype)


def _typed(buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numel = torch.Size(shape).numel()
    return typed_stretch(buffer, start, start + numel * dtype.itemsize, dtype).view(shape)
