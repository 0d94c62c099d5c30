"""The caller's collectives and memory, in the form that a bucket expects.

A custom collective expects one call per group over one buffer from its own allocator. So no parameter has
its own collective: all are packed (see ``layout/slots.py``), at the cost of a copy.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.communicators import BackendCollectives, Communicator, factor_before_sum
from shardwise.comm.streams import (
    BufferPool,
    Finish,
    Scratch,
    WaitThen,
    current_stream,
    has_streams,
    nothing,
    waiting_for,
)
from shardwise.torch_compat import c10d, foreach


class AllocatorPool(BufferPool):
    """A pool over ``allocate(size, dtype=..., device=...)``, whose buffers are freed with their last
    reference."""

    def __init__(self, allocate: Callable[..., Tensor]) -> None:
        self._allocate = allocate
        self.dtype = torch.uint8  # of the last buffer acquired

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents."""
        self.dtype = dtype
        buffer = self._allocate((num_bytes // dtype.itemsize,), dtype=dtype, device=device)
        return Scratch(buffer.view(torch.uint8))


class CustomCollectives(Communicator):
    """The caller's collective, over buffers from the caller's allocator.

    Either an all-gather, ``comm(output, input, group, async_op) -> Work | None``, or a reduce-scatter,
    ``comm(output, input, group, op, async_op) -> Work | None``.
    """

    packs_everything = True

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, comm: Any) -> None:
        super().__init__(pg, is_async=device.type == "cpu")
        self._comm = comm
        self.pool: AllocatorPool = AllocatorPool(comm.allocate)

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Make one call for the packed buffer."""
        dtype = self.pool.dtype
        works = [
            self._comm(output.view(dtype), source.view(dtype), self._pg, self._is_async)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return waiting_for(works)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Sum by the caller's function, one call per dtype, then divide."""
        before = max((factor_before_sum(source.dtype, divisor) for source in inputs), default=1.0)
        works = []
        for output, source in zip(outputs, inputs, strict=True):
            summand = source if before == 1 else source / before
            works.append(self._comm(output, summand, self._pg, dist.ReduceOp.SUM, self._is_async))
        wait = waiting_for(works)
        if not outputs or divisor == before:
            return wait
        return WaitThen(wait, partial(foreach.div_, list(outputs), divisor / before))


class HookedCollectives(Communicator):
    """FSDP1's hooks: ``(grad)`` over replicas, ``(grad, output)`` over shards, each with its state bound.

    On a mesh of both, the hook reduces over shards, and the averages over ``replicas`` are as usual.
    """

    packs_everything = True
    averages = True

    def __init__(
        self, hook: Callable[..., None], replicas: int, pg: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        super().__init__(pg)
        self._hook = hook
        self._replicas = replicas

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """The hook's result for one flat gradient of each dtype, as one of ``replicas`` summands."""
        for dtype in dict.fromkeys(source.dtype for source in inputs):
            pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if i.dtype == dtype]
            if len(pairs) > 1:  # on a single rank, or for parameters packed separately
                sizes = [output.numel() for output, _ in pairs]
                flat = torch.cat([source.view(self._world, -1) for _, source in pairs], dim=1).view(-1)
                result = flat.new_empty(sum(sizes))
                _filled(result, partial(self._hook, flat.detach()))
                for (output, _), part in zip(pairs, result.split(sizes), strict=True):
                    output.copy_(part)
            else:
                _filled(pairs[0][0], partial(self._hook, pairs[0][1].detach()))
            if self._replicas > 1:
                for output, _ in pairs:
                    output.div_(self._replicas)
        return nothing

    def all_reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Call the hook, if it is for replicas only."""
        for tensor in tensors:
            _filled(tensor, self._hook)
        return nothing


def _filled(target: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Have ``hook`` fill ``target``, even if it gives its argument other memory, as torch's hooks do."""
    given = target.detach()
    hook(given)
    if given.data_ptr() != target.data_ptr() or given.dtype != target.dtype:
        target.copy_(given)


_Buffers = WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, list[Scratch]]]


class SymmetricMemoryPool(BufferPool):
    """Buffers that all ranks of a process group can address.

    Setting one up is collective, and the host waits for it, so they live as long as the process group. All
    users of a stream take turns with the same buffers: the blocks of a model need one of each size together,
    not one each.
    """

    _kept: ClassVar[_Buffers] = WeakKeyDictionary()

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents, free once the current stream gets there."""
        unused = self._unused(num_bytes, device)
        return unused.pop() if unused else Scratch(c10d.symmetric_buffer(self._pg, num_bytes, device))

    def release(self, scratch: Scratch) -> None:
        """Keep the buffer for the next use on the current stream."""
        self._unused(scratch.num_bytes, scratch.bytes.device).append(scratch)

    def _unused(self, num_bytes: int, device: torch.device) -> list[Scratch]:
        stream = current_stream(device) if has_streams(device) else None
        return self._kept.setdefault(self._pg, {}).setdefault((stream, num_bytes), [])


class PooledCollectives(BackendCollectives):
    """The back end's collectives over packed buffers from ``pool``; see ``InPlaceAllGather``."""

    packs_everything = True

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, pool: Any) -> None:
        super().__init__(pg, device)
        self.pool = pool
