"""Process groups of the device, for one of many ranks: the others have the same tensors.

What a collective returns is as it would be if all ranks were alike, so that nothing is NaN that was sent. An
asynchronous one runs on a lane of its process group, as NCCL's do: it begins when the current stream is there, and its
results arrive when it is waited for. Before that they are NaN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from races.clocks import Lane, Reached
from races.device import DEVICE_TYPE, DeviceTensor, OrderedDevice, on_device, on_host, unseen
from races.memory import UNWRITTEN, Memory
from races.reports import Line, calling_lines
from shardwise.torch_compat.c10d import PythonGroup

BACKEND = "fake"
Write = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """A collective that was launched. `members`: the global ranks of the communicator."""

    communicator: str
    members: tuple[int, ...]
    kind: str
    num_bytes: int
    lane: Lane
    reached: Reached
    lines: tuple[Line, ...]


class Network:
    def __init__(self, device: OrderedDevice, memory: Memory) -> None:
        self.device = device
        self._memory = memory
        self.launches: list[Launch] = []
        self._functional: dict[int, Reached] = {}
        self._functional_lanes: dict[str, Lane] = {}

    def use(self, tensors: Sequence[Tensor], lane: Lane, *, is_write: bool, kind: str) -> None:
        for tensor in tensors:
            if not isinstance(tensor, DeviceTensor) and DEVICE_TYPE != "cpu" and lane is not self.device.host:
                raise RuntimeError(f"{kind}: a tensor of the host went to a process group of the device")
            owner = lane if isinstance(tensor, DeviceTensor) else self.device.host
            self._memory.access(tensor, owner, lane, is_write=is_write, operation=kind)

    def note(self, group: "SimulatedGroup", kind: str, tensors: Sequence[Tensor], lane: Lane) -> None:
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        members = tuple(dist.get_process_group_ranks(group))
        reached = self.device.clocks.snapshot(lane)
        self.launches.append(
            Launch(group.group_name, members, kind, num_bytes, lane, reached, calling_lines())
        )

    def functional(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """A collective of `torch.ops._c10d_functional`, which DTensor calls: asynchronous until `wait_tensor`."""
        name = operation._schema.name.rpartition("::")[2]
        device = self.device
        if name == "wait_tensor":
            reached = self._functional.pop(args[0].untyped_storage()._cdata, None)
            if reached is not None:
                device.clocks.join(device.lane, reached)
            return args[0]
        if name == "_wrap_tensor_autograd":
            return AsyncCollectiveTensor(args[0])
        source: Tensor = args[0]
        group = args[-1]
        lane = self._functional_lanes.setdefault(group, Lane(f"functional collectives of {group}"))
        device.clocks.wait(lane, device.lane)
        self.use([source], lane, is_write=False, kind=name)
        plain = on_host(source)
        with unseen():
            made = {
                "all_gather_into_tensor": lambda: torch.cat([plain] * args[1]),
                "reduce_scatter_tensor": lambda: plain.chunk(args[2])[0] * args[2],
                "all_reduce": lambda: plain.clone(),
            }[name]()
        result = on_device(made)
        self._memory.allocate(result.untyped_storage(), device.lane)
        self.use([result], lane, is_write=True, kind=name)
        self._functional[result.untyped_storage()._cdata] = device.clocks.snapshot(lane)
        return result


class SimulatedWork(dist.Work):
    """A collective in flight. Its results arrive when the first one waits."""

    def __init__(self, network: Network, reached: Reached, writes: Sequence[Write]) -> None:
        super().__init__()
        self._network = network
        self._reached = reached
        self._writes = list(writes)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        clocks = self._network.device.clocks
        clocks.join(self._network.device.lane, self._reached)
        writes, self._writes = self._writes, []
        for write in writes:
            write()
        return True

    def is_completed(self) -> bool:
        return not self._writes


class SimulatedGroup(PythonGroup):
    def __init__(self, rank: int, world: int, network: Network) -> None:
        super().__init__(rank, world, BACKEND)
        self._world, self._network = world, network
        self._lane = Lane("a process group")

    def _launch(
        self, kind: str, is_async: bool, outputs: Sequence[Tensor], inputs: Sequence[Tensor], results: Any
    ) -> SimulatedWork:
        """`results`: makes what goes to `outputs`, plain tensors, from the plain `inputs`."""
        network = self._network
        device = network.device
        lane = device.lane if all(isinstance(t, DeviceTensor) for t in (*outputs, *inputs)) else device.host
        network.note(self, kind, inputs, lane)
        if is_async and lane is not device.host:
            self._lane.name = f"an asynchronous {kind}"
            device.clocks.wait(self._lane, lane)
            lane = self._lane
        network.use(inputs, lane, is_write=False, kind=kind)
        network.use(outputs, lane, is_write=True, kind=kind)
        targets = [on_host(output) for output in outputs]
        with unseen():
            made = [result.clone() for result in results([on_host(source) for source in inputs])]

        def write() -> None:
            with unseen():
                for target, result in zip(targets, made, strict=True):
                    target.copy_(result.view(target.shape))

        if not is_async:
            write()
            return SimulatedWork(network, {}, ())
        with unseen():
            for target in targets:
                target.view(-1).view(torch.uint8).fill_(UNWRITTEN)
        return SimulatedWork(network, device.clocks.snapshot(lane), [write])

    # --- as torch calls them -------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, source: Tensor, options: Any = None) -> SimulatedWork:
        return self.all_gather_single_coalesced([output], [source], options)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> SimulatedWork:
        def results(given: list[Tensor]) -> list[Tensor]:
            return [source.reshape(-1).repeat(self._world) for source in given]

        return self._launch("all_gather", _is_async(options), outputs, inputs, results)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: Any = None) -> SimulatedWork:
        return self.reduce_scatter_single_coalesced([output], [source], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> SimulatedWork:
        factor = _factor(options, self._world)

        def results(given: list[Tensor]) -> list[Tensor]:
            return [source.reshape(self._world, -1)[self._rank] * factor for source in given]

        return self._launch("reduce_scatter", _is_async(options), outputs, inputs, results)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None
    ) -> SimulatedWork:
        def results(given: list[Tensor]) -> list[Tensor]:
            return [given[0]] * self._world

        return self._launch("all_gather", _is_async(options), outputs[0], inputs, results)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> SimulatedWork:
        factor = _factor(options, self._world)
        return self._launch(
            "all_reduce",
            _is_async(options),
            tensors,
            tensors,
            lambda given: [each * factor for each in given],
        )

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> SimulatedWork:
        return self._launch("broadcast", _is_async(options), tensors, tensors, lambda given: given)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any = None
    ) -> SimulatedWork:
        """Zeros for those who send nothing: what rank 0 has is not known here."""

        def results(given: list[Tensor]) -> list[Tensor]:
            return [given[self._rank] if given else torch.zeros(outputs[0].shape, dtype=outputs[0].dtype)]

        return self._launch("scatter", _is_async(options), outputs, inputs[0] if inputs else [], results)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, received: Any, sent: Any, options: Any = None
    ) -> SimulatedWork:
        assert not received
        assert not sent

        def results(given: list[Tensor]) -> list[Tensor]:
            own = given[0].reshape(self._world, -1)[self._rank]
            return [own.repeat(self._world).reshape(output.shape)]

        return self._launch("all_to_all", _is_async(options), [output], [source], results)

    def barrier(self, options: Any = None) -> SimulatedWork:
        return SimulatedWork(self._network, {}, ())

    # --- what torch asks a process group --------------------------------------------------------------

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(
            name=lambda: BACKEND,
            options=SimpleNamespace(_timeout=timedelta(minutes=1)),
            supports_splitting=False,
        )


def _is_async(options: Any) -> bool:
    return options is None or bool(options.asyncOp)


def _factor(options: Any, world: int) -> float:
    """What a number becomes when all ranks have the same."""
    is_sum = options is None or options.reduceOp == dist.ReduceOp.SUM
    return world if is_sum else 1
