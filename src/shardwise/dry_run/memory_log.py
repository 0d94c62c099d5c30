"""Every piece of memory that fake tensors would take, from its allocation to its release, and what for.

What a piece is for is often known only later: a gradient is a tensor like any other until it reaches its
parameter. So each piece has a kind that may be set at any time, and counts with its last one from its
beginning. Time is counted in allocations and releases.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.torch_compat import dtensor, pytree, tensor_impl

PARAMETERS = "parameters"
GRADIENTS = "gradients"
STATE = "optimizer state"
UNSHARDED = "unsharded parameters"
FULL_GRADIENTS = "unsharded gradients"
COMMUNICATION = "communication"
ACTIVATIONS = "activations"
TEMPORARY = "optimizer's temporaries"
OTHER = "buffers and batch"
KINDS = (
    *(PARAMETERS, GRADIENTS, STATE, OTHER, UNSHARDED, FULL_GRADIENTS, COMMUNICATION),
    *(ACTIVATIONS, TEMPORARY),
)
"""From what stays to what comes and goes. Of two kinds that a piece is given, the first of these counts."""

_RANK = {kind: rank for rank, kind in enumerate(KINDS)}


@dataclass(slots=True, eq=False)
class Allocation:
    """A piece of memory."""

    num_bytes: int
    begin: int
    kind: str
    end: int | None = None


@dataclass
class MemoryLog:
    """All pieces in order, and marks: what began at which moment."""

    allocations: list[Allocation] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    now: int = 0
    flops: int = 0
    """Of matrix products, convolutions and attention."""
    recomputed_flops: int = 0
    is_in_backward: bool = False
    unknown: str = ACTIVATIONS
    """What memory is taken for of which nothing is said."""
    _alive: dict[int, tuple[Allocation, Any]] = field(default_factory=dict)  # by storage
    _resizable: dict[int, Any] = field(default_factory=dict)  # weak references to storages

    def mark(self, what: str) -> None:
        """Something begins now."""
        self.look()
        self.marks.append((self.now, what))

    def see(self, tensor: Tensor) -> None:
        """Record the memory of a fake tensor, unless it is known."""
        storage = tensor.untyped_storage()
        key = tensor_impl.storage_key(storage)
        if key not in self._alive and tensor_impl.fake_device(tensor).type != "meta":
            self._begin(key, storage.nbytes(), weakref.ref(storage, partial(self._gone, key)), self.unknown)

    def set_kind(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Say what the memory of ``tensors`` is for; of what was said before, what stands first counts."""
        for tensor in tensors:
            if tensor is not None:
                local = dtensor.plain(tensor)
                self.see(local)
                found = self._alive.get(tensor_impl.storage_key(local.untyped_storage()))
                if found is not None and _RANK[kind] < _RANK[found[0].kind]:
                    found[0].kind = kind

    def watch(self, tensor: Tensor) -> None:
        """Record also when the memory of ``tensor`` is resized, which no operation tells."""
        self.see(tensor)
        storage = tensor.untyped_storage()
        self._resizable[tensor_impl.storage_key(storage)] = weakref.ref(storage)

    def look(self) -> None:
        """Record what was resized since."""
        for key, weak in self._resizable.items():
            storage = weak()
            if storage is None:
                continue
            allocation, reference = self._alive[key]
            num_bytes = storage.nbytes()
            if num_bytes != allocation.num_bytes:
                allocation.end = self._tick()
                self._begin(key, num_bytes, reference, allocation.kind)

    def _begin(self, key: int, num_bytes: int, reference: Any, kind: str) -> None:
        allocation = Allocation(num_bytes, self._tick(), kind)
        self.allocations.append(allocation)
        self._alive[key] = allocation, reference

    def _gone(self, key: int, _: Any) -> None:
        allocation, _ = self._alive.pop(key)
        allocation.end = self._tick()
        self._resizable.pop(key, None)

    def _tick(self) -> int:
        self.now += 1
        return self.now


_DEVICE, _NUMBER = torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default


class RecordingMode(TorchDispatchMode):
    """Inside, all fake tensors that operations make are seen by ``log``.

    A number that is read from a fake tensor, which has none, is 1, or True.
    """

    def __init__(self, log: MemoryLog) -> None:
        super().__init__()
        self._log = log

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the wrapper takes as long as the method

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is _DEVICE and type(args[0]) is tensor_impl.FakeTensor:
            return tensor_impl.fake_device(args[0])  # more than half of all calls
        if operation is _NUMBER and not tensor_impl.has_memory(args[0]):
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1
        self._log.look()
        result = operation(*args, **(kwargs or {}))
        if flops := tensor_impl.flops_of(operation, args, kwargs or {}, result):
            self._log.flops += flops
            if self._log.is_in_backward and torch.is_grad_enabled():  # as where a block runs again
                self._log.recomputed_flops += flops
        for leaf in pytree.tree_leaves(result):
            if type(leaf) is tensor_impl.FakeTensor:
                self._log.see(leaf)
        return result


# --- over time ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """What was in memory at a moment, by kind, in bytes."""

    time: int
    by_kind: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.by_kind.values())


def moments(allocations: Iterable[Allocation], begin: int, end: int) -> Iterator[Moment]:
    """What is in memory at ``begin``, and after each change until ``end``."""
    changes = []
    for each in allocations:
        changes.append((each.begin, each.kind, each.num_bytes))
        if each.end is not None:
            changes.append((each.end, each.kind, -each.num_bytes))
    changes.sort(key=lambda change: change[0])
    now = dict.fromkeys(KINDS, 0)
    has_begun = False
    for time, kind, change in changes:
        if time > end:
            break
        if time > begin and not has_begun:
            has_begun = True
            yield Moment(begin, dict(now))
        now[kind] += change
        if time > begin and change:
            yield Moment(time, dict(now))
    if not has_begun:
        yield Moment(begin, dict(now))
