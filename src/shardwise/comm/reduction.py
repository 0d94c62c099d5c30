"""One reduction in flight: reduce-scatter over the shard axis, then all-reduce over replicas.

Large gradients are reduced as soon as they are complete, and freed as soon as they are reduced.

The two stages run on two streams. On a device both are queued at once. On the host, ``advance`` waits for the
first and begins the second: while one group is reduced over the replicas, the next is reduced over the
shards.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.buffers import ReusedBuffer, buffer_for, cast_buffer, strided_pieces, typed_range
from shardwise.comm.communicators import Communicator
from shardwise.comm.streams import (
    BufferPool,
    CommStream,
    CommStreams,
    CommWork,
    Finish,
    Scratch,
    nothing,
    wait_and_release,
)
from shardwise.layout.slots import BufferSegment, Layout, Slot
from shardwise.ranks.activity import Wait
from shardwise.torch_compat import tensor_impl

Hook = Callable[[Tensor], None]
Agree = Callable[[Tensor, Sequence[int]], None]

# --- the reduce-scatter of a layout ---------------------------------------------------------------


@dataclass(frozen=True)
class GradientPart:
    """Parameters whose gradients are reduced together: ``direct`` ones, and those of ``packed_segments``."""

    direct: tuple[int, ...]
    packed_segments: Sequence[BufferSegment]
    num_bytes: int  # of their full gradients

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The indices of all its parameters."""
        return self.direct + tuple(index for segment in self.packed_segments for index in segment.slots)


_REUSED_BYTES = 1 << 20
"""In host memory, a group's whole gradients of at least this size reuse the memory of earlier ones. A step of
a GPT of 100 million parameters then takes 0.9 of the time: page faults of new memory took the other 0.1."""

_MOST_PARTS = 4
"""The most parts of a bucket. Of three equal parts, two are in flight while one is computed."""


class ReduceScatter:
    """The reduce-scatter of one bucket's gradients, planned once and issued many times.

    Large gradients do not wait for each other: those in one of ``parts`` are reduced together. The parameters
    registered last come first, which is the order of most backwards; packed ones are in the last part.
    """

    def __init__(
        self, comm: Communicator, layout: Layout, device: torch.device, part_bytes: float | None = None
    ) -> None:
        """``part_bytes``: the smallest part; None: the default of the communicator."""
        self._comm = comm
        self.layout = layout
        self.is_alone = comm.is_alone
        self.device = device
        least = comm.smallest_part_bytes if part_bytes is None else part_bytes
        # A communicator that packs everything gets one call, even on a single rank, where all are direct.
        self.parts = self._plan_parts(math.inf if comm.packs_everything else least)
        self._chunked: set[int] = set()  # starts of segments that contain only chunks of rows and padding
        self._plain: set[int] = set()  # those of them without padding
        for segment in layout.packed_segments:
            slots = [layout.slots[index] for index in segment.slots]
            if all(s.dim == 0 and s.chunk_numel and not (s.is_strided or s.is_replicated) for s in slots):
                self._chunked.add(segment.start)
                if all(slot.padded_numel == slot.chunk_numel for slot in slots):
                    self._plain.add(segment.start)
        self._paddings: dict[tuple[torch.dtype, int], Tensor] = {}
        self.make_sums: Callable[[], Tensor] = partial(buffer_for, layout, device)
        """Allocates the memory for this rank's sums, laid out as the flat shard."""
        is_large = comm.is_alone and layout.shard_bytes >= _REUSED_BYTES
        if is_large and device.type == "cpu" and not layout.has_gaps:
            self.make_sums = ReusedBuffer(layout, device).take
        self.reduce_memory_factor = comm.reduce_memory_factor
        """The memory that a part holds until it is waited for, in units of its gradients."""

    def reuse_nothing(self) -> None:
        """Allocate new memory for the sums of each step, as on a device."""
        self.make_sums = partial(buffer_for, self.layout, self.device)

    def _padding(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Zeros behind each chunk of a parameter, one row per rank; made once."""
        found = self._paddings.get((dtype, numel))
        if found is None:
            with torch.inference_mode(False):
                found = torch.zeros(self.layout.world, numel, dtype=dtype, device=self.device)
            self._paddings[dtype, numel] = found
        return found

    def _plan_parts(self, least: float) -> list[GradientPart]:
        slots, packed_segments = self.layout.slots, self.layout.packed_segments
        least = max(least, sum(slot.slot_bytes for slot in slots) / _MOST_PARTS)
        parts: list[GradientPart] = []
        direct: tuple[int, ...] = ()
        num_bytes = 0
        for index in reversed(self.layout.direct):
            direct = (*direct, index)
            num_bytes += slots[index].slot_bytes
            if num_bytes >= least:
                parts.append(GradientPart(direct, (), num_bytes))
                direct, num_bytes = (), 0
        num_bytes += sum(slots[index].slot_bytes for segment in packed_segments for index in segment.slots)
        if direct or packed_segments or not parts:
            parts.append(GradientPart(direct, packed_segments, num_bytes))
        return parts

    def start(
        self,
        stream: CommStream,
        part: GradientPart,
        gradients: Sequence[Tensor | None],
        sums: Callable[[], Tensor],
        divisor: float,
    ) -> Finish:
        """Issue the reduction of ``part``; a gradient of None is None on all ranks.

        ``gradients`` has one item per parameter. ``sums`` returns the output, laid out as the flat shard.
        Gradients must stay untouched until the returned function has waited.
        """
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        borrowed: list[Scratch] = []
        pool: BufferPool = self._comm.pool or stream
        output = sums()
        for index in part.direct:
            gradient = gradients[index]
            if gradient is not None:
                slot = self.layout.slots[index]
                inputs.append(_whole_slot(gradient.to(slot.dtype), slot).view(-1))
                end = slot.shard_offset + slot.chunk_bytes
                outputs.append(typed_range(output, slot.shard_offset, end, slot.dtype))
        for segment in part.packed_segments:
            own = list(map(gradients.__getitem__, segment.slots))
            if segment.end > segment.start and not all(map(is_, own, repeat(None))):
                num_bytes = self.layout.world * (segment.end - segment.start)
                scratch = pool.acquire(num_bytes, self.device, segment.dtype)
                key = ("reduce", self.layout.world, num_bytes, segment.dtype)
                flat, rows = scratch.views.get(key) or scratch.make_view(key, partial(_typed_rows, key))
                self._pack(segment, own, rows)
                borrowed.append(scratch)
                inputs.append(flat)
                outputs.append(typed_range(output, segment.start, segment.end, segment.dtype))
        wait = self._comm.reduce_scatter(outputs, inputs, divisor)
        return partial(wait_and_release, wait, pool, borrowed) if borrowed else wait

    def _pack(self, segment: BufferSegment, own: Sequence[Tensor | None], target: Tensor) -> None:
        """Pack the small gradients ``own``: row r of ``target`` holds the shards of rank r."""
        world, dtype = self.layout.world, target.dtype
        found: Any = _dtype_if_dense(own) if segment.start in self._chunked else None
        is_chunked = found is dtype or (found, dtype) in _CAST_BY_CHUNK_CAT
        if is_chunked and segment.start in self._plain:
            tensor_impl.chunk_cat(own, 0, world, out=target)
            return
        columns: list[Any] = []
        packed_numel = 0
        for index, gradient in zip(segment.slots, own, strict=True):
            slot = self.layout.slots[index]
            if slot.is_strided:
                continue
            if is_chunked:
                columns.append(gradient)
            elif slot.chunk_bytes:
                if gradient is None:
                    gradient = torch.zeros(slot.shape, dtype=dtype, device=self.device)
                columns.append(_whole_slot(gradient, slot).view(world, -1))
            if padding := slot.padded_numel - slot.chunk_numel:
                columns.append(self._padding(found if is_chunked else dtype, padding))
            packed_numel += slot.padded_numel
        if is_chunked:
            tensor_impl.chunk_cat(columns, 0, world, out=target)
            return
        if columns:
            torch.cat(columns, dim=1, out=target[:, :packed_numel])
        if packed_numel < target.shape[1]:
            self._pack_strided(segment, own, target, packed_numel)

    def _pack_strided(
        self, segment: BufferSegment, own: Sequence[Tensor | None], target: Tensor, packed_numel: int
    ) -> None:
        target[:, packed_numel:].zero_()
        for index, gradient in zip(segment.slots, own, strict=True):
            slot = self.layout.slots[index]
            if slot.is_strided and gradient is not None:
                for piece, part in strided_pieces(slot, target.view(torch.uint8), segment.start, gradient):
                    piece.copy_(part)


_dtype = attrgetter("dtype")
_CAST_BY_CHUNK_CAT = {(torch.bfloat16, torch.float32)}
"""Gradients of the first dtype, reduced in the second, are cast by the kernel that packs them."""


def _dtype_if_dense(tensors: Sequence[Any]) -> Any:
    """The dtype of all ``tensors``; None if one is None or not contiguous, or they differ. In C loops."""
    if not all(map(is_not, tensors, repeat(None))) or not all(map(Tensor.is_contiguous, tensors)):
        return None
    dtypes = set(map(_dtype, tensors))
    return dtypes.pop() if len(dtypes) == 1 else None


def _typed_rows(key: tuple[str, int, int, torch.dtype], buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The first bytes of a buffer as numbers: flat, and by rank."""
    _, world, num_bytes, dtype = key
    flat = buffer[:num_bytes].view(dtype)
    return flat, flat.view(world, -1)


def _whole_slot(gradient: Tensor, slot: Slot) -> Tensor:
    """``gradient`` padded to the world * chunk rows of its slot; itself if it is even and contiguous."""
    if slot.is_replicated:
        return gradient.expand(slot.world).contiguous()
    if slot.is_even:
        return gradient.contiguous()
    dim = slot.dim
    shape = list(gradient.shape)
    shape[dim] = slot.world * slot.chunk_size
    padded = gradient.new_zeros(shape)
    padded.narrow(dim, 0, gradient.shape[dim]).copy_(gradient)
    return padded


# --- from the first part to the result ------------------------------------------------------------


@dataclass(frozen=True)
class SecondStage:
    """The processing of the sums over the shard axis, and the place of the result.

    ``layout``, ``device``, ``is_pinned``: of the result. ``summed``: indices of the parameters that may have
    gradients on some rank; None if the sums are only moved to the result. ``all_reduce`` sums over replicas
    in place; None if there are no replicas, or not now. ``earlier``: sums of earlier backwards that have yet
    to be summed over replicas. ``agree``: see ``Reduction``; here for sums over replicas.
    """

    layout: Layout
    device: torch.device
    is_pinned: bool = False
    summed: frozenset[int] | None = None
    all_reduce: Callable[[Sequence[Tensor]], Finish] | None = None
    earlier: Tensor | None = None
    hook: Hook | None = None
    agree: Agree | None = None


class Reduction:
    """The reduction of one bucket, sent in one or several parts, and closed after the last.

    ``is_filled``: every parameter will have a gradient. ``agree`` gives scalars, of which every rank has a
    copy, the same bits on all ranks: the scalars among the parameters of these indices, in a buffer of sums.
    It communicates like the reduce-scatter, and so on its stream. ``awaited``: the wait for this reduction
    (see ``ranks``).
    """

    def __init__(
        self,
        reduce: ReduceScatter,
        divisor: float,
        streams: CommStreams,
        *,
        is_filled: bool,
        agree: Agree | None = None,
        awaited: Wait | None = None,
    ) -> None:
        self._reduce = reduce
        self._agree = agree
        self._layout = reduce.layout
        self._divisor = divisor
        self._streams = streams
        self._awaited = awaited
        self.output: Tensor | None = None  # allocated when the first part is sent
        self._is_filled = is_filled
        self.present = [is_filled] * len(reduce.layout.slots)
        """Whether a gradient was or will be sent, for each parameter."""
        self._unreduced: deque[tuple[CommWork, Sequence[Tensor | None]]] = deque()  # parts not waited for
        self.held_bytes: deque[float] = deque()
        """The memory that ``release_part`` will free, for each of these parts."""
        self._last_event: Any = None  # on a device, behind the last part
        self._stage: SecondStage | None = None  # once it is closed
        self._stage_work: CommWork | None = None
        self._is_advanced = False
        self.arrives_on_host = False
        """Whether the result is copied from a device to the host: waiting for it blocks the host."""
        self._scratch: list[Tensor] = []  # freed only once the computation has waited
        self._made_on: Sequence[Any] = ()  # the streams on which its gradients were made

    # --- the first stage --------------------------------------------------------------------------

    def send(
        self, part: GradientPart, gradients: Sequence[Tensor | None], made_on: Sequence[Any] = ()
    ) -> None:
        """Start the reduction of ``part``; ``gradients``, one item per parameter, must stay untouched until
        it is released.

        ``made_on``: the streams on which they were made, if not all on the computing one.
        """
        stream = self._streams.reduce_scatter
        stream.wait_for_compute(users=made_on)
        self._made_on = made_on  # with those of earlier parts
        if not self._is_filled:
            for index in part.indices:
                self.present[index] = self.present[index] or gradients[index] is not None
        start: Callable[[], Finish] = partial(
            self._reduce.start, stream, part, gradients, self._sums, self._divisor
        )
        if self._agree is not None:
            start = partial(self._start_alike, start, self._agree, part.indices)
        work = stream.submit(start, made_on, self._awaited)
        self._last_event = work.end
        self._unreduced.append((work, gradients))
        self.held_bytes.append(part.num_bytes * self._reduce.reduce_memory_factor)

    def _sums(self) -> Tensor:
        """The memory for this rank's sums, allocated for the first part.

        On the reducing stream: memory that the optimizer reads goes back to that stream's pool, from which
        only later reductions allocate, and those come after the optimizer. The computing stream may be far
        ahead of an optimizer that runs on another stream.
        """
        if self.output is None:
            self.output = self._reduce.make_sums()
            if not self._is_filled and self._streams.are_device_streams:
                self.output.zero_()  # in the order of the stream; on the host, see close
        return self.output

    def _start_alike(self, start: Callable[[], Finish], agree: Agree, indices: Sequence[int]) -> Finish:
        finish = start()

        def finish_alike() -> None:
            finish()
            agree(self._sums(), indices)

        return finish_alike

    def release_part(self) -> None:
        """Wait for the oldest part in flight, and drop its gradients."""
        self._unreduced[0][0].wait()
        self._unreduced.popleft()
        self.held_bytes.popleft()

    def release_parts(self) -> None:
        """Wait for the sums over the shard axis, the input of the second stage; drop the gradients."""
        while self._unreduced:
            self.release_part()

    # --- the second stage -------------------------------------------------------------------------

    def close(self, stage: SecondStage) -> None:
        """All parts are sent; ``stage`` processes the sums."""
        self._stage = stage
        if not (all(self.present) or self._streams.are_device_streams):
            for slot, is_present in zip(self._layout.slots, self.present, strict=True):
                if not is_present:  # the next stage adds up whole segments
                    self._sums()[slot.shard_offset : slot.shard_offset + slot.padded_bytes].zero_()
        assert self.output is not None  # a part was sent
        self.arrives_on_host = stage.device != self.output.device
        if self._streams.are_device_streams or self._reduce.is_alone:
            self.advance()

    def advance(self) -> None:
        """Start the second stage."""
        if self._is_advanced:
            return
        self._is_advanced = True
        stage, sums = self._stage, self.output
        assert stage is not None
        assert sums is not None
        if stage.summed is not None or stage.layout is not self._layout or self.arrives_on_host:
            if self._streams.are_device_streams:
                self._streams.all_reduce.wait_for_compute(self._last_event)
            else:
                self.release_parts()
            start = partial(self._start_stage, stage, sums)
            self._stage_work = self._streams.all_reduce.submit(start, self._made_on)
            self._stage_work.awaited = self._awaited  # not given to submit, which counts reductions

    def _start_stage(self, stage: SecondStage, sums: Tensor) -> Finish:
        parts = self._summed_segments(stage, sums)
        if stage.earlier is not None:
            earlier = self._summed_segments(stage, stage.earlier)
            for part, before in zip(parts, earlier, strict=True):
                part.add_(before)
        wait = nothing if stage.all_reduce is None else stage.all_reduce(parts)

        def finish() -> None:
            wait()
            if stage.agree is not None:
                stage.agree(sums, range(len(self._layout.slots)))
            if stage.hook is not None:
                for part in parts:
                    stage.hook(part)
            self._move(stage, sums)

        return finish

    def _summed_segments(self, stage: SecondStage, buffer: Tensor) -> list[Tensor]:
        """The segments that may hold gradients, typed."""
        summed = stage.summed or frozenset()
        return [
            typed_range(buffer, segment.start, segment.end, segment.dtype)
            for segment in self._layout.segments
            if segment.end > segment.start and not summed.isdisjoint(segment.slots)
        ]

    def _move(self, stage: SecondStage, source: Tensor) -> None:
        """Cast to the dtype of ``.grad`` on the device of the sums, then copy to the device of the shards."""
        if stage.layout is not self._layout:
            cast = buffer_for(stage.layout, source.device)
            cast_buffer(source, self._layout, cast, stage.layout)
            self._scratch.append(source)
            source = cast
        if stage.device != source.device:
            there = torch.empty(
                source.numel(), dtype=torch.uint8, device=stage.device, pin_memory=stage.is_pinned
            )
            there.copy_(source, non_blocking=stage.is_pinned)
            self._scratch.append(source)
            source = there
        self.output = source

    # --- the end ----------------------------------------------------------------------------------

    def release(self) -> None:
        """Wait for both stages, then drop the gradients and the buffers that the device used."""
        if not self._is_advanced:
            self.advance()
        if self._stage_work is not None:  # which ends after the parts
            self._stage_work.wait()
            self._unreduced.clear()
            self.held_bytes.clear()
        else:
            self.release_parts()
        self._scratch.clear()

    def finish(self) -> Tensor:
        """Wait for the result; return it, in the layout of the second stage."""
        self.release()
        if self.arrives_on_host:
            assert self._stage_work is not None  # it copies the result
            self._stage_work.synchronize()
        assert self.output is not None
        return self.output

    def drop(self) -> None:
        """Wait for the reduction and discard it. A closed one finishes: the replicas wait for it."""
        if self._stage is not None:
            self.finish()
        else:
            self.release_parts()

    @property
    def gradients(self) -> list[Tensor]:
        """The unsharded gradients that have not been dropped yet."""
        return [gradient for _, part in self._unreduced for gradient in part if gradient is not None]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of this rank's sums: the result, and those it is cast or copied from."""
        return [*([] if self.output is None else [self.output]), *self._scratch]
