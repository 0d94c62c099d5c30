"""Reducers: the caller's ways to reduce gradients.

A *reducer* replaces the reductions of a bucket: over the ranks that share the parameters by a communicator
(``reduce_scatter_communicator``), and over replicas by a function (``all_reduce_function``).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.communicators import Communicator, all_reduce, factor_before_sum, make_communicator
from shardwise.comm.quantized import Feedback, QuantizedExchange, QuantizedSum
from shardwise.comm.streams import Finish, nothing

AllReduce = Callable[[Sequence[Tensor], bool], Finish]


class Reducer(Protocol):
    """``divides``: its sums are averages already; nobody else divides."""

    divides: bool

    def reduce_scatter_communicator(self, pg: dist.ProcessGroup | None, device: torch.device) -> Communicator:
        """Makes reduce-scatters over the ranks of ``pg``; None is a single rank."""
        ...

    def all_reduce_function(self, pg: dist.ProcessGroup | None, device: torch.device) -> AllReduce | None:
        """Sums over replicas; None if there are no replicas."""
        ...


class CommHookReducer:
    """FSDP1's hooks: ``(state, grad)`` over replicas, ``(state, grad, output)`` over shards.

    Over a mesh of both the hook does the shards, and the averages go over the replicas as usual.
    """

    divides = True

    def __init__(self, state: Any, hook: Callable[..., None], *, shards: bool, replicas: int) -> None:
        self._state = state
        self._hook = hook
        self._shards = shards
        self._replicas = replicas

    def reduce_scatter_communicator(self, pg: dist.ProcessGroup | None, device: torch.device) -> Communicator:
        """The hook, or a plain communicator where it serves replicas only."""
        if not self._shards:
            return make_communicator(pg, device)
        ranks = 1 if pg is None else pg.size()
        return _HookedReduceScatter(partial(self._hook, self._state), ranks, self._replicas)

    def all_reduce_function(self, pg: dist.ProcessGroup | None, device: torch.device) -> AllReduce | None:
        """The hook where it serves replicas only; else the back end."""
        if self._shards:
            return None if pg is None or pg.size() == 1 else partial(all_reduce, pg)
        return self._call_for_each

    def _call_for_each(self, tensors: Sequence[Tensor], is_async: bool) -> Finish:
        for tensor in tensors:
            _filled(tensor, partial(self._hook, self._state))
        return nothing


class _HookedReduceScatter:
    """A communicator that calls the hook with one flat gradient for each dtype."""

    packing_limit_bytes = 0
    most_direct = 0.0
    packs_everything = True
    sums_are_bitwise_equal = False
    channel = 0
    smallest_part_bytes = math.inf
    reduce_memory_factor = 1.0
    pool: Any = None

    def __init__(self, hook: Callable[[Tensor, Tensor], None], ranks: int, replicas: int) -> None:
        self._hook = hook
        self._ranks = ranks
        self._replicas = replicas

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Unused: only for reductions."""
        raise NotImplementedError

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """The hook's result, as one of ``replicas`` summands. The hook divides, whatever ``divisor``."""
        for dtype in dict.fromkeys(source.dtype for source in inputs):
            pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if i.dtype == dtype]
            if len(pairs) > 1:  # on a single rank, or of parameters that are packed apart
                sizes = [output.numel() for output, _ in pairs]
                rows = [
                    source.view(self._ranks, size) for (_, source), size in zip(pairs, sizes, strict=True)
                ]
                flat = torch.cat(rows, dim=1).view(-1)
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


def _filled(target: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Have ``hook`` fill ``target``, even if it gives its argument other memory, as torch's own hooks do."""
    given = target.detach()
    hook(given)
    if given.data_ptr() != target.data_ptr() or given.dtype != target.dtype:
        target.copy_(given)


class LowPrecisionReducer:
    """Gradients are sent and summed in a smaller dtype."""

    divides = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def reduce_scatter_communicator(self, pg: dist.ProcessGroup | None, device: torch.device) -> Communicator:
        """The fastest communicator for ``pg``, over casts."""
        plain = make_communicator(pg, device)
        return plain if pg is None or pg.size() == 1 else _LowPrecisionReduceScatter(plain, self._dtype)

    def all_reduce_function(self, pg: dist.ProcessGroup | None, device: torch.device) -> AllReduce | None:
        """A sum of casts."""
        return None if pg is None or pg.size() == 1 else partial(self._all_reduce, pg)

    def _all_reduce(self, pg: dist.ProcessGroup, tensors: Sequence[Tensor], is_async: bool) -> Finish:
        casts = [tensor.to(self._dtype) for tensor in tensors]
        wait = all_reduce(pg, casts, is_async)

        def finish() -> None:
            wait()
            for tensor, cast in zip(tensors, casts, strict=True):
                tensor.copy_(cast)

        return finish


class _LowPrecisionReduceScatter:
    """Another communicator, over casts. ``outputs`` and ``inputs`` of a sum of float16 are kept in range."""

    def __init__(self, plain: Communicator, dtype: torch.dtype) -> None:
        self._plain = plain
        self._dtype = dtype
        self.packing_limit_bytes = plain.packing_limit_bytes
        self.most_direct = plain.most_direct
        self.packs_everything = plain.packs_everything
        self.sums_are_bitwise_equal = plain.sums_are_bitwise_equal
        self.smallest_part_bytes = plain.smallest_part_bytes
        self.reduce_memory_factor = plain.reduce_memory_factor + 1.0  # the casts, which are smaller
        self.pool = plain.pool

    @property
    def channel(self) -> int:
        """The channel of the communicator below."""
        return self._plain.channel

    @channel.setter
    def channel(self, channel: int) -> None:
        self._plain.channel = channel

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Unused: only for reductions."""
        raise NotImplementedError

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Cast, sum, cast back, divide. Numbers that go into a sum of float16 are divided before the cast."""
        before = factor_before_sum(self._dtype, divisor)
        sources = [(s if before == 1.0 else s / before).to(self._dtype) for s in inputs]
        results = [torch.empty_like(output, dtype=self._dtype) for output in outputs]
        wait = self._plain.reduce_scatter(results, sources, 1.0)

        def finish() -> None:
            wait()
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)
                if divisor != before:
                    output.div_(divisor / before)

        return finish


class QuantizedReducer:
    """Gradients are sent as int8 with a scale for each block, and summed in float32."""

    divides = False

    def __init__(self, block_size: int, has_feedback: bool) -> None:
        self._block_size = block_size
        self._has_feedback = has_feedback

    def reduce_scatter_communicator(self, pg: dist.ProcessGroup | None, device: torch.device) -> Communicator:
        """An exchange of int8 messages."""
        if pg is None or pg.size() == 1:
            return make_communicator(pg, device)
        return QuantizedExchange(pg, device, self._block_size, self._feedback())

    def all_reduce_function(self, pg: dist.ProcessGroup | None, device: torch.device) -> AllReduce | None:
        """An exchange and an all-gather of them."""
        if pg is None or pg.size() == 1:
            return None
        return QuantizedSum(pg, device, self._block_size, self._feedback())

    def _feedback(self) -> Feedback | None:
        return Feedback() if self._has_feedback else None
