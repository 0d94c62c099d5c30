"""The simulation itself: what torch sees of devices that are memory and kernels of the CPU."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.comm.streams import CurrentStream, DeviceStream
from software_gpu import inside, launch
from software_gpu.launch import run_on_gpus


def slow(*values: object) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def devices(backend: str) -> list[str]:
    """Many small checks in the same processes, which take seconds to start."""
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_name() == "Software GPU"
    tensors()
    pinned_memory()
    streams_and_events()
    streams_of_communication()
    draws()
    memory()
    missing_kernel()
    waits()
    found = meshes_over_gloo()
    collectives(backend)
    return found


def tensors() -> None:
    a, b = torch.randn(40, 30, dtype=torch.double), torch.randn(30, 20, dtype=torch.double)
    product = a.cuda() @ b.cuda()
    assert product.device == torch.device("cuda", 0)
    torch.testing.assert_close(product.cpu(), a @ b)
    x = a.cuda().requires_grad_()
    torch.nn.functional.gelu(x).sum().backward()
    y = a.clone().requires_grad_()
    torch.nn.functional.gelu(y).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), y.grad)
    assert torch.arange(10, device="cuda").nonzero().shape == (9, 1)
    assert torch.cat([x, x]).shape == (80, 30)
    assert torch.equal(a.cuda()[:, torch.tensor([3, 4]).cuda()].cpu(), a[:, 3:5])


def pinned_memory() -> None:
    pinned = torch.arange(1000.0).pin_memory()
    assert pinned.is_pinned()
    there = pinned.to("cuda", non_blocking=True)
    back = torch.empty(1000, pin_memory=True)
    back.copy_(there * 2, non_blocking=True)
    torch.cuda.synchronize()
    torch.testing.assert_close(back, pinned * 2)


def streams_and_events() -> None:
    side = torch.cuda.Stream()
    a = torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        b = a + 1
        ready = side.record_event()
    torch.cuda.current_stream().wait_event(ready)
    c = b * 2
    assert c.sum().item() == 4000
    ready.synchronize()
    assert ready.query()


def streams_of_communication() -> None:
    """The library's own look at the current stream, and buffers that come back without memory."""
    device, side = torch.device("cuda", 0), torch.cuda.Stream()
    current = CurrentStream(device)
    before = current()
    with side:
        assert current() == side
        assert current() is current()
    assert current() is before
    assert before == torch.cuda.current_stream()
    stream, allocated = DeviceStream(device), torch.cuda.memory_allocated()
    scratch = stream.acquire(1 << 20, device)
    assert torch.cuda.memory_allocated() - allocated == 1 << 20
    stream.release(scratch)
    assert torch.cuda.memory_allocated() == allocated
    assert stream.acquire(1 << 20, device) is scratch
    assert stream.acquire(1 << 20, device) is not scratch
    assert torch.cuda.memory_allocated() - allocated == 1 << 20  # the second is gone already


def draws() -> None:
    """Those of a generator of the CPU with the same seed; states can be saved and set."""
    on_host, on_device = torch.Generator().manual_seed(5), torch.Generator("cuda").manual_seed(5)
    for _ in range(3):
        expected = torch.randn(100, generator=on_host)
        torch.testing.assert_close(torch.randn(100, generator=on_device, device="cuda").cpu(), expected)
    state = on_device.get_state()
    first = torch.rand(10, generator=on_device, device="cuda")
    on_device.set_state(state)
    assert torch.equal(torch.rand(10, generator=on_device, device="cuda"), first)
    torch.manual_seed(7)
    dropped = torch.nn.functional.dropout(torch.ones(100, device="cuda"))
    assert not torch.equal(dropped, torch.nn.functional.dropout(torch.ones(100, device="cuda")))
    torch.manual_seed(7)
    assert torch.equal(dropped, torch.nn.functional.dropout(torch.ones(100, device="cuda")))


def memory() -> None:
    free, total = torch.cuda.mem_get_info()
    assert total == int(os.environ["SOFTWARE_GPU_BYTES"])
    assert free <= total
    before = torch.cuda.memory_allocated()
    kept = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del kept
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    torch.ones(1, device="cuda")  # as before


def missing_kernel() -> None:
    """An operation that has no twin on the CPU raises: it does not go on with what lies in memory."""
    with pytest.raises(RuntimeError, match="no kernel of the CPU"):
        torch.ops.aten._masked_scale(torch.ones(4, device="cuda"), torch.ones(4, device="cuda").byte(), 2.0)


def waits() -> None:
    x = torch.ones(10, device="cuda")
    torch.cuda.synchronize()
    before = inside.waits()
    x = x * 2 + 1
    assert inside.waits() == before
    x.cpu()
    x.sum().item()
    assert inside.waits() - before == 2
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        x.cpu()
    torch.cuda.set_sync_debug_mode("default")


def meshes_over_gloo() -> list[str]:
    """In which memory they are, though there are devices."""
    store = dist.FileStore(f"{os.environ['SOFTWARE_GPU_FOLDER']}/gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = shardwise.fully_shard(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    other = shardwise.shard_model(torch.nn.Linear(4, 4))
    found = [each.weight.device_mesh.device_type for each in (model, other)]
    dist.destroy_process_group()
    return found


def collectives(backend: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, device_id=torch.device("cuda", rank))
    for dtype in (torch.float, torch.double, torch.bfloat16, torch.half, torch.long):
        mine = torch.arange(6, device="cuda").to(dtype) + rank
        everything = torch.empty(6 * world, device="cuda", dtype=dtype)
        dist.all_gather_into_tensor(everything, mine)
        expected = torch.cat([torch.arange(6) + r for r in range(world)]).to(dtype)
        assert torch.equal(everything.cpu(), expected)
        part = torch.empty(6, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(part, everything)
        assert torch.equal(part.cpu(), (world * (torch.arange(6) + rank)).to(dtype))
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        assert mine[0].item() == world - 1
    mean = torch.full((3,), float(rank), device="cuda")
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.tolist() == [(world - 1) / 2] * 3
    root = torch.full((2,), float(rank), device="cuda")
    dist.broadcast(root, src=world - 1)
    assert root.tolist() == [world - 1] * 2
    sent = torch.arange(2 * world, device="cuda") + 10 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert received[::2].tolist() == [10 * r + 2 * rank for r in range(world)]
    if rank == 0:
        dist.send(torch.full((1 << 19,), 3.0, device="cuda"), 1)
    if rank == 1:
        letter = torch.empty(1 << 19, device="cuda")
        dist.recv(letter, 0)
        assert letter.mean().item() == 3
    group = dist.new_group([0, 1])
    dist.barrier(group)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]


@pytest.mark.parametrize("backend", ["nccl", launch.OLDER])
@pytest.mark.parametrize("late", [0, *slow(1, 2, 3, 17)])
def test_devices_their_collectives_and_meshes_on_the_host(backend: str, late: int) -> None:
    found = run_on_gpus(2, devices, backend, late=late, env={"SOFTWARE_GPU_BYTES": str(1 << 30)})
    assert found == [["cpu", "cpu"]] * 2


def unequal_counts() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    dist.all_reduce(torch.ones(3 + rank, device="cuda"))


def test_ranks_that_differ_end_and_a_failure_has_the_output_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_memory_or_disk", lambda: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"exit codes of the ranks: \[.*\](.|\n)*ranks differ"):
        run_on_gpus(2, unequal_counts)
    assert not list(tmp_path.iterdir())
