"""Host time that sharding adds: to a forward and backward pass, to an optimizer step, to clipping.

Claim: shardwise adds at most 0.40 of what torch's FSDP2 adds ("the peer"), per block of 12 parameters,
at world 8 and width 32. A step of fused AdamW over 200 parameters takes at most 0.16 of the time it takes
on the peer's DTensors, clipping at most 0.5. The targets stand beside the ratios.

Floor: the row `floor` issues, for each block, what any sharding must issue: two all-gathers and one
reduce-scatter over preallocated buffers. No variant that all-gathers again in backward can add less. For the
optimizer it is the same AdamW on one flat tensor, and beside it on the shards as plain tensors.

Refuted by: a ratio above its target that stands out of the noise, which is how far `peer again` (a
second instance of the peer) is from 1.0. Or by a variant that skips work: compare
`collectives` with the peer's (one less is meant: the last block is unsharded once for forward and backward).
How it is measured, and what it cannot show: README.md.

    python bench/host_overhead.py --json host_overhead.json
    python bench/host_overhead.py --params 12 --worlds 8 --widths 128
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy
import torch
import torch.distributed as dist
from common import (
    OURS,
    PEER,
    PEER_AGAIN,
    PEER_TUNED,
    PEERS,
    PLAIN,
    Sample,
    Spread,
    Step,
    alternate,
    command_line,
    fake_world,
    find_library,
    parse_variants,
    print_noise,
    print_table,
    ratios_to_peer,
    shard,
    write_json,
)
from copies import count_copies
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

FLOOR = "floor"
LOCAL = "local tensors"
OURS_DTENSORS = "ours, DTensors"
PASSES, UPDATE, CLIPPING = "forward + backward", "optimizer step", "clipping"
TARGETS = {UPDATE: 0.16, CLIPPING: 0.5}
UPDATE_WORLD = 8
CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "thread": time.thread_time_ns}
COLUMNS = {
    "params": "parameters/block",
    "world": "world",
    "width": "width",
    "variant": "variant",
    "step_us": "forward + backward, us",
    "added_us_per_block": "added us/block",
    "ratio_to_peer": "ratio to peer",
    "target": "target",
    "beyond_floor": "beyond floor",
    "collectives": "collectives",
}
UPDATE_COLUMNS = {
    "what": "what",
    "variant": "variant",
    "step_us": "us",
    "ratio_to_peer": "ratio to peer",
    "target": "target",
}


@dataclass(frozen=True)
class Case:
    params: int
    """Per block: weights and biases of linear layers."""
    world: int
    width: int
    blocks: int

    @property
    def target(self) -> float | None:
        """Of the ratio to the peer, for the one case that has one."""
        return 0.40 if (self.params, self.world, self.width) == (12, 8, 32) else None


class Block(nn.Module):
    """Linear layers in a row, each a weight and a bias."""

    def __init__(self, width: int, num_params: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_params // 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(variant: str, case: Case, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(case.width, case.params) for _ in range(case.blocks)))
    shard(variant, model, model, mesh=mesh)
    return model


def timed(act: Callable[[], Any], clock: Callable[[], int], before: Callable[[], Any] | None = None) -> Step:
    """A step that times ``act``, and does ``before`` ahead of it while the clock stands."""

    def step(_: int) -> Sample:
        if before is not None:
            before()
        start = clock()
        act()
        return {"step_us": (clock() - start) / 1e3}

    return step


def passes_of(model: nn.Module, x: Tensor, clock: Callable[[], int]) -> Step:
    return timed(lambda: model(x).sum().backward(), clock, model.zero_grad)


def floor_of(plain: nn.Module, case: Case, clock: Callable[[], int]) -> Step:
    """Time two all-gathers and a reduce-scatter per block, on buffers that already exist."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    chunk = sum(-(-len(p) // case.world) * p[0].numel() for p in plain.get_submodule("0").parameters())
    mine, full = torch.zeros(chunk), torch.zeros(chunk * case.world)

    def collectives() -> None:
        for _ in range(case.blocks):
            gather(full, mine)
            gather(full, mine)
            reduce_scatter(mine, full)

    return timed(collectives, clock)


def measure_passes(case: Case, options: argparse.Namespace, mesh: DeviceMesh) -> list[dict[str, Any]]:
    clock = CLOCKS[options.clock]
    models = {v: build(v, case, mesh) for v in options.variants}
    x = torch.randn(options.batch, case.width)
    steps = {v: passes_of(model, x, clock) for v, model in models.items()}
    steps[FLOOR] = floor_of(models[PLAIN], case, clock)
    times = run(steps, options)
    base = dict.fromkeys(models, times[PLAIN])
    added = {v: (t - base.get(v, 0.0)) / case.blocks for v, t in times.items() if v != PLAIN}
    ratios = ratios_to_peer(added)
    beyond = ratios_to_peer({v: added[v] - added[FLOOR] for v in list(models)[1:]})
    return [
        {
            "what": PASSES,
            **asdict(case),
            "variant": v,
            "step_us": vars(Spread.of(times[v])),
            "added_us_per_block": vars(Spread.of(added[v])) if v in added else None,
            "ratio_to_peer": vars(ratios[v]) if v in ratios else None,
            "target": case.target if v == OURS else None,
            "beyond_floor": vars(beyond[v]) if v in beyond else None,
            "collectives": count_copies(partial(steps[v], 0)).num_collectives,
        }
        for v in [PLAIN, FLOOR, *list(models)[1:]]
    ]


def run(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, numpy.ndarray]:
    """Microseconds by variant, a value a round."""
    measured = alternate(steps, warmup=options.warmup, steps=options.steps)
    return {variant: times["step_us"] for variant, times in measured.items()}


def measure_update(case: Case, options: argparse.Namespace, mesh: DeviceMesh) -> list[dict[str, Any]]:
    """An optimizer step, and clipping: one row each per variant."""
    wanted = [v for v in options.variants if v not in (PLAIN, PEER_TUNED)]  # nothing to tune here
    models = {v: build(v, case, mesh) for v in wanted}
    if not models:
        return []
    x = torch.randn(options.batch, case.width)
    fresh = {v: partial(make_gradients, model, x) for v, model in models.items()}
    fresh[OURS_DTENSORS] = fresh.get(OURS)
    local = local_copies(next(iter(models.values())))
    return [
        *rows_of(UPDATE, case, updates_of(models, local), fresh, options),
        *rows_of(CLIPPING, case, clippings_of(models, local), fresh, options),
    ]


def make_gradients(model: nn.Module, x: Tensor) -> None:
    """New gradients from a backward pass, as each step of a training meets them, with numbers in them."""
    model.zero_grad()
    model(x).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.grad.to_local().fill_(1e-3)  # the fake group may have left none


def local_copies(model: nn.Module) -> list[nn.Parameter]:
    """The shards of ``model`` as plain parameters with gradients."""
    copies = [nn.Parameter(param.to_local().detach().clone()) for param in model.parameters()]
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    return copies


def fused_adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def updates_of(models: dict[str, nn.Module], local: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """The same AdamW on DTensors, on local tensors, on one flat tensor, and as shardwise wraps it."""
    flat = nn.Parameter(torch.cat([param.detach().flatten() for param in local]))
    flat.grad = torch.full_like(flat, 1e-3)
    acts = {v: fused_adamw(model.parameters()).step for v, model in models.items() if v in PEERS}
    if OURS in models:
        acts[OURS_DTENSORS] = fused_adamw(models[OURS].parameters()).step
        from shardwise.optim import FlatOptimizer

        acts[OURS] = FlatOptimizer(fused_adamw(models[OURS].parameters())).step
    return {**acts, LOCAL: fused_adamw(local).step, FLOOR: fused_adamw([flat]).step}


def clippings_of(models: dict[str, nn.Module], local: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """torch's clipping of the peer's DTensors and of local tensors, shardwise's of its own."""
    clip = nn.utils.clip_grad_norm_
    acts: dict[str, Callable[[], Any]] = {
        v: lambda model=model: clip(model.parameters(), 0.01) for v, model in models.items() if v in PEERS
    }
    if OURS in models:
        acts[OURS] = partial(find_library(OURS).clip_grad_norm_, models[OURS], 0.01)
    return {**acts, LOCAL: partial(clip, local, 0.01)}


def rows_of(
    what: str,
    case: Case,
    acts: dict[str, Callable[[], Any]],
    fresh: dict[str, Callable[[], Any] | None],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Time ``acts`` in turns, each on ``fresh`` gradients: one row each, in the table's order."""
    clock = CLOCKS[options.clock]
    times = run({v: timed(act, clock, fresh.get(v)) for v, act in acts.items()}, options)
    ratios = ratios_to_peer(times)
    order = (LOCAL, FLOOR, PEER, OURS_DTENSORS, OURS, PEER_AGAIN)
    return [
        {
            "what": what,
            **asdict(case),
            "variant": v,
            "step_us": vars(Spread.of(times[v])),
            "ratio_to_peer": vars(ratios[v]) if v in ratios else None,
            "target": TARGETS[what] if v == OURS else None,
        }
        for v in order
        if v in times
    ]


def parse() -> argparse.Namespace:
    parser = command_line(__doc__, blocks=16, batch=2, steps=40, warmup=6)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 512])
    parser.add_argument("--params", type=int, nargs="+", default=[4, 12, 48], help="per block, even numbers")
    parser.add_argument("--widths", type=int, nargs="+", default=[32])
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="thread: CPU time only")
    parser.add_argument(
        "--update", action=argparse.BooleanOptionalAction, default=True, help="optimizer rows"
    )
    options = parse_variants(parser, noise=True)
    for params in options.params:
        if params < 2 or params % 2:
            parser.error(f"--params must be even (weights and biases), got {params}")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    passes: list[dict[str, Any]] = []
    for world in options.worlds:
        with fake_world(world) as mesh:
            for params, width in product(options.params, options.widths):
                passes += measure_passes(Case(params, world, width, options.blocks), options, mesh)
    print(
        f"{options.blocks} blocks, fake process group, median [quartiles] of {options.steps} steps, "
        f"{options.clock} clock"
    )
    print_table(passes, COLUMNS)
    updates: list[dict[str, Any]] = []
    if options.update:
        with fake_world(UPDATE_WORLD) as mesh:
            updates = measure_update(Case(10, UPDATE_WORLD, options.widths[0], 20), options, mesh)
        print(f"\n200 parameters of width {options.widths[0]}, world {UPDATE_WORLD}")
        print_table(updates, UPDATE_COLUMNS)
    rows = passes + updates
    print_noise(rows)
    write_json(options.json, "host_overhead", vars(options), rows)


if __name__ == "__main__":
    main()
