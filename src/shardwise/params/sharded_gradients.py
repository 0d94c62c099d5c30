"""The sharded gradients of a bucket: a buffer, and the DTensors over it that become ``.grad``.

To make a view and a DTensor for each parameter takes as long as to issue a collective of a small group. So
small buckets on the host, whose steps are that short, make them once and use them again in the next step, if
nobody else holds any of them. Larger ones make them anew, so that clearing ``.grad`` frees their memory. So
do all buckets on a device, where nothing tells whether a stream of the caller still reads them.

Nobody else holds them: reference counts show that the only references to a gradient, to its local tensor, and
to their memory are those of this module; nothing was set on them, and autograd has recorded nothing. Whoever
keeps ``param.grad`` beyond ``zero_grad()`` keeps it unchanged, and the next step makes new ones.
"""

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, call, is_
from sys import getrefcount

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.buffers import LocalViews, buffer_for, typed_range
from shardwise.layout.slots import Layout
from shardwise.params.changes import all_start_at, is_something
from shardwise.params.parameter import Param
from shardwise.torch_compat import dtensor, tensor_impl

_LARGEST_KEPT_BYTES = 256 * 1024
"""The largest buffer that a bucket keeps between ``zero_grad()`` and the next backward."""

_sharded, _gradient = attrgetter("sharded"), attrgetter("grad")
_gradient_spec, _attributes = attrgetter("gradient_spec"), attrgetter("__dict__")
_wants_gradient, _address = attrgetter("requires_grad"), Tensor.data_ptr
_ONLY_DTENSORS = {DTensor}


class ShardedGradients:
    """The sharded gradients of a bucket, laid out as its flat shard."""

    def __init__(self, params: Sequence[Param], layout: Layout, rank: int, device: torch.device) -> None:
        self._params = params
        self._layout = layout
        self._device = device
        self._views = LocalViews(layout, rank)
        self._keeps_buffer = device.type == "cpu" and layout.shard_bytes <= _LARGEST_KEPT_BYTES
        # Whether all gradients form one tensor: one dtype, equal placements, no padding in between.
        dtypes = {run.dtype for run in layout.segments}
        places = {(spec.mesh, spec.placements) for spec in map(_gradient_spec, params)}
        self._is_one = len(dtypes) == len(places) == 1 and not layout.has_padding
        self._offsets = [slot.shard_offset for slot in layout.slots]
        self._end = layout.segments[-1].end if layout.segments else 0
        # The local tensors of the last gradients. Not the gradients: torch cannot swap tensors
        # (``module.to()``) that have weak references.
        self._last: list[Callable[[], Tensor | None]] = []
        self._forget()

    def _forget(self) -> None:
        self._buffer: Tensor | None = None
        self._storage: torch.UntypedStorage  # its memory
        self._is_in_use = False
        self._locals: list[Tensor] = []
        self._addresses: list[int] = []  # of the local tensors
        self._gradients: list[DTensor] = []
        self._flat: Tensor | None = None  # all of them, where they form one tensor
        self._held: list[int] = []
        self._users: list[int] = []  # references to the memory before anybody saw it

    # --- the buffer -------------------------------------------------------------------------------

    def acquire_buffer(self, *, is_filled: bool) -> Tensor:
        """A buffer of bytes for the next gradients. ``is_filled``: all but padding will be written."""
        if self._buffer is not None and not self._is_in_use and self._count() == self._held:
            self._is_in_use = True
            return self._buffer if is_filled and not self._layout.has_padding else self._buffer.zero_()
        buffer = buffer_for(self._layout, self._device, is_filled=is_filled)
        # Sums that will be added to existing gradients are freed after that: not worth keeping.
        if self._keeps_buffer and self.flat_gradient_of(self.shards) is None:
            self._forget()
            self._buffer, self._storage = buffer, buffer.untyped_storage()
            self._users = self._count_users()
            self._is_in_use = True
        return buffer

    @property
    def kept_buffer(self) -> Tensor | None:
        """The buffer that is used again in the next step, whether ``.grad`` is in it now or not."""
        return self._buffer

    def _count(self) -> list[int]:
        """The reference counts of all objects, and how much was set on them."""
        with tensor_impl.plain_access():
            num_recorded = sum(map(_wants_gradient, self._gradients))
        num_attributes = sum(map(len, map(_attributes, self._gradients)))
        held = [*map(getrefcount, self._gradients), *map(getrefcount, self._locals)]
        return [*held, num_attributes, num_recorded, *self._count_users()]

    def _count_users(self) -> list[int]:
        return [getrefcount(self._storage), tensor_impl.storage_users(self._storage)]

    # --- the gradients ----------------------------------------------------------------------------

    def accumulate(self, buffer: Tensor, present: Sequence[bool]) -> None:
        """Add ``buffer`` to ``.grad`` of the sharded parameters one by one, running their hooks."""
        if buffer is self._buffer:
            self._forget()
        for param, local, is_there in zip(self._params, self._views.of(buffer), present, strict=True):
            if is_there:
                param.add_gradient(local)

    def accumulate_all(self, buffer: Tensor) -> bool:
        """Add ``buffer`` to all ``.grad`` at once; False, and nothing done, where some are None or foreign.

        For parameters without hooks, all of which have gradients in ``buffer``.
        """
        shards = self.shards
        with tensor_impl.plain_access():
            stand = any(map(is_something, map(_gradient, shards)))
        if not stand:
            gradients = self._over(buffer)
            with tensor_impl.plain_access():
                for shard, gradient in zip(shards, gradients, strict=True):
                    shard.grad = gradient
            return True
        whole = self.flat_gradient_of(shards)
        if whole is None:
            return False
        whole.add_(typed_range(buffer, 0, self._end, whole.dtype))
        return True

    def flat_gradient_of(self, shards: Sequence[Tensor]) -> Tensor | None:
        """``.grad`` of all ``shards``, which are those of this bucket, as one flat tensor.

        None where they do not form one: set by others, of several dtypes or placements, or with padding in
        between.
        """
        if not (self._is_one and self._last):
            return None
        with tensor_impl.plain_access():
            if self._gradients and all(map(is_, map(_gradient, shards), self._gradients)):
                is_whole = all(map(is_, map(dtensor.local_tensor, self._gradients), self._locals))
                return (
                    self._flat if is_whole and list(map(_address, self._locals)) == self._addresses else None
                )
            standing = list(map(_gradient, shards))
        if set(map(type, standing)) != _ONLY_DTENSORS:
            return None
        locals_ = list(map(dtensor.local_tensor, standing))
        first = locals_[0]
        start = first.data_ptr() - self._offsets[0]
        # The same tensors over the same memory: ``.data`` may have been set.
        if first.untyped_storage().data_ptr() != start or not all(map(is_, locals_, map(call, self._last))):
            return None
        if not self._lie_at(locals_, start):
            return None
        return first.as_strided((self._end // first.itemsize,), (1,), 0)

    def _lie_at(self, locals_: Sequence[Tensor], start: int) -> bool:
        places = zip(locals_, self._offsets, strict=True)
        return all_start_at(locals_, self._offsets, start) or all(
            local.data_ptr() == start + offset for local, offset in places if local.numel()
        )

    @property
    def shards(self) -> list[nn.Parameter]:
        """The sharded parameters, in order."""
        return list(map(_sharded, self._params))

    def _over(self, buffer: Tensor) -> list[DTensor]:
        """The gradients over ``buffer``; those over the kept buffer are made once."""
        if buffer is not self._buffer:
            locals_ = self._views.of(buffer)
            self._last = list(map(weakref.ref, locals_))
            return self._made(locals_)
        self._is_in_use = False
        if not self._gradients:
            before = self._count_users()
            self._locals = self._views.of(buffer)
            self._addresses = list(map(_address, self._locals))
            self._gradients = self._made(self._locals)
            if self._is_one:
                self._flat = typed_range(buffer, 0, self._end, self._locals[0].dtype)
            self._last = list(map(weakref.ref, self._locals))
            *held, handles, users = self._count()
            self._held = [*held, handles + self._users[0] - before[0], users + self._users[1] - before[1]]
        return self._gradients

    def _made(self, locals_: Sequence[Tensor]) -> list[DTensor]:
        return list(map(dtensor.make_dtensor, locals_, map(_gradient_spec, self._params)))
