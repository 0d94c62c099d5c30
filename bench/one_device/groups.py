"""Process groups for one device: ranks exchange by copies on the current stream, ordered by events.

torch's fake group leaves outputs unwritten, and NCCL (before 2.30) takes one rank a GPU. Here every
collective really writes what its callers read, so that values can be checked, on a GPU and on the host alike.
Two worlds:

    CloneWorld(8)     one rank is there, rank 0; all others hold and send what it does. Nothing waits for
                      anybody: streams run as freely as with NCCL.
    ThreadWorld(4)    every rank is a thread of this process, with a computing stream of its own. True
    results.

A collective of ThreadWorld, on rank r and its current stream s:

    record ready_r on s; meet; s waits for ready of all; s copies from the others' tensors into its own
    record done_r on s;  meet; s waits for done of all      so no input is freed while others read it

Sums are taken in the order of ranks, so that all ranks come to the same bits. Collectives that a world does
not have (send, recv) raise.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from one_device.lanes import Lanes
from shardwise.torch_compat.c10d import PythonGroup

CLONES, THREADS = "fake_clones", "fake_threads"
"""Names of the back ends. Where a name contains "fake", the library does not ask other ranks for their plans,
and has no thread of its own that watches waits: clones would not answer, and only the threads of ranks
know what torch knows of process groups."""

IN_GROUP = "collective"
"""What marks the work of a collective in a profile."""

CPU = torch.device("cpu")

LANE_OF = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "all_to_all": "reduce",
    "all_reduce": "replicate",
}

Sent = Sequence[Tensor]
Pair = tuple[Tensor, Tensor]
Pairs = Callable[[list[Sent]], Iterable[Pair]]
"""Targets, and what is copied to each, from what each rank has sent."""
Fill = Callable[[list[Sent]], Callable[[], None] | None]
"""Writes outputs from what each rank has sent; what it returns runs after the last read."""


# --- where ranks meet -----------------------------------------------------------------------------


class MeetingOfClones:
    """All ranks are this one."""

    def __init__(self, size: int) -> None:
        self._size = size

    def swap(self, rank: int, item: Any) -> list[Any]:
        """What every rank brings."""
        return [item] * self._size


class MeetingOfThreads:
    def __init__(self, size: int, timeout_s: float) -> None:
        self._items: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def swap(self, rank: int, item: Any) -> list[Any]:
        """What every rank brings; waits for all of them."""
        self._items[rank] = item
        try:
            self._barrier.wait()
            everyone = list(self._items)
            self._barrier.wait()  # no rank brings the next item before all have read these
        except threading.BrokenBarrierError:
            raise RuntimeError(f"rank {rank} waits for ranks that have failed or do not come") from None
        return everyone

    def abort(self) -> None:
        self._barrier.abort()


# --- a process group ------------------------------------------------------------------------------


class Done(dist.Work):
    """Work that is queued on the current stream already."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Nothing to wait for: later work of the stream comes later."""
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


@dataclass(frozen=True)
class Message:
    what: str
    sent: Sent
    ready: Any  # an event, or None on the host


class OneDeviceGroup(PythonGroup):
    """A process group of ranks on one device. ``backend`` and ``name``: of the back end, and its own."""

    def __init__(self, rank: int, size: int, backend: str, name: str, meeting: Any, lanes: Lanes) -> None:
        super().__init__(rank, size, backend, name)
        self._meeting, self._lanes = meeting, lanes

    def _exchange(self, what: str, sent: Sent, fill: Fill) -> Done:
        with torch.no_grad(), record_function(IN_GROUP):
            lane = LANE_OF.get(what)
            if lane is not None:
                self._lanes.enter(lane)
            stream = _current_stream(sent)
            everyone = self._meeting.swap(self._rank, Message(what, sent, _recorded(stream)))
            self._refuse_others(what, everyone)
            for message in everyone:
                _wait(stream, message.ready)
            finish = fill([message.sent for message in everyone])
            for done in self._meeting.swap(self._rank, _recorded(stream)):
                _wait(stream, done)
            if finish is not None:
                finish()
            if lane is not None:
                self._lanes.leave(lane, sent)
        return Done()

    def _refuse_others(self, what: str, everyone: Sequence[Message]) -> None:
        """All ranks call the same, with tensors of the same dtypes."""
        own = (what, [t.dtype for t in everyone[self._rank].sent])
        for rank, message in enumerate(everyone):
            other = (message.what, [t.dtype for t in message.sent])
            if other != own:
                raise RuntimeError(f"rank {self._rank} calls {own}, rank {rank} {other}: they would hang")

    def _copy(self, what: str, sent: Sent, pairs: Pairs) -> Done:
        return self._exchange(what, sent, lambda everyone: _copy_all(pairs(everyone)))

    # --- gathers

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        def pairs(everyone: list[Sent]) -> Iterator[Pair]:
            for index, output in enumerate(outputs):
                rows = output.view(-1).view(self._size, -1)
                yield from ((row, sent[index].view(-1)) for row, sent in zip(rows, everyone, strict=True))

        return self._copy("all_gather", inputs, pairs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        return self.all_gather_single_coalesced([output], [source], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        def pairs(everyone: list[Sent]) -> Iterator[Pair]:
            for index, targets in enumerate(outputs):
                yield from ((target, sent[index]) for target, sent in zip(targets, everyone, strict=True))

        return self._copy("all_gather", inputs, pairs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Done:
        targets = outputs[0] if self._rank == opts.rootRank else []
        return self._copy(
            "gather", inputs, lambda every: zip(targets, (sent[0] for sent in every), strict=bool(targets))
        )

    # --- sums

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Done:
        def pairs(everyone: list[Sent]) -> Iterator[Pair]:
            for index, output in enumerate(outputs):
                pieces = [sent[index].view(-1).view(self._size, -1)[self._rank] for sent in everyone]
                yield output.view(-1), _reduced(pieces, opts.reduceOp)

        return self._copy("reduce_scatter", inputs, pairs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> Done:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Done:
        def pairs(everyone: list[Sent]) -> Iterator[Pair]:
            yield outputs[0], _reduced([sent[self._rank] for sent in everyone], opts.reduceOp)

        return self._copy("reduce_scatter", inputs[0], pairs)

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def fill(everyone: list[Sent]) -> Callable[[], None]:
            # In place: no rank may write before all have read.
            sums = [_reduced([sent[index] for sent in everyone], op) for index in range(len(tensors))]

            def finish() -> None:
                for tensor, total in zip(tensors, sums, strict=True):
                    tensor.copy_(total)

            return finish

        return self._exchange("all_reduce", tensors, fill)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Done:
        return self.allreduce(tensors, opts)

    # --- the rest

    def all_to_all_single(
        self, output: Tensor, source: Tensor, received: Any = None, sent_rows: Any = None, opts: Any = None
    ) -> Done:
        cut = source.split(list(sent_rows)) if sent_rows else source.chunk(self._size)
        into = output.split(list(received)) if received else output.chunk(self._size)
        return self.alltoall(list(into), list(cut), opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        def pairs(everyone: list[Sent]) -> Iterator[Pair]:
            return zip(outputs, (sent[self._rank] for sent in everyone), strict=True)

        return self._copy("all_to_all", inputs, pairs)

    def broadcast(self, tensors: Any, opts: Any) -> Done:
        targets = tensors if self._rank != opts.rootRank else []
        return self._copy(
            "broadcast", tensors, lambda every: zip(targets, every[opts.rootRank], strict=bool(targets))
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Done:
        # Others send nothing, but must send as many tensors of as many dtypes.
        sent = inputs[0] if self._rank == opts.rootRank else [outputs[0]] * self._size
        return self._copy("scatter", sent, lambda every: [(outputs[0], every[opts.rootRank][self._rank])])

    def barrier(self, opts: Any = None) -> Done:
        return self._exchange("barrier", [], lambda everyone: None)


def _copy_all(pairs: Iterable[Pair]) -> None:
    """Copy each source into its target, unless they are the same memory, as the own part of a gather is.

    On a device by few kernels: many small ones would each wait for a place beside the computation, which a
    back end's one kernel does not.
    """
    apart = [
        (target, source.view(target.shape))
        for target, source in pairs
        if target.data_ptr() != source.data_ptr() or target.shape != source.shape
    ]
    if apart:
        torch._foreach_copy_([target for target, _ in apart], [source for _, source in apart])


def _reduced(pieces: Sequence[Tensor], op: Any) -> Tensor:
    total = pieces[0].clone()
    for piece in pieces[1:]:
        if op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG:
            total.add_(piece)
        elif op == dist.ReduceOp.MAX:
            torch.maximum(total, piece, out=total)
        elif op == dist.ReduceOp.MIN:
            torch.minimum(total, piece, out=total)
        else:
            raise NotImplementedError(f"no reduction by {op}")
    return total.div_(len(pieces)) if op == dist.ReduceOp.AVG else total


def _current_stream(tensors: Sent) -> Any:
    """The stream on which copies of ``tensors`` run; None on the host."""
    if tensors and tensors[0].is_cuda:
        return torch.cuda.current_stream(tensors[0].device)
    return None


def _recorded(stream: Any) -> Any:
    return None if stream is None else stream.record_event()


def _wait(stream: Any, event: Any) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


# --- worlds ---------------------------------------------------------------------------------------


@dataclass
class CloneWorld:
    """Rank 0 of ``size`` ranks that all hold what it holds, and see the data that it sees."""

    size: int
    lanes: Lanes = field(default_factory=Lanes)
    backend: str = CLONES

    def meeting(self, name: str, ranks: tuple[int, ...], size: int, rank: int) -> MeetingOfClones:
        """Where the ranks of a process group exchange."""
        return MeetingOfClones(size)

    @contextmanager
    def joined(self) -> Iterator[None]:
        _seats.of_process = self
        dist.init_process_group(self.backend, store=dist.HashStore(), rank=0, world_size=self.size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            _seats.of_process = None


@dataclass
class ThreadWorld:
    """``size`` ranks, each on its thread."""

    size: int
    timeout_s: float = 60.0
    lanes: Lanes = field(default_factory=Lanes)
    device: torch.device = CPU
    backend: str = THREADS
    _meetings: dict[Any, MeetingOfThreads] = field(default_factory=dict)
    _made: dict[Any, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meeting(self, name: str, ranks: tuple[int, ...], size: int, rank: int) -> MeetingOfThreads:
        """The same for all ranks that make the n-th process group of a name over some ranks."""
        with self._lock:
            nth = self._made.get((name, ranks, rank), 0)
            self._made[name, ranks, rank] = nth + 1
            key = (name, ranks, nth)
            if key not in self._meetings:
                self._meetings[key] = MeetingOfThreads(size, self.timeout_s)
            return self._meetings[key]

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        """``act(rank)`` on every rank; what each returns.

        Raises:
            RuntimeError: from the first error of a rank; the others are woken up.
        """
        from torch.testing._internal.distributed import multi_threaded_pg as torchs

        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []
        store = dist.HashStore()

        def be(rank: int) -> None:
            _seats.of_thread.world = self
            # Backward on this thread. Else the device's one thread would run those of all ranks in turn,
            # and the first would wait for the second for ever.
            try:
                with self._computing(), torch.autograd.set_multithreading_enabled(False):
                    dist.init_process_group(self.backend, store=store, rank=rank, world_size=self.size)
                    results[rank] = act(rank)
            except BaseException as error:
                errors.append((rank, error))
                with self._lock:
                    for meeting in self._meetings.values():
                        meeting.abort()
            finally:
                _seats.of_thread.world = None

        # Each thread its own default process group, and its own names of process groups.
        isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode
        isolate(True)
        torchs._install_threaded_pg()
        try:
            threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            torchs._uninstall_threaded_pg()
            isolate(False)
        if errors:
            rank, error = errors[0]
            raise RuntimeError(
                f"rank {rank} of {self.size} threads: {type(error).__name__}: {error}"
            ) from error
        return results

    def _computing(self) -> AbstractContextManager[Any]:
        """A stream of its own: on one for all, ranks would wait for each other by that alone."""
        if self.device.type != "cuda":
            return nullcontext()
        if self.device.index is not None:  # a new thread is on the first device
            torch.cuda.set_device(self.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        return torch.cuda.stream(stream)


class _Seats:
    """Which world a process group that is being made belongs to."""

    def __init__(self) -> None:
        self.of_thread = threading.local()
        self.of_process: CloneWorld | None = None  # autograd's threads may make groups as well

    def world(self) -> Any:
        found = getattr(self.of_thread, "world", None) or self.of_process
        if found is None:
            raise RuntimeError("Enter CloneWorld.joined() or ThreadWorld.run() before making process groups.")
        return found


_seats = _Seats()


def _make(opts: Any, _: Any = None) -> OneDeviceGroup:
    world = _seats.world()
    ranks = tuple(opts.global_ranks_in_group) or tuple(range(opts.group_size))
    name = str(opts.group_id)
    meeting = world.meeting(name, ranks, opts.group_size, opts.group_rank)
    return OneDeviceGroup(opts.group_rank, opts.group_size, world.backend, name, meeting, world.lanes)


for _name in (CLONES, THREADS):
    dist.Backend.register_backend(_name, _make, extended_api=True, devices=["cpu", "cuda"])
