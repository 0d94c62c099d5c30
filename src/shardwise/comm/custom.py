"""The caller's own collectives and memory, in the form in which a bucket asks for them.

Whoever brings a collective of his own expects one call a group over one buffer, which he allocates.
So with one of these nothing travels alone: all parameters are packed (see layout.py), at the price of
a copy.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.communicators import BackendCollectives, divided_before
from shardwise.comm.streams import Finish, Scratch, waiting_for
from shardwise.torch_compat import c10d


class _CallersMemory:
    """Buffers from ``allocate(size, dtype=..., device=...)``."""

    def __init__(self, allocate: Any) -> None:
        self._allocate = allocate
        self.dtype = torch.uint8  # of the buffer lent last

    def borrow(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents."""
        self.dtype = dtype
        buffer = self._allocate((num_bytes // dtype.itemsize,), dtype=dtype, device=device)
        return Scratch(buffer.view(torch.uint8))

    def give_back(self, scratch: Scratch) -> None:
        """The caller's allocator sees the buffer go when nobody holds it any more."""


class _Custom:
    """A collective of the caller, over buffers that it allocates."""

    packs_everything = True
    sums_alike = False
    channel = 0
    smallest_part_bytes = math.inf
    room_to_reduce = 1.0
    packing_limit_bytes = 0

    def __init__(self, comm: Any, pg: dist.ProcessGroup, device: torch.device) -> None:
        self._comm = comm
        self._pg = pg
        self._is_async = device.type == "cpu"
        self.memory = _CallersMemory(comm.allocate)

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
        dtype = self.memory.dtype
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

        def finish() -> None:
            wait()
            if outputs and divisor != before:
                torch._foreach_div_(list(outputs), divisor / before)

        return finish


class ProcessGroupMemory:
    """Buffers from the allocator of a process group's back end."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg

    def borrow(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents."""
        buffer = c10d.allocate_from_group(self._pg, num_bytes // dtype.itemsize, dtype, device)
        return Scratch(buffer.view(torch.uint8))

    def give_back(self, scratch: Scratch) -> None:
        """The back end's pool sees the buffer go when nobody holds it any more."""


class SymmetricMemory:
    """Buffers that all ranks of a group see; each size is set up once, by all of them, and kept."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg
        self._kept: dict[int, list[Scratch]] = {}

    def borrow(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents."""
        if self._kept.get(num_bytes):
            return self._kept[num_bytes].pop()
        return Scratch(c10d.symmetric_buffer(self._pg, num_bytes, device))

    def give_back(self, scratch: Scratch) -> None:
        """Keep it for the next use."""
        self._kept.setdefault(scratch.bytes.numel(), []).append(scratch)


class WithMemory(BackendCollectives):
    """The back end's collectives over packed buffers that come from ``memory``."""

    packs_everything = True
    smallest_part_bytes = math.inf

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, memory: Any) -> None:
        super().__init__(pg, device)
        self.memory = memory
