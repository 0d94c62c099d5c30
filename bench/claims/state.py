"""What full states cost: taking them out of a sharded model, walking them, and putting them back.

Claim: against torch's functions (`torch.distributed.checkpoint.state_dict`, with torch's `fully_shard`),
a full state takes less time and, on each rank, less memory beside the shards: a rank that does not want it
holds none of it, and one that loads holds a bucket. Walking all parameters in buckets, as an export or the
weights of an inference engine need it, beats one `full_tensor()` after the other.

How: one launch, the same GPT sharded by both, functions in turn; time of the slower rank between two
barriers. Memory: the most bytes of tensors alive at once beside the model, by torch's profiler, in units of
the full model, in runs of their own.

Refuted by: ratios above 1; more than a bucket (64 MiB) beside the state on a rank. Exits with an error if a
state differs from torch's.

    python bench/claims/state.py --json state.json
    python bench/claims/state.py --layers 24 --width 128         # many small parameters
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import numpy
import torch
import torch.distributed as dist
from common import (
    Spread,
    alternate,
    find_fully_shard,
    gpt_parser,
    join,
    launch,
    leave,
    peak_bytes,
    print_table,
    write_json,
)
from gpt import GPT
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from shardwise import full_state_dict, load_full_state_dict
from shardwise.state import iter_full_parameters

COLUMNS = {
    "what": "what",
    "peer_ms": "torch's, ms",
    "ours_ms": "shardwise, ms",
    "ratio": "ratio",
    "peer_first": "torch's memory, first rank",
    "ours_first": "shardwise's",
    "peer_other": "torch's, other ranks",
    "ours_other": "shardwise's",
}
WHAT = {
    "out": "full state on rank 0, in host memory",
    "walk": "all full parameters, one after the other, on all ranks",
    "in": "full state of rank 0 into the shards",
}


def sharded(variant: str, options: argparse.Namespace) -> nn.Module:
    """The GPT, sharded block by block."""
    fully_shard = find_fully_shard(variant)
    torch.manual_seed(0)
    model = GPT(options)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def peers(model: nn.Module, full: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """As torch documents it."""
    out = StateDictOptions(full_state_dict=True, cpu_offload=True)
    into = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return {
        "out": lambda: get_model_state_dict(model, options=out),
        "walk": lambda: [param.full_tensor().numel() for param in model.parameters()],
        "in": lambda: set_model_state_dict(model, dict(full), options=into),
    }


def ours(model: nn.Module, full: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The same with shardwise."""
    return {
        "out": lambda: full_state_dict(model),
        "walk": lambda: [value.numel() for _, value in iter_full_parameters(model)],
        "in": lambda: load_full_state_dict(model, full or None),
    }


def timed(act: Callable[[], Any]) -> Callable[[int], dict[str, float]]:
    """One call between barriers."""

    def call(_: int) -> dict[str, float]:
        dist.barrier()
        start = time.perf_counter()
        act()
        dist.barrier()
        return {"ms": (time.perf_counter() - start) * 1e3}

    return call


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One process; rank 0 leaves the rows in the folder."""
    join(rank, options.processes, folder)
    models = {variant: sharded(variant, options) for variant in ("peer", "ours")}
    full = full_state_dict(models["ours"])
    acts = {"peer": peers(models["peer"], full), "ours": ours(models["ours"], full)}
    size = sum(param.numel() * 4 for param in models["ours"].parameters())
    rows = []
    for what, text in WHAT.items():
        steps = {variant: timed(acts[variant][what]) for variant in acts}
        times = {v: t["ms"] for v, t in alternate(steps, warmup=1, steps=options.steps).items()}
        mine = {variant: round(peak_bytes(acts[variant][what]) / size, 3) for variant in acts}
        ranks: list[Any] = [None] * options.processes
        dist.all_gather_object(ranks, mine)
        rows.append(
            {
                "what": text,
                **{f"{v}_ms": vars(Spread.of(times[v])) for v in times},
                "ratio": vars(Spread.of(numpy.array(times["ours"]) / times["peer"])),
                **{f"{v}_first": ranks[0][v] for v in acts},
                **{f"{v}_other": max(other[v] for other in ranks[1:]) for v in acts},
            }
        )
    theirs = acts["peer"]["out"]()
    agree = all(torch.equal(theirs[name], value) for name, value in full.items())
    leave(rank, folder, {"rows": rows, "agree": agree, "size_mb": size / 1e6})


def main() -> None:
    """The table, and the record."""
    options = gpt_parser(__doc__, context=128, steps=10).parse_args()
    report = launch(worker, options)
    if not report["agree"]:
        raise SystemExit("The two states differ: the times above compare nothing.")
    mb = report["size_mb"]
    print(f"{options.processes} processes (gloo), {mb:.0f} MB of float32; memory in units of that")
    print_table(report["rows"], COLUMNS)
    write_json(options.json, "state", vars(options), report["rows"], size_mb=mb)


if __name__ == "__main__":
    main()
