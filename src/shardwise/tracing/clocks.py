"""The moments of a trace: of the host, or of the device on which they are recorded as events."""

import time
from typing import Any, Protocol

import torch

from shardwise.comm.streams import timed_event


class Clock(Protocol):
    """``mark`` notes a moment; ``ns_of`` says when it was, in ns since the clock was made."""

    is_of_host: bool

    def mark(self) -> Any:
        """Now. On a device: when its current stream comes to what is queued next."""
        ...

    def finish(self) -> None:
        """Wait until all marks have been passed."""
        ...

    def ns_of(self, mark: Any) -> int:
        """When ``mark`` was passed; after ``finish``."""
        ...


class HostClock:
    """The host's own clock."""

    is_of_host = True

    def __init__(self) -> None:
        self._zero = time.perf_counter_ns()
        self.mark = time.perf_counter_ns

    def finish(self) -> None:
        """Nothing to do."""

    def ns_of(self, mark: int) -> int:
        """When ``mark`` was noted."""
        return mark - self._zero


class DeviceClock:
    """Events on the streams of a device, whose times are read when the trace is over.

    The device is idle when the clock is made, so that its zero is the host's as well.
    """

    is_of_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = self.mark()
        self._zero.synchronize()

    def mark(self) -> Any:
        """An event on the current stream."""
        return timed_event(self._device)

    def finish(self) -> None:
        """Wait for the current stream, which waits for all others before a step is over."""
        self.mark().synchronize()

    def ns_of(self, mark: Any) -> int:
        """When the device came to ``mark``."""
        mark.synchronize()
        return round(self._zero.elapsed_time(mark) * 1e6)
