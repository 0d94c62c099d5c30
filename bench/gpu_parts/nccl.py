"""NCCL itself, with as many ranks on this one GPU as its version allows.

Claim: what the library asks of NCCL gives what it gives elsewhere. Coalesced calls and averages give the same
numbers as sums in float64; training with 1, 2 and 4 ranks is plain training; `device_id` changes nothing and
hangs nobody; all-gathers may be in symmetric memory; a second communicator for reductions costs the memory
that `mem_get_info` shows.

From 2.30 on NCCL takes several ranks on one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1); before, more than one is
skipped. On the host gloo takes its place, to try out the logic.

Refuted by: any difference, or an error.

What it cannot show: several GPUs, and wires between them.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_device.recipes import tower
from one_device.side import Side, train
from torch import Tensor

from gpu_parts.correctness import PlainTraining, Trained, assert_close, parts_of, plain_training
from gpu_parts.plan import Item, Options, Row, Skipped
from shardwise.comm.communicators import BackendCollectives

SIZES = (4096, 3, 17, 1)
"""Of what is sent, in numbers: off 16 bytes as well."""
TRAINED = ("full", "direct", "mixed", "bf16", "accumulation", "separate communicator", "zero1", "offload")
TRAINED_BY_FOUR = ("hybrid", "tensor parallel", "kept by few")
SEVERAL_RANKS_FROM = (2, 30)


def items(options: Options) -> Iterator[Item]:
    """Checks by the number of ranks."""
    for world in (1, 2) if options.is_tiny else (1, 2, 4):
        names = TRAINED + (TRAINED_BY_FOUR if world == 4 else ())
        checks: dict[str, Callable[..., Row]] = {
            "collectives": collectives,
            "training": partial(training, names[: 2 if options.is_tiny else None]),
            "device_id": bound_to_a_device,
            "two communicators": memory_of_communicators,
            "symmetric memory": in_symmetric_memory,
        }
        for name, check in checks.items():
            yield f"{name}, {world} ranks", partial(on_ranks, check, world, options.device)


def on_ranks(check: Callable[..., Row], world: int, device: str) -> Row:
    """Run ``check(rank, world, device)`` in a process for each rank; what rank 0 found."""
    if device == "cuda" and world > 1:
        version = torch.cuda.nccl.version()
        if version[:2] < SEVERAL_RANKS_FROM:
            raise Skipped(f"NCCL {'.'.join(map(str, version))} takes one rank a GPU")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_be, (check, world, device, folder), nprocs=world)
        return json.loads(Path(folder, "found.json").read_text())


def _be(rank: int, check: Callable[..., Row], world: int, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if device == "cuda":
        torch.cuda.set_device(0)
        os.environ["LOCAL_RANK"] = "0"  # by which the back end of torch 2.15 chooses, where nothing is bound
    options: dict[str, Any] = {
        "init_method": f"file://{folder}/store",
        "rank": rank,
        "world_size": world,
        "timeout": timedelta(seconds=60),
    }
    if check is bound_to_a_device and device == "cuda":
        options["device_id"] = torch.device("cuda", 0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)
    found = check(rank, world, device)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# --- checks ---------------------------------------------------------------------------------------


def collectives(rank: int, world: int, device: str) -> Row:
    """Coalesced gathers, sums and averages, of several sizes and dtypes at once."""
    where = torch.device(device)
    comm = BackendCollectives(dist.group.WORLD, where)  # with one rank as well, for which nobody asks NCCL
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        sent = [_held_by(rank, size, dtype, where) for size in SIZES]
        outputs = [torch.full((world * size,), float("nan"), dtype=dtype, device=where) for size in SIZES]
        comm.all_gather(outputs, sent)()
        for output, size in zip(outputs, SIZES, strict=True):
            expected = torch.cat([_held_by(each, size, dtype, where) for each in range(world)])
            assert torch.equal(output, expected), f"gather of {size} of {dtype} on rank {rank}"
        for divisor in (float(world), 1.0, 3.0):  # the first one averages in the back end
            full = [_held_by(rank, world * size, dtype, where) for size in SIZES]
            sums = [torch.full((size,), float("nan"), dtype=dtype, device=where) for size in SIZES]
            comm.reduce_scatter(sums, full, divisor)()
            for got, size in zip(sums, SIZES, strict=True):
                everyone = [_held_by(each, world * size, dtype, where).double() for each in range(world)]
                want = sum(each.view(world, -1)[rank] for each in everyone) / divisor
                off = (got.double() - want).abs().max().item() / max(1.0, want.abs().max().item())
                assert off <= (1e-6 if dtype is torch.float32 else 2e-2), (
                    f"sum of {size} of {dtype}: off by {off}"
                )
                worst = max(worst, off)
    return {"found": {"off_by": f"{worst:.1e}"}}


def _held_by(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(device, dtype)


def training(names: Sequence[str], rank: int, world: int, device: str) -> Row:
    """Recipes against plain training on the global batch; all of them, also where some are wrong."""
    off: dict[str, float] = {}
    wrong = []
    for name in names:
        try:
            off[name] = _off_by(name, rank, world, device)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "; ".join(wrong)
    return {"found": {name: f"{each:.0e}" for name, each in off.items()}}


def _off_by(name: str, rank: int, world: int, device: str) -> float:
    plain = plain_training(name, device)
    side = Side(torch.device(device), rank, world, is_sharded=True)
    plain.recipe.act(side)
    return _off_plain(plain, side, f"{name}, rank {rank} of {world}")


def _off_plain(plain: PlainTraining, side: Side, what: str) -> float:
    """How far this rank's part of a sharded training is from ``plain``."""
    got = Trained.of(side)
    losses = got.losses.to(side.device)
    dist.all_reduce(losses)
    mean = Trained((losses / side.world).cpu(), torch.zeros(0), got.parameters)
    expected = Trained(plain.trained.losses, torch.zeros(0), parts_of(plain.full, side.model))
    return assert_close(mean, expected, plain.recipe.tolerance, what)


def bound_to_a_device(rank: int, world: int, device: str) -> Row:
    """With `init_process_group(device_id=...)` new process groups would be split off, by all ranks."""
    off = _off_by("separate communicator", rank, world, device)
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    return {"found": {"off_by": f"{off:.1e}", "bound_to": str(bound)}}


def in_symmetric_memory(rank: int, world: int, device: str) -> Row:
    """All-gathers in place, in memory that NCCL has registered."""
    if device != "cuda":
        return {"found": "no symmetric memory on the host"}
    plain = plain_training("full", device)
    side = Side(torch.device(device), rank, world, is_sharded=True)
    model = side.shard(side.build(tower))
    for module in (*model.blocks, model):
        module.set_symm_mem_for_comm()
    train(side, model)
    return {"found": {"off_by": f"{_off_plain(plain, side, f'rank {rank} of {world}'):.1e}"}}


def memory_of_communicators(rank: int, world: int, device: str) -> Row:
    """What the device holds before a communicator, with one, and with a second for reductions, in MB."""
    if device != "cuda":
        return {"found": "no device memory on the host"}
    free = [_free_mb()]
    tensor = torch.ones(1 << 20, device=device)
    free.append(_free_mb())
    dist.all_reduce(tensor)
    free.append(_free_mb())
    second = dist.new_group(backend="nccl")
    dist.all_reduce(tensor, group=second)
    free.append(_free_mb())
    allocated = torch.cuda.memory_allocated() / 1e6
    context, first, other = (before - after for before, after in pairwise(free))
    return {
        "found": {
            "one MB": round(context, 1),
            "first": round(first, 1),
            "second": round(other, 1),
            "torch says": round(allocated, 1),
        }
    }


def _free_mb() -> float:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0] / 1e6
