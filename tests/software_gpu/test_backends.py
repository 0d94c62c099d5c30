"""What the library asks of torch's back ends for NCCL, under each of their names, on software GPUs.

Torch 2.15 makes a new back end, "nccl2", where "nccl" is asked for; TORCH_DIST_USE_NCCL2=0 brings the older back.
Torch 2.14 makes the new one with TORCH_DIST_USE_NCCL2=1.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from models import built, even_tower, random_batch, shard_tower
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardwise.comm.communicators import BackendCollectives
from shardwise.torch_compat import c10d
from software_gpu.launch import run_on_gpus


@pytest.fixture(
    scope="module",
    params=[{}, *(pytest.param({"TORCH_DIST_USE_NCCL2": value}, marks=pytest.mark.slow) for value in "01")],
    ids=["as torch chooses", "the older", "the newer"],
)
def env(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.param


def newer_can_wait() -> bool:
    """Whether "nccl2" can be made without connecting: not in torch 2.14."""
    return hasattr(dist.ProcessGroupNCCL.Options, "lazy_init")


def join() -> torch.device:
    device = torch.device("cuda", int(os.environ["WORLD_SIZE"]) - 1 - int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


@contextmanager
def noted_reductions() -> Iterator[set[str]]:
    """By which operation gradients are reduced, and in what process groups."""
    noted = set()

    division = BackendCollectives._division

    def noting(comm: BackendCollectives, dtype: torch.dtype, divisor: float) -> Any:
        op, *factors = division(comm, dtype, divisor)
        noted.add(
            f"{op} in {'a group of its own' if '_reduce_' in comm._pg.group_name else 'the same group'}"
        )
        return op, *factors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackendCollectives, "_division", noting)
        yield noted


def plain_losses(world: int, steps: int) -> list[float]:
    model = built(even_tower, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = torch.stack(
            [model(random_batch(step * world + rank, 4)).mean() for rank in range(world)]
        ).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(model: Any, device: torch.device, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(steps):
        loss = model(random_batch(step * world + rank, 4).to(device)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def sharded(device: torch.device, keep: bool | int = True) -> Any:
    torch.manual_seed(0)
    model: Any = even_tower().double().to(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    shard_tower(model, mesh=mesh, reshard_after_forward=keep)
    return model


def is_connected(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """The older back end says so. The new one, made for later, can be split once it has a communicator."""
    backend: Any = pg._get_backend(device)
    return bool(backend._is_initialized() if backend.name() == "nccl" else backend.supports_splitting)


def first_steps() -> tuple[list[str], set[str], list[float], list[float]]:
    """When the process group for reductions connects, how gradients are reduced, the losses, and those of groups
    that two ranks keep together."""
    model = sharded(device := join())
    made: list[dist.ProcessGroup] = []
    make = c10d.subgroup

    def noted_make(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
        made.append(make(*args, **kwargs))
        return made[-1]

    connected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "subgroup", noted_make)
        for grad in (torch.no_grad(), torch.enable_grad()):
            with grad:
                model(random_batch(0, 4).to(device))
            connected += [f"{type(grad).__name__}: {is_connected(pg, device)}" for pg in made]
    with noted_reductions() as noted:
        losses = losses_of(model, device, 3)
    return connected, noted, losses, losses_of(sharded(device, keep=2), device, 3)


@pytest.fixture(scope="module")
def found(env: dict[str, str]) -> list[Any]:
    return run_on_gpus(4, first_steps, env=env)


def test_nccl_averages_gradients_in_a_group_that_connects_when_it_is_needed(
    env: dict[str, str], found: list[Any]
) -> None:
    for connected, noted, losses, _ in found:
        connects_at_once = env.get("TORCH_DIST_USE_NCCL2") == "1" and not newer_can_wait()
        assert connected == [f"no_grad: {connects_at_once}", "enable_grad: True"]
        assert noted == {f"{dist.ReduceOp.AVG} in a group of its own"}
        assert losses == pytest.approx(plain_losses(4, 3), abs=1e-12)


def test_groups_of_some_ranks_are_bound_to_the_devices_of_these(found: list[Any]) -> None:
    for *_, losses in found:
        assert losses == pytest.approx(plain_losses(4, 3), abs=1e-12)


def leave_together() -> None:
    """Wait until all ranks have come here; rank 0, which holds the store of the job, leaves last. Without
    collectives, which may have failed."""
    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"came/{rank}", "")
    store.wait([f"came/{each}" for each in range(world)])
    store.set(f"leaves/{rank}", "")
    if rank == 0:
        store.wait([f"leaves/{each}" for each in range(world)])


def error_without_set_device() -> tuple[str, str]:
    """The name of the back end, and the error of the first forward, where all ranks build on the first device."""
    dist.init_process_group("nccl")
    name = c10d.backend_name(dist.group.WORLD, torch.device("cuda"))
    torch.manual_seed(0)
    model: Any = even_tower().cuda()
    shard_tower(model)
    try:
        model(random_batch(0, 4).float().cuda())
    except RuntimeError as error:
        return name, str(error)
    finally:
        leave_together()
    return name, "none"


def test_all_ranks_hear_that_they_have_not_chosen_a_device(env: dict[str, str]) -> None:
    (name, first), (_, second) = run_on_gpus(2, error_without_set_device, env=env)
    assert first == second
    wrong = "ranks 0, 1 use the same device, cuda:0"
    if name == "nccl2" and newer_can_wait():  # which is bound to the device of LOCAL_RANK, and shows it
        wrong = "rank 1 uses cuda:0, but its process group is bound to cuda:1"
    assert first == (
        f"{wrong}. With NCCL each rank has a device of its own. Choose it in each process before anything is "
        'put on a device and before init_process_group: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
    )


class Fails(torch.autograd.Function):
    """Fails in backward on rank 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        bad_batch()
        return gradients[0]


def bad_batch() -> None:
    if dist.get_rank() == 1:
        raise ValueError("batch 7 has no labels")


def error_of_a_failure(where: str) -> str:
    """What a rank hears where rank 1 fails, which stays in its handler until the other has left."""
    model = sharded(device := join())
    idle = dist.new_group()
    dist.all_reduce(torch.zeros(1, device=device), group=idle)
    dist.new_group()  # not connected by every back end
    batch = random_batch(0, 4).to(device)
    model(batch).mean().backward()
    torch.cuda.synchronize()  # else the device of the rank that fails may be late with this step for ever
    if where == "backward":
        model.blocks[1].register_forward_hook(lambda _module, _inputs, output: Fails.apply(output))
    else:
        model.blocks[1].register_forward_pre_hook(lambda *_: bad_batch())
    abort, is_raised = c10d._abort, Event()
    try:
        with patch.object(c10d, "_abort", lambda pg: (abort(pg), is_raised.wait(1))):
            model(batch).mean().backward()
            torch.cuda.synchronize()  # the device waits for rank 1, until the communicators are aborted
            model(batch)
    except Exception as error:
        aborting = any(thread.name == c10d._ABORT_THREAD for thread in enumerate_threads())
        is_raised.set()
        return f"{type(error).__name__}{' while aborting' if aborting else ''}: {error}"
    finally:
        leave_together()
    return "none"


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_communicators_are_aborted_so_that_a_rank_hears_of_the_failure_of_another(
    where: str, env: dict[str, str]
) -> None:
    """The host waits for nothing but the device, whose work runs beside it: the thread that looks aborts it."""
    first, own = run_on_gpus(2, error_of_a_failure, where, env=env, late=3, timeout_s=60)
    assert own == "ValueError: batch 7 has no labels"
    assert first.startswith(
        "CommunicationError: Communication on the device failed, because rank 1 has failed in the "
        f"{where} of 'Tower': "
    )
