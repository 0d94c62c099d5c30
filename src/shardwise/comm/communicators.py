"""What moves the bytes: a back end, gloo's pairs, or nothing on a single rank; and those of a bucket."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.streams import BufferPool, Finish, WaitThen, all_of, nothing, waiting_for
from shardwise.layout.mesh import Axis, ShardMesh
from shardwise.layout.slots import ALIGNMENT, Layout
from shardwise.torch_compat import c10d, foreach


class Communicator:
    """Moves pieces between the ranks of a process group; None stands for a single rank.

    All tensors are contiguous and 1D; ``outputs`` of an all-gather and ``inputs`` of a reduce-scatter hold
    ``world`` pieces of equal size, piece r from or for rank r. Each call returns the function that waits.
    Subclasses implement the collectives that they are chosen for.
    """

    packing_limit_bytes = 0
    """Chunks from this size on are worth their own all-gather."""
    most_direct = math.inf
    """At most this many parameters may have one, however large they are."""
    packs_everything = False
    """No parameter has its own collective, however large."""
    pool: BufferPool | None = None
    """The source of buffers of packed pieces, if not the stream."""
    is_alone = False
    """Whether there is a single rank."""
    channel = 0
    """A number that separates this bucket's messages from those of other buckets."""
    sums_are_bitwise_equal = False
    """Ranks that get the same sum get the same bits; otherwise the order of additions may differ."""
    force_sum = False
    """The back end only sums; the division follows."""
    averages = False
    """Sums are averages already, for any divisor; nothing else divides them."""
    smallest_part_bytes = float(1 << 20)
    """Gradients from this size on are worth their own reduction, as soon as they are complete."""
    reduce_memory_factor = 1.0
    """The memory that a reduction holds until it is waited for, in units of its inputs."""

    def __init__(self, pg: dist.ProcessGroup | None = None, *, is_async: bool = True) -> None:
        """``is_async``: collectives run concurrently with the host, not on the current stream."""
        self._pg: Any = pg
        self._world = 1 if pg is None else pg.size()
        self._is_async = is_async

    def plan_for(self, layout: Layout) -> None:
        """Prepare for sums in this layout, which replaces any earlier one."""

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Fill each output with the inputs of all ranks."""
        raise NotImplementedError

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Fill each output with the sum over ranks of this rank's piece, divided by ``divisor``."""
        raise NotImplementedError

    def all_reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Sum each of ``tensors`` over ranks, in place."""
        return waiting_for(
            [dist.all_reduce(tensor, group=self._pg, async_op=self._is_async) for tensor in tensors]
        )


Make = Callable[[dist.ProcessGroup | None, torch.device], Communicator]


def factor_before_sum(dtype: torch.dtype, divisor: float) -> float:
    """The part of ``divisor`` by which to divide numbers of ``dtype`` before a sum over ranks.

    A sum of float16 numbers soon leaves their range: they are divided by the root of ``divisor`` before the
    sum, and by the rest after it.
    """
    if divisor <= 1 or dtype is not torch.float16:
        return 1.0
    return 2.0 ** math.ceil(math.log2(divisor) / 2)


class SingleRank(Communicator):
    """A world of one: sharded and unsharded parameters are the same bytes."""

    is_alone = True
    sums_are_bitwise_equal = True

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Do nothing: the outputs are the inputs."""
        return nothing

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Divide the gradient of the only rank."""
        for output, source in zip(outputs, inputs, strict=True):
            torch.div(source, divisor, out=output)
        return nothing


class GlooExchange(Communicator):
    """Direct exchange between all pairs of ranks, with gloo's point-to-point calls.

    gloo's collectives pass the data through internal buffers, and its reduce-scatter sends twice the
    bytes. Here each rank sends its piece directly to its place, (world - 1) / world of the bytes each
    way, which is the minimum; the transfers run on gloo's thread, concurrently with the computation.
    Measured on 50 MB in 10 parameters, ms: 2 ranks 12 against 40 to 57 for gloo's all-gather, 4 ranks
    28 against 76 to 126.

    A reduction is such an exchange and a sum over the pieces received, in order of ranks.
    """

    packing_limit_bytes = 64 * 1024
    sums_are_bitwise_equal = True
    # Early parts are sent by the computing thread and waited for more often: with parts of 4 MB a step took a
    # tenth longer. For larger groups the memory saved is worth it.
    smallest_part_bytes = float(16 << 20)
    # Messages with one tag between two ranks are matched in the order of their calls. Each parameter
    # has its own two tags, by its bucket's channel and its place in the shard buffer, so that ranks that
    # disagree on what to exchange wait for each other instead of adding unrelated data. Tags avoid those
    # of the caller's messages.
    _first_tag = 0x5A000000
    _num_tags = 1 << 20
    _channels_apart = 10007  # a prime, so that channels and places do not add up to the same tag

    def __init__(self, pg: dist.ProcessGroup) -> None:
        super().__init__(pg)
        self._rank = pg.rank()
        self.reduce_memory_factor = 1.0 + (self._world - 1) / self._world
        # Each rank starts with the rank after its own, so that no rank receives from all others at once.
        self._others = [(self._rank + i) % self._world for i in range(1, self._world)]

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Send this rank's piece to every other rank, and put its own in place."""
        works: list[Any] = []
        own: list[tuple[Tensor, Tensor]] = []
        for output, source in zip(outputs, inputs, strict=True):
            pieces = output.view(self._world, -1)
            works += self._exchange([(pieces[rank], source) for rank in self._others], source, 0)
            own.append((pieces[self._rank], source))
        self._copy_own(own)
        return WaitThen(partial(self._wait_for, works))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Send every other rank its piece, and sum the received ones."""
        received: list[Tensor] = []
        works: list[Any] = []
        for output, source in zip(outputs, inputs, strict=True):
            pieces = source.view(self._world, -1)
            buffer = pieces.new_empty(self._world - 1, pieces.shape[1])
            pairs = [(buffer[rank - (rank > self._rank)], pieces[rank]) for rank in self._others]
            works += self._exchange(pairs, output, 1)
            received.append(buffer)

        def add() -> None:
            for output, source, buffer in zip(outputs, inputs, received, strict=True):
                self._sum(output, source.view(self._world, -1), buffer, divisor)

        return WaitThen(partial(self._wait_for, works), add)

    def _copy_own(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy this rank's own piece of an all-gather into place, as every back end must."""
        for piece, source in pairs:
            piece.copy_(source)

    def _wait_for(self, works: list[Any]) -> None:
        """Wait for exchanges; an error carries the peer of the failed one."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            member = self._others[works.index(work) % len(self._others)]
            error.peer = c10d.ranks_of(self._pg)[member]  # type: ignore[attr-defined]
            raise

    def _exchange(self, pairs: list[tuple[Tensor, Tensor]], in_shard: Tensor, kind: int) -> list[Any]:
        """Receive into and send from each (buffer, source), one pair per rank of ``_others``."""
        place = int(in_shard.storage_offset()) * in_shard.itemsize // ALIGNMENT
        channel = 2 * self.channel + kind
        tag = self._first_tag + (channel * self._channels_apart + place) % self._num_tags
        both = list(zip(pairs, self._others, strict=True))
        receives = [self._pg.recv([buffer], rank, tag) for (buffer, _), rank in both]
        return receives + [self._pg.send([source], rank, tag) for (_, source), rank in both]

    def _sum(self, output: Tensor, own: Tensor, received: Tensor, divisor: float) -> None:
        """Add the pieces in order of ranks, so that the result is the same on every rank."""
        pieces = [*received[: self._rank], own[self._rank], *received[self._rank :]]
        if output.dtype in (torch.bfloat16, torch.float16):  # round once, not once per rank
            total = pieces[0].float()
            for piece in pieces[1:]:
                total.add_(piece)
            output.copy_(total.div_(divisor))
            return
        torch.add(pieces[0], pieces[1], out=output)
        for piece in pieces[2:]:
            output.add_(piece)
        if divisor != 1:
            output.div_(divisor)


_AVERAGE = (dist.ReduceOp.AVG, 1.0, 1.0)


class BackendCollectives(Communicator):
    """The back end's collectives, several in one call if it supports that.

    On a device they are queued on the current stream; on the host they run concurrently.
    """

    # NCCL is slow with many small collectives; on NVLink a copy of 256 KiB costs about as much as
    # the launch of one more.
    packing_limit_bytes = 256 * 1024
    # A coalesced call runs its collectives one after another in one launch, and each pays the latency of all
    # ranks again. Parameters beyond this number are packed, as all are with one collective per group.
    most_direct = 64.0

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(pg, is_async=device.type == "cpu")
        self.smallest_part_bytes = self.smallest_part_on(device, self._world)
        # The bare calls, ``all_gather_single`` and ``reduce_scatter_single`` since torch 2.13: a wrapper
        # around each would take as long as its arguments do.
        self._gather, self._scatter = getattr(pg, c10d.ALL_GATHER), getattr(pg, c10d.REDUCE_SCATTER)
        self._gather_options = c10d.all_gather_options(self._is_async)
        self._can_coalesce = True
        # The fake back end moves nothing, and counts as dividing.
        self._divides = c10d.is_nccl(pg, device) or c10d.backend_name(pg, device) == "fake"

    @classmethod
    def smallest_part_on(cls, device: torch.device, world: int) -> float:
        """The smallest part of a group's gradients, in bytes.

        On the host, 4 MiB take longer to send than to begin to send. On a device, each part took the host
        0.2 ms (bench/README.md, "What single GPUs have shown"); a group reduced whole holds its gradients
        longer. A part is cut into a chunk for each rank, each large enough to be worth a collective.
        """
        least = 4 << 20 if device.type == "cpu" else 128 << 20
        return float(max(least, world * cls.packing_limit_bytes))

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Make one coalesced call, or one call per output."""
        options = self._gather_options
        if len(outputs) == 1:
            work = self._gather(outputs[0], inputs[0], options)
            return nothing if work is None else work.wait  # type: ignore[no-any-return]
        works = self._coalesced(c10d.all_gather_coalesced, outputs, inputs)
        if works is None:
            works = [self._gather(o, i, options) for o, i in zip(outputs, inputs, strict=True)]
        return waiting_for(works)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Sum and divide, in the back end as far as it can. Sums of several dtypes run one after another."""
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
        return all_of(finishes)

    def _division(self, dtype: torch.dtype, divisor: float) -> tuple[Any, float, float]:
        """How to divide a sum: the back end's operation, and the divisors before and after it.

        Sums of float16 numbers are always divided in two steps: an average would divide by the whole divisor
        first, and lose small numbers.
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
        """One call for all pairs; None if the back end cannot, or there are no pairs."""
        if not self._can_coalesce or not outputs:
            return None
        try:
            return [call(self._pg, outputs, inputs, *more, self._is_async)]
        except (AttributeError, RuntimeError) as error:
            if not (isinstance(error, (AttributeError, NotImplementedError)) or c10d.is_unsupported(error)):
                raise
            self._can_coalesce = False
            return None


def unless_alone(kind: Callable[..., Communicator], *args: Any) -> Make:
    """Makes a ``kind`` with ``args``, or a ``SingleRank`` on a rank that is alone."""

    def make(pg: dist.ProcessGroup | None, device: torch.device) -> Communicator:
        return SingleRank() if pg is None or pg.size() == 1 else kind(pg, device, *args)

    return make


@unless_alone
def make_communicator(pg: dist.ProcessGroup, device: torch.device) -> Communicator:
    """The fastest communicator for ``pg``."""
    if device.type == "cpu" and c10d.backend_name(pg, device) == "gloo":
        return GlooExchange(pg)
    return BackendCollectives(pg, device)


# --- those of a bucket ----------------------------------------------------------------------------


@dataclass(frozen=True)
class CommOptions:
    """How a bucket communicates.

    ``reduce_pg`` is a process group only for reductions. ``post_forward_axis``: the ranks that together keep
    the parameters after forward. ``make_all_gather``, ``make_reduce_scatter`` and, over replicas,
    ``make_all_reduce`` make the caller's collectives.
    """

    reduce_pg: dist.ProcessGroup | None = None
    post_forward_axis: Axis | None = None
    make_all_gather: Make | None = None
    make_reduce_scatter: Make | None = None
    make_all_reduce: Make | None = None
    force_sum: bool = False


class Communication:
    """The communicators of a bucket, made from its options.

    ``all_gather`` and ``reduce_scatter`` connect the ranks that share it, ``post_forward`` the few that keep
    the parameters after forward, if any. ``over_replicas``: None without replicas. ``channel`` separates its
    messages from those of other buckets.
    """

    def __init__(self, mesh: ShardMesh) -> None:
        self.mesh = mesh
        self.channel = 0
        self.use(CommOptions())

    def use(self, options: CommOptions) -> None:
        """Make all communicators at once, so that no option undoes another."""
        self.options = options
        pg, device = self.mesh.shard_axis.pg, self.mesh.device
        self.all_gather = (options.make_all_gather or make_communicator)(pg, device)
        self.reduce_scatter = (options.make_reduce_scatter or make_communicator)(
            options.reduce_pg or pg, device
        )
        over_replicas = (options.make_all_reduce or make_communicator)(self.mesh.replicate_axis.pg, device)
        self.over_replicas = None if isinstance(over_replicas, SingleRank) else over_replicas
        self.post_forward: Communicator | None = None
        if options.post_forward_axis is not None:
            self.post_forward = make_communicator(options.post_forward_axis.pg, device)
        self.use_channel(self.channel)
        self.force_sums(options.force_sum)

    def axes(self) -> list[Axis]:
        """All process groups that it uses: those of the mesh, and those made in addition."""
        axes, options = self.mesh.axes(), self.options
        if options.reduce_pg is not None:
            axes.append(replace(self.mesh.shard_axis, pg=options.reduce_pg))
        if options.post_forward_axis is not None:
            axes.append(options.post_forward_axis)
        return axes

    def use_channel(self, channel: int) -> None:
        """Separate this bucket's messages from those of other buckets. May be called at any time."""
        self.channel = channel
        for comm in (self.all_gather, self.reduce_scatter, self.post_forward):
            if comm is not None:
                comm.channel = channel

    def force_sums(self, enable: bool) -> None:
        """Let the back end only sum, and divide afterwards. May be called at any time."""
        self.options = replace(self.options, force_sum=enable)
        self.reduce_scatter.force_sum = enable

    def would_change(self, choices: dict[str, Any]) -> bool:
        """Whether these options differ from the current ones."""
        return replace(self.options, **choices) != self.options

    @property
    def averages_itself(self) -> bool:
        """True if the caller's reduction divides as well."""
        return any(comm is not None and comm.averages for comm in (self.reduce_scatter, self.over_replicas))
