"""Where reduced gradients land: a buffer, and the DTensors over it that become ``.grad`` of the shards.

A view and a DTensor for each parameter take as long to make as a collective of a small group to issue. So
they are made once, and land again from step to step, once nobody else has any of them:

    lend()      a buffer for the next sums: the old one, if what lies over it is idle, else a new one
    land()      its contents are gradients now, ``.grad`` of the shards
    give_back() between passes: what is idle loses its memory; the objects alone stay

Idle: nobody but this room holds a gradient, its local tensor or a view of their memory, which reference
counts tell. Whoever keeps ``param.grad`` beyond ``zero_grad()`` keeps it as it is; the next step has others.
"""

from collections.abc import Sequence
from operator import attrgetter, is_
from sys import getrefcount

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.runtime import compat
from shardwise.runtime.buffers import KEPT_ON_HOST_BYTES, LocalViews, typed_stretch
from shardwise.runtime.layout import Layout
from shardwise.runtime.param import Param

_sharded, _gradient = attrgetter("sharded"), attrgetter("grad")
_gradient_spec, _attributes = attrgetter("gradient_spec"), attrgetter("__dict__")
_placements = attrgetter("placements")


class Landing:
    """The reduced gradients of a bucket, laid out as its shard buffer."""

    def __init__(self, params: Sequence[Param], layout: Layout, rank: int, device: torch.device) -> None:
        self._params = params
        self._layout = layout
        self._device = device
        self._views = LocalViews(layout, rank)
        self._keeps_memory = device.type == "cpu" and layout.shard_bytes <= KEPT_ON_HOST_BYTES
        self._forget()

    def _forget(self) -> None:
        self._buffer: Tensor | None = None
        self._storage: torch.UntypedStorage  # its memory
        self._is_lent = self._is_empty = False
        self._locals: list[Tensor] = []
        self._gradients: list[DTensor] = []
        self._flats: list[Tensor] = []
        self._is_whole = False
        self._held: list[int] = []

    # --- the buffer -------------------------------------------------------------------------------

    def lend(self, *, is_filled: bool) -> Tensor:
        """A buffer of bytes for the next gradients. ``is_filled``: all of it will be written, but padding."""
        is_filled = is_filled and not self._layout.has_padding
        buffer = self._buffer
        if buffer is not None and not self._is_lent and (self._is_empty or self._is_idle()):
            if self._is_empty:
                self._storage.resize_(self._layout.shard_bytes)
            if not is_filled:
                buffer.zero_()
        else:
            make = torch.empty if is_filled else torch.zeros
            buffer = make(self._layout.shard_bytes, dtype=torch.uint8, device=self._device)
            if not self._is_lent and self._stands():
                return buffer  # to be added to what stands, and gone
            self._forget()
            self._buffer, self._storage = buffer, buffer.untyped_storage()
            self._num_users = compat.storage_users(self._storage)
        self._is_lent, self._is_empty = True, False
        return buffer

    def give_back(self) -> None:
        """Free the memory of gradients that nobody has any more, but for small ones on the host."""
        if self._keeps_memory or self._is_lent or self._is_empty:
            return
        if self._buffer is not None and self._is_idle():
            self._storage.resize_(0)
            self._is_empty = True

    def _is_idle(self) -> bool:
        return bool(self._gradients) and self._count() == self._held

    def _count(self) -> list[int]:
        """By how many each object is held, and how many attributes were set on them."""
        return [
            *map(getrefcount, self._gradients),
            *map(getrefcount, self._locals),
            sum(map(len, map(_attributes, self._gradients))),
            compat.storage_users(self._storage),
        ]

    # --- the gradients ----------------------------------------------------------------------------

    def land(self, buffer: Tensor, present: Sequence[bool]) -> None:
        """Add the contents of ``buffer`` to ``.grad`` of the shards, one by one: their hooks run."""
        locals_ = self._locals if buffer is self._buffer and self._locals else self._views.of(buffer)
        for param, local, is_there in zip(self._params, locals_, present, strict=True):
            if is_there and param.sharded.requires_grad:  # it may have been frozen since forward
                param.add_gradient(local)
        self._settle(buffer)

    def land_plainly(self, buffer: Tensor) -> bool:
        """Do so for all at once; False, and nothing done, where their ``.grad`` are a mixture.

        For parameters without hooks, all of which have gradients in ``buffer``.
        """
        shards = self.shards
        if set(map(_gradient, shards)) == _NOTHING:
            for shard, gradient in zip(shards, self._over(buffer), strict=True):
                shard.grad = gradient
        elif buffer is not self._buffer and self._stands():  # as lend() has said
            for flat, more in zip(self._flats, self._flats_of(buffer), strict=True):
                flat.add_(more)
        else:
            return False
        self._settle(buffer)
        return True

    def whole_of(self, shards: Sequence[Tensor]) -> Tensor | None:
        """``.grad`` of all ``shards``, which are ours, as one flat tensor.

        None where they are not one: put there by others, of several dtypes or placements, or with padding
        between them.
        """
        is_one = self._is_whole and all(map(is_, map(_gradient, shards), self._gradients))
        return self._flats[0] if is_one else None

    @property
    def shards(self) -> list[nn.Parameter]:
        """The parameters whose gradients land here."""
        return list(map(_sharded, self._params))

    def _stands(self) -> bool:
        """True if ``.grad`` of all shards are the gradients that landed here last."""
        if not self._gradients:
            return False
        return all(map(is_, map(_gradient, map(_sharded, self._params)), self._gradients))

    def _over(self, buffer: Tensor) -> Sequence[Tensor]:
        """The gradients over ``buffer``, remembered if it is ours."""
        if buffer is not self._buffer:
            return self._made(self._views.of(buffer))
        if not self._gradients:
            before = compat.storage_users(self._storage)
            self._locals = self._views.of(buffer)
            self._gradients = self._made(self._locals)
            self._flats = self._flats_of(buffer)
            placements = set(map(_placements, map(compat.spec_of, self._gradients)))
            self._is_whole = len(self._flats) == len(placements) == 1 and not self._layout.has_padding
            self._held = self._count()
            self._held[-1] += self._num_users - before
        return self._gradients

    def _made(self, locals_: Sequence[Tensor]) -> list[DTensor]:
        return list(map(compat.make_dtensor, locals_, map(_gradient_spec, self._params)))

    def _flats_of(self, buffer: Tensor) -> list[Tensor]:
        """All numbers of ``buffer``, those of one dtype as one tensor."""
        flats = []
        for run in self._layout.runs:
            assert isinstance(run.dtype, torch.dtype)
            flats.append(typed_stretch(buffer, run.start, run.end, run.dtype))
        return flats

    def _settle(self, buffer: Tensor) -> None:
        if buffer is self._buffer:
            self._is_lent = False


_NOTHING = {None}
