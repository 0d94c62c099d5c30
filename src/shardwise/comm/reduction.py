"""The reduction of one bucket's gradients: reduce-scatter over the shard axis, then all-reduce over replicas.

Large gradients are reduced as soon as they are complete, and freed as soon as they are reduced.

The two stages run on two streams. On a device both are queued at once. On the host the second begins when the
first has been waited for, which ``advance`` does: while the reduction of one group goes over the replicas,
that of the next group goes over the shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.buffers import buffer_for, cast_buffer, typed_range
from shardwise.comm.reduce_scatter import GradientPart, ReduceScatter
from shardwise.comm.reducers import AllReduce
from shardwise.comm.streams import CommStreams, CommWork, Finish
from shardwise.layout.slots import Layout

Hook = Callable[[Tensor], None]
Agree = Callable[[Tensor, Sequence[int]], None]


@dataclass(frozen=True)
class Destination:
    """Where reduced gradients go: in which layout, on which device, in pinned memory or not."""

    layout: Layout
    device: torch.device
    is_pinned: bool = False


@dataclass(frozen=True)
class ReplicaReduction:
    """What happens to the sums over the shard axis.

    ``summed``: indices of the parameters that may have gradients on some rank. ``all_reduce`` sums over
    replicas in place; None where there are no replicas, or not now. ``earlier``: sums of earlier backwards
    that have yet to be summed over replicas. ``agree``: see ``Reduction``; here for sums over replicas.
    """

    summed: frozenset[int] = frozenset()
    all_reduce: AllReduce | None = None
    earlier: Tensor | None = None
    hook: Hook | None = None
    agree: Agree | None = None

    @property
    def has_work(self) -> bool:
        """False if the sum over the shard axis is the result."""
        is_plain = self.all_reduce is None and self.earlier is None and self.hook is None
        return not is_plain or self.agree is not None


NO_REPLICAS = ReplicaReduction()


class PartReduction:
    """The reduction of one part's unsharded gradients, which must stay untouched until ``release``."""

    def __init__(self, gradients: Sequence[Tensor | None], num_bytes: float, work: CommWork) -> None:
        self.gradients: Sequence[Tensor | None] = gradients
        self.num_bytes = num_bytes  # freed by ``release``
        self.work = work

    def release(self) -> None:
        """Wait for the reduction, and drop the gradients."""
        self.work.wait()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients, which are reduced by now."""
        self.gradients = ()
        self.num_bytes = 0


class Reduction:
    """The reduction of one bucket, sent in one or several parts, and closed after the last.

    ``allocate`` makes the memory for this rank's sums, with zeros wherever nothing will be written. It is
    called on the reducing stream: memory that the optimizer reads goes back to that stream's pool, from which
    only later reductions allocate, and those come after the optimizer. The computing stream may be far ahead
    of an optimizer that runs on a stream of its own. ``is_filled``: every parameter will have a gradient.
    ``agree`` gives scalars, which all ranks keep, the same bits on all of them: those among the parameters of
    these indices, in a buffer of sums. It communicates as the reduce-scatter does, and so on its stream.
    """

    def __init__(
        self,
        reduce: ReduceScatter,
        layout: Layout,
        divisor: float,
        streams: CommStreams,
        allocate: Callable[[], Tensor],
        *,
        is_filled: bool,
        agree: Agree | None = None,
    ) -> None:
        self._reduce = reduce
        self._agree = agree
        self._layout = layout
        self._divisor = divisor
        self._streams = streams
        self._allocate = allocate
        self.output: Tensor  # allocated when the first part is sent
        self.part_reductions: list[PartReduction] = []
        self._is_filled = is_filled
        self.present = [is_filled] * len(layout.slots)
        """For each parameter, whether a gradient was or will be sent."""
        self._replica_work: CommWork | None = None  # of the second stage
        self._scratch: list[Tensor] = []  # freed only once the computation has waited
        self._made_on: Sequence[Any] = ()  # the streams on which its gradients were made
        self._is_advanced = self._is_closed = self._needs_move = False
        self.arrives_on_host = False
        """Whether the result is copied from a device to the host: waiting for it blocks the host."""

    def send(
        self, part: GradientPart, gradients: Sequence[Tensor | None], made_on: Sequence[Any] = ()
    ) -> PartReduction:
        """Start the reduction of ``part``; ``gradients`` has one item for every parameter.

        ``made_on``: the streams on which they were made, if not all on the computing one.
        """
        stream = self._streams.reduce_scatter
        stream.wait_for_compute(users=made_on)
        self._made_on = made_on  # with those of the parts before
        if not self._is_filled:
            for index in part.indices:
                self.present[index] = self.present[index] or gradients[index] is not None
        num_bytes = part.num_bytes * self._reduce.reduce_memory_factor
        part_reduction = PartReduction(
            gradients, num_bytes, stream.submit(partial(self._start, part, gradients), made_on)
        )
        self.part_reductions.append(part_reduction)
        return part_reduction

    def _start(self, part: GradientPart, gradients: Sequence[Tensor | None]) -> Finish:
        if not self.part_reductions:
            self.output = self._allocate()
        finish = self._reduce.start(self._streams.reduce_scatter, part, gradients, self.output, self._divisor)
        if self._agree is None:
            return finish
        agree = partial(self._agree, self.output, part.indices)

        def finish_alike() -> None:
            finish()
            agree()

        return finish_alike

    def close(self, replicas: ReplicaReduction, destination: Destination) -> None:
        """All parts are sent; say what happens to the sums."""
        self._replicas = replicas
        self._destination = destination
        self._is_closed = True
        self.arrives_on_host = destination.device != self.output.device
        self._needs_move = destination.layout is not self._layout or self.arrives_on_host
        if self._streams.are_device_streams:
            self.advance()

    def advance(self) -> None:
        """Start the second stage."""
        if self._is_advanced:
            return
        self._is_advanced = True
        if self._replicas.has_work or self._needs_move:
            for part_reduction in self.part_reductions:
                self._streams.all_reduce.wait_for(self._streams.reduce_scatter, part_reduction.work)
            self._replica_work = self._streams.all_reduce.submit(self._start_replicas, self._made_on)

    def release_parts(self) -> None:
        """Wait for the sums over the shard axis, which the second stage works on; drop the gradients."""
        for part_reduction in self.part_reductions:
            part_reduction.release()

    def release(self) -> None:
        """Wait for both stages, then drop the gradients and the buffers that the device worked with."""
        self.advance()
        if self._replica_work is not None:  # which ends after the parts
            self._replica_work.wait()
            for part_reduction in self.part_reductions:
                part_reduction.drop_gradients()
        else:
            self.release_parts()
        self._scratch.clear()

    def drop(self) -> None:
        """Wait for what was started and discard it. A closed one finishes: the replicas wait for it."""
        if self._is_closed:
            self.finish()
        else:
            self.release_parts()

    @property
    def gradients(self) -> list[Tensor]:
        """The unsharded gradients that have not been dropped yet."""
        every = [gradient for part_reduction in self.part_reductions for gradient in part_reduction.gradients]
        return [gradient for gradient in every if gradient is not None]

    @property
    def sums(self) -> list[Tensor]:
        """The buffers of this rank's sums: the result, and those that it is cast or copied from."""
        return [*([self.output] if self.part_reductions else ()), *self._scratch]

    def finish(self) -> None:
        """Wait until ``output`` holds the result in the layout of the destination."""
        self.release()
        if self.arrives_on_host and self._replica_work is not None:
            self._replica_work.synchronize()

    def _start_replicas(self) -> Finish:
        replicas = self._replicas
        parts = self._segments_with_gradients(self.output)
        if replicas.earlier is not None:
            for part, earlier in zip(parts, self._segments_with_gradients(replicas.earlier), strict=True):
                part.add_(earlier)
        wait: Finish | None = None
        if replicas.all_reduce is not None:
            streams = self._streams
            wait = streams.all_reduce.issue(replicas.all_reduce, parts, not streams.are_device_streams)

        def finish() -> None:
            if wait is not None:
                wait()
            if replicas.agree is not None:
                replicas.agree(self.output, range(len(self._layout.slots)))
            if replicas.hook is not None:
                for part in parts:
                    replicas.hook(part)
            if self._needs_move:
                self._move()

        return finish

    def _segments_with_gradients(self, buffer: Tensor) -> list[Tensor]:
        """The segments that may hold gradients, typed."""
        return [
            typed_range(buffer, segment.start, segment.end, segment.dtype)
            for segment in self._layout.segments
            if segment.end > segment.start
            and isinstance(segment.dtype, torch.dtype)
            and not self._replicas.summed.isdisjoint(segment.slots)
        ]

    def _move(self) -> None:
        """Cast to the dtype of ``.grad`` on the device of the sums, then copy to the device of the shards."""
        target, source = self._destination, self.output
        if target.layout is not self._layout:
            cast = buffer_for(target.layout, source.device, is_filled=True)
            cast_buffer(source, self._layout, cast, target.layout)
            self._scratch.append(source)
            source = cast
        if target.device != source.device:
            on_target = torch.empty(
                source.numel(), dtype=torch.uint8, device=target.device, pin_memory=target.is_pinned
            )
            on_target.copy_(source, non_blocking=target.is_pinned)
            self._scratch.append(source)
            source = on_target
        self.output = source
