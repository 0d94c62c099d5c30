"""The caller's own collectives and memory, in the form in which a bucket asks for them.

A custom collective expects one call a group over one buffer from its own allocator. So no parameter has a
collective of its own: all are packed (see ``layout/slots.py``), at the
price of a copy.
"""

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.communicators import BackendCollectives, divided_before
from shardwise.comm.streams import Finish, Scratch, WaitThen, current_stream, has_streams, waiting_for
from shardwise.torch_compat import c10d, foreach


class _CallersPool:
    """A pool over the caller's ``allocate(size, dtype=..., device=...)``."""

    def __init__(self, allocate: Any) -> None:
        self._allocate = allocate
        self.dtype = torch.uint8  # of the last buffer acquired

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents."""
        self.dtype = dtype
        buffer = self._allocate((num_bytes // dtype.itemsize,), dtype=dtype, device=device)
        return Scratch(buffer.view(torch.uint8))

    def release(self, scratch: Scratch) -> None:
        """Nothing to do: the caller's allocator frees the buffer with its last reference."""


class _Custom:
    """A collective of the caller, over buffers from the caller's allocator."""

    packs_everything = True
    sums_are_bitwise_equal = False
    channel = 0
    smallest_part_bytes = math.inf
    reduce_memory_factor = 1.0
    packing_limit_bytes = 0
    most_direct = 0.0

    def __init__(self, comm: Any, pg: dist.ProcessGroup, device: torch.device) -> None:
        self._comm = comm
        self._pg = pg
        self._is_async = device.type == "cpu"
        self.pool = _CallersPool(comm.allocate)

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """For subclasses."""
        raise NotImplementedError

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """For subclasses."""
        raise NotImplementedError


class CustomAllGather(_Custom):
    """An all-gather of the caller: ``comm(output, input, group, async_op) -> Work | None``."""

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """One call for the packed buffer."""
        dtype = self.pool.dtype
        works = [
            self._comm(output.view(dtype), source.view(dtype), self._pg, self._is_async)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return waiting_for(works)


class CustomReduceScatter(_Custom):
    """A reduce-scatter of the caller: ``comm(output, input, group, op, async_op) -> Work | None``."""

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Sum by the caller's call, one a dtype, and divide after it."""
        inputs, before = divided_before(inputs, divisor)
        works = [
            self._comm(output, source, self._pg, dist.ReduceOp.SUM, self._is_async)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        wait = waiting_for(works)
        if not outputs or divisor == before:
            return wait
        return WaitThen(wait, partial(foreach.div_, list(outputs), divisor / before))


class ProcessGroupPool:
    """Buffers from the allocator of a process group's back end."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents."""
        buffer = c10d.allocate_from_group(self._pg, num_bytes // dtype.itemsize, dtype, device)
        return Scratch(buffer.view(torch.uint8))

    def release(self, scratch: Scratch) -> None:
        """Nothing to do: the back end's allocator frees the buffer with its last reference."""


_Buffers = WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, list[Scratch]]]


class SymmetricMemoryPool:
    """Buffers that all ranks of a process group can address.

    To set one up is collective, and the host waits for it, so they are kept for as long as the process
    group. All that use the same stream take turns with the same buffers: the blocks of a model need one of
    each size together, not one each.
    """

    _kept: ClassVar[_Buffers] = WeakKeyDictionary()

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents, which is free once the current stream comes to it."""
        unused = self._unused(num_bytes, device)
        return unused.pop() if unused else Scratch(c10d.symmetric_buffer(self._pg, num_bytes, device))

    def release(self, scratch: Scratch) -> None:
        """Keep the buffer for the next use on the current stream."""
        self._unused(scratch.num_bytes, scratch.bytes.device).append(scratch)

    def _unused(self, num_bytes: int, device: torch.device) -> list[Scratch]:
        stream = current_stream(device) if has_streams(device) else None
        return self._kept.setdefault(self._pg, {}).setdefault((stream, num_bytes), [])


class PooledCollectives(BackendCollectives):
    """The back end's collectives over packed buffers that come from ``pool``; see ``InPlaceAllGather``."""

    packs_everything = True
    smallest_part_bytes = math.inf

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, pool: Any) -> None:
        super().__init__(pg, device)
        self.pool = pool
