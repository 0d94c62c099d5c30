"""One rank of many, on the simulated device: `with Simulation() as simulation:` and train.

Inside, `torch.get_device_module` is the device, process groups are those of `collectives.py`, and every operation
goes by `dispatch.py`.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import simulated_device
import torch
import torch.distributed as dist
from scenario import one_thread
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from races.clocks import Lane
from races.collectives import BACKEND, Network, SimulatedGroup
from races.device import (
    DEVICE,
    DEVICE_TYPE,
    DeviceTensor,
    OrderedDevice,
    PlainType,
    on_device,
    on_host,
    unseen,
)
from races.dispatch import Operations, fill_unwritten
from races.memory import Memory
from races.reports import Finding, Line
from shardwise.comm import buffers
from shardwise.comm.streams import CommStreams, DeviceStream


class Simulation:
    """`findings`: races; `blocks`: where the host waited, and for what; `launches`: collectives, in order."""

    def __init__(self, rank: int = 0, world: int = 8) -> None:
        self.rank, self.world = rank, world
        self.findings: list[Finding] = []
        self.blocks: list[tuple[str, tuple[Line, ...]]] = []
        self.device = OrderedDevice(lambda why, lines: self.blocks.append((why, lines)))
        self.memory = Memory(self.device.clocks, self.device.host, self.findings.append)
        self.network = Network(self.device, self.memory)
        self._operations = Operations(self.device, self.memory, self.network.functional)
        self._inside = ExitStack()

    torch_device = DEVICE

    def __enter__(self) -> "Simulation":
        with ExitStack() as inside:
            inside.enter_context(one_thread())
            patch = inside.enter_context(pytest.MonkeyPatch.context())
            simulated_device.install(patch, self.device)
            patch.setattr(torch, DEVICE_TYPE, self.device, raising=False)  # as DeviceMesh looks for it
            self._patch_memory(patch)
            self._patch_groups(patch)
            _name_streams(patch)
            for name, module in list(sys.modules.items()):
                if name.startswith("shardwise."):
                    patch.setattr(module, "type", PlainType(), raising=False)
            dist.init_process_group("fake", rank=self.rank, world_size=self.world, store=FakeStore())
            inside.callback(dist.destroy_process_group)
            inside.enter_context(self._operations)
            self._inside = inside.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._inside.__exit__(*failure)

    @property
    def host_waits(self) -> Counter[str]:
        """How often the host waited for the device, by what it called."""
        return Counter(why for why, _ in self.blocks)

    def stream(self, name: str) -> Any:
        return self.device.make_stream(name)

    def _patch_memory(self, patch: pytest.MonkeyPatch) -> None:
        """Storages that are emptied and refilled, and tensors that share memory without sharing a storage."""
        resize, nbytes = torch.UntypedStorage.resize_, torch.UntypedStorage.nbytes
        from_dlpack, tensor_of = torch.from_dlpack, torch.tensor

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            self.memory.drop_dead()
            fill_unwritten(storage)
            if num_bytes == 0:  # what still points there reads NaN
                self.memory.free(storage)
                return storage
            if num_bytes != nbytes(storage):
                resize(storage, num_bytes)
            self.memory.allocate(storage, self.device.lane)
            fill_unwritten(storage)
            return storage

        def num_bytes(storage: torch.UntypedStorage) -> int:
            return 0 if self.memory.is_emptied(storage) else nbytes(storage)

        def shared(tensor: Any, **options: Any) -> Tensor:
            if not isinstance(tensor, Tensor):
                return from_dlpack(tensor, **options)
            with unseen():
                made = from_dlpack(on_host(tensor))
            self.memory.alias(made.untyped_storage(), tensor)
            self._operations.pin_alias(made, tensor)
            return on_device(made) if isinstance(tensor, DeviceTensor) else made

        patch.setattr(torch.UntypedStorage, "resize_", resize_)
        patch.setattr(torch.UntypedStorage, "nbytes", num_bytes)

        def made_of(data: Any, *, device: Any = None, **options: Any) -> Tensor:
            made = tensor_of(data, **options)
            return made if device is None else made.to(device)  # from pageable memory: the host waits

        patch.setattr(torch, "from_dlpack", shared)
        patch.setattr(buffers, "to_dlpack", lambda tensor: tensor)  # what `shared` is given
        with torch.device("meta"):
            torch.empty(0)  # torch lists its constructors at the first use of such a context, for good
        patch.setattr(torch, "tensor", made_of)

    def _patch_groups(self, patch: pytest.MonkeyPatch) -> None:
        def make(options: Any, _: Any) -> SimulatedGroup:
            return SimulatedGroup(options.group_rank, options.group_size, self.network)

        # NCCL's own sum: what is read and written is the same.
        patch.setattr(dist, "_make_nccl_premul_sum", lambda _: dist.ReduceOp.SUM)
        backend: Any = dist.Backend
        patch.setitem(backend._plugins, BACKEND.upper(), backend._BackendPlugin(make, True))
        patch.setitem(backend.backend_capability, BACKEND, ["cpu", DEVICE_TYPE])


def _name_streams(patch: pytest.MonkeyPatch) -> None:
    """Have reports call the streams of a model by what they are for."""
    plain = CommStreams.__init__

    def init(streams: CommStreams, device: torch.device) -> None:
        plain(streams, device)
        for name, stream in vars(streams).items():
            if isinstance(stream, DeviceStream):
                stream._stream.name = name.replace("_", "-")

    patch.setattr(CommStreams, "__init__", init)


__all__ = ["DEVICE", "DEVICE_TYPE", "Lane", "Simulation"]
