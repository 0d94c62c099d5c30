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

import torch
import torch.distributed as dist
from common import (
    Spread,
    alternate,
    find_fully_shard,
    gpt_parser,
    launch,
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
    fully_shard = find_fully_shard(variant)
    torch.manual_seed(0)
    model = GPT(options)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def peers(model: nn.Module, full: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    out = StateDictOptions(full_state_dict=True, cpu_offload=True)
    into = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return {
        "out": lambda: get_model_state_dict(model, options=out),
        "walk": lambda: [param.full_tensor().numel() for param in model.parameters()],
        "in": lambda: set_model_state_dict(model, dict(full), options=into),
    }


def ours(model: nn.Module, full: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {
        "out": lambda: full_state_dict(model),
        "walk": lambda: [value.numel() for _, value in iter_full_parameters(model)],
        "in": lambda: load_full_state_dict(model, full or None),
    }


def timed(act: Callable[[], Any]) -> Callable[[int], dict[str, float]]:

    def call(_: int) -> dict[str, float]:
        dist.barrier()
        start = time.perf_counter()
        act()
        dist.barrier()
        return {"ms": (time.perf_counter() - start) * 1e3}

    return call


def work(options: argparse.Namespace) -> dict[str, Any]:
    models = {variant: sharded(variant, options) for variant in ("peer", "ours")}
    full = full_state_dict(models["ours"])
    acts = {"peer": peers(models["peer"], full), "ours": ours(models["ours"], full)}
    size = sum(param.numel() * 4 for param in models["ours"].parameters())
    times, peaks = {}, {}
    for what in WHAT:
        steps = {variant: timed(acts[variant][what]) for variant in acts}
        measured = alternate(steps, warmup=1, steps=options.steps)
        times[what] = {variant: each["ms"] for variant, each in measured.items()}
        peaks[what] = {variant: round(peak_bytes(acts[variant][what]) / size, 3) for variant in acts}
    theirs = acts["peer"]["out"]()
    agree = all(torch.equal(theirs[name], value) for name, value in full.items())
    return {"times": times, "peaks": peaks, "agree": agree, "size_mb": size / 1e6}


def row_of(what: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one function: times are rank 0's, which ends with the others."""
    first, *others = (rank["peaks"][what] for rank in ranks)
    times = ranks[0]["times"][what]
    return {
        "what": WHAT[what],
        **{f"{variant}_ms": vars(Spread.of(times[variant])) for variant in times},
        "ratio": vars(Spread.of(times["ours"] / times["peer"])),
        **{f"{variant}_first": peak for variant, peak in first.items()},
        **{f"{variant}_other": max(other[variant] for other in others) for variant in first},
    }


def main() -> None:
    options = gpt_parser(__doc__, context=128, steps=10).parse_args()
    ranks = launch(work, options)
    if not ranks[0]["agree"]:
        raise SystemExit("The two states differ: the times above compare nothing.")
    mb, rows = ranks[0]["size_mb"], [row_of(what, ranks) for what in WHAT]
    print(f"{options.processes} processes (gloo), {mb:.0f} MB of float32; memory in units of that")
    print_table(rows, COLUMNS)
    write_json(options.json, "state", vars(options), rows, size_mb=mb)


if __name__ == "__main__":
    main()
