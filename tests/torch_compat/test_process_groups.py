"""Process groups that are made beside those of the mesh: for reductions, and for what is kept in parts.

Where the default group is bound to a device (``init_process_group(device_id=...)``), torch would split the
communicator of the whole world for each, and wait for ranks that do not come. gloo has no communicator to
split; what is tested is that torch is not asked to.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import even_tower, random_batch, shard_tower
from on_ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import fully_shard
from shardwise.engine.module_state import sharded_module_states
from shardwise.torch_compat import c10d

GPU = torch.device("cuda", 0)


@contextmanager
def world_bound_to_a_device() -> Iterator[list[str]]:
    """As after ``init_process_group(device_id=...)``; what is made and connected then is written down."""
    log: list[str] = []
    world: Any = dist.group.WORLD
    make: Any = dist.distributed_c10d._new_process_group_helper
    connect = c10d.connect

    def noted_make(size: int, own: int, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        whose = "whole" if world.bound_device_id is None else "split"
        log.append(f"ranks {ranks} make a group, the world stays {whose}")
        return make(size, own, ranks, *args, **kwargs)

    def noted_connect(pg: dist.ProcessGroup, device: torch.device) -> None:
        log.append(f"ranks {c10d.ranks_of(pg)} connect")
        connect(pg, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", noted_make)
        patch.setattr(c10d, "connect", noted_connect)
        world.bound_device_id = GPU
        try:
            yield log
            assert world.bound_device_id == GPU  # for groups of the caller's own
        finally:
            world.bound_device_id = None


def train(mesh: DeviceMesh, log: list[str], keep: bool | int = True) -> None:
    """A forward without gradients, and two steps, with a group for reductions."""
    model: Any = even_tower().double()
    shard_tower(model, mesh=mesh, reshard_after_forward=keep)
    model.set_separate_reduce_scatter_group(True)
    with torch.no_grad():
        model(random_batch(0, 4))
    log.append("-- forward without gradients")
    for number in range(2):
        loss = model(random_batch(number, 4)).sum()
        log.append("-- forward")
        loss.backward()
        log.append("-- backward")


@on_ranks(4)
def test_only_the_ranks_of_the_mesh_take_part_in_its_process_groups() -> None:
    """Two stages of a pipeline, over two ranks each. The second has no sharded model."""
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    with world_bound_to_a_device() as log:
        if stages.get_local_rank("stage") == 0:
            train(stages["shard"], log)
    expected = [
        "ranks [0, 1] make a group, the world stays whole",
        "-- forward without gradients",
        "ranks [0, 1] connect",
        *["-- forward", "-- backward"] * 2,
    ]
    assert log == (expected if stages.get_local_rank("stage") == 0 else [])


@on_ranks(4)
def test_groups_are_made_in_one_order_and_connect_before_the_first_backward() -> None:
    with world_bound_to_a_device() as log:
        train(init_device_mesh("cpu", (4,)), log, keep=2)
    own = [0, 1] if dist.get_rank() < 2 else [2, 3]
    assert log == [
        "ranks [0, 1, 2, 3] make a group, the world stays whole",
        f"ranks {own} make a group, the world stays whole",
        "-- forward without gradients",
        "ranks [0, 1, 2, 3] connect",
        f"ranks {own} connect",
        *["-- forward", "-- backward"] * 2,
    ]


@on_ranks(4)
def test_a_failure_ends_waits_in_all_process_groups_of_a_group() -> None:
    model: Any = even_tower().double()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group(True)
    model(random_batch(0, 4))
    (module_state,) = sharded_module_states(model)
    names = [axis.pg.group_name.split("_") for axis in module_state.group.gradients.awaited.axes()]
    kinds = sorted(name[1] if name[0] == "shardwise" else "mesh" for name in names)
    assert kinds == ["mesh", "part", "reduce"]


@on_ranks(2)
def test_the_world_is_bound_as_before_where_a_group_could_not_be_made() -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    world: Any = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", fail)
        world.bound_device_id = GPU
        try:
            with pytest.raises(OSError, match="no route"):
                c10d.subgroup(world, range(2), torch.device("cpu"), "test")
            assert world.bound_device_id == GPU
        finally:
            world.bound_device_id = None


class Backend:
    """Of a process group; counts what it is asked."""

    def __init__(self, name: str, has_communicator: bool) -> None:
        self._name = name
        self.supports_splitting = has_communicator
        self.connected: list[torch.device] = []

    def name(self) -> str:
        return self._name

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)


class Group:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> Backend:
        return self.backend


@pytest.mark.parametrize("device", [GPU, torch.device("cuda")], ids=str)
def test_nccl_is_known_by_all_its_names_and_what_has_a_communicator_connects(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """It is told its device by the index, as all back ends for NCCL take it, or given a first collective."""
    summed: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: summed.append((tensor.numel(), group)))
    monkeypatch.setattr(torch, "zeros", lambda size, device: torch.empty(size, device="meta"))
    for name, has_communicator in (
        *(("nccl", True), ("nccl2", True), ("nccl-legacy", True)),
        *(("nccl2", False), ("nccl-lazy", False), ("ucc", False), ("gloo", False)),
    ):
        group: Any = Group(Backend(name, has_communicator))
        assert c10d.is_nccl(group, GPU) == name.startswith("nccl")
        c10d.connect(group, device)
        assert group.backend.connected == [GPU] * has_communicator
        assert summed == [(1, group)] * (name.startswith("nccl") and not has_communicator)
        summed.clear()


# --- after a failure ------------------------------------------------------------------------------


class Aborted:
    """A process group whose ``abort`` acts; ``count``: how often it has begun."""

    def __init__(self, abort: Callable[[], None], name: str = "nccl") -> None:
        self._device_types, self._name, self._abort, self.count = [GPU], name, abort, 0

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._name, abort=self.abort)

    def abort(self) -> None:
        self.count += 1
        self._abort()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[Any, None]:
    """What torch knows of process groups."""
    groups: dict[Any, None] = {}
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    return groups


def test_all_communicators_are_aborted_at_the_same_time(known: dict[Any, None]) -> None:
    """Each waits for the device, and so for what the others' kernels wait for."""
    together = threading.Barrier(3, timeout=20)
    waits, idle, alien = (Aborted(together.wait) for _ in range(3))
    other = Aborted(together.abort, name="ucc")
    known |= dict.fromkeys((waits, idle, other))
    c10d.end_waits([waits, alien], {})
    c10d.wait_for_aborts(20)
    assert not together.broken
    assert [group.count for group in (waits, idle, alien, other)] == [1, 1, 1, 0]


def test_an_abort_is_repeated_while_it_is_needed_and_spares_groups_made_since(known: dict[Any, None]) -> None:
    def fail() -> None:
        raise RuntimeError("nothing to abort")

    may_end = threading.Event()
    slow, failing, later = Aborted(may_end.wait), Aborted(fail), Aborted(fail)
    known[failing] = None
    aborts: c10d.Aborts = {}
    c10d.end_waits([slow], aborts)
    aborts[failing].join(20)
    known[later] = None
    c10d.end_waits([slow], aborts)
    may_end.set()
    c10d.wait_for_aborts(20)
    assert [group.count for group in (slow, failing, later)] == [1, 2, 0]


LEAVES_DURING_AN_ABORT = """
from datetime import timedelta
import torch, torch.distributed as dist
from shardwise.ranks import failures
from shardwise.torch_compat import c10d

class Group:
    _device_types = [torch.device("cuda")]
    def _get_backend(self, device):
        return self
    def name(self):
        return "nccl"
    def abort(self):  # for a while, without the lock of the interpreter, as torch does
        try:
            store.wait(["never"], timedelta(milliseconds=300))
        except dist.DistError:
            pass

store = dist.HashStore()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
monitor = failures._started(dist.group.WORLD)
c10d.end_waits([Group()], {})
raise SystemExit(7)
"""


@pytest.mark.processes
def test_a_process_that_ends_during_an_abort_keeps_its_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_DURING_AN_ABORT], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
