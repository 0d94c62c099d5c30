"""What each strategy of `shard_model` holds and sends, against the formulas of the ZeRO paper.

Claim: on N processes, a model of P bytes of parameters, as many of gradients and twice as many of Adam's
state holds and sends what the paper says (Rajbhandari et al., 2020, sections 5 and 7), in float32:

    ddp            P + P + 2 P             sends 2 P a step
    zero1          P + P + (2 P + P) / N         2 P     shards beside the full parameters
    zero2          P + (P + 2 P + P) / N         2 P     likewise; full only from forward to backward
    zero3          (P + P + 2 P) / N             3 P     2 P for what stays unsharded into backward:
                                                         the root's group and the last block

times (N - 1) / N for what is sent, by each rank; `hybrid` is zero3 over the ranks of a host (half of
the processes here) and sends P / ranks more among hosts, 2 (H - 1) / H of it.

How: one launch; every strategy trains the same GPT from the same seed, in turn. Held: bytes of all storages
of live tensors, found by the garbage collector, not asked of the library; parameters at the end of forward,
gradients after a backward, Adam's state after the step. The batch is one short sequence, so that activations
do not count. The paper's zero1 holds whole gradients, and so do ddp and zero1 here where microbatches add up
in `no_sync`: theirs are measured there. (In an ordinary backward zero1 holds 1 / N of them, as zero2 does.)
Sent: bytes through the loopback interface over some steps, as the kernel counts them, headers included,
divided by ranks.

Refuted by: a column off its formula by more than 5 % and a block (of 3 MB here: buffers of groups in flight).

    python bench/claims/strategies.py --processes 2 --json strategies.json
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import numpy
import psutil
import torch
import torch.distributed as dist
from common import gpt_parser, launch, print_table, write_json
from gpt import GPT, batch_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import no_sync, shard_model

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2")
COLUMNS = {
    "strategy": "strategy",
    "parameters_mb": "parameters, MB",
    "parameters_formula_mb": "formula",
    "gradients_mb": "gradients, MB",
    "gradients_formula_mb": "formula",
    "state_mb": "Adam, MB",
    "state_formula_mb": "formula",
    "sent_mb": "sent a step, MB",
    "sent_formula_mb": "formula",
    "step_ms": "step, ms",
}


def live_bytes() -> int:
    """Bytes of memory under all tensors there are, each once: storages may lie inside others."""
    gc.collect()
    stretches = set()
    for value in gc.get_objects():
        # By class, and not by isinstance, which asks every object, deprecated ones too.
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu":
            storage = value.untyped_storage()
            stretches.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total = reached = 0
    for start, end in sorted(stretches):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def sent_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def sent_and_ms(step: Callable[[], Any], options: argparse.Namespace) -> tuple[float, float]:
    """Megabytes that a rank sends in a step, and the median of its times."""
    times = []
    dist.barrier()
    before = sent_bytes()
    for _ in range(options.steps):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    dist.barrier()
    sent = (sent_bytes() - before) / options.steps / options.processes
    return sent / 1e6, float(numpy.median(times))


def mesh_of(strategy: str, world: int) -> Any:
    """Two hosts of half of the processes each, for the hybrid strategies."""
    if not strategy.startswith("hybrid"):
        return None
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def measure(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    world = dist.get_world_size()
    before = live_bytes()
    torch.manual_seed(0)
    model = shard_model(GPT(options), strategy=strategy, mesh=mesh_of(strategy, world))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens, targets = batch_of(dist.get_rank(), options)

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = sum(
        value.to_local().nbytes
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, DTensor)
    )
    step()
    loss = model(tokens, targets)
    forward = live_bytes() - before
    del loss
    step()
    rest = live_bytes()
    with no_sync(model) if strategy in ("ddp", "zero1") else nullcontext():
        model(tokens, targets).backward()
    gradients = live_bytes() - rest
    step()
    sent, step_ms = sent_and_ms(step, options)
    return {
        "parameters_mb": (forward - state) / 1e6,
        "gradients_mb": gradients / 1e6,
        "state_mb": state / 1e6,
        "sent_mb": sent,
        "step_ms": step_ms,
    }


def formulas(strategy: str, options: argparse.Namespace) -> dict[str, float]:
    """The same by the paper, in MB."""
    with torch.device("meta"):
        model = GPT(options)
    whole = sum(p.numel() * 4 for p in model.parameters()) / 1e6
    # Of zero3, from forward to backward: the root's group and the block that backward begins with.
    stays = whole - sum(p.numel() * 4 for block in model.blocks[:-1] for p in block.parameters()) / 1e6
    world = options.processes
    hosts = 2 if strategy.startswith("hybrid") else 1
    ranks = world // hosts
    shard = 1 if strategy == "ddp" else ranks
    keeps = strategy in ("zero1", "zero2", "hybrid_zero2")
    parameters = whole if shard == 1 else whole / shard + (whole if keeps else stays)
    gradients = whole if strategy in ("ddp", "zero1") else whole / shard
    all_gathers = 0 if strategy == "ddp" else whole if keeps else 2 * whole - stays
    sent = (all_gathers + whole) * (ranks - 1) / ranks
    if hosts > 1:
        sent += 2 * whole / ranks * (hosts - 1) / hosts
    if strategy == "ddp":
        sent = 2 * whole * (world - 1) / world
    return {
        "parameters_formula_mb": parameters,
        "gradients_formula_mb": gradients,
        "state_formula_mb": 2 * whole / shard,
        "sent_formula_mb": sent,
    }


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"strategy": name, **measure(name, options)} for name in options.strategies]


def main() -> None:
    parser = gpt_parser(__doc__, context=8, batch=1, steps=10)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    options = parser.parse_args()
    rows = [{**row, **formulas(row["strategy"], options)} for row in launch(work, options)[0]]
    print(f"{options.processes} processes (gloo), float32; rank 0; times are medians of {options.steps}")
    print_table(rows, COLUMNS)
    write_json(options.json, "strategies", vars(options), rows)


if __name__ == "__main__":
    main()
