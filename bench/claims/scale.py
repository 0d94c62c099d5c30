"""Time and memory of `fully_shard`, and of planning a step, for models of 175 and 1000 billion parameters.

Claim: both grow with the number of parameters (of tensors) and not with the world. All blocks of the GPT of
1T (128 layers of width 25600) at world 1024 are sharded in under 60 s and under 8 GiB.

How: a process of its own for each row, one thread; the model on the meta device, bf16. `fully_shard` of every
block and of the root, on a process group of that many ranks that does nothing. `grown` is what resident
memory grew by in that call, `max RSS` the most that the process had in all, `Python` the most that Python's
allocator had for a second model's call, by tracemalloc. The peer is torch's FSDP2, which does much of such
work at the first forward only.

`a step` is everything that this library does in a step but computing and sending: shards get memory, full
parameters are allocated and freed, hooks, schedule and collectives run in their order, gradients are reduced
and set. Blocks compute nothing: an autograd function takes their parameters and returns gradients of
undefined contents; memory that is never written to is not allocated, so that groups of 16 GB fit. `first`
records the order, `steady` is the median of the others; the rank's shards of gradients are memory that is
written, most of the time at small worlds. For this nothing may be copied: parameters are not packed
(packing_limit_bytes=0). Left out where it cannot be: rows that do not divide evenly over the world are copied
into place; shards with gradients above --step-gib have no room. And for the peer, which copies each full
parameter into place.

Refuted by: a time or a growth that rises with the world, or out of proportion with the tensors; 60 s or 8 GiB
exceeded by the row of the claim (exits with 1).

What it cannot show: time of a step on devices, start of communicators at such worlds.

    python bench/claims/scale.py --json scale.json
    python bench/claims/scale.py --models 1t --worlds 1024 --variants ours
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import psutil
import torch
import torch.distributed as dist
from common import OURS, PEER, PEER_TUNED, command_line, find_library, print_table, shard, write_json
from gpt import GPT
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.dry_run.fakes import without_computation
from shardwise.engine.module_state import sharded_module_states
from shardwise.torch_compat.c10d import PythonGroup

MODELS = {
    "175b": {"layers": 96, "width": 12288, "heads": 96},
    "1t": {"layers": 128, "width": 25600, "heads": 160},
}
# Rows of embeddings that divide evenly over 4096 ranks, as those of the blocks of "175b" do.
SHAPE = {"vocab": 53248, "context": 4096, "batch": 1}
LIMIT_S, LIMIT_GIB = 60, 8
STEPS = 4
COLUMNS = {
    "model": "model",
    "world": "world",
    "variant": "variant",
    "tensors": "tensors",
    "shard_s": "fully_shard, s",
    "us_per_tensor": "us a tensor",
    "grown_mib": "grown, MiB",
    "python_mib": "Python, MiB",
    "explain_ms": "explain, ms",
    "first_step_s": "a step, first, s",
    "steady_step_s": "steady, s",
    "max_rss_gib": "max RSS, GiB",
    "note": "",
}


class Silent(PythonGroup):
    """Many ranks that are not there: collectives end at once and write nothing.

    torch's own fake process group copies the shard into each rank's place of what is gathered.
    """

    def _nothing(self, *_: Any) -> FakeWork:
        return FakeWork()

    allgather = all_gather_single = all_gather_single_coalesced = _nothing
    reduce_scatter = reduce_scatter_single = reduce_scatter_single_coalesced = _nothing
    allreduce = allreduce_coalesced = all_to_all_single = barrier = broadcast = send = recv = _nothing


def make_world(world: int) -> DeviceMesh:
    dist.Backend.register_backend(
        "silent_fake", lambda _s, rank, size, _t: Silent(rank, size, "silent_fake"), devices=["cpu"]
    )
    dist.init_process_group("silent_fake", store=dist.HashStore(), rank=0, world_size=world)
    return init_device_mesh("cpu", (world,))


# --- one row --------------------------------------------------------------------------------------


def on_meta(model: str, layers: int | None) -> GPT:
    """The model without memory; ``layers`` of its blocks if given."""
    sizes = MODELS[model] | ({} if layers is None else {"layers": layers})
    with torch.device("meta"):
        return GPT(argparse.Namespace(**SHAPE, **sizes)).to(torch.bfloat16)


def settings_of(variant: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Nothing is packed: see the docstring."""
    if variant != OURS:
        return {"mesh": mesh}
    return {"mesh": mesh, "comm_policy": find_library(variant).CommPolicy(packing_limit_bytes=0)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    [model_name], [world], [variant] = options.models, options.worlds, options.variants
    mesh = make_world(world)
    settings = settings_of(variant, mesh)
    shard(variant, tiny := nn.Sequential(nn.Linear(2, 2)), list(tiny), **settings)  # imports, caches
    model = on_meta(model_name, options.layers)
    params = list(model.parameters())
    row: dict[str, Any] = {
        "model": model_name,
        "world": world,
        "variant": variant,
        "tensors": len(params),
        "parameters": sum(p.numel() for p in params),
    }
    del params
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    shard(variant, model, model.blocks, **settings)
    row["shard_s"] = time.perf_counter() - start
    row["us_per_tensor"] = row["shard_s"] / row["tensors"] * 1e6
    row["grown_mib"] = (psutil.Process().memory_info().rss - before) / 2**20
    row["shard_max_rss_gib"] = max_rss_gib()
    if variant == OURS:
        row |= planning(model, row, options)
    row["max_rss_gib"] = max_rss_gib()
    del model
    row["python_mib"] = traced_mib(variant, on_meta(model_name, options.layers), settings)
    dist.destroy_process_group()
    return row


def max_rss_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from KiB


def traced_mib(variant: str, model: GPT, settings: dict[str, Any]) -> float:
    """The most that Python's allocator has beyond what it had, while ``model`` is sharded."""
    tracemalloc.start()
    shard(variant, model, model.blocks, **settings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def planning(model: GPT, row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Explaining the model, and steps that compute nothing; or why there are none."""
    start = time.perf_counter()
    find_library(OURS).explain(model)
    found: dict[str, Any] = {"explain_ms": (time.perf_counter() - start) * 1e3}
    if any(p.shape[0] % row["world"] for p in model.parameters()):
        return {**found, "note": "no step: uneven rows are copied"}
    needed = 2 * 2 * row["parameters"] / row["world"] / 2**30  # shards and gradients, in bf16
    if needed > options.step_gib:
        return {**found, "note": f"no step: shards and gradients take {needed:.0f} GiB"}
    model.to_empty(device="cpu")
    without_computation(model, [module_state.group for module_state in sharded_module_states(model)])
    times = [step_s(model) for _ in range(STEPS)]
    return {**found, "first_step_s": times[0], "steady_step_s": statistics.median(times[1:])}


def step_s(model: GPT) -> float:
    x = torch.zeros(2, requires_grad=True)
    start = time.perf_counter()
    model(x).sum().backward()
    elapsed = time.perf_counter() - start
    if any(p.grad is None for p in model.parameters()):
        raise RuntimeError("A parameter got no gradient: the step was none.")
    model.zero_grad()
    return elapsed


# --- all rows -------------------------------------------------------------------------------------


def in_own_process(model: str, world: int, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--here", "--step-gib", str(options.step_gib)]
    command += ["--models", model, "--worlds", str(world), "--variants", variant]
    if options.layers is not None:
        command += ["--layers", str(options.layers)]
    row = {"model": model, "world": world, "variant": variant}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return {**row, "note": f"not done after {options.timeout} s"}
    if done.returncode:
        return {**row, "note": f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1][:100]}"}
    return json.loads(done.stdout.splitlines()[-1])


def verdict(rows: list[dict[str, Any]]) -> str | None:
    """The claim's row against its limits; None where it did not run."""
    for row in rows:
        if (row["model"], row["world"], row["variant"]) == ("1t", 1024, OURS) and "shard_s" in row:
            holds = row["shard_s"] < LIMIT_S and row["shard_max_rss_gib"] < LIMIT_GIB
            return (
                f"1T at world 1024: fully_shard of all blocks in {row['shard_s']:.2g} s (under {LIMIT_S} s), "
                f"{row['shard_max_rss_gib']:.2g} GiB (under {LIMIT_GIB} GiB): {'holds' if holds else 'FAILS'}"
            )
    return None


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[128, 512, 1024, 4096])
    parser.add_argument("--variants", nargs="+", choices=(PEER, PEER_TUNED, OURS), default=[PEER, OURS])
    parser.add_argument("--layers", type=int, help="so many blocks only, to try it out")
    parser.add_argument(
        "--step-gib", type=float, default=6.0, help="memory for shards and gradients of steps"
    )
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a row")
    parser.add_argument("--here", action="store_true", help="one row, in this process, as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.here:
        print(json.dumps(measure(options)))
        return
    rows = [
        in_own_process(model, world, variant, options)
        for model in options.models
        for world in options.worlds
        for variant in options.variants
    ]
    print("meta device, bf16, one thread; a process for each row")
    print_table(rows, COLUMNS)
    said = verdict(rows)
    if said is not None:
        print(said)
    write_json(options.json, "scale", vars(options), rows)
    if said is not None and said.endswith("FAILS"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
