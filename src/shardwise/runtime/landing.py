"""Where reduced gradients land: a buffer, and the DTensors over it that become ``.grad`` of the shards.

A view and a DTensor for each parameter take as long to make as a collective of a small group to issue. So
small groups, whose steps are that short, have them made once: they land again from step to step, if nobody
else has any of them. Larger groups make new ones, so that clearing ``.grad`` frees their memory at once.

Nobody else has them: no reference to a gradient, to its local tensor, or to their memory is left but those of
this room, which reference counts tell. Whoever keeps ``param.grad`` beyond ``zero_grad()`` keeps it as it is,
and the next step has others.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, call, is_, is_not
from sys import getrefcount

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.runtime import compat
from shardwise.runtime.buffers import LocalViews, buffer_for, typed_stretch
from shardwise.runtime.layout import Layout
from shardwise.runtime.param import Param

_LARGEST_KEPT_BYTES = 256 * 1024
"""What a group may hold on to between ``zero_grad()`` and the next backward."""

_sharded, _gradient = attrgetter("sharded"), attrgetter("grad")
_gradient_spec, _attributes = attrgetter("gradient_spec"), attrgetter("__dict__")
_placements = attrgetter("placements")
_is_something = partial(is_not, None)
_ONLY_DTENSORS = {DTensor}


class Landing:
    """The reduced gradients of a bucket, laid out as its shard buffer."""

    def __init__(self, params: Sequence[Param], layout: Layout, rank: int, device: torch.device) -> None:
        self._params = params
        self._layout = layout
        self._device = device
        self._views = LocalViews(layout, rank)
        self._is_small = layout.shard_bytes <= _LARGEST_KEPT_BYTES
        # Whether the gradients are one tensor: of one dtype, without padding between them, placed alike.
        dtypes = {run.dtype for run in layout.runs}
        placements = set(map(_placements, map(_gradient_spec, params)))
        self._is_one = len(dtypes) == len(placements) == 1 and not layout.has_padding
        self._end = layout.runs[-1].end if layout.runs else 0
        # The local tensors of those that landed last; not the gradients, which torch does not swap for others
        # (``module.to()``) where there is a weak reference.
        self._last: list[Callable[[], Tensor | None]] = []
        self._forget()

    def _forget(self) -> None:
        self._buffer: Tensor | None = None
        self._storage: torch.UntypedStorage  # its memory
        self._is_lent = False
        self._locals: list[Tensor] = []
        self._gradients: list[DTensor] = []
        self._held: list[int] = []

    # --- the buffer -------------------------------------------------------------------------------

    def lend(self, *, is_filled: bool) -> Tensor:
        """A buffer of bytes for the next gradients. ``is_filled``: all of it will be written, but padding."""
        if self._buffer is not None and not self._is_lent and self._count() == self._held:
            self._is_lent = True
            return self._buffer if is_filled and not self._layout.has_padding else self._buffer.zero_()
        buffer = buffer_for(self._layout, self._device, is_filled=is_filled)
        if self._is_small and self.whole_of(self.shards) is None:  # else it will be added to that, and gone
            self._forget()
            self._buffer, self._storage = buffer, buffer.untyped_storage()
            self._is_lent = True
        return buffer

    def _count(self) -> list[int]:
        """By how many each object is held, and how many attributes were set on them."""
        return [
            *map(getrefcount, self._gradients),
            *map(getrefcount, self._locals),
            sum(map(len, map(_attributes, self._gradients))),
            getrefcount(self._storage),
            compat.storage_users(self._storage),
        ]

    # --- the gradients ----------------------------------------------------------------------------

    def land(self, buffer: Tensor, present: Sequence[bool]) -> None:
        """Add the contents of ``buffer`` to ``.grad`` of the shards, one by one: their hooks run."""
        if buffer is self._buffer:
            self._forget()
        for param, local, is_there in zip(self._params, self._views.of(buffer), present, strict=True):
            if is_there:
                param.add_gradient(local)

    def land_plainly(self, buffer: Tensor) -> bool:
        """Do so for all at once; False, and nothing done, where their ``.grad`` are a mixture.

        For parameters without hooks, all of which have gradients in ``buffer``.
        """
        shards = self.shards
        with compat.plain_access():
            if not any(map(_is_something, map(_gradient, shards))):
                for shard, gradient in zip(shards, self._over(buffer), strict=True):
                    shard.grad = gradient
                return True
        whole = self.whole_of(shards)
        if whole is None:
            return False
        whole.add_(typed_stretch(buffer, 0, self._end, whole.dtype))
        return True

    def whole_of(self, shards: Sequence[Tensor]) -> Tensor | None:
        """``.grad`` of all ``shards``, which are ours, as one flat tensor.

        None where they are not one: put there by others, of several dtypes or placements, or with padding
        between them.
        """
        if not (self._is_one and self._last):
            return None
        with compat.plain_access():
            standing = list(map(_gradient, shards))
        if set(map(type, standing)) != _ONLY_DTENSORS:
            return None
        locals_ = list(map(compat.local_tensor, standing))
        if not all(map(is_, locals_, map(call, self._last))):
            return None
        first = locals_[0]
        return first.as_strided((self._end // first.itemsize,), (1,), 0)

    @property
    def shards(self) -> list[nn.Parameter]:
        """The parameters whose gradients land here."""
        return list(map(_sharded, self._params))

    def _over(self, buffer: Tensor) -> list[DTensor]:
        """The gradients over ``buffer``; those over our own are made once."""
        if buffer is not self._buffer:
            locals_ = self._views.of(buffer)
            self._last = list(map(weakref.ref, locals_))
            return self._made(locals_)
        self._is_lent = False
        if not self._gradients:
            before = compat.storage_users(self._storage)
            self._locals = self._views.of(buffer)
            self._gradients = self._made(self._locals)
            self._last = list(map(weakref.ref, self._locals))
            self._held = self._count()
            self._held[-1] -= before - _OWN_USERS
        return self._gradients

    def _made(self, locals_: Sequence[Tensor]) -> list[DTensor]:
        return list(map(compat.make_dtensor, locals_, map(_gradient_spec, self._params)))


_OWN_USERS = 2  # of a storage: the buffer, and the handle to the storage itself
