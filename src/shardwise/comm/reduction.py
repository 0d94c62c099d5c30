"""The gradients of one bucket on their way: summed over the ranks that share it, then over replicas.

Large gradients leave as soon as they are there, and are freed as soon as they have been summed.

The stages follow each other on two lanes. On a device both are queued at once. On the host the second
begins when the first has been waited for, which `advance` does: while the reduction of one group goes
over the replicas, that of the next goes over the shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardwise.comm.buffers import buffer_for, cast_buffer, typed_stretch
from shardwise.comm.gradient_sums import AllReduce
from shardwise.comm.reduce_scatter import Part, Reduce
from shardwise.comm.streams import Finish, Lanes, Ticket
from shardwise.layout.slots import Layout

Hook = Callable[[Tensor], None]


@dataclass(frozen=True)
class Destination:
    """Where reduced gradients go: laid out how, on which device, in pinned memory or not.

    ``lend`` gives memory for them; None: whatever has been summed into serves.
    """

    layout: Layout
    device: torch.device
    is_pinned: bool = False
    lend: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Replicas:
    """What is done with the sum over the shard axis.

    ``summed``: indices of the parameters that may have gradients on some rank. ``sum_up`` sums over replicas,
    in place; None where there are none, or not now. ``earlier``: sums of earlier backwards that have not been
    summed over replicas yet. ``agree`` lets ranks have the same bits of what several of them keep.
    """

    summed: frozenset[int] = frozenset()
    sum_up: AllReduce | None = None
    earlier: Tensor | None = None
    hook: Hook | None = None
    agree: Callable[[Tensor], None] | None = None

    @property
    def has_work(self) -> bool:
        """False if the sum over the shard axis is the result."""
        return not (self.sum_up is self.earlier is self.hook is self.agree is None)


NO_REPLICAS = Replicas()


class Shipment:
    """Full gradients that are being summed. They must stay as they are until ``release``."""

    def __init__(self, gradients: Sequence[Tensor | None], num_bytes: float, ticket: Ticket) -> None:
        self.gradients: Sequence[Tensor | None] = gradients
        self.num_bytes = num_bytes  # that are free once it is released
        self.ticket = ticket

    def release(self) -> None:
        """Let go of the gradients, as soon as they have been summed."""
        self.ticket.wait()
        self.let_go()

    def let_go(self) -> None:
        """They have been summed."""
        self.gradients = ()
        self.num_bytes = 0


class Reduction:
    """The gradients of one bucket on their way, sent in one or several parts, and closed after the last.

    ``allocate`` makes the memory for this rank's sums, with zeros wherever none will be written. It is called
    on the stream that reduces: what the optimizer reads is given back to that stream's memory, which is
    allocated from in later reductions only, and those come after the optimizer. The computing stream may be
    far ahead of an optimizer that runs on a stream of its own. ``is_filled``: every parameter will have a
    gradient.
    """

    def __init__(
        self,
        reduce: Reduce,
        layout: Layout,
        divisor: float,
        lanes: Lanes,
        allocate: Callable[[], Tensor],
        *,
        is_filled: bool,
    ) -> None:
        self._reduce = reduce
        self._layout = layout
        self._divisor = divisor
        self._lanes = lanes
        self._allocate = allocate
        self.output: Tensor  # made when the first part is sent
        self.shipments: list[Shipment] = []
        self._is_filled = is_filled
        self.present = [is_filled] * len(layout.slots)
        """Of which parameters gradients were sent, or will be."""
        self._ticket: Ticket | None = None  # of what follows the sums
        self._scratch: list[Tensor] = []  # freed when the computation has waited, never before
        self._is_advanced = self._is_closed = self._needs_move = False
        self.lands_on_host = False
        """Whether the result is brought from a device to the host: waiting for it holds up the host."""

    def send(self, part: Part, gradients: Sequence[Tensor | None]) -> Shipment:
        """Begin to sum the gradients in ``part``; ``gradients`` has a place for every parameter."""
        lane = self._lanes.reduce
        lane.follow_compute()
        if not self._is_filled:
            for index in part.indices:
                self.present[index] = self.present[index] or gradients[index] is not None
        num_bytes = part.num_bytes * self._reduce.room_to_reduce
        shipment = Shipment(gradients, num_bytes, lane.submit(partial(self._start, part, gradients)))
        self.shipments.append(shipment)
        return shipment

    def _start(self, part: Part, gradients: Sequence[Tensor | None]) -> Finish:
        if not self.shipments:
            self.output = self._allocate()
        return self._reduce.start(self._lanes.reduce, part, gradients, self.output, self._divisor)

    def close(self, replicas: Replicas, destination: Destination) -> None:
        """All that there is to send has been sent; say what becomes of the sums."""
        self._replicas = replicas
        self._destination = destination
        self._is_closed = True
        self.lands_on_host = destination.device != self.output.device
        self._needs_move = destination.layout is not self._layout or self.lands_on_host
        if self._lanes.are_streams:
            self.advance()

    def advance(self) -> None:
        """Begin what follows the sum over the shard axis."""
        if self._is_advanced:
            return
        self._is_advanced = True
        if self._replicas.has_work or self._needs_move:
            for shipment in self.shipments:
                self._lanes.replicate.follow(self._lanes.reduce, shipment.ticket)
            self._ticket = self._lanes.replicate.submit(self._start_replicas)

    def release(self) -> None:
        """Let go of the gradients, and of what the device has worked with, as soon as it has ended."""
        self.advance()
        if self._ticket is not None:  # it ends after them
            self._ticket.wait()
            for shipment in self.shipments:
                shipment.let_go()
        else:
            self._release_shipments()
        self._scratch.clear()

    def drop(self) -> None:
        """Wait for what was begun; nothing comes of it. What was closed goes to the replicas, who wait."""
        if self._is_closed:
            self.finish()
        else:
            self._release_shipments()

    def _release_shipments(self) -> None:
        for shipment in self.shipments:
            shipment.release()

    def finish(self) -> None:
        """Wait until the result is in ``output``, laid out as the destination says."""
        self.release()
        if self.lands_on_host and self._ticket is not None:
            self._ticket.land()

    def _start_replicas(self) -> Finish:
        replicas = self._replicas
        parts = self._parts(self.output)
        if replicas.earlier is not None:
            for part, earlier in zip(parts, self._parts(replicas.earlier), strict=True):
                part.add_(earlier)
        wait: Finish | None = None
        if replicas.sum_up is not None:
            wait = replicas.sum_up(parts, not self._lanes.are_streams)

        def finish() -> None:
            if wait is not None:
                wait()
            if replicas.agree is not None:
                replicas.agree(self.output)
            if replicas.hook is not None:
                for part in parts:
                    replicas.hook(part)
            if self._needs_move:
                self._move()

        return finish

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        """What gradients may be in, by dtype."""
        return [
            typed_stretch(buffer, run.start, run.end, run.dtype)
            for run in self._layout.runs
            if run.end > run.start
            and isinstance(run.dtype, torch.dtype)
            and not self._replicas.summed.isdisjoint(run.slots)
        ]

    def _move(self) -> None:
        """Cast to the dtype of ``.grad``, where the sums are, then bring it to where the shards are."""
        target, source = self._destination, self.output
        if target.layout is not self._layout:
            if target.lend is not None:
                cast = target.lend()
            else:
                cast = buffer_for(target.layout, source.device, is_filled=True)
            cast_buffer(source, self._layout, cast, target.layout)
            self._scratch.append(source)
            source = cast
        if target.device != source.device:
            landed = torch.empty(
                source.numel(), dtype=torch.uint8, device=target.device, pin_memory=target.is_pinned
            )
            landed.copy_(source, non_blocking=target.is_pinned)
            self._scratch.append(source)
            source = landed
        self.output = source
