"""Steady steps: where the host waits, and how much memory lies between what is allocated.

Claim: in ten steps after the first three the host never waits for the device, as far as torch can see.
With batches of changing size, what the allocator has reserved is no more above what was allocated at once
than the peer's, with and without `expandable_segments` (a process for each, since an allocator is set up
once).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from common import OURS, PEER, PLAIN
from one_device.groups import CloneWorld

from gpu_parts.plan import Item, Options, Row, Skipped
from gpu_parts.speed import WORLD, Case, Iterations

MODEL = "4 x 4096, 512 tokens"
STEPS, BATCHES = 10, 30
EXPANDABLE = "expandable_segments:True"
PROGRAM = """
import json, sys
sys.path.insert(0, {bench!r})
from gpu_parts.steady import memory_of_steps
print("found", json.dumps(memory_of_steps({variant!r}, {model!r}, {device!r})))
"""


def items(options: Options) -> Iterator[Item]:
    """Waits by how groups are kept; memory by variant and allocator."""
    model = "tiny" if options.is_tiny else MODEL
    for precision in ("bf16", "mixed"):
        for keeps in (False, True):
            name = f"ten steps, {precision}" + (", groups kept" if keeps else "")
            yield name, partial(without_waits, Case(model, WORLD, precision, options.device), keeps)
    yield "a wait is noticed", partial(notice_a_wait, Case("tiny", WORLD, "bf16", options.device))
    for setting in ("", EXPANDABLE):
        for variant in (PLAIN, PEER, OURS):
            name = f"memory, {variant}" + (f", {setting}" if setting else "")
            yield name, partial(memory_in_a_process, variant, model, options.device, setting)


# --- waits ----------------------------------------------------------------------------------------


def without_waits(case: Case, keeps: bool, waits: bool = False) -> Row:
    """Ten steps in which torch raises where the host waits."""
    if case.device != "cuda":
        raise Skipped("the host does not wait for itself")
    with CloneWorld(case.world).joined():
        run = Iterations(OURS, case, keeps, fused=True)
        for _ in range(3):
            run.take()
        torch.cuda.synchronize()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        segments = torch.cuda.memory_stats()["segment.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(STEPS):
                run.take()
                if waits:
                    run.trainer.model.norm.weight.to_local().sum().item()  # type: ignore[operator]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return {
        "found": {
            "steps": STEPS,
            "segments taken": after["segment.all.allocated"] - segments,
            "retries": after["num_alloc_retries"] - retries,
        }
    }


def notice_a_wait(case: Case) -> Row:
    """The same with a wait in each step.

    Raises:
        AssertionError: torch let it pass.
    """
    try:
        without_waits(case, keeps=False, waits=True)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return {"found": str(error)}
    raise AssertionError("a step that waits for the device ran as others do")


# --- memory ---------------------------------------------------------------------------------------


def memory_in_a_process(variant: str, model: str, device: str, setting: str) -> Row:
    """Figures of `memory_of_steps`, with the allocator set up so."""
    if device != "cuda" and setting:
        raise Skipped("the host's memory is not torch's")
    program = PROGRAM.format(
        bench=str(Path(__file__).parents[1]), variant=variant, model=model, device=device
    )
    set_up = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting} if setting else None
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=set_up)
    if done.returncode != 0:
        raise RuntimeError(f"{done.stderr.strip().splitlines()[-1:]}\n{done.stderr[-1500:]}")
    if "not supported" in done.stderr and setting:
        raise Skipped(f"torch says that this platform has no {setting.partition(':')[0]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    return json.loads(line.removeprefix("found "))


def memory_of_steps(variant: str, model: str, device: str) -> Row:
    """Steps on batches of changing size: the most allocated, and reserved, at once."""
    sizes = torch.randint(1, 9, (BATCHES,), generator=torch.Generator().manual_seed(0)).tolist()
    with CloneWorld(WORLD).joined():
        run = Iterations(variant, Case(model, WORLD, "bf16", device))
        rows = run.trainer.batch
        for size in sizes:
            run.trainer.batch = [tensor.repeat(size, 1) for tensor in rows]
            run.take()
    if device != "cuda":
        return {"found": f"ran {BATCHES} steps; the host's memory is not torch's"}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return {
        "allocated_mb": round(allocated / 1e6, 1),
        "reserved_mb": round(reserved / 1e6, 1),
        "reserved_to_allocated": round(reserved / allocated, 3),
        "found": {
            "segments": stats["segment.all.peak"],
            "inactive split MB": round(stats["inactive_split_bytes.all.peak"] / 1e6, 1),
            "retries": stats["num_alloc_retries"],
        },
    }
