"""Tools that look at a step from outside: compute-sanitizer, and the allocator's own history as a picture.

Claim: no kernel of a step reads or writes outside of what is allocated. Under memcheck every tensor has an
allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), so that a buffer that was given back is outside as
well. The picture (`gpu_memory.html`) shows what of three steps is allocated when, and by which line.
"""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import OURS
from one_device.groups import CloneWorld

from gpu_parts.plan import Item, Options, Row, Skipped
from gpu_parts.speed import WORLD, Case, Trainer, one_step
from shardwise.observe import memory_snapshot

SANITIZED = ("direct", "mixed", "hybrid")
PROGRAM = """
import sys
sys.path.insert(0, {bench!r})
from gpu_parts.correctness import assert_finite, in_clones
from one_device.lanes import Lanes
assert_finite(in_clones({name!r}, {device!r}, Lanes()), {name!r})
print("finished")
"""
ERROR_EXIT = 9


def items(options: Options) -> Iterator[Item]:
    for name in SANITIZED[: 1 if options.is_tiny else None]:
        yield f"memcheck, {name}", partial(memcheck, name, options.device)
    yield "picture of memory", partial(picture, options)


def memcheck(name: str, device: str) -> Row:
    """A recipe under compute-sanitizer; on the host without it, so that the program is known to run."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    program = [sys.executable, "-W", "ignore", "-c", program_of(name, device)]
    if device == "cuda":
        if not Path(tool).exists():
            raise Skipped("there is no compute-sanitizer on the PATH")
        program = [tool, "--tool", "memcheck", "--error-exitcode", str(ERROR_EXIT), *program]
    without_cache = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=without_cache)
    if "Device not supported" in done.stdout:
        raise Skipped("compute-sanitizer does not support this device, or this machine's runtime")
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    assert "finished" in done.stdout, "the program did not come to its end"
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    return {"found": summary[-1].strip("= ") if summary else "ran without the sanitizer"}


def program_of(name: str, device: str) -> str:
    return PROGRAM.format(bench=str(Path(__file__).parents[1]), name=name, device=device)


def picture(options: Options) -> Row:
    """Three steps of a model in a world of clones."""
    case = Case("tiny" if options.is_tiny else "4 x 4096, 512 tokens", WORLD, "bf16", options.device)
    with CloneWorld(WORLD).joined():
        trainer = Trainer(OURS, case)
        one_step(trainer)
        found: dict[str, Any] = {"groups": len(memory_snapshot(trainer.model).groups)}
        if options.device != "cuda":
            return {"found": {**found, "picture": "none: the history is that of CUDA's allocator"}}
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(max_entries=200_000)
        for _ in range(3):
            one_step(trainer)
        torch.cuda.synchronize()
        history = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
    from torch.cuda import _memory_viz

    path = options.folder / "gpu_memory.html"
    path.write_text(_memory_viz.trace_plot(history))
    with path.with_suffix(".pickle").open("wb") as file:
        pickle.dump(history, file)
    peak = torch.cuda.max_memory_allocated() / 1e6
    return {"found": {**found, "picture": str(path), "peak MB": round(peak, 1)}}
