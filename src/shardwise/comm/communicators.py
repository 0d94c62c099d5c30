"""Who moves the bytes: a back end, or nobody for a single rank."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.gloo import GlooExchange
from shardwise.comm.streams import Finish, Scratch, WaitThen, nothing, waiting_for
from shardwise.torch_compat import c10d, foreach


class BufferPool(Protocol):
    """A pool of byte buffers."""

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of at least ``num_bytes``, with undefined contents, to hold numbers of ``dtype``."""
        ...

    def release(self, scratch: Scratch) -> None:
        """Return a buffer to the pool."""
        ...


class Communicator(Protocol):
    """Moves pieces between the ranks of a process group.

    ``packing_limit_bytes``: chunks from this size on are worth a collective of their own.
    ``most_direct``: so many parameters may have one, however large they are.
    ``pool``: where buffers of packed pieces come from, if not from the stream.
    ``packs_everything``: no parameter has a collective of its own, however large.
    ``sums_are_bitwise_equal``: ranks that get the same sum get the same bits; else the order of additions may
    differ between ranks.
    ``channel``: a number that keeps this bucket's messages apart from those of other buckets.
    ``smallest_part_bytes``: gradients from this size on are worth a reduction of their own, as soon as they
    are complete; infinite where one call has to reduce them all.
    ``reduce_memory_factor``: the memory that a reduction holds until it is waited for, in units of its
    inputs.

    All tensors are contiguous and 1D; ``outputs`` of an all-gather and ``inputs`` of a reduce-scatter hold
    ``world`` pieces of equal size, piece r from or for rank r. Each call returns the function that waits.
    """

    packing_limit_bytes: int
    most_direct: float
    packs_everything: bool
    sums_are_bitwise_equal: bool
    channel: int
    smallest_part_bytes: float
    reduce_memory_factor: float
    pool: Any  # BufferPool | None; a Protocol's variable is invariant

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Fill each output with the inputs of all ranks."""
        ...

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Fill each output with the sum over ranks of this rank's piece, divided by ``divisor``."""
        ...


def all_reduce(pg: dist.ProcessGroup, tensors: Sequence[Tensor], is_async: bool) -> Finish:
    """Sum each of ``tensors`` over the ranks of ``pg``, in place."""
    return waiting_for([dist.all_reduce(tensor, group=pg, async_op=is_async) for tensor in tensors])


def gather_to(pg: dist.ProcessGroup, dst: int, own: Tensor, pieces: Sequence[Tensor] | None) -> Finish:
    """Gather ``own`` of each rank of ``pg`` into ``pieces`` on rank ``dst``; other ranks pass None."""
    if own.device.type != "cpu" or c10d.backend_name(pg, own.device) != "gloo":
        everywhere = None if pieces is None else list(pieces)
        return waiting_for([dist.gather(own, everywhere, group=pg, group_dst=dst, async_op=True)])
    # gloo's own gather receives into an extra buffer.
    if pieces is None:
        return waiting_for([dist.isend(own, group=pg, group_dst=dst)])
    others = [(rank, piece) for rank, piece in enumerate(pieces) if rank != dst]
    works = [dist.irecv(piece, group=pg, group_src=rank) for rank, piece in others]
    pieces[dst].copy_(own)
    return waiting_for(works)


def factor_before_sum(dtype: torch.dtype, divisor: float) -> float:
    """What to divide numbers of ``dtype`` by before a sum over ranks, of a division by ``divisor`` in all.

    A sum of float16 numbers soon leaves their range: they are divided by the root of ``divisor`` before the
    sum, and by the rest after it.
    """
    if divisor <= 1 or dtype is not torch.float16:
        return 1.0
    return 2.0 ** math.ceil(math.log2(divisor) / 2)


def divided_before(inputs: Sequence[Tensor], divisor: float) -> tuple[Sequence[Tensor], float]:
    """Inputs of a sum over ranks, and the factor that they are divided by already."""
    before = max((factor_before_sum(source.dtype, divisor) for source in inputs), default=1.0)
    return (inputs if before == 1 else [source / before for source in inputs]), before


def make_communicator(pg: dist.ProcessGroup | None, device: torch.device) -> Communicator:
    """The fastest communicator for ``pg``; None is a single rank."""
    if pg is None or pg.size() == 1:
        return SingleRank()
    if device.type == "cpu" and c10d.backend_name(pg, device) == "gloo":
        return GlooExchange(pg)
    return BackendCollectives(pg, device)


class SingleRank:
    """A world of one: sharded and unsharded parameters are the same bytes."""

    packing_limit_bytes = 0
    most_direct = math.inf
    packs_everything = False
    sums_are_bitwise_equal = True
    channel = 0
    smallest_part_bytes = float(1 << 20)
    reduce_memory_factor = 1.0
    pool: Any = None

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Nothing to move: the outputs are the inputs."""
        return nothing

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """The gradient of the only rank, divided."""
        for output, source in zip(outputs, inputs, strict=True):
            torch.div(source, divisor, out=output)
        return nothing


_AVERAGE = (dist.ReduceOp.AVG, 1.0, 1.0)


class BackendCollectives:
    """The back end's own collectives, several as one call where it can.

    On a device they are queued on the current stream; on the host they run beside it.
    """

    # NCCL is slow with many small collectives; on NVLink a copy of 256 KiB costs about as much as
    # the launch of one more.
    packing_limit_bytes = 256 * 1024
    # A coalesced call is as many collectives, one behind the other, which share one launch: each pays the
    # latency of all ranks again. What lies beyond is packed, as all would be with one collective a group.
    most_direct = 64.0
    packs_everything = False
    sums_are_bitwise_equal = False
    channel = 0
    # Above, the transfer takes longer than one more launch; with many ranks, see __init__.
    smallest_part_bytes = float(4 << 20)
    reduce_memory_factor = 1.0
    pool: Any = None

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        self._pg = pg
        self._world = pg.size()
        # A part is cut into a chunk for each rank, as large as one that is worth a collective.
        self.smallest_part_bytes = max(
            self.smallest_part_bytes, float(self._world * self.packing_limit_bytes)
        )
        self._is_async = device.type == "cpu"
        # The calls themselves: a function of ours around each would take as long as its arguments do.
        self._gather, self._scatter = getattr(pg, c10d.ALL_GATHER), getattr(pg, c10d.REDUCE_SCATTER)
        self._gather_options = c10d.all_gather_options(self._is_async)
        self._can_coalesce = True
        # The fake back end moves nothing, and counts as one that divides.
        self._divides = c10d.is_nccl(pg, device) or c10d.backend_name(pg, device) == "fake"
        self.force_sum = False

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """One coalesced call, or one call an output."""
        options = self._gather_options
        if len(outputs) == 1:
            work = self._gather(outputs[0], inputs[0], options)
            return nothing if work is None else work.wait  # type: ignore[no-any-return]
        works = self._coalesced(c10d.all_gather_coalesced, outputs, inputs)
        if works is None:
            works = [self._gather(o, i, options) for o, i in zip(outputs, inputs, strict=True)]
        return waiting_for(works)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Sum and divide, in the back end as far as it can. Sums of several dtypes go one after the other."""
        if not outputs:
            return nothing
        dtype, is_one = outputs[0].dtype, len(outputs) == 1
        if not is_one and any(output.dtype != dtype for output in outputs):
            return self._reduce_scatter_by_dtype(outputs, inputs, divisor)
        op, before, after = self._division(dtype, divisor)
        if before != 1:
            inputs = [source / before for source in inputs]
        options = c10d.reduce_options(op, self._is_async)
        if is_one:
            work = self._scatter(outputs[0], inputs[0], options)
            wait = nothing if work is None else work.wait
        else:
            works = self._coalesced(c10d.reduce_scatter_coalesced, outputs, inputs, op)
            if works is None:
                works = [self._scatter(o, i, options) for o, i in zip(outputs, inputs, strict=True)]
            wait = waiting_for(works)
        return wait if after == 1 else WaitThen(wait, partial(foreach.div_, list(outputs), after))

    def _reduce_scatter_by_dtype(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float
    ) -> Finish:
        finishes = []
        for dtype in dict.fromkeys(output.dtype for output in outputs):
            pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if o.dtype == dtype]
            finishes.append(self.reduce_scatter([o for o, _ in pairs], [i for _, i in pairs], divisor))

        def finish() -> None:
            for each in finishes:
                each()

        return finish

    def _division(self, dtype: torch.dtype, divisor: float) -> tuple[Any, float, float]:
        """How to divide a sum: the operation of the back end, and what is left before and after it.

        The sum of float16 numbers is divided in two steps whatever the divisor: an average divides by all of
        it first, and small numbers are lost.
        """
        divides = self._divides and not self.force_sum
        if divides and divisor == self._world and dtype is not torch.float16:
            return _AVERAGE
        before = factor_before_sum(dtype, divisor)
        if not divides:
            return dist.ReduceOp.SUM, before, divisor / before
        first = divisor if before == 1 else before
        if first != 1 and dtype in c10d.PremultipliedSum.dtypes:
            return c10d.PremultipliedSum(1 / first), 1.0, divisor / first
        return dist.ReduceOp.SUM, before, divisor / before

    def _coalesced(self, call: Any, outputs: Any, inputs: Any, *more: Any) -> list[Any] | None:
        """One call for all pairs; None where the back end cannot, or there are none."""
        if not self._can_coalesce or not outputs:
            return None
        try:
            return [call(self._pg, outputs, inputs, *more, self._is_async)]
        except (NotImplementedError, AttributeError):
            self._can_coalesce = False
        except RuntimeError as error:
            if not c10d.is_unsupported(error):
                raise
            self._can_coalesce = False
        return None
