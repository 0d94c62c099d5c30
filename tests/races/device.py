"""The device: tensors whose memory is the host's, and streams that know what waits for what.

Its type is "lazy": of the types that a torch without accelerators knows, it is one whose tensors autograd takes, and
`src/shardwise` treats it as any device but the host. Nothing of torch's own lazy tensors is used.

A tensor of the device is a `DeviceTensor`. Its storage is that of a plain tensor, so that views, resizing and
addresses are torch's own; only operations go by `dispatch.py`, as no kernel of torch takes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from simulated_device import Device, Event, Stream
from torch import Tensor

from races.clocks import Clocks, Lane, Reached
from races.reports import Line, calling_functions, calling_lines

DEVICE_TYPE = "lazy"
DEVICE = torch.device(DEVICE_TYPE, 0)


class DeviceTensor(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.prim.device.default:
            return DEVICE
        if operation is torch.ops.aten._has_compatible_shallow_copy_type.default:  # may `.data` be set?
            return True
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # another subclass is among the arguments, and has its own way
        raise RuntimeError(f"{operation} outside of the simulation: no kernel takes tensors of the device")


class PlainType:
    """As the builtin `type`, but a tensor of the device is a plain one, as it is on any other device."""

    def __call__(self, thing: Any, *rest: Any) -> type:
        kind = type(thing, *rest)
        if kind is DeviceTensor:
            return torch.nn.Parameter if isinstance(thing, torch.nn.Parameter) else Tensor
        return kind

    def __instancecheck__(self, thing: object) -> bool:
        return isinstance(thing, type)


unseen: Any = torch._C._DisableTorchDispatch
"""Inside, operations on plain tensors are the simulation's own: nobody sees them."""


def on_device(tensor: Tensor) -> Tensor:
    made: Any = torch.Tensor._make_subclass
    return made(DeviceTensor, tensor, False, dispatch_device=True, device_for_backend_keys=DEVICE)


def on_host(tensor: Tensor) -> Tensor:
    """A plain tensor over the memory of `tensor`, which may be of the device; autograd does not know it."""
    if not isinstance(tensor, DeviceTensor):
        return tensor
    with unseen():
        plain = torch.empty(0, dtype=tensor.dtype)
        return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def is_of_type(device: Any) -> bool:
    """Whether `device`, as a caller of torch writes it, is the simulated one."""
    return device is not None and torch.device(device).type == DEVICE_TYPE


@dataclass(frozen=True, order=True)
class Site:
    """Where `src/shardwise` orders streams: an operation, and the functions that ask for it, the innermost first."""

    operation: str
    callers: tuple[str, ...]

    def __str__(self) -> str:
        return " < ".join((self.operation, *self.callers))


class OrderedEvent(Event):
    def __init__(self, stream: "OrderedStream", reached: Reached) -> None:
        super().__init__(stream.name, stream.device.log)
        self._device: OrderedDevice = stream.device
        self._reached = reached

    def wait(self, stream: Stream) -> None:
        super().wait(stream)
        assert isinstance(stream, OrderedStream)
        if self._device.keeps("wait_event"):
            self._device.clocks.join(stream.lane, self._reached)

    def synchronize(self) -> None:
        super().synchronize()
        if self._device.keeps("event.synchronize"):
            self._device.block_host("event synchronize", self._reached)


class OrderedStream(Stream):
    """A stream whose work is ordered with that of others only where it waits."""

    device: "OrderedDevice"

    def __init__(self, name: str, device: "OrderedDevice") -> None:
        self.lane = Lane(name)
        super().__init__(name, device)
        self._when_entered: Reached = {}

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.lane.name

    @name.setter
    def name(self, name: str) -> None:
        self.lane.name = name

    def record_event(self) -> OrderedEvent:
        super().record_event()
        is_late = self.device.keeps("record_event")
        return OrderedEvent(self, self.device.clocks.snapshot(self.lane) if is_late else self._when_entered)

    def __enter__(self) -> None:
        super().__enter__()
        self._when_entered = self.device.clocks.snapshot(self.lane)
        if not self.device.keeps("enter"):
            self.device.current[-1] = self.device.current[-2]

    def __exit__(self, *_: object) -> None:
        self.device.current[-1] = self
        super().__exit__(*_)

    def wait_stream(self, other: Stream) -> None:
        super().wait_stream(other)
        assert isinstance(other, OrderedStream)
        if self.device.keeps("wait_stream"):
            self.device.clocks.wait(self.lane, other.lane)

    def synchronize(self) -> None:
        super().synchronize()
        if self.device.keeps("stream.synchronize"):
            self.device.block_host("stream synchronize", self.device.clocks.snapshot(self.lane))


class OrderedDevice(Device):
    Event = OrderedEvent

    def __init__(self, on_block: Callable[[str, tuple[Line, ...]], None]) -> None:
        self.clocks = Clocks()
        self.host = Lane("the host")
        self._on_block = on_block
        self.sites: set[Site] = set()
        self.dropped: Site | None = None
        """A wait that a mutant leaves out."""
        super().__init__()
        self.computing = self.current[0]

    def make_stream(self, name: str) -> OrderedStream:
        return OrderedStream(name, self)

    def keeps(self, operation: str) -> bool:
        """Whether an operation on streams takes place, as all do but that of a mutant."""
        site = Site(operation, calling_functions(2, outside="comm/streams.py"))
        self.sites.add(site)
        return site != self.dropped

    @property
    def lane(self) -> Lane:
        """The lane of the current stream, for work that the host launches now: after all that the host has done."""
        stream = self.current[-1]
        assert isinstance(stream, OrderedStream)
        self.clocks.wait(stream.lane, self.host)
        return stream.lane

    def synchronize(self, device: Any = None) -> None:
        for lane in self.clocks.lanes():
            self.clocks.wait(self.host, lane)
        self._on_block("synchronize", calling_lines())

    def block_host(self, why: str, reached: Reached) -> None:
        self.clocks.join(self.host, reached)
        self._on_block(why, calling_lines())
