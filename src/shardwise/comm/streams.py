"""Lanes: where communication runs beside the computation.

A lane takes a piece of work in two parts: ``start`` issues the collectives and returns ``finish``,
which waits for them and unpacks. On a device, a lane is a stream: both parts are queued on it at once
and the caller later lets the computing stream wait for an event. On the host there are no streams:
``start`` leaves the collectives to the back end's own threads and ``finish`` runs when the result is
needed.

Memory on a device follows one rule: a gathered or scratch buffer is allocated and freed with its lane
current, after that lane has waited for the event that marks the buffer's last use. ``record_stream`` is
never used.

Streams and events are those of the device's own module, such as ``torch.cuda``. A generic ``torch.Stream``
does not wait for a ``torch.cuda.Event``: it reads the base of the event, which CUDA's leaves empty. A
stream of ``torch.cuda`` waits for both kinds.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

Finish = Callable[[], Any]
Start = Callable[[], Finish]


def nothing() -> None:
    """The end of work that took no time."""


def waiting_for(works: Sequence[Any]) -> Finish:
    """The end of work that was issued as ``works``, handles of a process group or None."""

    if len(works) == 1:
        return nothing if works[0] is None else works[0].wait

    def finish() -> None:
        for work in works:
            if work is not None:
                work.wait()

    return finish


class Ticket:
    """Work in flight.

    ``wait`` returns when the computation may use the result, once only; ``land`` when the host may.
    """

    def __init__(self, complete: Finish, land: Finish | None = None) -> None:
        self._complete: Finish | None = complete
        self._land = land

    def wait(self) -> None:
        """Let the computation continue only with the result in place."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()

    def land(self) -> None:
        """Hold up the host until the result, in its own memory, is in place."""
        self.wait()
        if self._land is not None:
            self._land()


_V = TypeVar("_V")


class Scratch:
    """A buffer of bytes that is lent, and the views of it that are wanted again and again."""

    _MOST_VIEWS = 64

    def __init__(self, whole: torch.Tensor) -> None:
        self.bytes = whole
        self.num_bytes = whole.numel()
        self._views: dict[Hashable, Any] = {}

    def view(self, key: Hashable, make: Callable[[torch.Tensor], _V]) -> _V:
        """What ``make`` makes of the bytes, made once for all that ask for the same ``key``."""
        found = self._views.get(key)
        if found is None:
            if len(self._views) == self._MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = make(self.bytes)
        return found


_NOWHERE = nullcontext()
_size = attrgetter("num_bytes")


class HostLane:
    """Work of the back end's own threads; nothing is ordered but by waiting.

    Keeps a few scratch buffers for the next use: memory fresh from the system costs more in page
    faults than the copies through it (at width 128 a third of the time added to a block).
    """

    _MOST_KEPT = 2  # a group's, and that of the one after it
    _LARGEST_KEPT_BYTES = 1 << 20  # for large ones memory counts more, and the wire takes longer anyway

    def __init__(self) -> None:
        self._kept: list[Scratch] = []  # by size

    def borrow(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of at least so many bytes, of undefined contents."""
        for index, scratch in enumerate(self._kept):
            if num_bytes <= scratch.num_bytes and scratch.bytes.device == device:
                del self._kept[index]
                return scratch
        with torch.inference_mode(False):  # the next user may be training
            return Scratch(torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def give_back(self, scratch: Scratch) -> None:
        """End of use: all that was issued with the buffer has been waited for."""
        if scratch.num_bytes <= self._LARGEST_KEPT_BYTES:
            self._kept.append(scratch)
            if len(self._kept) > 1:
                self._kept.sort(key=_size)
                del self._kept[: -self._MOST_KEPT]

    def submit(self, start: Start) -> Ticket:
        """Issue the work now; ``wait`` of the ticket finishes it."""
        return Ticket(start())

    def follow(self, other: "Lane", ticket: Ticket) -> None:
        """Let what is submitted next begin after the work of ``ticket``: here it is waited for."""
        ticket.wait()

    def follow_compute(self, event: Any = None) -> None:
        """Host computation that was called is done: nothing to wait for."""

    def synchronize(self) -> None:
        """What was waited for has ended."""

    def memory(self) -> AbstractContextManager[Any]:
        """The context in which the lane's buffers are allocated and freed."""
        return _NOWHERE


class DeviceLane:
    """Work on a stream of its own."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._current = partial(_own(device, "current_stream", torch.accelerator), device)
        self._stream = _own(device, "Stream", torch)(device, priority=priority)

    def submit(self, start: Start) -> Ticket:
        """Queue the whole work on the lane; ``wait`` makes the computing stream wait for it."""
        with self._stream:
            start()()
            done = self._stream.record_event()
        return Ticket(lambda: self._current().wait_event(done), done.synchronize)

    def follow(self, other: "Lane", ticket: Ticket) -> None:
        """Order everything submitted later behind what ``other`` has been given."""
        assert isinstance(other, DeviceLane)
        self._stream.wait_stream(other._stream)

    def follow_compute(self, event: Any = None) -> None:
        """Order everything submitted later behind what the computing stream has been given, or ``event``."""
        if event is not None:
            self._stream.wait_event(event)
        else:
            self._stream.wait_stream(self._current())

    def synchronize(self) -> None:
        """Hold up the host until all that was submitted has ended."""
        self._stream.synchronize()

    def memory(self) -> AbstractContextManager[Any]:
        """The context in which the lane's buffers are allocated and freed."""
        return self._stream

    def borrow(self, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Scratch:
        """A buffer of undefined contents, from the lane's own memory: torch keeps it for reuse."""
        return Scratch(torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def give_back(self, scratch: Scratch) -> None:
        """Nothing to do: what the lane frees, it alone allocates again, in order."""


Lane = HostLane | DeviceLane


def in_stream(function: Callable[[torch.Tensor], None], stream: Any) -> Callable[[torch.Tensor], None]:
    """``function``, run in ``stream``, between what comes before and after it on the current one."""

    def run(tensor: torch.Tensor) -> None:
        current = current_stream(tensor.device)
        stream.wait_stream(current)
        with stream:
            function(tensor)
        current.wait_stream(stream)

    return run


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams; on the host it is done when it was called."""
    return device.type not in ("cpu", "meta")


def is_of_device(thing: Any, kind: str, device: torch.device) -> bool:
    """True if ``thing`` is a stream or an event (``kind`` is "Stream" or "Event") of ``device``.

    The module of the device has a class for each; the generic ones of torch say which device they are of.
    """
    generic = getattr(torch, kind)
    if type(thing) is generic:
        return thing.device is not None and thing.device.type == device.type
    own = _own(device, kind, torch)
    return own is not generic and isinstance(thing, own)


def current_stream(device: torch.device) -> Any:
    """The stream that the caller computes on."""
    return _own(device, "current_stream", torch.accelerator)(device)


def _own(device: torch.device, name: str, generic: Any) -> Any:
    """``name`` of the device's own module, or of ``generic`` where that module has none."""
    module = torch.get_device_module(device) if has_streams(device) else torch.cpu
    return getattr(module, name, None) or getattr(generic, name)


class Lanes:
    """The lanes of one module tree: gathers on one, reductions on another, those over replicas on a third."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.are_streams = has_streams(device)
        """Whether work may be queued behind other work without waiting for it."""
        if not self.are_streams:
            self.gather: Lane = HostLane()
            self.reduce: Lane = HostLane()
            self.replicate: Lane = HostLane()
        else:
            # Gathers are what the computation waits for next: they go before its own kernels.
            self.gather = DeviceLane(device, priority=-1)
            self.reduce = DeviceLane(device, priority=-1)
            self.replicate = DeviceLane(device, priority=-1)

    def follow_optimizer(self, event: Any = None) -> None:
        """Order gathers behind the optimizer, which has written the shards: behind the computing stream, or
        behind ``event``, recorded on another one.

        Reductions follow the event as well: the memory of gradients that the optimizer reads there may have
        been given back to them. What follows the computing stream they follow anyhow.
        """
        self.gather.follow_compute(event)
        if event is not None:
            self.reduce.follow_compute(event)
            self.replicate.follow_compute(event)

    def compute_waits_for(self, event: Any) -> None:
        """Let the computing stream wait for ``event``."""
        if self.are_streams:
            current_stream(self._device).wait_event(event)
