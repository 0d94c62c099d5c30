"""NCCL itself, with as many ranks as there are GPUs for, or as its version allows on one (worlds.py).

Claim: what the library asks of NCCL gives what it gives elsewhere; each further communicator, as one for
reductions, costs the memory that `mem_get_info` shows. Refuted by: any difference, or an error. What it
cannot show on one GPU: wires between several.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from common import OURS, PEER, PLAIN, Sample, Spread, alternate
from one_device.recipes import RECIPES, tower
from one_device.side import Side, train
from torch import Tensor

from gpu_parts.compiled import iteration_in_a_graph
from gpu_parts.correctness import PlainTraining, Trained, assert_close, parts_of, plain_training
from gpu_parts.plan import Item, Options, Row, Skipped
from gpu_parts.processes import rows_of
from gpu_parts.speed import Case, Trainer
from gpu_parts.worlds import Check, Start, on_ranks
from shardwise.comm.communicators import BackendCollectives
from shardwise.torch_compat import c10d

SIZES = (4096, 3, 17, 1)
"""Of what is sent, in numbers: off 16 bytes as well."""
COMMUNICATORS = 4
HOST_TIME = "4 x 1024, 8 tokens"


def items(options: Options) -> Iterator[Item]:
    start = Start(options.device)
    bound, older = replace(start, binds=True), replace(start, older=True)
    yield "back end", partial(first_of, back_end, 1, start)
    yield "back end, TORCH_DIST_USE_NCCL2=0", partial(first_on_cuda, back_end, 1, older)
    for world in (1, 2) if options.is_tiny else (1, 2, 4):
        names = list(RECIPES)[: 2 if options.is_tiny else None]
        yield (
            f"collectives and training, {world} ranks",
            partial(first_of, partial(everything, names), world, start),
        )
        yield f"device_id, {world} ranks", partial(first_of, bound_to_a_device, world, bound)
        for name, check, how in (
            ("communicators", memory_of_communicators, start),
            ("communicators, the older back end", memory_of_communicators, older),
            ("symmetric memory", in_symmetric_memory, start),
            ("CUDA graph of an iteration", in_a_graph, start),
        ):
            yield f"{name}, {world} ranks", partial(first_on_cuda, check, world, how)
    case = Case("tiny" if options.is_tiny else HOST_TIME, 2, "bf16", options.device)
    yield "host time, 2 ranks", partial(first_of, partial(host_time, case, options.is_tiny), 2, start)


def first_of(check: Check, world: int, start: Start) -> Row | list[Row]:
    """What rank 0 found; of several rows, each as it was on the first rank where it failed, if on any."""
    first, *others = on_ranks(check, world, start)
    if not isinstance(first, list):
        return first  # type: ignore[no-any-return]
    by_row = zip(first, *others, strict=True)
    return [next((row for row in rows if row.get("status") == "failed"), rows[0]) for rows in by_row]


def first_on_cuda(check: Check, world: int, start: Start) -> Row | list[Row]:
    """The same, of a check that says nothing on the host."""
    if start.device != "cuda":
        raise Skipped("asks about CUDA")
    return first_of(check, world, start)


# --- checks ---------------------------------------------------------------------------------------


def back_end(rank: int, world: int, device: str) -> Row:
    """What "nccl" stands for in this torch, and that the library knows it."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    pg = dist.group.WORLD
    assert pg is not None
    assert c10d.is_nccl(pg, where) == (device == "cuda"), f"taken for another: {c10d.backend_name(pg, where)}"
    made: object = pg._get_backend(where)
    return {"found": {"name": c10d.backend_name(pg, where), "type": type(made).__name__}}


def collectives(rank: int, world: int, device: str) -> Row:
    """Coalesced gathers, sums and averages, of several sizes and dtypes at once."""
    where = torch.device(device)
    comm = BackendCollectives(dist.group.WORLD, where)  # with one rank as well, which does not need NCCL
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        sent = [_held_by(rank, size, dtype, where) for size in SIZES]
        outputs = [torch.full((world * size,), float("nan"), dtype=dtype, device=where) for size in SIZES]
        comm.all_gather(outputs, sent)()
        for output, size in zip(outputs, SIZES, strict=True):
            expected = torch.cat([_held_by(each, size, dtype, where) for each in range(world)])
            assert torch.equal(output, expected), f"gather of {size} of {dtype} on rank {rank}"
        # The first one averages in the back end. The last is a factor of each number, which NCCL leaves out
        # where there is one rank.
        for divisor in (float(world), 1.0, 3.0)[: 2 if world == 1 else None]:
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


def everything(names: Sequence[str], rank: int, world: int, device: str) -> list[Row]:
    """Collectives, and recipes against plain training on the global batch, in one start of the ranks.

    Each has a row.
    """
    checks = {"collectives": partial(collectives, rank, world, device)}
    checks |= {name: partial(_training, name, rank, world, device) for name in names}
    return [
        {**row, "name": f"{name}, {world} ranks"}
        for name, check in checks.items()
        for row in rows_of(name, check)
    ]


def _training(name: str, rank: int, world: int, device: str) -> Row:
    return {"found": {"off_by": f"{_off_by(name, rank, world, device):.0e}"}}


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
    plain = plain_training("full", device)
    side = Side(torch.device(device), rank, world, is_sharded=True)
    model = side.shard(side.build(tower))
    for module in (*model.blocks, model):
        module.set_symm_mem_for_comm()
    train(side, model)
    return {"found": {"off_by": f"{_off_plain(plain, side, f'rank {rank} of {world}'):.1e}"}}


def in_a_graph(rank: int, world: int, device: str) -> Row:
    return {"found": iteration_in_a_graph(Case("tiny", world, "bf16", device), keeps=False)}


def host_time(case: Case, is_tiny: bool, rank: int, world: int, device: str) -> list[Row]:
    """Host time until a step's calls return, minus the plain step's. The device's own time says nothing where
    ranks share it: it serves one at a time, and each collective waits for its turn on all."""
    trainers = {variant: Trainer(variant, case) for variant in (PLAIN, PEER, OURS)}

    def step(variant: str, index: int) -> Sample:
        dist.barrier()
        return trainers[variant].timed_step(index)

    turns = {variant: partial(step, variant) for variant in trainers}
    timed = alternate(turns, warmup=1 if is_tiny else 5, steps=2 if is_tiny else 20)
    added = {v: each["host_ms"] - timed[PLAIN]["host_ms"] for v, each in timed.items() if v != PLAIN}
    return [
        {
            "found": {
                "variant": v,
                "added_ms": str(Spread.of(each)),
                "to_peer": str(Spread.of(each / added[PEER])),
            }
        }
        for v, each in added.items()
    ]


def memory_of_communicators(rank: int, world: int, device: str) -> Row:
    """What the device holds before a communicator, and with each that comes, in MB."""
    free = [_free_mb()]
    tensor = torch.ones(1 << 20, device=device)
    free.append(_free_mb())
    for number in range(COMMUNICATORS):
        pg = dist.group.WORLD if number == 0 else dist.new_group(backend="nccl")
        dist.all_reduce(tensor, group=pg)
        free.append(_free_mb())
    context, *communicators = (round(before - after, 1) for before, after in pairwise(free))
    allocated = round(torch.cuda.memory_allocated() / 1e6, 1)
    return {"found": {"communicators": communicators, "tensor": context, "torch says": allocated}}


def _free_mb() -> float:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0] / 1e6
