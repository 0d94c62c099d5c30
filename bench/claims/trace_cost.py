"""What a trace costs: a step without one, a step inside of one, and the same step without one again.

Claim: outside of `shardwise.trace` nothing is added, for nothing is attached to the model. Inside, the host
pays for the moments that it notes, and on gloo for the threads that wait in its place.

How: one process, torch's fake process group at world 8, small blocks: what is left is host time, which is
what a trace adds. The kinds of step take turns; `us/block` is the median over rounds, forward and backward.
`never traced` is a model that was never traced: what tells it from `not traced` is noise, or left behind.

Refuted by: `not traced` above `never traced` by more than `never traced again` is from it.

    python bench/claims/trace_cost.py
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise


def build(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(width, width) for _ in range(6))) for _ in range(blocks))
    )
    for block in model:
        shardwise.fully_shard(block)
    return shardwise.fully_shard(model)


def measured(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    traced, untouched, again = (build(options.blocks, options.width) for _ in range(3))
    inputs = torch.randn(2, options.width)

    def step(model: nn.Module) -> float:
        return measured(lambda: model(inputs).sum().backward())

    def step_in_trace() -> float:
        with shardwise.trace(traced, on_all_ranks=False):
            return step(traced)

    kinds: dict[str, Callable[[], float]] = {
        "never traced": lambda: step(untouched),
        "traced": step_in_trace,
        "not traced": lambda: step(traced),
        "never traced again": lambda: step(again),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(options.rounds + 5):
        for name, run in kinds.items():
            took = run()
            if number >= 5:
                times[name].append(took / options.blocks)
    for name, found in times.items():
        low, high = sorted(found)[len(found) // 4], sorted(found)[3 * len(found) // 4]
        print(f"{name:20} {median(found):8.1f} us/block  ({low:.1f} to {high:.1f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
