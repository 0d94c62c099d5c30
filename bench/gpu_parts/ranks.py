"""Several ranks: one that fails, the devices that they are on, and which all-gathers are quicker.

Claim: when a rank fails, the others raise within RELEASED_S seconds and name it. Ranks train on devices in
any order if that is declared; otherwise every rank raises the same error before anything hangs.

`gathers` has no claim: for chunks of 64 KiB to 4 MiB it times one coalesced all-gather, straight into the
parameters' places, beside packing, one all-gather and copying out. Where the ratio passes 1 the limit belongs
from which on parameters have collectives of their own (`packing_limit_kib` is what it is). On one GPU times
of all-gathers are those of copies.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import Spread, alternate
from one_device.recipes import tower
from one_device.side import Side, loss_of
from torch import Tensor

from gpu_parts.nccl import bound_to_a_device
from gpu_parts.plan import Item, Options, Row, Skipped
from gpu_parts.speed import synchronize, timed_act
from gpu_parts.worlds import Start, have_their_own, on_ranks
from shardwise.comm.communicators import BackendCollectives

RELEASED_S = 30
"""Far below the timeout of collectives (worlds.py)."""
CHUNKS_KIB = (64, 128, 256, 512, 1024, 2048, 4096)
PARAMETERS = 8
"""As many have a chunk of that size, in one block."""


def items(options: Options) -> Iterator[Item]:
    """Failures and gathers with two ranks and with all devices; orders of two devices."""
    start = Start(options.device)
    for older in (False, True):
        for where in ("forward", "backward"):
            name = f"a failure in {where}" + (", the older back end" if older else "")
            yield name, partial(released, where, replace(start, older=older, fails=True))
    yield "devices in reverse order", partial(in_reverse, replace(start, is_reversed=True, binds=True))
    yield "the same without device_id", partial(refused, replace(start, is_reversed=True, fails=True))
    yield "no set_device", partial(refused, replace(start, chooses=False, fails=True))
    worlds = {2, max(2, torch.cuda.device_count())} if options.device == "cuda" else {2}
    for world in sorted(worlds):
        yield f"gathers, {world} ranks", partial(gathers_of_rank_0, world, start, options.is_tiny)


# --- a rank fails ---------------------------------------------------------------------------------


def released(where: str, start: Start) -> Row:
    """How long after the failure of a rank the other raises."""
    if start.older and start.device != "cuda":
        raise Skipped("the host has one back end")
    first, failed = on_ranks(partial(hear_of_a_failure, where), 2, start)
    assert failed["error"] == "ValueError: bad batch", f"the rank that fails raises {failed['error']}"
    expected = f"rank 1 has failed in the {where}"
    assert expected in first["error"], f"rank 0 does not hear of it: {first['error']}"
    seconds = first["at"] - failed["at"]
    assert seconds <= RELEASED_S, f"rank 0 was released after {seconds:.1f} s"
    return {"released_s": round(seconds, 2), "found": first["error"]}


def hear_of_a_failure(where: str, rank: int, world: int, device: str) -> Row:
    """What a rank raises where the last one fails in the second step, and when."""
    side = Side(torch.device(device), rank, world, is_sharded=True)
    model = side.shard(side.build(tower))
    inputs = side.inputs(0)
    loss_of(model, inputs).backward()
    synchronize(device)
    found: Row = {"error": "none"}

    def fail() -> None:
        if rank == world - 1:
            found["at"] = time.time()
            raise ValueError("bad batch")

    if where == "forward":
        model.blocks[1].register_forward_pre_hook(lambda *_: fail())
    else:
        model.blocks[1].register_forward_hook(lambda _module, _inputs, output: Fails.apply(output, fail))
    try:
        loss_of(model, inputs).backward()
        synchronize(device)  # the device waits for the other rank, until the communicators are aborted
        loss_of(model, inputs)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found.setdefault("at", time.time())
    return found


class Fails(torch.autograd.Function):
    """Calls what fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Any) -> Tensor:
        ctx.fail = fail
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.fail()
        return gradients[0], None


# --- devices --------------------------------------------------------------------------------------


def needs_two_devices(start: Start) -> None:
    """Skips where there are fewer."""
    if start.device != "cuda":
        raise Skipped("the host is one device")
    if not have_their_own(2):
        raise Skipped("needs two devices")


def in_reverse(start: Start) -> Row:
    """Rank 0 on the last device, told by `device_id`."""
    needs_two_devices(start)
    return on_ranks(bound_to_a_device, 2, start)[0]


def refused(start: Start) -> Row:
    """Ranks on devices that were not declared: all raise the same, or train."""
    needs_two_devices(start)
    first, *others = on_ranks(error_of_a_step, 2, start)
    assert all(each == first for each in others), f"ranks differ: {[first, *others]}"
    may_train = start.chooses  # only where the back end takes the device of what it is given
    assert "torch.cuda.set_device" in first or (may_train and first == "none"), f"no advice: {first}"
    return {"found": "trains" if first == "none" else first}


def error_of_a_step(rank: int, world: int, device: str) -> Any:
    side = Side(torch.device(device), rank, world, is_sharded=True)
    try:
        loss_of(side.shard(side.build(tower)), side.inputs(0)).backward()
        synchronize(device)
    except RuntimeError as error:
        return str(error)
    return "none"


# --- all-gathers ----------------------------------------------------------------------------------


def gathers_of_rank_0(world: int, start: Start, is_tiny: bool) -> list[Row]:
    return on_ranks(partial(gathers, is_tiny), world, start)[0]


def coalesced(comm: BackendCollectives, places: list[Tensor], chunks: list[Tensor]) -> None:
    comm.all_gather([place.view(-1) for place in places], chunks)()


def packed(
    comm: BackendCollectives, places: list[Tensor], chunks: list[Tensor], own: Tensor, everyone: Tensor
) -> None:
    torch.cat(chunks, out=own)
    comm.all_gather([everyone.view(-1)], [own])()
    torch.split_with_sizes_copy(everyone, [len(chunk) for chunk in chunks], dim=1, out=places)


def gathers(is_tiny: bool, rank: int, world: int, device: str) -> list[Row]:
    where = torch.device(device)
    comm = BackendCollectives(dist.group.WORLD, where)
    rows = []
    for kib in CHUNKS_KIB[:: 6 if is_tiny else 1]:
        numel = kib * 256  # of float32
        chunks = [torch.full((numel,), 8.0 * rank + i, device=where) for i in range(PARAMETERS)]
        places = [torch.empty(world, numel, device=where) for _ in chunks]
        own, everyone = (torch.empty(*ranks, PARAMETERS * numel, device=where) for ranks in ((), (world,)))
        acts = {
            "coalesced": partial(coalesced, comm, places, chunks),
            "packed": partial(packed, comm, places, chunks, own, everyone),
        }
        for name, act in acts.items():
            for place in places:
                place.fill_(float("nan"))
            act()
            for i, place in enumerate(places):
                expected = 8.0 * torch.arange(world, device=where)[:, None] + i
                assert (place == expected).all(), f"{name} all-gather of {kib} KiB is wrong"
        timed = alternate(
            {name: lambda _, act=act: timed_act(act, device) for name, act in acts.items()},
            warmup=1 if is_tiny else 5,
            steps=2 if is_tiny else 30,
        )
        step_ms = {name: each["step_ms"] for name, each in timed.items()}
        rows.append(
            {
                "chunk_kib": kib,
                **{f"{name}_ms": vars(Spread.of(each)) for name, each in step_ms.items()},
                "ratio": vars(Spread.of(step_ms["coalesced"] / step_ms["packed"])),
                "packing_limit_kib": comm.packing_limit_bytes // 1024,
            }
        )
    return rows
