"""`estimate` against what training holds: every strategy, on gloo.

Claim: parameters, gradients and optimizer state are estimated within 3 %, and the peaks of forward, backward
and the optimizer's step within 10 %, for every strategy, with and without activation checkpointing. Refuted
by a figure beyond its bound (exits with 1). How it is measured, and what it cannot show: README.md.

    python bench/estimate.py --json estimate.json                        # 25 M parameters, world 4
    python bench/estimate.py --layers 12 --width 768 --vocab 16000       # 100 M
    python bench/estimate.py --only claim                                # 1T at world 1024: time and memory
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import fake_world, gpt_parser, launch, print_table, write_json
from gpt import GPT, batch_of
from memory import local, mark, recorded
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.strategies.meshes import STRATEGIES

PHASES = ("forward", "backward", "optimizer")
STEPS = 3
BOUNDS = {"parameters": 0.03, "gradients": 0.03, "state": 0.03} | dict.fromkeys(PHASES, 0.10)
LIMIT_S, LIMIT_GIB = 60, 4


def mesh_of(strategy: str) -> Any:
    """All ranks; for the hybrid strategies as two hosts."""
    world, roles = dist.get_world_size(), STRATEGIES[strategy].roles
    return init_device_mesh("cpu", (world,) if len(roles) == 1 else (2, world // 2), mesh_dim_names=roles)


def sharded(strategy: str, is_checkpointed: bool, options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(options)
    if is_checkpointed:
        for block in model.blocks:
            block.forward = _checkpointed(block.forward)
    return shardwise.shard_model(model, strategy=strategy, mesh=mesh_of(strategy), check_equal_weights=False)


def _checkpointed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)


def held(shard: Callable[[], Any], options: Any) -> dict[str, int]:
    """What this rank holds in the third step of what ``shard`` makes, in bytes; ``highest``: in any step."""
    batch = batch_of(dist.get_rank(), options)
    found = {}
    with recorded() as log:
        model = shard()
        optimizer = torch.optim.AdamW(model.parameters())
        for index in range(STEPS):
            gc.collect()
            with mark(f"forward {index}"):
                loss = model(*batch)
            with mark(f"backward {index}"):
                loss.backward()
            del loss
            found["gradients"] = sum(local(p.grad).nbytes for p in model.parameters())
            with mark(f"optimizer {index}"):
                optimizer.step()
            optimizer.zero_grad()
    peaks = {phase: log.peak(*log.marks[f"{phase} {STEPS - 1}"])[0] for phase in PHASES}
    found["highest"] = max(log.peak(*log.marks[f"{phase} {n}"])[0] for phase in PHASES for n in range(STEPS))
    found["parameters"] = sum(local(p).nbytes for p in model.parameters())
    state = [local(v) for each in optimizer.state.values() for v in each.values()]
    found["state"] = sum(tensor.nbytes for tensor in state)
    return found | peaks


def estimated(
    strategy: str, is_checkpointed: bool, world: int, options: Any, device: Any = "cpu"
) -> dict[str, int]:
    sizes = (2, world // 2) if len(STRATEGIES[strategy].roles) == 2 else world
    with torch.device("meta"):
        model = GPT(options)
    row = shardwise.estimate(
        model,
        world=sizes,
        strategy=strategy,
        batch=batch_of(0, options),
        activation_checkpointing=is_checkpointed,
        device=device,
    ).rows[0]
    found = {"parameters": row.parameters, "gradients": row.gradients, "state": row.optimizer_state}
    return found | {phase: row.peaks[phase].num_bytes for phase in PHASES}


def misses(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['strategy']}{' checkpointed' * row['is_checkpointed']}: {name} "
        f"{row['estimated'][name] / 1e6:.2f} MB, measured {row['measured'][name] / 1e6:.2f}"
        for row in rows
        for name, bound in BOUNDS.items()
        if abs(row["estimated"][name] - row["measured"][name]) > bound * row["measured"][name]
    ]


def measured_rows(options: Any) -> list[dict[str, Any]]:
    return [
        {"strategy": s, "is_checkpointed": c, "measured": held(partial(sharded, s, c, options), options)}
        for s in options.strategies
        for c in options.checkpointing
    ]


def largest_of(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for of_ranks in zip(*ranks, strict=True):
        most = {name: max(row["measured"][name] for row in of_ranks) for name in BOUNDS}
        rows.append({**of_ranks[0], "measured": most})
    return rows


def on_gpu(strategy: str, world: int, options: Any) -> dict[str, dict[str, int]]:
    """Peaks by CUDA's allocator, as one rank of a fake world, and the estimate."""
    with fake_world(world, "cuda", *STRATEGIES[strategy].roles) as mesh:
        with torch.device("cuda"):
            model: Any = GPT(options)
        take_workspaces()
        before = torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters())
        model = shardwise.shard_model(model, strategy=strategy, mesh=mesh, check_equal_weights=False)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = [tensor.cuda() for tensor in batch_of(0, options)]
        peaks = {}
        for _ in range(STEPS):
            optimizer.zero_grad()
            kept: list[Any] = []
            for phase, act in (
                ("forward", lambda kept=kept: kept.append(model(*batch))),
                ("backward", lambda kept=kept: kept.pop().backward()),
                ("optimizer", optimizer.step),
            ):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                act()
                torch.cuda.synchronize()
                peaks[phase] = torch.cuda.max_memory_allocated() - before
    return {"measured": peaks, "estimated": estimated(strategy, False, world, options, "cuda")}


def take_workspaces() -> None:
    """Have cuBLAS take its workspaces, one for each thread; estimates are without them."""
    layer = torch.nn.Linear(8, 8, device="cuda")
    layer(torch.ones(8, 8, device="cuda")).sum().backward()


CLAIM = """
import argparse, json, resource, sys, time
sys.path.insert(0, {folder!r})
import torch, shardwise
from scale import on_meta
torch.set_num_threads(1)
model = on_meta("1t", {layers})
start = time.process_time()
found = shardwise.estimate(
    model, world=1024, strategy="zero3", batch="1x4096,1x4096", activation_checkpointing=True
)
seconds = time.process_time() - start
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, str(found)]))
"""


def claim(layers: int | None = None) -> tuple[float, float, str]:
    """CPU seconds, GiB and the table for 1T parameters at world 1024, in a process of its own."""
    script = CLAIM.format(folder=str(Path(__file__).parent / "claims"), layers=layers)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
    )
    seconds, gib, table = json.loads(done.stdout.splitlines()[-1])
    return seconds, gib, table


def main() -> None:
    parser = gpt_parser(__doc__, processes=4, context=64, batch=4)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--only", choices=("strategies", "claim"))
    options = parser.parse_args()
    options.checkpointing = (False, True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
    rows: list[dict[str, Any]] = []
    if options.only != "claim":
        rows = largest_of(launch(measured_rows, options))
    shown = []
    for row in rows:
        key = row["strategy"], row["is_checkpointed"]
        row["estimated"] = estimated(*key, options.processes, options)
        line = {"strategy": row["strategy"] + " checkpointed" * row["is_checkpointed"]}
        for name in BOUNDS:
            line[name] = f"{row['estimated'][name] / 1e6:.1f} / {row['measured'][name] / 1e6:.1f}"
        shown.append(line)
    if shown:
        print("MB: estimated / measured")
        print_table(shown, {name: name for name in ("strategy", *BOUNDS)})
    failed = misses(rows)
    print("\n".join(failed) if failed else "all within bounds")
    more: dict[str, Any] = {}
    if options.only != "strategies":
        seconds, gib, table = claim()
        print(table)
        holds = seconds < LIMIT_S and gib < LIMIT_GIB
        print(f"1T at world 1024: {seconds:.0f} s of CPU, {gib:.2f} GiB: {'holds' if holds else 'FAILS'}")
        failed += [] if holds else ["claim"]
        more = {"claim": {"cpu_s": seconds, "max_rss_gib": gib}}
    write_json(options.json, "estimate", vars(options), rows, **more)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
