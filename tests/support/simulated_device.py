"""A device that is simulated on the host: its module, with streams and events that write down who waits for whom.

As strict as torch. A generic ``torch.Stream`` waits for nothing, silently, where it is given an event of the
device; an event or a stream of the device takes only its own kind; a stream that is entered is not entered again.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardwise import fsdp_module as fsdp_module
from shardwise.comm import streams


class Event:
    """Of the simulated device, as ``torch.cuda.Event`` is of CUDA."""

    def __init__(
        self, name: str = "nothing", log: list[str] | None = None, enable_timing: bool = False
    ) -> None:
        self.name, self.log, self.is_timed = name, [] if log is None else log, enable_timing
        self.at = 0.0

    def record(self, stream: "Stream") -> None:
        """On the host, work of the device is done when it is queued."""
        self.name, self.at = stream.name, time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        if not (self.is_timed and end.is_timed and self.at and end.at):
            raise ValueError("both events must be recorded, and made with enable_timing=True")
        return (end.at - self.at) * 1e3

    def wait(self, stream: "Stream") -> None:
        if not isinstance(stream, Stream):
            raise TypeError(f"wait() takes a stream of the device, not {type(stream)}")
        self.log.append(f"{stream.name} waits for the event of {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"the host waits for the event of {self.name}")

    def query(self) -> bool:
        return True


class Stream:
    """Of the simulated device: writes down what it is asked to do."""

    def __init__(self, name: str, device: "Device") -> None:
        self.name, self.device = name, device

    def __enter__(self) -> None:
        if self in self.device.current[1:]:  # torch 2.11 refuses it so
            raise RuntimeError("Stream's context should not be initialized.")
        self.device.log.append(f"{self.name} is current")
        self.device.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.device.log.append(f"{self.name} is left")
        assert self.device.current.pop() is self

    def record_event(self) -> Event:
        self.device.log.append(f"{self.name} records")
        return Event(self.name, self.device.log)

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, Event):
            raise TypeError(f"wait_event() takes an event of the device, not {type(event)}")
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        if not isinstance(other, Stream):
            raise TypeError(f"wait_stream() takes a stream of the device, not {type(other)}")
        self.device.log.append(f"{self.name} waits for all of {other.name}")

    def synchronize(self) -> None:
        self.device.log.append(f"the host waits for all of {self.name}")


class GenericStream:
    """What ``torch.Stream`` is to events of the device: it takes them, and anything else, and does not wait."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.name = "a generic stream"

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class StreamType:
    """What makes a device's streams, and tells them from others: `torch.cuda.Stream` is to CUDA what this is here."""

    def __init__(self, device: "Device") -> None:
        self._device = device

    def __call__(self, device: torch.device, priority: int = 0) -> Stream:
        assert isinstance(device, torch.device)
        return self._device.make_stream(next(self._device.names, "stream"))

    def __instancecheck__(self, thing: object) -> bool:
        return isinstance(thing, Stream)


class Device:
    """The module of the device: what ``torch.get_device_module`` returns."""

    Event = Event

    def __init__(self) -> None:
        self.log: list[str] = []
        self.Stream = StreamType(self)
        self.current: list[Stream] = [self.make_stream("computing")]
        self.names = iter(())

    def name_streams(self, *names: str) -> None:
        """What the streams that are made next are called; they are streams otherwise."""
        self.names = iter(names)

    def make_stream(self, name: str) -> Stream:
        return Stream(name, self)

    def current_stream(self, device: torch.device) -> Stream:
        assert isinstance(device, torch.device)
        return self.current[-1]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None: ...


def install(patch: pytest.MonkeyPatch, simulated: Device | None = None) -> Device:
    """Have ``torch.get_device_module`` return a simulated device from now on.

    The process has no accelerator all the same, whatever torch was built for: models and meshes that name no
    device are the host's.
    """
    simulated = Device() if simulated is None else simulated
    generic: Any = GenericStream
    patch.setattr(torch, "Stream", generic)
    patch.setattr(torch.accelerator, "current_stream", generic)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    patch.setattr(torch, "get_device_module", lambda _=None: simulated)
    return simulated


@contextmanager
def streams_on_the_host() -> Iterator[Device]:
    """Inside, sharded models of the host communicate on streams, as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        simulated = install(patch)
        for where in (streams, fsdp_module):
            patch.setattr(where, "has_streams", lambda _: True)
        simulated.name_streams("gather", "reduce", "replicate")
        yield simulated
