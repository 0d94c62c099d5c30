"""Numbers as int8 with a scale a block, and communication in that form.

    block       256 numbers, the last of a piece perhaps fewer
    scale       largest magnitude in the block / 127, float32
    number      round(x / scale) in -127..127, one byte; error at most scale / 2
    message     | int8 of all numbers | padding to 4 bytes | scales |      1.016 bytes a number

A block with an infinity or NaN has a scale that is no number either, and comes out as NaN: overflow is not
hidden from loss scaling and clipping. Source of block quantisation in sharded training: Wang et al., "ZeRO++:
Extremely Efficient Collective Communication for Giant Model Training", 2023
(https://arxiv.org/abs/2306.10209); of error feedback: Seide et al., "1-Bit Stochastic Gradient Descent",
2014.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.runtime import compat
from shardwise.runtime.buffers import GatheredBuffer
from shardwise.runtime.collectives import Communicator, Gather
from shardwise.runtime.layout import Layout
from shardwise.runtime.streams import Finish, Lane, nothing, waiting_for

LEVELS = 127
_TINY = torch.finfo(torch.float32).tiny
"""Scales up to here have no reciprocal: such blocks are taken for zeros."""


@dataclass(frozen=True)
class Blocks:
    """How rows of ``numel`` numbers are cut."""

    numel: int
    block_size: int

    @property
    def count(self) -> int:
        """Blocks of a row."""
        return -(-self.numel // self.block_size)

    @property
    def scales_at(self) -> int:
        """Where in a message the scales begin."""
        return -(-self.numel // 4) * 4

    @property
    def message_bytes(self) -> int:
        """Size of a row's message."""
        return self.scales_at + 4 * self.count

    def encode(self, rows: Tensor) -> Tensor:
        """Messages of ``rows``, float32 of shape (n, numel), as bytes of shape (n, message_bytes)."""
        messages = torch.empty(len(rows), self.message_bytes, dtype=torch.uint8, device=rows.device)
        messages[:, self.numel : self.scales_at].zero_()
        blocks = self._in_blocks(rows)
        scales = torch.linalg.vector_norm(blocks, torch.inf, dim=2).div_(LEVELS)
        steps = torch.where(scales > _TINY, scales.reciprocal(), 0.0).unsqueeze(2)
        numbers = (blocks * steps).round_().view(len(rows), -1)
        messages[:, : self.numel].view(torch.int8).copy_(numbers[:, : self.numel])
        messages[:, self.scales_at :].view(torch.float32).copy_(scales)
        return messages

    def decode(self, messages: Tensor) -> Tensor:
        """The numbers of ``messages``, as float32 of shape (n, numel)."""
        scales = messages[:, self.scales_at :].view(torch.float32)
        blocks = self._in_blocks(messages[:, : self.numel].view(torch.int8))
        return (blocks * scales.unsqueeze(2)).view(len(messages), -1)[:, : self.numel]

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """``rows`` in the shape (n, count, block_size), filled up with zeros where they need it."""
        if self.numel % self.block_size:
            rows = torch.nn.functional.pad(rows, (0, self.count * self.block_size - self.numel))
        return rows.unflatten(1, (self.count, self.block_size))


class Feedback:
    """What quantisation has left out so far, to be added the next time; by the place of what was quantised.

    Kept in bfloat16: its own rounding is a 256th of the error that it carries.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def add_to(self, key: tuple[int, ...], rows: Tensor) -> None:
        """Add to ``rows``, in place, what they lacked the last time."""
        if key in self._kept:
            rows.add_(self._kept[key])

    def keep(self, key: tuple[int, ...], rows: Tensor, sent: Tensor) -> None:
        """Remember what ``sent`` lacks of ``rows``; of numbers that are none, nothing."""
        self._kept[key] = (rows - sent).nan_to_num_(0.0, 0.0, 0.0).to(torch.bfloat16)


class QuantizedExchange:
    """A reduction in which each rank sends every other one its piece as int8, and sums what it receives.

    An all-to-all of messages. The rank's own piece is not rounded. ``feedback`` is None without it.
    """

    packing_limit_bytes = 0
    packs_everything = True
    sums_alike = False
    channel = 0
    memory = None

    def __init__(
        self, pg: dist.ProcessGroup, device: torch.device, block_size: int, feedback: Feedback | None
    ) -> None:
        self._pg = pg
        self._world, self._rank = pg.size(), pg.rank()
        self._is_async = device.type == "cpu"
        self._block_size = block_size
        self._feedback = feedback

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Not its subject."""
        raise NotImplementedError

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Fill each output with the sum over ranks of this rank's piece, divided by ``divisor``."""
        pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if o.numel()]
        finishes = [self._exchange(o, i, divisor) for o, i in pairs]

        def finish() -> None:
            for each in finishes:
                each()

        return finish

    def _exchange(self, output: Tensor, source: Tensor, divisor: float) -> Finish:
        blocks = Blocks(output.numel(), self._block_size)
        rows = source.view(self._world, -1).float()
        rows = rows.clone() if rows.data_ptr() == source.data_ptr() else rows
        key = (int(output.storage_offset()) * output.itemsize, blocks.numel)
        if self._feedback is not None:
            self._feedback.add_to(key, rows)
        messages = blocks.encode(rows)
        own = rows[self._rank].clone()
        if self._feedback is not None:
            sent = blocks.decode(messages)
            sent[self._rank] = own
            self._feedback.keep(key, rows, sent)
        landing = torch.empty_like(messages)
        work = dist.all_to_all_single(landing, messages, group=self._pg, async_op=self._is_async)

        def finish() -> None:
            waiting_for([work])()
            received = blocks.decode(landing)
            received[self._rank] = own
            output.copy_(received.sum(dim=0).div_(divisor))

        return finish


def quantized_all_reduce(
    pg: dist.ProcessGroup,
    device: torch.device,
    block_size: int,
    feedback: Feedback | None,
    tensors: Sequence[Tensor],
    is_async: bool,
) -> Finish:
    """Sum each of ``tensors`` over the ranks of ``pg``, in place: an exchange, and a gather of the sums.

    All ranks end with the same bits: those of the messages of the second part.
    """
    exchange = QuantizedExchange(pg, device, block_size, feedback)
    for index, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        _all_reduce(exchange, pg, block_size, feedback, tensor, index)
    return nothing


def _all_reduce(
    exchange: QuantizedExchange,
    pg: dist.ProcessGroup,
    block_size: int,
    feedback: Feedback | None,
    tensor: Tensor,
    index: int,
) -> None:
    world, numel = pg.size(), tensor.numel()
    share = -(-numel // world)
    padded = tensor.new_zeros(world * share)
    padded[:numel].copy_(tensor.view(-1))
    room = torch.empty(index + share, dtype=torch.float32, device=tensor.device)
    total = room[index:]  # its place tells the tensors apart
    exchange.reduce_scatter([total], [padded], 1.0)()
    blocks = Blocks(share, block_size)
    rows = total.view(1, -1).clone()
    if feedback is not None:
        feedback.add_to((-1, index, share), rows)
    message = blocks.encode(rows)
    if feedback is not None:
        feedback.keep((-1, index, share), rows, blocks.decode(message))
    gathered = message.new_empty(world, blocks.message_bytes)
    waiting_for([compat.all_gather(pg, gathered.view(-1), message.view(-1), False)])()
    tensor.view(-1).copy_(blocks.decode(gathered).flatten()[:numel])


class Int8Gather(Gather):
    """An all-gather that sends floating-point parameters as int8. All of them are packed.

    Each rank, the one that holds them too, computes with what the messages say.
    """

    def __init__(self, comm: Communicator, layout: Layout, gathered: GatheredBuffer, block_size: int) -> None:
        super().__init__(comm, layout, gathered)
        self._codecs = [
            _RunCodec(run.start - layout.packed_start, run.end - layout.packed_start, run.dtype, block_size)
            for run in layout.packed_runs
            if run.end > run.start
        ]
        self._message_bytes = sum(codec.message_bytes for codec in self._codecs)

    def start(self, lane: Lane, inputs: Sequence[Tensor]) -> Finish:
        """Fill the gathered buffer from ``inputs``, as ``cut`` makes them; returns what waits."""
        device = self._gathered.bytes.device
        message = torch.empty(self._message_bytes, dtype=torch.uint8, device=device)
        landing = torch.empty(self._world * self._message_bytes, dtype=torch.uint8, device=device)
        at = 0
        for codec in self._codecs:
            codec.encode(inputs[0], message[at : at + codec.message_bytes])
            at += codec.message_bytes
        wait = self._comm.all_gather([landing], [message])
        return partial(self._finish, wait, landing, lane)

    def _finish(self, wait: Finish, landing: Tensor, lane: Lane) -> None:
        wait()
        packed_bytes = self._layout.packed_bytes
        staging = lane.borrow(self._world * packed_bytes, landing.device)
        rows = staging.view(self._world, packed_bytes)
        messages, at = landing.view(self._world, -1), 0
        for codec in self._codecs:
            codec.decode(messages[:, at : at + codec.message_bytes], rows)
            at += codec.message_bytes
        self._unpack(rows)
        lane.give_back(staging)


class _RunCodec:
    """A stretch of the shard buffer of one dtype: quantised, or as it is where it is of integers."""

    def __init__(self, start: int, end: int, dtype: object, block_size: int) -> None:
        assert isinstance(dtype, torch.dtype)
        self._start, self._end, self._dtype = start, end, dtype
        self._blocks: Blocks | None = None
        self.message_bytes = -(-(end - start) // 4) * 4
        if dtype.is_floating_point and dtype.itemsize > 1:
            self._blocks = Blocks((end - start) // dtype.itemsize, block_size)
            self.message_bytes = self._blocks.message_bytes

    def encode(self, send: Tensor, message: Tensor) -> None:
        raw = send[self._start : self._end]
        if self._blocks is None:
            message[: raw.numel()].copy_(raw)
        else:
            message.copy_(self._blocks.encode(raw.view(self._dtype).float().view(1, -1)).view(-1))

    def decode(self, messages: Tensor, rows: Tensor) -> None:
        target = rows[:, self._start : self._end]
        if self._blocks is None:
            target.copy_(messages[:, : self._end - self._start])
        else:
            target.view(self._dtype).copy_(self._blocks.decode(messages))
