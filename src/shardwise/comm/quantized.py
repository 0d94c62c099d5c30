"""Communication in fewer bytes: in a smaller dtype, or as int8 with a scale per block.

    block       256 numbers of one parameter, the last perhaps fewer
    scale       largest magnitude in the block / 127, float32
    number      round(x / scale) in -127..127, one byte; error at most scale / 2
    message     | int8 of all numbers | padding to 4 bytes | scales |      1.016 bytes a number

Parameters of fewer than two dims are sent unchanged: they have few bytes, and small numbers often matter in
them. A block with an infinity or NaN has a scale that is not finite, and becomes NaN: overflow is not hidden
from loss scaling and clipping.

Source of block quantisation in sharded training: Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", 2023 (https://arxiv.org/abs/2306.10209); of error feedback: Seide et
al., "1-Bit Stochastic Gradient Descent", 2014.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.buffers import AllGather, UnshardedBuffer
from shardwise.comm.communicators import Communicator, factor_before_sum, make_communicator
from shardwise.comm.streams import CommStream, Finish, all_of, nothing, waiting_for
from shardwise.layout.chunks import ceil_div, chunk_size, round_up
from shardwise.layout.slots import BufferSegment, Layout
from shardwise.torch_compat import c10d

LEVELS = 127
_TINY = torch.finfo(torch.float32).tiny
"""Scales up to this have no reciprocal: such blocks count as zeros."""


class Blocks:
    """How rows of ``numel`` numbers are cut into blocks, and the layout of each row's message."""

    def __init__(self, numel: int, block_size: int) -> None:
        self.numel = numel
        self.block_size = block_size
        self.count = ceil_div(numel, block_size)
        self.scales_at = round_up(numel, 4)
        self.message_bytes = self.scales_at + 4 * self.count

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
        """``rows`` in the shape (n, count, block_size), padded with zeros if needed."""
        if self.numel % self.block_size:
            rows = torch.nn.functional.pad(rows, (0, self.count * self.block_size - self.numel))
        return rows.unflatten(1, (self.count, self.block_size))


class RowCodec:
    """Encodes rows of numbers of one dtype, with some ranges quantised.

    ``ranges``: (start, end, is quantised), in numbers, without gaps.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, bool]], dtype: torch.dtype, block_size: int) -> None:
        self.ranges = ranges
        self._dtype = dtype
        self._parts: list[tuple[int, int, Blocks | None, int]] = []
        at = 0
        for start, end, is_quantised in ranges:
            blocks = Blocks(end - start, block_size) if is_quantised else None
            self._parts.append((start, end, blocks, at))
            at += blocks.message_bytes if blocks else round_up((end - start) * dtype.itemsize, 16)
        self.message_bytes = round_up(at, 16)

    def encode(self, rows: Tensor) -> Tensor:
        """Messages of ``rows``, of shape (n, numbers), as bytes of shape (n, message_bytes)."""
        messages = torch.zeros(len(rows), self.message_bytes, dtype=torch.uint8, device=rows.device)
        for start, end, blocks, at in self._parts:
            part = rows[:, start:end]
            if blocks is None:
                raw = part.to(self._dtype).contiguous().view(torch.uint8)
                messages[:, at : at + raw.shape[1]].copy_(raw)
            else:
                messages[:, at : at + blocks.message_bytes].copy_(blocks.encode(part.float()))
        return messages

    def decode(self, messages: Tensor, rows: Tensor) -> Tensor:
        """Fill ``rows`` with the numbers of ``messages``, and return them."""
        for start, end, blocks, at in self._parts:
            if blocks is None:
                raw = messages[:, at : at + (end - start) * self._dtype.itemsize].contiguous()
                rows[:, start:end].copy_(raw.view(self._dtype))
            else:
                rows[:, start:end].copy_(blocks.decode(messages[:, at : at + blocks.message_bytes]))
        return rows


def numbers_to_quantize(layout: Layout, segment: BufferSegment) -> list[tuple[int, int, bool]]:
    """The ranges of a segment, and which are worth quantising: matrices, parameter by parameter."""
    size = segment.dtype.itemsize
    found: list[tuple[int, int, bool]] = []
    for index in segment.slots:
        slot = layout.slots[index]
        start = (slot.shard_offset - segment.start) // size
        end = start + slot.padded_bytes // size
        is_float = segment.dtype.is_floating_point and size > 1
        is_quantised = is_float and len(slot.shape) > 1
        if end == start:
            continue
        if found and not is_quantised and not found[-1][2]:
            start = found.pop()[0]
        found.append((start, end, is_quantised))
    return found


class QuantizedCollectives(Communicator):
    """Reductions in which each rank sends every other one its piece as int8, and sums the received ones.

    An all-to-all of messages; the rank's own piece is not rounded. With feedback, the quantisation error is
    added to the next gradient. It is stored in bfloat16, whose rounding is a 256th of the error.
    """

    packs_everything = True

    def __init__(
        self, pg: dist.ProcessGroup, device: torch.device, block_size: int, has_feedback: bool
    ) -> None:
        super().__init__(pg, is_async=device.type == "cpu")
        self._rank = pg.rank()
        self._block_size = block_size
        self._has_feedback = has_feedback
        self._left_out: dict[int, Tensor] = {}  # by the place of the quantised numbers
        self._codecs: dict[int, RowCodec] = {}  # by the start of the segment

    def plan_for(self, layout: Layout) -> None:
        """Plan for the segments of ``layout``, in which places stand for other parameters."""
        self._left_out.clear()
        self._codecs = {
            segment.start: RowCodec(numbers_to_quantize(layout, segment), torch.float32, self._block_size)
            for segment in layout.segments
            if segment.end > segment.start
        }

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Exchange each output's pieces."""
        return all_of(
            [
                self._exchange(output, source, divisor, self._codecs[_offset(output)], _offset(output))
                for output, source in zip(outputs, inputs, strict=True)
                if output.numel()
            ]
        )

    def all_reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Exchange pieces, then all-gather the sums in the same form.

        All ranks end with the same bits: those of the all-gathered messages. The back end sums numbers that
        are not quantised.
        """
        for tensor in tensors:
            start = _offset(tensor)
            ranges = self._codecs[start].ranges
            exact = [tensor[begin:end] for begin, end, is_quantised in ranges if not is_quantised]
            if exact:
                together = torch.cat(exact)
                dist.all_reduce(together, group=self._pg)
                for target, value in zip(exact, together.split([len(t) for t in exact]), strict=True):
                    target.copy_(value)
            for begin, end, is_quantised in ranges:
                if is_quantised:
                    self._sum(tensor[begin:end], start + begin * tensor.itemsize)
        return nothing

    def _exchange(
        self, output: Tensor, source: Tensor, divisor: float, codec: RowCodec, place: int
    ) -> Finish:
        """The sum for one output, with rows for ``codec``; ``place`` distinguishes it from others."""
        rows = source.view(self._world, -1).float()
        rows = rows.clone() if rows.data_ptr() == source.data_ptr() else rows
        messages = self._encode(rows, codec, place, self._rank)
        own = rows[self._rank].clone()
        incoming = torch.empty_like(messages)
        work = dist.all_to_all_single(incoming, messages, group=self._pg, async_op=self._is_async)

        def finish() -> None:
            waiting_for([work])()
            received = codec.decode(incoming, torch.empty_like(rows))
            received[self._rank] = own
            output.copy_(received.sum(dim=0).div_(divisor))

        return finish

    def _encode(self, rows: Tensor, codec: RowCodec, place: int, unsent: int | None = None) -> Tensor:
        """Messages of ``rows``, to which the last error is added in place.

        ``unsent``: the row that is used without rounding.
        """
        if place in self._left_out:
            for begin, end, is_quantised in codec.ranges:
                if is_quantised:
                    _add_error(rows[:, begin:end], self._left_out[place][:, begin:end])
        messages = codec.encode(rows)
        if self._has_feedback:
            lacking = rows - codec.decode(messages, torch.empty_like(rows))
            if unsent is not None:
                lacking[unsent] = 0
            # Infinities and NaNs leave no error.
            self._left_out[place] = lacking.nan_to_num_(0.0, 0.0, 0.0).to(torch.bfloat16)
        return messages

    def _sum(self, tensor: Tensor, place: int) -> None:
        share = chunk_size(tensor.numel(), self._world)
        padded = tensor.new_zeros(self._world * share)
        padded[: tensor.numel()].copy_(tensor)
        total = torch.empty(share, dtype=torch.float32, device=tensor.device)
        codec = RowCodec([(0, share, True)], torch.float32, self._block_size)
        self._exchange(total, padded, 1.0, codec, 2 * place)()
        message = self._encode(total.view(1, -1), codec, 2 * place + 1)
        gathered = message.new_empty(self._world, codec.message_bytes)
        waiting_for([c10d.all_gather(self._pg, gathered.view(-1), message.view(-1), False)])()
        sums = codec.decode(gathered, total.new_empty(self._world, share))
        tensor.copy_(sums.view(-1)[: tensor.numel()])


def _add_error(numbers: Tensor, error: Tensor) -> None:
    """Add the error of the gradient before.

    Not if it is larger than this whole gradient: then it is left over from a spike, whose step was probably
    skipped. If the gradient is zero, the error is all that there is to send. NaNs stay NaNs.
    """
    largest = _largest(numbers)
    is_fit = ~(_largest(error) > largest) | (largest == 0)
    numbers.add_(torch.where(is_fit, error, 0.0))


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude in each row, as a column."""
    return torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True)


def _offset(tensor: Tensor) -> int:
    """The start of ``tensor`` in its buffer, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


class LowPrecisionCollectives(Communicator):
    """Sums in ``dtype``, over shards and replicas. Sums of float16 are kept in range."""

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(pg)
        self._plain = make_communicator(pg, device)
        self._dtype = dtype
        self.smallest_part_bytes = self._plain.smallest_part_bytes
        self.reduce_memory_factor = self._plain.reduce_memory_factor + 1.0  # the casts, which are smaller

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Cast, sum, cast back, divide. For a sum in float16, numbers are divided before the cast."""
        before = factor_before_sum(self._dtype, divisor)
        sources = [(s if before == 1.0 else s / before).to(self._dtype) for s in inputs]
        results = [torch.empty_like(output, dtype=self._dtype) for output in outputs]
        self._plain.channel = self.channel
        wait = self._plain.reduce_scatter(results, sources, 1.0)

        def finish() -> None:
            wait()
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)
                if divisor != before:
                    output.div_(divisor / before)

        return finish

    def all_reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Cast, sum, cast back."""
        casts = [tensor.to(self._dtype) for tensor in tensors]
        wait = self._plain.all_reduce(casts)

        def finish() -> None:
            wait()
            for tensor, cast in zip(tensors, casts, strict=True):
                tensor.copy_(cast)

        return finish


class Int8AllGather(AllGather):
    """An all-gather that sends floating-point matrices as int8. All parameters are packed.

    Every rank computes with the rounded numbers, even the one that holds the shard.
    """

    def __init__(self, comm: Communicator, layout: Layout, buffer: UnshardedBuffer, block_size: int) -> None:
        super().__init__(comm, layout, buffer)
        self._segments: list[tuple[int, int, torch.dtype, RowCodec]] = []
        for segment in layout.packed_segments:
            if segment.end > segment.start:
                codec = RowCodec(numbers_to_quantize(layout, segment), segment.dtype, block_size)
                start = segment.start - layout.packed_start
                self._segments.append((start, segment.end - layout.packed_start, segment.dtype, codec))
        self._message_bytes = sum(codec.message_bytes for *_, codec in self._segments)

    def start(self, stream: CommStream, inputs: Sequence[Tensor]) -> Finish:
        """Fill the unsharded buffer from ``inputs``, made by ``cut``; return the function that waits."""
        self._buffer.allocate()
        messages = [
            codec.encode(inputs[0][start:end].view(dtype).view(1, -1)).view(-1)
            for start, end, dtype, codec in self._segments
        ]
        message = torch.cat(messages)
        received = message.new_empty(self._world * self._message_bytes)
        wait = self._comm.all_gather([received], [message])
        return partial(self._finish, wait, received, stream)

    def _finish(self, wait: Finish, received: Tensor, stream: CommStream) -> None:
        wait()
        packed_bytes = self._layout.packed_bytes
        scratch = stream.acquire(self._world * packed_bytes, received.device)
        staging = self._stage(scratch.bytes)
        messages, at = received.view(self._world, -1), 0
        for start, end, dtype, codec in self._segments:
            codec.decode(messages[:, at : at + codec.message_bytes], staging.rows[:, start:end].view(dtype))
            at += codec.message_bytes
        self._end(nothing, staging, stream, scratch)
