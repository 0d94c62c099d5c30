"""Objects between the ranks of a process group.

After each step that may fail on one rank alone, every rank reports its outcome: see agreement.py.
"""

import pickle
from collections.abc import Callable
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.layout.mesh import Axis, device_of_group
from shardwise.ranks.agreement import kind_of, run_on_all_ranks
from shardwise.ranks.model_ranks import gather_from_all

T = TypeVar("T")


class RankGroup:
    """The ranks of `pg`; None stands for this process alone. Every method is collective."""

    def __init__(self, pg: dist.ProcessGroup | None) -> None:
        self.pg = pg
        self.size = 1 if pg is None else dist.get_world_size(pg)
        self.rank = 0 if pg is None else dist.get_rank(pg)
        self.is_first = self.rank == 0
        self._axes = [] if pg is None else [Axis(pg, self.size, self.rank)]
        self._device = torch.device("cpu") if pg is None else device_of_group(pg)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return list(gather_from_all(self._axes, value).values())

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Every rank's value, on the first rank only."""
        if self.pg is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, group=self.pg, group_dst=0)
        return values

    def scatter_objects(self, values: list[Any] | None) -> Any:
        """Each rank's item of the first rank's `values`."""
        if self.pg is None:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, group=self.pg, group_src=0)
        return received[0]

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The value of rank `source` of this group."""
        if self.pg is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.pg, group_src=source)
        return values[0]

    def distinct(self, value: Any, key: Any) -> list[Any]:
        """The different values of the ranks, in the order of ranks; equal keys mean equal values.

        In most jobs all values are equal, and ranks exchange only digests.
        """
        digests = self.all_gather_objects(sha256(repr(key).encode()).digest())
        if len(set(digests)) == 1:
            return [value]
        firsts = [rank for rank, each in enumerate(digests) if digests.index(each) == rank]
        # A failure to pickle is raised on all ranks.
        pickled = self.run_on_all_ranks(lambda: pickle.dumps(value))
        return [pickle.loads(self.broadcast_object(pickled, rank)) for rank in firsts]

    def agree(self, caller: str, arguments: dict[str, Any]) -> None:
        """Refuse `arguments` of the public function `caller` that differ between ranks.

        Ranks with different arguments would use different folders, or wait for each other forever.
        """
        run_on_all_ranks(self._axes, self._device, lambda: None, caller=caller, same=arguments)

    def run_on_all_ranks(
        self, act: Callable[[], T], explain: Callable[[Exception], str] = str, says_rank: bool = True
    ) -> T:
        """Run `act` on all ranks; return this rank's result if it succeeded on all; otherwise all raise.

        Args:
            act: does not communicate.
            explain: makes the text of this rank's error, before it is sent to the others.
            says_rank: if only some ranks failed, begin the error with the first of them.
        """

        def explained() -> T:
            try:
                return act()
            except Exception as error:
                raise kind_of(error)(explain(error)) from error

        told = act if explain is str else explained
        return run_on_all_ranks(self._axes, self._device, told, says_rank=says_rank)

    def on_first(self, act: Callable[[], Any], explain: Callable[[Exception], str] = str) -> None:
        """Run `act` on the first rank; its exception is raised on all."""
        self.run_on_all_ranks(lambda: act() if self.is_first else None, explain, says_rank=False)
