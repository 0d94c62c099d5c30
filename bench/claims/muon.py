"""A step of Muon on shards, against torch's own on the same DTensors.

Claim: less time than torch's, which gathers for each product and computes 0.63 of all products on each of 2
ranks, 0.38 on each of 4 (counted on torch 2.13), where ours are 0.5 and 0.25. Floor: the ratio of these, 0.79
and 0.65, where communication costs nothing; below it is what fewer exchanges save. Refuted by a ratio above 1
by more than the noise (row `peer again`).

    python bench/claims/muon.py --processes 2
    python bench/claims/muon.py --processes 4 --width 1024 --matrices 8

Each rank has rows of every matrix, and its gradient is drawn once. Both compute in bfloat16, with the same
kernels; torch's gathers for each product. Processes run on one thread each.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import numpy
import torch
from common import (
    OURS,
    PEER,
    PEER_AGAIN,
    Spread,
    alternate,
    command_line,
    launch,
    print_table,
    ratios_to_peer,
    time_step_ms,
    write_json,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.optim import Muon


def stepper(kind: Any, options: argparse.Namespace) -> Callable[[int], dict[str, float]]:
    mesh = init_device_mesh("cpu", (options.processes,))
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(options.matrices):
        whole = torch.randn(options.width, options.width, generator=generator)
        param = nn.Parameter(distribute_tensor(whole, mesh, (Shard(0),)))
        param.grad = param.detach().clone()
        params.append(param)
    optimizer = kind(params, lr=0.01)

    def step(_: int) -> dict[str, float]:
        return {"step_ms": time_step_ms(optimizer)}

    return step


def work(options: argparse.Namespace) -> list[dict[str, str]]:
    kinds = {PEER: torch.optim.Muon, OURS: Muon, PEER_AGAIN: torch.optim.Muon}
    steps = {name: stepper(kind, options) for name, kind in kinds.items()}
    values = alternate(steps, warmup=options.warmup, steps=options.steps)
    times: dict[str, numpy.ndarray] = {name: measures["step_ms"] for name, measures in values.items()}
    ratios = ratios_to_peer(times)
    return [
        {"variant": name, "step_ms": str(Spread.of(each)), "to_peer": str(ratios[name])}
        for name, each in times.items()
    ]


def main() -> None:
    parser = command_line(__doc__, processes=2, width=1024, matrices=4, warmup=1, steps=5)
    options = parser.parse_args()
    rows = launch(work, options)[0]
    print_table(rows, {"variant": "variant", "step_ms": "step, ms", "to_peer": "to the peer"})
    write_json(options.json, "muon", vars(options), rows)


if __name__ == "__main__":
    main()
