"""One GPU and a process group that is not there: step time, kernels, copies, memory and host time.

Claim: where copies around collectives weigh most (sequence of 8), a step takes shardwise at most 0.80 of
the time of torch's FSDP2 ("the peer"), and its peak memory is at most 0.85 of the peer's.

How: torch's fake process group, world 8 and 64: kernels, copies, allocations and launches of a step are real,
the wire is not. Models in bf16: 4 blocks of width 4096 with sequences of 8 and of 512 tokens, and a GPT of
1 B parameters. In one process the variants take turns, step by step: `plain` (unsharded), the peer as it
comes, the peer tuned by hand, and this library. A step is forward and backward (with --optimizer fused AdamW
as well); gradients are cleared after the clock has stopped.

    step      between two CUDA events around the step, the GPU idle before (in the JSON wall_ms as well: until
              the whole device is idle again; more, if a stream is left behind)
    host      until the calls have returned, the GPU still at work
    busy      some kernel or copy runs on the GPU, in one more step (torch's profiler)
    kernels   kernels, copies and fills launched in that step, without those inside of collectives
    in group  what the fake group launches itself: it copies the shard into every rank's place of what is
              gathered, chunk by chunk, and so does more the larger the world. Its GPU time is beside it
    copied    bytes that operators copy beyond the plain step, see copies.py; without collectives' insides
    syncs, mallocs    calls that wait for the GPU, and that take or return its memory, in that steady step
    allocated, reserved    max_memory_allocated and _reserved over three steps of a model of its own, less
              what was allocated before it was built: shards and gradients are in it, and plain's full ones in
              the row `plain`

Floor: `plain` (no communication), and the bytes that any sharding writes.

Refuted by: a ratio above those by more than the quartiles and the noise (--noise runs the peer twice).

What it cannot show: a wire, and overlap with it. At world 64 `in group` time weighs as the transport chooses
to loop: compare `step` less it, or world 8.

Needs torch, numpy, tabulate and psutil, and a CUDA device: says so and exits with 2 where there is none.

    PYTHONPATH=src python bench/gpu.py --json gpu.json
    PYTHONPATH=src python bench/gpu.py --device cpu --tiny        # tries out its logic, measures nothing
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    PEER,
    PLAIN,
    VARIANTS,
    Sample,
    Spread,
    alternate,
    choose_variants,
    find_library,
    print_noise,
    print_table,
    ratios_to_peer,
    shard,
    write_json,
)
from copies import Copies, count_copies
from gpt import GPT, batch_of
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDE = {"layers": 4, "width": 4096, "heads": 32, "vocab": 256, "batch": 1}
MODELS: dict[str, dict[str, int]] = {
    "4 x 4096, 8 tokens": {**WIDE, "context": 8},
    "4 x 4096, 512 tokens": {**WIDE, "context": 512},
    # 16 x 12 x 2048^2 and two tables of 50304 x 2048: 1.01 B.
    "GPT of 1 B": {"layers": 16, "width": 2048, "heads": 16, "vocab": 50304, "context": 1024, "batch": 4},
}
TINY: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "vocab": 32, "context": 8, "batch": 1},
}
PRECISIONS = ("bf16", "mixed")
COUNTED = "counted step"
SYNCS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
MALLOCS = ("cudaMalloc", "cudaMallocAsync", "cudaFree", "cudaHostAlloc", "cuMemCreate")
TIME_COLUMNS = {
    "model": "model",
    "world": "world",
    "variant": "variant",
    "step_ms": "step, ms",
    "ratio_to_peer": "ratio to peer",
    "host_ms": "host, ms",
    "host_to_peer": "ratio to peer",
    "busy_ms": "busy, ms",
    "in_group_ms": "in group, ms",
}
COUNT_COLUMNS = {
    "model": "model",
    "world": "world",
    "variant": "variant",
    "kernels": "kernels",
    "in_group_kernels": "in group",
    "copied_mb": "copied, MB",
    "filled_mb": "filled, MB",
    "syncs": "syncs",
    "mallocs": "mallocs",
    "allocated_mb": "allocated, MB",
    "allocated_to_peer": "to peer",
    "reserved_mb": "reserved, MB",
    "reserved_to_peer": "to peer",
    "note": "",
}


# --- a step, timed --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is measured together."""

    model: str
    world: int
    precision: str
    device: str
    with_optimizer: bool

    @property
    def sizes(self) -> argparse.Namespace:
        return argparse.Namespace(**(MODELS | TINY)[self.model])


class Trainer:
    """One variant on the device."""

    def __init__(self, variant: str, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)
        is_mixed = case.precision == "mixed"
        with torch.device(case.device):
            model = GPT(case.sizes)
        settings: dict[str, Any] = {"mesh": init_device_mesh(case.device, (case.world,))}
        if is_mixed and variant != PLAIN:
            policy = find_library(variant).MixedPrecisionPolicy
            settings["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        else:
            model.to(torch.bfloat16)
        shard(variant, model, model.blocks, **settings)
        self.model = model
        self.batch = [tensor.to(case.device) for tensor in batch_of(0, case.sizes)]
        self.optimizer = None
        if case.with_optimizer:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        """What is timed."""
        self.model(*self.batch).backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def timed_step(self, _: int) -> Sample:
        """Time a step on the device and on the host, from an idle device on."""
        synchronize(self.case.device)
        if self.case.device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            start = time.perf_counter()
            self.step()
            host = time.perf_counter() - start
            end.record()
            torch.cuda.synchronize()
            wall = time.perf_counter() - start
            elapsed = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            self.step()
            host = wall = time.perf_counter() - start
            elapsed = host * 1e3
        self.model.zero_grad()
        return {"step_ms": elapsed, "host_ms": host * 1e3, "wall_ms": wall * 1e3}

    def copies(self) -> Copies:
        """What a step copies; backward on this thread, where a dispatch mode sees it."""
        with torch.autograd.set_multithreading_enabled(False):
            counted = count_copies(self.step)
        self.model.zero_grad()
        if not counted.saw_backward:
            raise RuntimeError("The dispatch mode saw no operator of backward; counts are wrong.")
        return counted

    def launches(self) -> "Launches":
        """What a step launches on the device, from the profiler's trace."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.case.device == "cuda")
        synchronize(self.case.device)
        with profile(activities=activities, acc_events=True) as seen:
            with record_function(COUNTED):
                self.step()
            synchronize(self.case.device)
        self.model.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            seen.export_chrome_trace(str(path))
            return read_trace(json.loads(path.read_text())["traceEvents"])


def synchronize(device: str) -> None:
    """Let the device become idle."""
    if device == "cuda":
        torch.cuda.synchronize()


# --- a trace --------------------------------------------------------------------------------------


@dataclass
class Launches:
    """What the counted part of a trace launched; times in ms, without collectives' insides where named so."""

    kernels: int = 0
    in_group_kernels: int = 0
    busy_ms: float = 0.0
    in_group_ms: float = 0.0
    memcpy_bytes: int = 0
    """Of the device's copy engine, which torch uses for contiguous copies of one dtype."""
    in_group_memcpy_bytes: int = 0
    syncs: int = 0
    mallocs: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    """Kernels outside of collectives."""


def read_trace(events: list[dict[str, Any]]) -> Launches:
    """Count a Chrome trace of torch's profiler, whose step stands in a `record_function(COUNTED)`.

    Work on the device belongs to the call that launched it, by the correlation id; a call belongs to a
    collective when a c10d operator was running on its thread.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    step = next(e for e in spans if e["name"] == COUNTED and e.get("cat") == "user_annotation")
    begin, end = step["ts"], step["ts"] + step["dur"]
    calls = [e for e in spans if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] <= end]
    collectives: dict[Any, list[tuple[float, float]]] = {}
    for e in spans:
        if e.get("cat") == "cpu_op" and e["name"].startswith("c10d::"):
            collectives.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    inside = {
        e["args"]["correlation"]: any(a <= e["ts"] <= b for a, b in collectives.get(e["tid"], ()))
        for e in calls
        if "correlation" in e.get("args", {})
    }
    found = Launches(
        syncs=sum(e["name"] in SYNCS for e in calls), mallocs=sum(e["name"] in MALLOCS for e in calls)
    )
    busy = []
    for e in spans:
        correlation = e.get("args", {}).get("correlation")
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or correlation not in inside:
            continue
        busy.append((e["ts"], e["ts"] + e["dur"]))
        num_bytes = int(e["args"].get("bytes", 0)) if e["cat"] == "gpu_memcpy" else 0
        if inside[correlation]:
            found.in_group_kernels += 1
            found.in_group_ms += e["dur"] / 1e3
            found.in_group_memcpy_bytes += num_bytes
        else:
            found.kernels += 1
            found.memcpy_bytes += num_bytes
            found.by_name[e["name"]] += 1
    found.busy_ms = union_length(busy) / 1e3
    return found


def union_length(spans: list[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


# --- memory ---------------------------------------------------------------------------------------


def peaks(variant: str, case: Case) -> dict[str, float]:
    """The most memory of three steady steps of a model of its own, in MB; empty without a CUDA device."""
    if case.device != "cuda":
        return {}
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, before_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trainer = Trainer(variant, case)
    for index in range(6):
        if index == 3:  # what building and the first steps left is not what a step needs
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.step()
        trainer.model.zero_grad()
    torch.cuda.synchronize()
    return {
        "allocated_mb": (torch.cuda.max_memory_allocated() - before) / 1e6,
        "reserved_mb": (torch.cuda.max_memory_reserved() - before_reserved) / 1e6,
    }


# --- rows -----------------------------------------------------------------------------------------


def measure(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant."""
    trainers = {variant: Trainer(variant, case) for variant in options.variants}
    steps = {variant: trainer.timed_step for variant, trainer in trainers.items()}
    times = alternate(steps, warmup=options.warmup, steps=options.steps)
    copies = {variant: trainer.copies() for variant, trainer in trainers.items()}
    launches = {variant: trainer.launches() for variant, trainer in trainers.items()}
    has_device = case.device == "cuda"
    trainers.clear()
    steps.clear()
    memory = {variant: peaks(variant, case) for variant in options.variants}
    ratios = ratios_to_peer({v: t["step_ms"] for v, t in times.items()})
    host_ratios = ratios_to_peer({v: t["host_ms"] for v, t in times.items()})
    rows = []
    for variant, measured in times.items():
        beyond, launched = copies[variant].beyond(copies[PLAIN]), launches[variant]
        row = {
            **head(case),
            "variant": variant,
            "step_ms": vars(Spread.of(measured["step_ms"])),
            "host_ms": vars(Spread.of(measured["host_ms"])),
            "wall_ms": vars(Spread.of(measured["wall_ms"])),
            "ratio_to_peer": vars(ratios[variant]) if variant in ratios else None,
            "host_to_peer": vars(host_ratios[variant]) if variant in host_ratios else None,
            "copied_mb": beyond.total("copied") / 1e6,
            "filled_mb": beyond.total("filled") / 1e6,
            "arithmetic_mb": beyond.total("arithmetic") / 1e6,
            "collectives": beyond.num_collectives,
            **memory[variant],
        }
        for key, value in vars(launched).items():
            row[key] = value if has_device else None
        row["by_name"] = dict(launched.by_name.most_common(12))
        for key in ("allocated_mb", "reserved_mb"):
            if key in row and PEER in memory:
                row[key.replace("_mb", "_to_peer")] = row[key] / memory[PEER][key]
        rows.append(row)
    return rows


def head(case: Case) -> dict[str, Any]:
    """What names a case in its rows."""
    return {"model": case.model, "world": case.world, "precision": case.precision}


@contextmanager
def fake_world(world: int) -> Iterator[None]:
    """Rank 0 of so many, of which there is one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_rows(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of each case; of one that fails, a row that says why, so that the others still count."""
    for world in options.worlds:
        with fake_world(world):
            for model in options.models:
                for precision in options.precisions:
                    case = Case(model, world, precision, options.device, options.optimizer)
                    try:
                        yield measure(case, options)
                    except Exception as error:
                        if options.device == "cpu":
                            raise
                        traceback.print_exc()
                        yield [{**head(case), "note": f"failed: {type(error).__name__}, see above"}]
                    gc.collect()
                    if options.device == "cuda":
                        torch.cuda.empty_cache()


def machine() -> dict[str, Any]:
    """The device and what drives it, for the record."""
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() or None
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs at once")
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--optimizer", action="store_true", help="fused AdamW in the step")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--noise", action="store_true", help="a second instance of the peer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.variants = choose_variants(options.variants, noise=options.noise)
    if options.tiny:
        options.models = list(TINY)
    return options


def main() -> None:
    """Every case, the tables, the record."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu.py cannot run here: torch {torch.__version__} sees no CUDA device. "
            "(--device cpu --tiny tries out its logic, and measures nothing.)",
            file=sys.stderr,
        )
        raise SystemExit(2)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
    if options.device == "cpu":
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    found = machine()
    for more in all_rows(options):
        rows += more
        # After each case, so that a machine that is taken away leaves what it did.
        write_json(options.json, "gpu", vars(options), rows, **found)
    steps = "forward + backward" + " + fused AdamW" * options.optimizer
    print(
        f"{found['gpu'] or 'CPU: no measurement'}, fake group, {steps}, median [quartiles] of {options.steps}"
    )
    for precision in options.precisions:
        shown = [row for row in rows if row["precision"] == precision]
        print(f"\n{precision}")
        print_table(shown, TIME_COLUMNS)
        print()
        print_table(shown, COUNT_COLUMNS)
        print_noise([row for row in shown if "variant" in row])


if __name__ == "__main__":
    main()
