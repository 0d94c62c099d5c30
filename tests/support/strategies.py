"""What the tests of `shard_model` and its contexts share: every strategy on its meshes, and two scales.

`Wire` weighs what a rank sends, where the back end is called; `live_bytes` weighs what a rank holds, by what
Python still reaches. Neither asks the library.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshed import Layout
from models import random_batch
from reference import mean_of_squares
from scenario import one_thread
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.params.parameter import DeferredGradient

FLAT = ("ddp", "zero1", "zero2", "zero3")
HYBRID = ("hybrid", "hybrid_zero2")
BY_HOSTS = (*HYBRID, "zero3_hpz")  # on meshes of hosts and the ranks of each
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3_hpz", "hybrid", "hybrid_zero2")


@dataclass(frozen=True)
class Plan:
    """A strategy and how many ranks there are, and on how many hosts. Travels by pickle."""

    strategy: str
    ranks: int
    hosts: int = 1

    def __str__(self) -> str:
        return f"{self.strategy}_{self.hosts}x{self.ranks // self.hosts}"

    @property
    def shards(self) -> int:
        """Over how many ranks a parameter is sharded."""
        return {"ddp": 1, "zero3_hpz": self.ranks}.get(self.strategy, self.ranks // self.hosts)

    @property
    def layout(self) -> Layout:
        """The mesh: its data-parallel dimensions are all it has."""
        if self.strategy in BY_HOSTS:
            return Layout((self.hosts, self.ranks // self.hosts))
        return Layout((self.ranks,), ("data",), ("data",))

    def shard(self, model: nn.Module, **options: Any) -> Any:
        return shardwise.shard_model(model, strategy=self.strategy, mesh=self.layout.mesh(), **options)


def plans_for(ranks: int) -> list[Plan]:
    """Every strategy on `ranks` ranks; those by hosts on one host and on two, where that is something else."""
    hosts = {1: [1], 2: [1, 2], 3: [], 4: [2]}[ranks]
    return [Plan(s, ranks) for s in FLAT] + [Plan(s, ranks, count) for s in BY_HOSTS for count in hosts]


FOUR = plans_for(4)
# All strategies on four ranks, and some on fewer; the rest is marked slow.
ALWAYS = [
    *FOUR,
    Plan("zero2", 1),
    Plan("zero3", 2),
    Plan("hybrid", 2),
    Plan("ddp", 3),
    Plan("zero1", 3),
]


def rows(plan: Plan | None, batch: Tensor) -> Tensor:
    """This rank's rows of a global batch; all of them in one process."""
    if plan is None:
        return batch
    share = len(batch) // plan.ranks
    return batch[dist.get_rank() * share :][:share].clone()


def part(plan: Plan | None, seed: int, width: int = 7) -> Tensor:
    return rows(plan, random_batch(seed, 12, width))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | None, seed: int, width: int = 7
) -> None:
    optimizer.zero_grad()
    mean_of_squares(model, part(plan, seed, width)).backward()
    optimizer.step()


@cache
def plainly(act: Callable[..., Any], *args: Any) -> Any:
    """What the plain run of `act` finds, once for all tests."""
    with one_thread():
        return act(None, *args)


def groups_of(model: nn.Module) -> list[list[str]]:
    """The names of the modules that share each group, in the order of the tree; the root is ''."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, shardwise.FSDPModule):
            found.setdefault(id(module._shardwise_state), []).append(name)
    return list(found.values())


# --- what a rank sends ----------------------------------------------------------------------------

# Everything of a process group that moves data, except what is weighed one by one below.
OTHERS = (
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allgather_coalesced", "broadcast"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall"),
    *("alltoall_base", "reduce", "gather", "scatter", "allreduce_coalesced"),
)


@dataclass
class Wire:
    """Bytes that this rank sends while it is entered, by what carries them.

    A sum over n ranks costs each 2 (n - 1) / n of its bytes, the least possible (a ring). Sums of a few
    integers, by which ranks agree on what to do, count apart. Anything else fails: it is not weighed here.
    """

    messages: float = 0.0  # point to point
    sums: float = 0.0
    agreements: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def bytes(self) -> float:
        return self.messages + self.sums

    def __enter__(self) -> "Wire":
        pg_class = dist.ProcessGroup
        send, allreduce = pg_class.send, pg_class.allreduce

        def weighed_send(pg: Any, tensors: Any, *args: Any) -> Any:
            self.messages += sum(_num_bytes(tensor) for tensor in tensors)
            return send(pg, tensors, *args)

        def weighed_sum(pg: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                if tensor.is_floating_point():
                    self.sums += 2 * (pg.size() - 1) / pg.size() * _num_bytes(tensor)
                else:
                    assert tensor.numel() <= 64, "more than flags"
                    self.agreements += 1
            return allreduce(pg, tensors, *args, **kwargs)

        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError("a collective that is not weighed")

        self._stack.enter_context(mock.patch.object(pg_class, "send", weighed_send))
        self._stack.enter_context(mock.patch.object(pg_class, "allreduce", weighed_sum))
        for name in OTHERS:
            if hasattr(pg_class, name):
                self._stack.enter_context(mock.patch.object(pg_class, name, refuse))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# --- what a rank holds ----------------------------------------------------------------------------


def live_bytes() -> int:
    """Bytes of all memory that Python reaches: tensors, their parts, and gradients of leaves."""
    gc.collect()
    storages: dict[int, int] = {}  # start -> end

    def count(tensor: Tensor | None) -> None:
        while isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor is None or tensor.is_meta or tensor.layout is not torch.strided:
            return
        if isinstance(tensor, DeferredGradient):  # has no memory
            return
        storage = tensor.untyped_storage()
        if storage.nbytes():
            start = storage.data_ptr()
            storages[start] = max(storages.get(start, 0), start + storage.nbytes())

    # Not isinstance: it asks every object for __class__, which some answer with a warning.
    for found in [each for each in gc.get_objects() if issubclass(type(each), Tensor)]:
        count(found)
        if found.is_leaf and type(found) in (Tensor, nn.Parameter):
            count(found.grad)
    total = reached = 0
    for start, end in sorted(storages.items()):  # shards lie inside the buffer of their group
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --- a strategy by its name alone -------------------------------------------------------------------


def seats(*cases: tuple[Any, ...], also: str = "") -> Any:
    """Worlds and strategies, and what ``also`` names, where not every combination tells something new."""
    return pytest.mark.parametrize(("world", "strategy", *also.split()), cases, indirect=["world"])


def shard_as(model: nn.Module, strategy: str, **options: Any) -> Any:
    """Shard ``model`` over all ranks; the process group over which its gradients are summed first."""
    world = dist.get_world_size()
    shape: tuple[int, ...] = (world,)
    names: tuple[str, ...] = ("dp",)
    if strategy.startswith("hybrid"):
        shape = (2, world // 2) if world % 2 == 0 else (1, world)
        names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    shardwise.shard_model(model, strategy=strategy, mesh=mesh, **options)
    return mesh.get_group(names[-1])
