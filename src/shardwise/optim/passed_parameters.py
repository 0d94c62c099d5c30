"""Checks that all ranks pass the same parameters, by one number in an all-reduce that is sent anyway.

The number is a sum over the names of the DTensors on a mesh: their order may differ by rank, and only ranks
on the mesh are compared.

    over dp, rank 0   passes a.weight, b.weight    number("a.weight") + number("b.weight")
             rank 1   passes b.weight              number("b.weight"): both ranks raise
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, reduce
from hashlib import blake2b
from itertools import chain
from operator import attrgetter, or_
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout.fqns import listed
from shardwise.torch_compat import c10d

_RANGE = 2**52
"""float64 holds all integers up to twice that."""

# Numbers that all ranks of a process group have sent. Where reading would wait for a device, a rank reads
# only if its own number is new.
_agreed: "WeakKeyDictionary[dist.ProcessGroup, set[int]]" = WeakKeyDictionary()


class PassedParameters:
    """The names of the DTensors that ``caller`` was given, by mesh."""

    def __init__(self, caller: str) -> None:
        self.caller = caller
        # For meshes that are equal: the names, and these meshes by id.
        self._on: dict[DeviceMesh, tuple[list[str], dict[int, DeviceMesh]]] = {}

    def add(self, mesh: DeviceMesh, names: Iterable[str]) -> None:
        """Add parameters that live on ``mesh``."""
        own, equal = self._on.setdefault(mesh, ([], {}))
        own.extend(names)
        equal[id(mesh)] = mesh

    def group_of(self, mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
        """The process group of a dimension of ``mesh``, of which equal meshes may have different ones.

        The choice depends neither on the order of the parameters, which may differ by rank, nor on other
        dimensions.
        """
        _, equal = self._on.get(mesh, ([], {id(mesh): mesh}))
        return min((each.get_group(dim) for each in equal.values()), key=attrgetter("group_name"))

    def along(self, pg: dist.ProcessGroup, others: Sequence[str], is_on_host: bool) -> "PassedAlong":
        """Those on all ranks of ``pg``, a dimension of their meshes, besides ``others``."""
        names = list(others)
        for own, equal in self._on.values():
            groups = chain.from_iterable(mesh.get_all_groups() for mesh in equal.values())
            if any(group.group_name == pg.group_name for group in groups):
                names += own
        return PassedAlong(self.caller, pg, names, is_on_host)


class PassedAlong:
    """The names of parameters on all ranks of a process group, to be compared among them."""

    def __init__(self, caller: str, pg: dist.ProcessGroup, names: Sequence[str], is_on_host: bool) -> None:
        self._caller = caller
        self._pg = pg
        self._names = names
        own = 1 + sum(map(_number_of, names)) % _RANGE
        # To be sent; negative if this rank will not read those of others.
        self.number = own if is_on_host or own not in _agreed.get(pg, ()) else -own

    def compare(self, numbers: Tensor) -> None:
        """Refuse different ``numbers`` of ranks, on every rank that reads them.

        On a device, ranks that pass what all have passed before do not read, and raise in their next wait.
        """
        if self.number < 0:
            return
        found = [int(number) for number in numbers.tolist()]
        if len({abs(number) for number in found if number}) > 1:  # 0 is that of a fake rank
            raise ValueError(
                f"{self._caller}: ranks have passed different parameters: {self._difference(found)}. All "
                "ranks get the same result, so they must pass the same parameters, such as "
                "model.parameters(); a parameter without .grad counts as zeros."
            )
        _agreed.setdefault(self._pg, set()).add(self.number)

    def _difference(self, numbers: Sequence[int]) -> str:
        ranks = c10d.ranks_of(self._pg)
        if min(numbers) < 0:  # not all ranks come here to send their names
            others = [str(r) for r, number in zip(ranks, numbers, strict=True) if abs(number) != self.number]
            return f"this rank {len(self._names)} ({listed(self._names, 4)}), rank {listed(others)} others"
        everyone: list[Any] = [None] * len(ranks)
        dist.all_gather_object(everyone, list(self._names), group=self._pg)
        counts: dict[int, Counter[str]] = dict(zip(ranks, map(Counter, everyone), strict=True))
        lacking = []
        for name, most in reduce(or_, counts.values()).items():
            if without := [str(rank) for rank, own in counts.items() if own[name] < most]:
                lacking.append(f"{name} (not on rank {listed(without)})")
        return listed(lacking, 4)


@cache
def _number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest())
