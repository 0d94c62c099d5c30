"""Host time that sharding adds to a forward and backward pass.

Claim: shardwise adds at most half of what torch's FSDP2 adds ("the peer"), per block of 12
parameters, at world 8, for widths 32 and 128: `ratio to peer` <= 0.5 in both tables.

How: one process, torch's fake process group (collectives return at once and move nothing), tiny
batch. What is left is Python, dispatcher and small copies. The variants take turns step by step;
`added us/block` is the median over rounds of (variant - plain in the same round) / blocks.

Floor: the row `floor` issues, for each block, what any sharding must issue: two all-gathers and
one reduce-scatter over preallocated buffers, nothing else. No variant that gathers again in
backward can add less (one that keeps its parameters gathered could).

Refuted by: a ratio above 0.5 that stands out of the noise, which is how far `peer again` (a
second instance of the peer) is from 1.0. Or by a variant that skips work: compare
`collectives` with the peer's.

What it cannot show: device time, overlap, real networks. The fake group leaves gathered
parameters unwritten, so the numbers computed are meaningless (denormals are flushed, lest they
cost time). Its coalesced calls loop over ranks: at large worlds it measures itself, hence 8.

    python bench/host_overhead.py --json host_overhead.json
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    OURS,
    PEER,
    PLAIN,
    Sample,
    Spread,
    Step,
    alternate,
    choose_variants,
    find_fully_shard,
    print_noise,
    print_table,
    ratios_to_peer,
    write_json,
)
from copies import count_copies
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

FLOOR = "floor"
CLOCKS: dict[str, Callable[[], int]] = {
    "wall": time.perf_counter_ns,
    "thread": time.thread_time_ns,
}
COLUMNS = {
    "width": "width",
    "variant": "variant",
    "step_us": "forward + backward, us",
    "added_us_per_block": "added us/block",
    "ratio_to_peer": "ratio to peer",
    "collectives": "collectives",
}


class Block(nn.Module):
    """Linear layers in a row, each a weight and a bias."""

    def __init__(self, width: int, num_params: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_params // 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(variant: str, width: int, options: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """The same stack of blocks from the same seed, sharded as the variant says."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, options.params) for _ in range(options.blocks)))
    if variant == PLAIN:
        return model
    fully_shard = find_fully_shard(variant)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_step(model: nn.Module, x: Tensor, clock: Callable[[], int]) -> Step:
    """Time forward and backward; clear gradients after the clock has stopped."""

    def step(_: int) -> Sample:
        start = clock()
        model(x).sum().backward()
        elapsed = clock() - start
        model.zero_grad()
        return {"step_us": elapsed / 1e3}

    return step


def make_floor(plain: nn.Module, options: argparse.Namespace, clock: Callable[[], int]) -> Step:
    """Time two all-gathers and a reduce-scatter per block, on buffers that already exist."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    chunk = -(-sum(p.numel() for p in plain.get_submodule("0").parameters()) // options.world)
    shard, full = torch.zeros(chunk), torch.zeros(chunk * options.world)

    def step(_: int) -> Sample:
        start = clock()
        for _ in range(options.blocks):
            gather(full, shard)
            gather(full, shard)
            reduce_scatter(shard, full)
        return {"step_us": (clock() - start) / 1e3}

    return step


def measure(width: int, options: argparse.Namespace, mesh: DeviceMesh) -> list[dict[str, Any]]:
    """One row per variant for one width."""
    clock = CLOCKS[options.clock]
    models = {v: build(v, width, options, mesh) for v in options.variants}
    x = torch.randn(options.batch, width)
    steps = {v: make_step(model, x, clock) for v, model in models.items()}
    steps[FLOOR] = make_floor(models[PLAIN], options, clock)
    times = {
        variant: measured["step_us"]
        for variant, measured in alternate(steps, warmup=options.warmup, steps=options.steps).items()
    }
    base = dict.fromkeys(models, times[PLAIN])
    added = {v: (t - base.get(v, 0.0)) / options.blocks for v, t in times.items() if v != PLAIN}
    ratios = ratios_to_peer(added)
    return [
        {
            "width": width,
            "variant": v,
            "step_us": vars(Spread.of(times[v])),
            "added_us_per_block": vars(Spread.of(added[v])) if v in added else None,
            "ratio_to_peer": vars(ratios[v]) if v in ratios else None,
            "collectives": count_copies(partial(steps[v], 0)).num_collectives,
        }
        for v in [PLAIN, FLOOR, *list(models)[1:]]
    ]


def parse() -> argparse.Namespace:
    """The command line; its defaults are the project's target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--params", type=int, default=12, help="per block, an even number")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="thread: CPU time only")
    parser.add_argument("--noise", action=argparse.BooleanOptionalAction, default=True, help="the peer twice")
    parser.add_argument("--variants", nargs="+", choices=[PLAIN, PEER, OURS], default=[PLAIN, PEER, OURS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.params < 2 or options.params % 2:
        parser.error(f"--params must be even (weights and biases), got {options.params}")
    options.variants = choose_variants(options.variants, noise=options.noise)
    return options


def main() -> None:
    """Measure every width, print one table, write the record."""
    options = parse()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,))
    rows = [row for width in options.widths for row in measure(width, options, mesh)]
    print(
        f"world {options.world} (fake), {options.blocks} blocks of {options.params} parameters, "
        f"median [quartiles] of {options.steps} steps, {options.clock} clock"
    )
    print_table(rows, COLUMNS)
    print_noise(rows)
    write_json(options.json, "host_overhead", vars(options), rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
