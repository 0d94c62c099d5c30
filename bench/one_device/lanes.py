"""Delays of one lane at a time, and memory that is NaN while it must not be read.

A lane is what work is queued for: "gather", "reduce" and "replicate" (the collectives, on the library's
streams), "compute" (forward and backward of modules with parameters, on the caller's stream), "optimizer",
and with offload "copy in" (shards to the device, on a stream of their own) and "copy out" (sums to the host).
`Lanes(delayed="gather")` puts a kernel that only waits in front of every collective of that lane, and another
behind it, so that everything which does not wait for the lane runs long before it. A run with a delayed lane
has to give the same bits as one without.

`poisoned_memory()` makes a read that comes too early or too late visible: torch fills what it allocates with
NaN (integers with their maximum, so that buffers of bytes are NaN as floating-point numbers as well),
storages that are emptied in place are filled before, those that grow after, and blocks that were freed are
taken and filled by the next collective of the stream, as any later allocation might.

On the host nothing is delayed, and only NaN is left of this; passages through lanes are counted there too.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardwise.comm.reduction import Reduction
from shardwise.comm.streams import DeviceStream, HostStream

COPIES = ("copy in", "copy out")
LANES = ("gather", "reduce", "replicate", "compute", "optimizer", *COPIES)
CYCLES = 4_000_000
"""Of a delay: 2 ms at 2 GHz. Longer than the host takes for a block, or what is gathered one block ahead
would be there in time whether anybody waits for it or not."""

_MOST_SIZES = 12

# cuBLAS gives the same bits on several streams only with a workspace of a fixed size; read at its first use.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Lanes:
    """Counts passages through the lanes, and delays one of them on a GPU.

    ``reuses``: take and fill blocks of sizes that were sent before, so that freed ones are overwritten.
    """

    def __init__(self, delayed: str | None = None, *, reuses: bool = False, cycles: int = CYCLES) -> None:
        if delayed is not None and delayed not in LANES:
            raise ValueError(f"there is no lane {delayed!r}; they are {', '.join(LANES)}")
        self.passages: Counter[str] = Counter()
        self._delayed, self._reuses, self._cycles = delayed, reuses, cycles
        self._sizes: dict[int, None] = {}

    def enter(self, lane: str) -> None:
        """Before work of ``lane`` is queued on the current stream."""
        self.passages[lane] += 1
        self._sleep(lane)

    def leave(self, lane: str, tensors: Sequence[Tensor] = ()) -> None:
        """After it: hold up what comes next on the lane, and overwrite what was freed there."""
        self._sleep(lane)
        if self._reuses:
            for tensor in tensors:
                if len(self._sizes) < _MOST_SIZES:
                    self._sizes.setdefault(tensor.numel() * tensor.itemsize)
            for num_bytes in self._sizes:
                if tensors:
                    torch.empty(num_bytes, dtype=torch.uint8, device=tensors[0].device).fill_(255)

    def _sleep(self, lane: str) -> None:
        if lane == self._delayed and torch.cuda.is_available():
            torch.cuda._sleep(self._cycles)

    def watch(self, model: nn.Module) -> None:
        """Have modules with parameters of their own pass through "compute", forward and backward."""

        def before(module: nn.Module, args: Any) -> None:
            self.enter("compute")

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: self.enter("compute"))

        for module in model.modules():
            if (
                next(module.parameters(recurse=False), None) is not None
                and next(module.children(), None) is None
            ):
                module.register_forward_pre_hook(before)
                module.register_forward_hook(after)


@contextmanager
def counted_copies(lanes: Lanes) -> Iterator[None]:
    """Inside, what offload copies passes through ``lanes``, on the stream on which it is copied.

    On the host nothing is copied out: sums are there already.
    """

    def through(lane: str, work: Callable[[], Any]) -> Any:
        lanes.enter(lane)
        result = work()
        lanes.leave(lane)
        return result

    def counted_in(copy_in: Callable[..., Any]) -> Callable[..., Any]:
        return lambda stream, copy: copy_in(stream, partial(through, "copy in", copy))

    def counted_out(reduction: Reduction, *result: Any) -> None:
        if reduction.arrives_on_host:
            through("copy out", partial(move, reduction, *result))
        else:
            move(reduction, *result)

    move = Reduction._move
    with ExitStack() as patches:
        for stream in (HostStream, DeviceStream):
            patches.enter_context(patch.object(stream, "copy_in", counted_in(stream.copy_in)))
        patches.enter_context(patch.object(Reduction, "_move", counted_out))
        yield


class Wire(Lanes):
    """A wire of ``gigabytes_per_s`` between ``world`` ranks: a collective lasts as long as its bytes take.

    A kernel that only waits stands on the stream of the collective; it takes none of the memory's bandwidth,
    and one of the multiprocessors' many places. ``total_ms`` sums up what went over the wire. While it is not
    ``is_up``, collectives take no more than their copies.
    """

    def __init__(self, world: int, gigabytes_per_s: float, cycles_per_ms: float) -> None:
        super().__init__()
        self.total_ms = 0.0
        self.is_up = True
        self._world, self._speed, self._cycles_per_ms = world, gigabytes_per_s, cycles_per_ms

    def leave(self, lane: str, tensors: Sequence[Tensor] = ()) -> None:
        """Last until the bytes are over: all pieces but the own one."""
        if not self.is_up:
            return
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        share = self._world - 1 if lane == "gather" else (self._world - 1) / self._world
        milliseconds = num_bytes * share / self._speed / 1e6
        self.total_ms += milliseconds
        if tensors and tensors[0].is_cuda:
            torch.cuda._sleep(int(milliseconds * self._cycles_per_ms))


def cycles_per_ms() -> float:
    """What `torch.cuda._sleep` counts in a millisecond of this GPU."""
    cycles = 20_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)  # so that the clock is up
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / begin.elapsed_time(end)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory holds NaN from its allocation to the first write, and from its release on."""
    was_on, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    resize = torch.UntypedStorage.resize_

    def poisoned(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        before = storage.nbytes()
        if num_bytes < before:
            _fill(storage)
        result = resize(storage, num_bytes)
        if num_bytes > before == 0:
            _fill(storage)
        return result

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.UntypedStorage.resize_ = poisoned  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            torch.use_deterministic_algorithms(was_on, warn_only=warned)


def _fill(storage: torch.UntypedStorage) -> None:
    with torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,)).fill_(255)
