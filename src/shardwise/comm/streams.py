"""Streams, on which communication runs concurrently with the computation.

Communication is submitted as ``start``, a function that issues the collectives and returns ``finish``, which
waits for them and unpacks. On a device, both are queued at once, on a separate stream, and the computing
stream later waits for an event. On the host there are no streams: ``start`` hands the collectives to the back
end's threads, and ``finish`` runs when the result is needed.

Memory on a device follows one rule: a transient buffer is allocated and freed with its stream current, after
that stream has waited for the event that marks the last use of the buffer. ``record_stream`` is never used.

Streams are those of the device's module, such as ``torch.cuda``. Events that we record are ``torch.Event``,
in C where those of ``torch.cuda`` are in Python. Events of callers may be of either kind. So streams wait by
``event.wait(stream)``: a generic ``Stream.wait_event`` does not wait for a ``torch.cuda.Event``, because it
reads the base of the event, which CUDA's leaves empty.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from shardwise.ranks.activity import Wait
from shardwise.torch_compat import autograd

Finish = Callable[[], Any]
StartWork = Callable[[], Finish]


def nothing() -> None:
    """The ``finish`` of work that is already over."""


class WaitThen:
    """A ``finish`` in two steps: ``wait`` for other ranks, then run ``then``.

    Any one thread may wait; ``then`` belongs to the thread that calls.
    """

    __slots__ = ("then", "wait")

    def __init__(self, wait: Finish, then: Finish = nothing) -> None:
        self.wait = wait
        self.then = then

    def __call__(self) -> None:
        """Run both steps."""
        self.wait()
        self.then()


def waiting_for(works: Sequence[Any]) -> Finish:
    """The ``finish`` of ``works``, handles of a process group or None."""
    if len(works) == 1:
        return nothing if works[0] is None else works[0].wait  # type: ignore[no-any-return]
    return WaitThen(all_of([work.wait for work in works if work is not None]))


def all_of(finishes: Sequence[Finish]) -> Finish:
    """A ``finish`` that calls all of ``finishes``."""

    def finish() -> None:
        for each in finishes:
            each()

    return finish


def in_two_steps(finish: Finish) -> tuple[Finish, Finish] | None:
    """The steps of ``finish``: the wait for other ranks, and the rest; None if they are inseparable."""
    if isinstance(finish, WaitThen):
        return finish.wait, finish.then
    is_of_work = getattr(finish, "__name__", "") == "wait"  # see ``waiting_for``
    return (finish, nothing) if is_of_work else None


class CommWork:
    """Communication in flight.

    ``wait`` lets the computation use the result and acts only once; ``synchronize`` lets the host use it.
    While the host waits in either, the monitor of ``awaited`` records what for (see ``ranks``).
    """

    def __init__(self, complete: Finish, end: Any = None, awaited: Wait | None = None) -> None:
        self._complete: Finish | None = complete
        self.end = end
        """The event behind it, on a device."""
        self.awaited = awaited

    def wait(self) -> None:
        """Make the computation wait for the result; raise CommunicationError if another rank has failed."""
        complete, self._complete = self._complete, None
        if complete is None:
            return
        if (awaited := self.awaited) is None:
            complete()
            return
        monitor = awaited.monitor
        around, monitor.waiting = monitor.waiting, awaited
        try:
            complete()
        except RuntimeError as error:
            monitor.raise_explained(error, awaited)
        finally:
            monitor.waiting = around

    def synchronize(self) -> None:
        """Block the host until the result is in place in host memory."""
        self.wait()
        if self.end is not None:
            self._complete = self.end.synchronize
            self.wait()


_V = TypeVar("_V")


class Scratch:
    """A buffer of bytes from a pool, and its reusable views."""

    _MOST_VIEWS = 64

    def __init__(self, whole: torch.Tensor) -> None:
        self.bytes = whole
        self.storage = whole.untyped_storage()
        self.num_bytes = whole.numel()
        self.views: dict[Hashable, Any] = {}

    def make_view(self, key: Hashable, make: Callable[[torch.Tensor], _V]) -> _V:
        """The result of ``make`` on the bytes, kept under ``key`` in ``views``."""
        if len(self.views) == self._MOST_VIEWS:
            self.views.clear()
        with torch.inference_mode(False):  # the next user may be training
            made = self.views[key] = make(self.bytes)
        return made


class BufferPool:
    """Provides buffers of bytes: here new ones, from memory of the current stream."""

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of at least ``num_bytes``, with undefined contents, to hold numbers of ``dtype``."""
        return Scratch(torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def release(self, scratch: Scratch) -> None:
        """Take the buffer back, after all work issued with it has been waited for."""


def wait_and_release(wait: Finish, pool: BufferPool, borrowed: Sequence[Scratch]) -> None:
    """Wait for work, then give back the buffers that it used."""
    wait()
    for scratch in borrowed:
        pool.release(scratch)


_NO_CONTEXT = nullcontext()

KEPT_STAGING_BYTES = 1 << 20
"""On the host, scratch buffers up to this size are kept. Above it, memory matters more, and the transfer
takes longer."""


_MOST_SIZES = 32  # of scratch buffers that are kept on the host


class CommStream(BufferPool):
    """Takes communication. Methods that only a device needs do nothing here."""

    _stream: Any = None  # of a device
    _record_event: Callable[[Any], Any]  # of a device
    _host_copies: "HostCopies | None" = None
    last_event: Any = None
    """On a device, at the end of the work submitted last."""

    def submit(self, start: StartWork, users: Sequence[Any] = (), awaited: Wait | None = None) -> CommWork:
        """Issue the work.

        On a device, ``wait`` of the result makes the computing stream and ``users`` wait for it; on the host,
        it finishes the work.
        """
        if awaited is not None:
            awaited.monitor.issuing = awaited  # a back end may block, to connect or to wait for all ranks
        try:
            if self._stream is None:
                complete, end = start(), None
            else:
                with self._stream:
                    start()()
                    self.last_event = end = self._record_event(self._stream)
                complete = partial(self._let_compute_wait, end, users)
        except BaseException as error:
            if awaited is not None:
                awaited.monitor.issuing = None
                if isinstance(error, RuntimeError):
                    awaited.monitor.raise_explained(error, awaited)
            raise
        if awaited is not None:
            awaited.monitor.issue(awaited)
        if self._host_copies is not None:
            self._host_copies.were_used(end)
        return CommWork(complete, end, awaited)

    def _let_compute_wait(self, end: Any, users: Sequence[Any]) -> None:
        raise NotImplementedError

    def wait_for_compute(self, event: Any = None, users: Sequence[Any] = ()) -> None:
        """Order everything submitted later behind ``event``, or behind all work of the computing stream and
        of ``users``. On the host that work is already done."""

    def note_reader(self) -> None:
        """The current stream has read results of this one, and dropped them: what waits for the computation
        next also waits for that stream, before it reuses their memory."""

    def drop_readers(self) -> None:
        """Forget these streams, whose work is over."""

    def wait_for_optimizer(self, event: Any = None) -> None:
        """Like ``wait_for_compute``, for ``copy_in`` as well: the optimizer may have written there."""

    def copy_in(self, copy: Callable[[], _V]) -> _V:
        """The result of ``copy``, which reads host memory, for the work being submitted."""
        return copy()

    def wait_until_host_was_read(self) -> None:
        """Block the host only until every ``copy_in`` is done: it may write there now."""

    def allocation_scope(self) -> AbstractContextManager[Any]:
        """The context in which this stream's buffers are allocated and freed."""
        return _NO_CONTEXT


class HostStream(CommStream):
    """Work of the back end's threads. Only waiting orders it.

    Keeps small scratch buffers for the next use: page faults of fresh memory cost more than the copies
    through it (at width 128 a third of the time added to a block).
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[Scratch]] = {}  # by size
        self._most_kept = KEPT_STAGING_BYTES

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A kept buffer of this size, or a new one."""
        if spare := self._spare.get(num_bytes):
            return spare.pop()
        with torch.inference_mode(False):  # the next user may be training
            return super().acquire(num_bytes, device, dtype)

    def release(self, scratch: Scratch) -> None:
        """Keep the buffer, if it is small."""
        if scratch.num_bytes <= self._most_kept:
            if len(self._spare) > _MOST_SIZES:
                self._spare.clear()
            self._spare.setdefault(scratch.num_bytes, []).append(scratch)

    def keep_nothing(self) -> None:
        """Free all buffers when they are released, as a device does."""
        self._most_kept = -1
        self._spare.clear()


class HostCopies:
    """Copies from host memory for the work of another stream, ``user``, on a separate stream.

    They run ahead: while one collective of ``user`` is in flight, the copy for the next one runs, and does
    not wait for it. Copies lie in memory of the copying stream, and are kept until that has waited for the
    work that uses them. There are copies for at most two pieces of work:

        copies     [copy 1][copy 2]        [copy 3]         copy 3 waits for the end of AG 1
        user               [  AG 1  ][  AG 2  ][  AG 3  ]
    """

    _MOST_KEPT = 2

    def __init__(self, stream: Any, user: Any) -> None:
        self._stream = stream
        self._user = user
        self._new: list[Any] = []  # for the work being submitted
        self._kept: deque[tuple[list[Any], Any]] = deque()  # with the event at the end of the work
        self._last: Any = None  # the event behind the last copy
        self._record_event, self._wait_stream = ordering_of(stream)
        self.wait_for_user()

    def wait_for_user(self) -> None:
        """Order later copies behind the work queued on ``user``."""
        self._wait_stream(self._stream, self._user)

    def run(self, copy: Callable[[], _V]) -> _V:
        """The result of ``copy``, for which ``user`` waits."""
        if not self._new:
            while len(self._kept) >= self._MOST_KEPT:
                results, used = self._kept.popleft()
                used.wait(self._stream)
                del results
        with self._stream:
            result = copy()
            self._last = self._record_event(self._stream)
        self._last.wait(self._user)
        self._new.append(result)
        return result

    def were_used(self, event: Any) -> None:
        """``event`` is at the end of the work that uses the new copies."""
        if self._new:
            self._kept.append((self._new, event))
            self._new = []

    def synchronize(self) -> None:
        """Block the host until all copies are done, and drop them: the host may overwrite their sources."""
        last, self._last = self._last, None
        if last is not None:
            last.synchronize()
            for _, used in self._kept:
                used.wait(self._stream)
            self._kept.clear()


class DeviceStream(CommStream):
    """Work on a separate stream, in memory that torch caches: only this stream reuses what it frees."""

    def __init__(
        self, device: torch.device, current: Callable[[], Any] | None = None, priority: int = 0
    ) -> None:
        """``current`` returns the current stream."""
        self._current = current or CurrentStream(device)
        self._spare: dict[int, list[Scratch]] = defaultdict(list)  # without memory, by size
        self._readers: dict[Any, None] = {}
        self._make_stream = partial(_own(device, "Stream", torch), device, priority=priority)
        self._stream = self._make_stream()
        self._record_event, self._wait_stream = ordering_of(self._stream)

    def acquire(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """New memory of the current stream; in a buffer that was released, with its views, if any was."""
        if spare := self._spare[num_bytes]:
            scratch = spare.pop()
            scratch.storage.resize_(num_bytes)
            return scratch
        with torch.inference_mode(False):  # the next user may be training
            return super().acquire(num_bytes, device, dtype)

    def release(self, scratch: Scratch) -> None:
        """Give the memory back."""
        scratch.storage.resize_(0)
        self._spare[scratch.num_bytes].append(scratch)

    def _let_compute_wait(self, end: Any, users: Sequence[Any]) -> None:
        current = self._current()
        end.wait(current)
        for user in users:
            if user != current:
                end.wait(user)

    def copy_in(self, copy: Callable[[], _V]) -> _V:
        """On a separate stream, which owns the memory of the result: see ``HostCopies``."""
        if self._host_copies is None:
            self._host_copies = HostCopies(self._make_stream(), self._stream)
        return self._host_copies.run(copy)

    def wait_until_host_was_read(self) -> None:
        """Wait for the event behind the last copy."""
        if self._host_copies is not None:
            self._host_copies.synchronize()

    def wait_for_compute(self, event: Any = None, users: Sequence[Any] = ()) -> None:
        """Queue the waits on this stream."""
        if event is not None:
            event.wait(self._stream)
            return
        current = self._current()
        self._wait_stream(self._stream, current)
        for user in (*users, *self._readers):
            if user != current:
                self._wait_stream(self._stream, user)
        self._readers.clear()

    def note_reader(self) -> None:
        """Keep the stream until the next wait."""
        self._readers[self._current()] = None

    def drop_readers(self) -> None:
        """Wait for none of them."""
        self._readers.clear()

    def wait_for_optimizer(self, event: Any = None) -> None:
        """Queue the waits on the copying stream as well."""
        self.wait_for_compute(event)
        if self._host_copies is not None:
            self._host_copies.wait_for_user()

    def allocation_scope(self) -> AbstractContextManager[Any]:
        """Make this stream current."""
        return self._stream


def ordering_of(stream: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """Functions of streams such as ``stream``: record an event on one, and let one wait for another.

    Those of ``torch.Stream`` are in C; beneath a stream of ``torch.cuda`` they take a fifth of its own.
    """
    kind = torch.Stream if isinstance(stream, torch.Stream) else type(stream)
    return kind.record_event, kind.wait_stream


def in_stream(function: Callable[[torch.Tensor], None], stream: Any) -> Callable[[torch.Tensor], None]:
    """``function``, run on ``stream``, ordered with the work before and after it on the current stream."""
    _, wait_stream = ordering_of(stream)

    def run(tensor: torch.Tensor) -> None:
        current = current_stream(tensor.device)
        wait_stream(stream, current)
        with stream:
            function(tensor)
        wait_stream(current, stream)

    return run


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams. On the host, a call returns when its work is done."""
    return device.type not in ("cpu", "meta")


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph captures the current stream, so that the host cannot wait."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_of_device(thing: Any, kind: str, device: torch.device) -> bool:
    """True if ``thing`` is a stream or an event (``kind`` is "Stream" or "Event") of ``device``.

    Each device's module has its own classes; objects of torch's generic classes have a ``device``.
    """
    generic = getattr(torch, kind)
    if type(thing) is generic:
        return thing.device is not None and thing.device.type == device.type
    own = _own(device, kind, torch)
    return own is not generic and isinstance(thing, own)


def current_stream(device: torch.device) -> Any:
    """The caller's current stream, on which it computes unless it is inside a ``CommStream``."""
    return _own(device, "current_stream", torch.accelerator)(device)


class CurrentStream:
    """Returns the current stream of ``device``, whose number it asks for: one object for each number.

    ``torch.cuda.current_stream`` takes sixteen calls to make a new object; a group asks eight times a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._make = partial(_own(device, "current_stream", torch.accelerator), device)
        self.number: Callable[[], Hashable] | None = autograd.number_of_stream(device)
        self._known: dict[Hashable, Any] = {}

    def __call__(self) -> Any:
        """The stream, as an object that is made once."""
        if self.number is None:
            return self._make()
        number = self.number()
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._make()
        return found


def timed_event(device: torch.device) -> Any:
    """An event with timing, recorded on the current stream of ``device``."""
    own = _own(device, "Event", torch)
    event = own(device=device, enable_timing=True) if own is torch.Event else own(enable_timing=True)
    event.record(current_stream(device))
    return event


def _own(device: torch.device, name: str, generic: Any) -> Any:
    """``name`` from the device's module, or from ``generic`` if that lacks it."""
    module = torch.get_device_module(device) if has_streams(device) else torch.cpu
    return getattr(module, name, None) or getattr(generic, name)


class CommStreams:
    """The streams of one module tree: for all-gathers, for reduce-scatters, for all-reduces over replicas."""

    def __init__(self, device: torch.device) -> None:
        self.are_device_streams = has_streams(device)
        """Whether work can be queued behind other work without blocking the host."""
        self._current = current = CurrentStream(device)
        # The computation waits for all-gathers next, so they go before its own kernels.
        make = partial(DeviceStream, device, current, priority=-1) if self.are_device_streams else HostStream
        self.all_gather: CommStream = make()
        self.reduce_scatter: CommStream = make()
        self.all_reduce: CommStream = make()
        self.are_labelled = False
        """Whether profiler ranges name submitted work: set by each pass, if a profiler records."""
        self.current_number: Callable[[], Hashable] = current.number or current
        """Returns what tells the current stream from others."""

    def note_current(self, seen: dict[Hashable, Any]) -> None:
        """Add the current stream to ``seen``, by its number."""
        number = self.current_number()
        if number not in seen:
            seen[number] = self._current()

    def wait_for_optimizer(self, event: Any = None) -> None:
        """Order all-gathers behind the optimizer, which writes the shards: behind the computing stream, or
        behind ``event``, recorded on another stream.

        Reductions wait for the event as well: they may reuse the memory of gradients that the optimizer
        reads there. They are always ordered behind the computing stream.
        """
        self.all_gather.wait_for_optimizer(event)
        if event is not None:
            self.reduce_scatter.wait_for_compute(event)
            self.all_reduce.wait_for_compute(event)

    def make_compute_wait_for(self, event: Any) -> None:
        """Make the computing stream wait for ``event``."""
        if self.are_device_streams:
            event.wait(self._current())
