"""The ranks of the job, as a check meets them: what is around each, and how they tell rank 0.

Facts go through the store of the job, which works where collectives do not.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Surroundings:
    """What is around one rank. Tests put something else there."""

    versions: Mapping[str, str]
    environment: Mapping[str, str]
    host: str
    clock: Callable[[], float] = time.time

    @staticmethod
    def of_this_process(version: str) -> "Surroundings":
        """What is there; ``version`` is that of this library."""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "shardwise": version}
        if torch.cuda.is_available():
            versions["cuda"] = str(torch.version.cuda)
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return Surroundings(versions, dict(os.environ), platform.node())


@dataclass
class Job:
    """One rank's end of the job; all ranks run the same checks in the same order.

    ``timeout_s``: how long to wait for the facts of a rank.
    """

    rank: int
    world: int
    device: torch.device
    store: dist.Store
    timeout_s: float = 60.0
    _run: int = field(init=False)
    _num_exchanges: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._run = self.store.add(f"runs/{self.rank}", 1)  # earlier ones have left their facts behind

    def gather(self, own: Any) -> list[Any] | None:
        """The facts of all ranks, in order, on rank 0; None elsewhere. They travel as JSON.

        Raises:
            TimeoutError: on rank 0, with the ranks that have not told theirs.
        """
        key = self._next_key()
        self.store.set(f"{key}/{self.rank}", json.dumps(own))
        if self.rank:
            return None
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + self.timeout_s
        silent = list(range(self.world))
        while silent := [rank for rank in silent if not self.store.check([keys[rank]])]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer from {silent} within {self.timeout_s:g} s")
            time.sleep(0.01)
        return [json.loads(self.store.get(each)) for each in keys]

    def share(self, value: Any) -> Any:
        """The ``value`` of rank 0, on all ranks."""
        key = self._next_key()
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        self.store.wait([key], timedelta(days=1))  # rank 0 has a limit for everything that it waits for
        return json.loads(self.store.get(key))

    def _next_key(self) -> str:
        self._num_exchanges += 1
        return f"run/{self._run}/{self._num_exchanges}"
