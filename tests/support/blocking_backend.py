"""A back end that only blocks: a wait ends when all ranks have come, and nothing else ends it.

Ranks exchange bytes through the store of the job. There is no abort, and no timeout but that which a test sets.
"""

import io
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.torch_compat.c10d import PythonGroup

NAME = "only_blocks"
GIVEN_UP = f"{NAME}/given up"
"""A key of the group's store: set, it is the timeout of the waits of all ranks, which tests need not wait for."""


class BlockingWork(dist.Work):
    """Waits for what every rank sends, then writes the results."""

    def __init__(
        self,
        pieces: Callable[[], list[Any] | None],
        fill: Callable[[list[Any]], None],
        is_given_up: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._pieces: Callable[[], list[Any] | None] | None = pieces
        self._fill = fill
        self._is_given_up = is_given_up

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._pieces is not None:
            while (found := self._pieces()) is None:
                if self._is_given_up():
                    raise dist.DistBackendError("the test gives up")
                time.sleep(0.005)
            self._pieces = None
            self._fill(found)
        return True

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class BlockingGroup(PythonGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size, NAME)
        self._store, self._own, self._world = store, rank, size
        self._counts: Counter[str] = Counter()

    def give_up(self) -> None:
        """Have the waits of all ranks raise."""
        self._store.set(GIVEN_UP, "")

    def _swap(self, kind: str, own: Any, fill: Callable[[list[Any]], None]) -> BlockingWork:
        """The next collective of its kind on each rank belongs to the next of the others."""
        self._counts[kind] += 1
        keys = [f"{NAME}/{kind}/{self._counts[kind]}/{rank}" for rank in range(self._world)]
        data = io.BytesIO()
        torch.save(own, data)
        self._store.set(keys[self._own], data.getvalue())

        def pieces() -> list[Any] | None:
            if not self._store.check(keys):
                return None
            return [torch.load(io.BytesIO(self._store.get(key))) for key in keys]

        return BlockingWork(pieces, fill, lambda: self._store.check([GIVEN_UP]))

    def all_gather_single(self, output: Tensor, source: Tensor, options: Any = None) -> BlockingWork:
        return self._swap("all-gather", source.clone(), lambda found: output.copy_(torch.cat(found)))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: Any = None) -> BlockingWork:
        def fill(found: list[Tensor]) -> None:
            output.copy_(sum(each.view(self._world, -1)[self._own] for each in found))

        return self._swap("reduce-scatter", source.clone(), fill)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> BlockingWork:
        op = options.reduceOp

        def fill(found: list[Tensor]) -> None:
            stacked = torch.stack(found)
            tensors[0].copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))

        return self._swap("all-reduce", tensors[0].clone(), fill)

    def allgather(self, outputs: Any, sources: Any, options: Any = None) -> BlockingWork:
        def fill(found: list[Tensor]) -> None:
            for output, piece in zip(outputs[0], found, strict=True):
                output.copy_(piece)

        return self._swap("all-gather list", sources[0].clone(), fill)


def blocking_group() -> dist.ProcessGroup:
    """All ranks of the job, over a back end that only blocks."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, BlockingGroup, devices=["cpu"])
    return dist.new_group(backend=NAME)
