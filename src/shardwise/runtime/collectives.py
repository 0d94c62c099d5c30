"""All-gather and reduce-scatter of a layout.

Two subjects, in two halves of the file. A *communicator* moves lists of equal-sized pieces between
the ranks of one process group, as its back end does it best. *Gather* and *reduce* know the layout:
which pieces travel alone from where they lie to where they belong, and which small ones are packed
together first.

Everything here is issued at once and finished later (see streams.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.runtime import compat
from shardwise.runtime.buffers import GatheredBuffer, dtype_of, typed_stretch
from shardwise.runtime.layout import ALIGNMENT, Layout, Run, Slot
from shardwise.runtime.streams import Finish, Lane, Scratch, nothing, waiting_for


class Memory(Protocol):
    """Lends buffers of bytes."""

    def borrow(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of so many bytes or more, of undefined contents, to hold numbers of ``dtype``."""
        ...

    def give_back(self, scratch: Scratch) -> None:
        """End of use."""
        ...


class Communicator(Protocol):
    """Moves pieces between the ranks of a process group.

    ``packing_limit_bytes``: chunks from this size on are worth a collective of their own.
    ``memory``: where packed pieces are put together, if not in that of the lane.
    ``packs_everything``: no parameter travels alone, however large.
    ``sums_alike``: ranks that get the same sum get the same bits; else the order of adding up may differ.
    ``channel``: a number that sets this bucket's messages apart from those of others, if there are any.
    ``smallest_part_bytes``: gradients from this size on are worth a reduction of their own, as soon as they
    are there; infinite where one call has to reduce them all.
    ``room_to_reduce``: the memory that a reduction holds until it is waited for, in units of its inputs.
    All tensors are contiguous and 1D; ``outputs`` of a gather and ``inputs`` of a reduction hold
    ``world`` pieces of equal size, piece r for or from rank r. Each call returns the function that
    waits for it.
    """

    packing_limit_bytes: int
    packs_everything: bool
    sums_alike: bool
    channel: int
    smallest_part_bytes: float
    room_to_reduce: float
    memory: Any  # Memory | None; a Protocol's variable is invariant

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
    """Bring ``own`` of each rank of ``pg`` into ``pieces`` of the one at ``dst``; others pass None."""
    if own.device.type != "cpu" or compat.backend_name(pg, own.device) != "gloo":
        everywhere = None if pieces is None else list(pieces)
        return waiting_for([dist.gather(own, everywhere, group=pg, group_dst=dst, async_op=True)])
    # gloo's own gather receives into one buffer more.
    if pieces is None:
        return waiting_for([dist.isend(own, group=pg, group_dst=dst)])
    others = [(rank, piece) for rank, piece in enumerate(pieces) if rank != dst]
    works = [dist.irecv(piece, group=pg, group_src=rank) for rank, piece in others]
    pieces[dst].copy_(own)
    return waiting_for(works)


def divided_before(inputs: Sequence[Tensor], divisor: float) -> tuple[Sequence[Tensor], float]:
    """Inputs of a sum over ranks, and by how much they are divided already.

    A sum of float16 numbers leaves their range soon: those are divided by the root of ``divisor`` before
    it, and by the rest after it.
    """
    if divisor <= 1 or not any(source.dtype is torch.float16 for source in inputs):
        return inputs, 1.0
    before = 2.0 ** math.ceil(math.log2(divisor) / 2)
    return [source / before for source in inputs], before


def make_communicator(pg: dist.ProcessGroup | None, device: torch.device) -> Communicator:
    """The communicator that serves ``pg`` best; None is a rank alone."""
    if pg is None or pg.size() == 1:
        return SingleRank()
    if device.type == "cpu" and compat.backend_name(pg, device) == "gloo":
        return GlooExchange(pg)
    return BackendCollectives(pg, device)


class SingleRank:
    """A world of one: gathered and sharded are the same bytes."""

    packing_limit_bytes = 0
    packs_everything = False
    sums_alike = True
    channel = 0
    smallest_part_bytes = float(1 << 20)
    room_to_reduce = 1.0
    memory: Any = None

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Nothing to move: the outputs are the inputs."""
        return nothing

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """The gradient of the only rank, divided."""
        for output, source in zip(outputs, inputs, strict=True):
            torch.div(source, divisor, out=output)
        return nothing


class BackendCollectives:
    """The back end's own collectives, several as one call where it can.

    On a device they are queued on the current stream; on the host they run beside it.
    """

    # NCCL is slow with many small collectives; on NVLink a copy of 256 KiB costs about as much as
    # the launch of one more.
    packing_limit_bytes = 256 * 1024
    packs_everything = False
    sums_alike = False
    channel = 0
    # One more launch, for what takes the wire longer than that.
    smallest_part_bytes = float(4 << 20)
    room_to_reduce = 1.0
    memory: Any = None

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        self._pg = pg
        self._world = pg.size()
        self._is_async = device.type == "cpu"
        self._can_coalesce = True
        # The fake back end moves nothing, and stands for one that averages.
        self._averages = compat.backend_name(pg, device) in ("nccl", "fake")
        self.force_sum = False

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """One coalesced call, or one call an output."""
        if len(outputs) == 1:
            return waiting_for([compat.all_gather(self._pg, outputs[0], inputs[0], self._is_async)])
        works = self._coalesced(compat.all_gather_coalesced, outputs, inputs)
        if works is None:
            works = [
                compat.all_gather(self._pg, output, source, self._is_async)
                for output, source in zip(outputs, inputs, strict=True)
            ]
        return waiting_for(works)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Sum and divide, in the back end where it averages over exactly this world."""
        averages = self._averages and not self.force_sum and divisor == self._world
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        if averages and len(outputs) == 1:
            return waiting_for([compat.reduce_scatter(self._pg, outputs[0], inputs[0], op, self._is_async)])
        works: list[Any] = []
        inputs, before = (inputs, 1.0) if averages else divided_before(inputs, divisor)
        for dtype in dict.fromkeys(output.dtype for output in outputs):
            pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if o.dtype == dtype]
            outs, ins = [o for o, _ in pairs], [i for _, i in pairs]
            issued = self._coalesced(compat.reduce_scatter_coalesced, outs, ins, op)
            works += issued or [compat.reduce_scatter(self._pg, o, i, op, self._is_async) for o, i in pairs]

        def finish() -> None:
            waiting_for(works)()
            if outputs and not averages and divisor != before:
                torch._foreach_div_(list(outputs), divisor / before)

        return finish

    def _coalesced(self, call: Any, outputs: Any, inputs: Any, *more: Any) -> list[Any] | None:
        """One call for all pairs; None where there is only one or the back end cannot."""
        if len(outputs) < 2 or not self._can_coalesce:
            return None
        try:
            return [call(self._pg, outputs, inputs, *more, self._is_async)]
        except (NotImplementedError, AttributeError):
            self._can_coalesce = False
        except RuntimeError as error:
            # The refusal of c10d's base class. It comes before anything has been sent.
            if "does not support" not in str(error) and "not implemented" not in str(error):
                raise
            self._can_coalesce = False
        return None


class GlooExchange:
    """Direct exchange between all pairs of ranks, over gloo's point-to-point calls.

    gloo's own collectives pass the data through buffers of their own, and its reduce-scatter sends
    twice the bytes. Here each rank sends its piece from where it lies to where it belongs, (world -
    1) / world of the bytes each way, which is the least possible; the transfers run on gloo's own
    thread, beside the computation. Measured on 50 MB in 10 parameters, ms: 2 ranks 12 against 40
    to 57 for gloo's all-gather, 4 ranks 28 against 76 to 126.

    A reduction is such an exchange and a sum over the pieces received, in order of ranks.
    """

    packing_limit_bytes = 64 * 1024
    packs_everything = False
    sums_alike = True
    channel = 0
    # What leaves early is sent by the thread that computes, and waited for more often: with parts of 4 MB a
    # step took a tenth longer. Larger groups are worth it for their memory.
    smallest_part_bytes = float(16 << 20)
    memory: Any = None
    # Messages with one tag between two ranks are matched in the order of their calls. Each parameter
    # has two tags of its own, by its bucket's channel and its place in the shard buffer, so that ranks
    # which disagree on what to exchange wait for each other instead of adding up what does not belong
    # together. Tags keep clear of the caller's own messages.
    _first_tag = 0x5A000000
    _num_tags = 1 << 20
    _channels_apart = 10007  # a prime, lest channels and places add up to the same tag

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg
        self._world = pg.size()
        self._rank = pg.rank()
        self.room_to_reduce = 1.0 + (self._world - 1) / self._world
        self.channel = 0
        # Starting after itself, each rank meets the others in another order: nobody is swamped.
        self._others = [(self._rank + i) % self._world for i in range(1, self._world)]

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Finish:
        """Each rank sends its piece to every other one and puts its own in place."""
        works: list[Any] = []
        own: list[tuple[Tensor, Tensor]] = []
        for output, source in zip(outputs, inputs, strict=True):
            pieces = output.view(self._world, -1)
            works += self._swap([(pieces[rank], source) for rank in self._others], source, 0)
            own.append((pieces[self._rank], source))
        self._place_own(own)
        return partial(self._wait_for, works)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Each rank sends every other one its piece, and sums what it receives."""
        received: list[Tensor] = []
        works: list[Any] = []
        for output, source in zip(outputs, inputs, strict=True):
            pieces = source.view(self._world, -1)
            landing = pieces.new_empty(self._world - 1, pieces.shape[1])
            pairs = [(landing[rank - (rank > self._rank)], pieces[rank]) for rank in self._others]
            works += self._swap(pairs, output, 1)
            received.append(landing)

        def finish() -> None:
            self._wait_for(works)
            for output, source, landing in zip(outputs, inputs, received, strict=True):
                self._sum(output, source.view(self._world, -1), landing, divisor)

        return finish

    def _place_own(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """The part of an all-gather that stays on this rank, which every back end has to copy too."""
        for piece, source in pairs:
            piece.copy_(source)

    def _wait_for(self, works: list[Any]) -> None:
        """Wait for exchanges; an error says which rank the failed one was with."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            member = self._others[works.index(work) % len(self._others)]
            error.peer = compat.ranks_of(self._pg)[member]  # type: ignore[attr-defined]
            raise

    def _swap(self, pairs: list[tuple[Tensor, Tensor]], in_shard: Tensor, kind: int) -> list[Any]:
        """Receive into and send from each (landing, source), one pair a rank of ``_others``."""
        place = in_shard.storage_offset() * in_shard.itemsize // ALIGNMENT
        channel = 2 * self.channel + kind
        tag = self._first_tag + (channel * self._channels_apart + place) % self._num_tags
        receives = [
            self._pg.recv([landing], rank, tag)
            for (landing, _), rank in zip(pairs, self._others, strict=True)
        ]
        sends = [
            self._pg.send([source], rank, tag) for (_, source), rank in zip(pairs, self._others, strict=True)
        ]
        return receives + sends

    def _sum(self, output: Tensor, own: Tensor, landing: Tensor, divisor: float) -> None:
        """Add the pieces in order of ranks, so that the result does not depend on who computes it."""
        pieces = [*landing[: self._rank], own[self._rank], *landing[self._rank :]]
        if output.dtype in (torch.bfloat16, torch.float16):  # round once, not once a rank
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


class _Staging(NamedTuple):
    """A buffer that a packed gather fills: as one, by rank, what is not strided of that, by stretches."""

    flat: Tensor
    rows: Tensor
    packed: Tensor
    stretches: list[Tensor]


class _Stretch(NamedTuple):
    """``length`` packed parameters of one size, side by side.

    Of each rank ``num_bytes``, ``pitch`` bytes apart from ``start`` on in the rank's row, for slots
    ``slot_pitch`` bytes apart from ``slot_start`` on.
    """

    length: int
    num_bytes: int
    pitch: int
    start: int
    slot_pitch: int
    slot_start: int

    def takes(self, slot: Slot, start: int) -> bool:
        """True if ``slot``, at ``start`` in the row, is one more of them."""
        sizes = (slot.chunk_bytes, slot.padded_bytes)
        slot_pitch = self.slot_pitch if self.length > 1 else slot.slot_offset - self.slot_start
        return (*sizes, start, slot.slot_offset) == (
            self.num_bytes,
            self.pitch,
            self.start + self.length * self.pitch,
            self.slot_start + self.length * slot_pitch,
        )


def _stretches(layout: Layout) -> list[_Stretch]:
    found: list[_Stretch] = []
    for slot in [layout.slots[index] for index in layout.packed]:
        start = slot.shard_offset - layout.packed_start
        if not slot.chunk_bytes:
            continue
        if found and found[-1].takes(slot, start):
            last = found[-1]
            slot_pitch = (slot.slot_offset - last.slot_start) // last.length
            found[-1] = last._replace(length=last.length + 1, slot_pitch=slot_pitch)
        else:
            found.append(_Stretch(1, slot.chunk_bytes, slot.padded_bytes, start, 0, slot.slot_offset))
    return found


class Gather:
    """The all-gather of one bucket, planned once and issued many times."""

    def __init__(self, comm: Communicator, layout: Layout, gathered: GatheredBuffer) -> None:
        self._comm = comm
        self._gathered = gathered
        self._layout = layout
        self._world = layout.world
        dtypes = {run.dtype for run in layout.runs}
        self._dtype: Any = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._outputs = [gathered.slot(layout.slots[i]) for i in layout.direct]
        if layout.packed_bytes:
            self._plan_unpacking(layout, gathered)

    def start(self, lane: Lane, inputs: Sequence[Tensor]) -> Finish:
        """Fill the gathered buffer from ``inputs``, as ``cut`` makes them; returns what waits."""
        packed_bytes = self._layout.packed_bytes
        if not packed_bytes:
            return self._comm.all_gather(self._outputs, inputs)
        memory: Memory = self._comm.memory or lane
        scratch = memory.borrow(self._world * packed_bytes, self._gathered.bytes.device, self._dtype)
        staging = scratch.view(self._staged, self._stage)
        wait = self._comm.all_gather([*self._outputs, staging.flat], inputs)

        def finish() -> None:
            wait()
            self._unpack(staging)
            memory.give_back(scratch)

        return finish

    def cut(self, send: Tensor) -> list[Tensor]:
        """The pieces that travel of ``send``, laid out as a shard buffer."""
        slots = [self._layout.slots[i] for i in self._layout.direct]
        pieces = [send[s.shard_offset : s.shard_offset + s.chunk_bytes] for s in slots]
        if self._layout.packed_bytes:
            pieces.append(send[self._layout.packed_start :])
        return pieces

    def _plan_unpacking(self, layout: Layout, gathered: GatheredBuffer) -> None:
        """Columns of the staging buffer and where they go; padding between them goes to scrap.

        On the host, one copy takes all parameters of one size; a device takes all in one kernel.
        """
        self._stretches = _stretches(layout) if gathered.bytes.device.type == "cpu" else []
        self._homes = [
            gathered.bytes.as_strided(
                (s.length, self._world, s.num_bytes), (s.slot_pitch, s.num_bytes, 1), s.slot_start
            )
            for s in self._stretches
        ]
        self._sizes: list[int] = []
        self._targets: list[Tensor] = []
        for index in layout.packed:
            slot = layout.slots[index]
            if slot.chunk_bytes:
                self._sizes.append(slot.chunk_bytes)
                self._targets.append(gathered.slot(slot).view(self._world, -1))
            if padding := slot.padded_bytes - slot.chunk_bytes:
                self._sizes.append(padding)
                self._targets.append(gathered.bytes.new_empty(self._world, padding))
        self._strided = [(layout.slots[i], gathered.full_tensor(layout.slots[i])) for i in layout.strided]
        self._staged = ("gather", self._world, layout.packed_bytes, tuple(self._sizes))

    def _stage(self, buffer: Tensor) -> "_Staging":
        """The views of a staging buffer that bytes come into and go out of."""
        flat = buffer[: self._world * self._layout.packed_bytes]
        rows = flat.view(self._world, -1)
        stretches = [
            flat.as_strided((s.length, self._world, s.num_bytes), (s.pitch, rows.stride(0), 1), s.start)
            for s in self._stretches
        ]
        return _Staging(flat, rows, rows[:, : sum(self._sizes)], stretches)

    def _unpack(self, staging: "_Staging") -> None:
        if self._sizes and staging.flat.device.type == "cpu":
            torch._foreach_copy_(self._homes, staging.stretches)
        elif self._sizes:  # one kernel
            torch.split_with_sizes_copy(staging.packed, self._sizes, dim=1, out=self._targets)
        for slot, full in self._strided:
            for piece, part in _strided_pieces(slot, staging.rows, self._layout.packed_start, full):
                part.copy_(piece)


@dataclass(frozen=True)
class Part:
    """Parameters whose gradients leave together: those at ``direct``, and those of ``packed_runs``."""

    direct: tuple[int, ...]
    packed_runs: Sequence[Run]
    num_bytes: int  # of their full gradients

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """All of them."""
        return self.direct + tuple(index for run in self.packed_runs for index in run.slots)


_MOST_PARTS = 4
"""Of a bucket. With three parts of a third each, two under way and one coming into being make a whole."""


class Reduce:
    """The reduce-scatter of one bucket's gradients, planned once and issued many times.

    Large gradients need not wait for each other: ``parts`` says which leave together. The last to be
    registered come first, which is the order in which most modules' backward has them; the packed ones
    come with the last part.
    """

    def __init__(
        self, comm: Communicator, layout: Layout, device: torch.device, part_bytes: float | None = None
    ) -> None:
        """``part_bytes``: the least that leaves by itself; None: what the communicator thinks worth it."""
        self._comm = comm
        self._layout = layout
        self._device = device
        least = comm.smallest_part_bytes
        if part_bytes is not None and least < math.inf:
            least = part_bytes
        self.parts = self._plan_parts(least)
        self._chunked = {run.start for run in layout.packed_runs if self._is_chunked(run)}

    def _is_chunked(self, run: Run) -> bool:
        """True if ``run`` packed is its gradients in chunks of rows, and nothing between them."""
        slots = [self._layout.slots[index] for index in run.slots]
        return all(
            slot.entry.dim == 0 and not slot.is_strided and not slot.is_replicated
            and slot.chunk_numel == slot.padded_numel > 0
            for slot in slots
        )  # fmt: skip

    @property
    def room_to_reduce(self) -> float:
        """The memory that a part holds until it is waited for, in units of its gradients."""
        return self._comm.room_to_reduce

    def _plan_parts(self, least: float) -> list[Part]:
        slots, packed_runs = self._layout.slots, self._layout.packed_runs
        least = max(least, sum(slot.slot_bytes for slot in slots) / _MOST_PARTS)
        parts: list[Part] = []
        direct: tuple[int, ...] = ()
        num_bytes = 0
        for index in reversed(self._layout.direct):
            direct = (*direct, index)
            num_bytes += slots[index].slot_bytes
            if num_bytes >= least:
                parts.append(Part(direct, (), num_bytes))
                direct, num_bytes = (), 0
        num_bytes += sum(slots[index].slot_bytes for run in packed_runs for index in run.slots)
        if direct or packed_runs or not parts:
            parts.append(Part(direct, packed_runs, num_bytes))
        return parts

    def start(
        self, lane: Lane, part: Part, gradients: Sequence[Tensor | None], output: Tensor, divisor: float
    ) -> Finish:
        """Issue the reduction of the gradients in ``part`` into ``output``; None: nothing for it on any rank.

        ``gradients`` are those of all parameters, ``output`` is laid out as the shard buffer. The gradients
        must stay untouched until the returned function has waited.
        """
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        borrowed: list[Scratch] = []
        memory: Memory = self._comm.memory or lane
        for index in part.direct:
            gradient = gradients[index]
            if gradient is not None:
                slot = self._layout.slots[index]
                dtype = dtype_of(slot)
                inputs.append(_whole_slot(gradient.to(dtype), slot).view(-1))
                end = slot.shard_offset + slot.chunk_bytes
                outputs.append(typed_stretch(output, slot.shard_offset, end, dtype))
        for run in part.packed_runs:
            if run.end > run.start and any(gradients[index] is not None for index in run.slots):
                assert isinstance(run.dtype, torch.dtype)
                num_bytes = self._layout.world * (run.end - run.start)
                scratch = memory.borrow(num_bytes, self._device, run.dtype)
                key = ("reduce", self._layout.world, num_bytes, run.dtype)
                flat, rows = scratch.view(key, partial(_typed_rows, key))
                self._pack(run, gradients, rows)
                borrowed.append(scratch)
                inputs.append(flat)
                outputs.append(typed_stretch(output, run.start, run.end, run.dtype))
        wait = self._comm.reduce_scatter(outputs, inputs, divisor)

        def finish() -> None:
            wait()
            for scratch in borrowed:
                memory.give_back(scratch)

        return finish

    def _pack(self, run: Run, gradients: Sequence[Tensor | None], target: Tensor) -> None:
        """Put small gradients side by side: row r of ``target`` is what rank r will keep."""
        world, dtype = self._layout.world, target.dtype
        if run.start in self._chunked:
            own: list[Any] = [gradients[index] for index in run.slots]
            if _are_dense_of(dtype, own):
                compat.chunk_cat(own, world, target)
                return
        columns: list[Tensor] = []
        packed_numel = 0
        for index in run.slots:
            slot, gradient = self._layout.slots[index], gradients[index]
            if slot.is_strided:
                continue
            if gradient is None:
                gradient = torch.zeros(slot.entry.shape, dtype=dtype, device=self._device)
            if slot.chunk_bytes:
                columns.append(_whole_slot(gradient, slot).view(world, -1))
            if padding := slot.padded_numel - slot.chunk_numel:
                columns.append(gradient.new_zeros(world, padding))
            packed_numel += slot.padded_numel
        if packed_numel == target.shape[1]:
            torch.cat(columns, dim=1, out=target)
            return
        if columns:
            torch.cat(columns, dim=1, out=target[:, :packed_numel])
        self._pack_strided(run, gradients, target, packed_numel)

    def _pack_strided(
        self, run: Run, gradients: Sequence[Tensor | None], target: Tensor, packed_numel: int
    ) -> None:
        target[:, packed_numel:].zero_()
        for index in run.slots:
            slot, gradient = self._layout.slots[index], gradients[index]
            if slot.is_strided and gradient is not None:
                for piece, part in _strided_pieces(slot, target.view(torch.uint8), run.start, gradient):
                    piece.copy_(part)


_dtype = attrgetter("dtype")


def _are_dense_of(dtype: torch.dtype, tensors: Sequence[Any]) -> bool:
    """True if all are there, contiguous and of ``dtype``; in passes that run in C."""
    there = all(map(is_not, tensors, repeat(None)))
    return there and set(map(_dtype, tensors)) == {dtype} and all(map(Tensor.is_contiguous, tensors))


def _typed_rows(key: tuple[str, int, int, torch.dtype], buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The first bytes of a buffer as numbers, flat and by rank."""
    _, world, num_bytes, dtype = key
    flat = buffer[:num_bytes].view(dtype)
    return flat, flat.view(world, -1)


def _whole_slot(gradient: Tensor, slot: Slot) -> Tensor:
    """``gradient`` as the world * chunk rows of its slot: itself where it is even and contiguous."""
    if slot.is_replicated:
        return gradient.expand(slot.world).contiguous()
    if slot.is_even:
        return gradient.contiguous()
    dim = slot.entry.dim
    shape = list(gradient.shape)
    shape[dim] = slot.world * slot.chunk_size
    padded = gradient.new_zeros(shape)
    padded.narrow(dim, 0, gradient.shape[dim]).copy_(gradient)
    return padded


def _strided_pieces(slot: Slot, rows: Tensor, origin: int, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank's part of a strided parameter, twice: in ``rows`` and in ``full``.

    Row r of ``rows`` holds what rank r keeps, in bytes, from the offset ``origin`` of the shard buffer on.
    """
    if not slot.chunk_bytes:
        return
    start = slot.shard_offset - origin
    dtype, dim = dtype_of(slot), slot.entry.dim
    columns = rows[:, start : start + slot.chunk_bytes].view(dtype)
    if slot.is_even:
        parts = full.unflatten(dim, (slot.world, slot.chunk_size)).movedim(dim, 0)
        yield columns.unflatten(1, slot.local_shape(0)), parts
        return
    for rank in range(slot.world):
        first, end = slot.index_range(rank)
        if end > first:
            shape = slot.local_shape(rank)
            yield columns[rank, : torch.Size(shape).numel()].view(shape), full.narrow(dim, first, end - first)
