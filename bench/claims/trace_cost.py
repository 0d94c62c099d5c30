"""What a trace costs: a step without one, a step inside of one, and the same step without one again.

Claim: outside of `shardwise.trace` nothing is added, for nothing is attached to the model. Inside, the host
pays for the moments that it notes, and on gloo for the threads that wait in its place.

How: one process, torch's fake process group at world 8, small blocks: what is left is host time, which is
what a trace adds. The kinds of step take turns; `us/block` is the median over rounds, forward and backward.
`never traced` is a model that was never traced: what tells it from `not traced` is noise, or left behind.

Refuted by: `not traced` above `never traced` by more than `never traced again` is from it.

    python bench/claims/trace_cost.py
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import torch
from common import Sample, Spread, Step, alternate, command_line, fake_world, print_table, write_json
from torch import nn

import shardwise


def build(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(width, width) for _ in range(6))) for _ in range(blocks))
    )
    for block in model:
        shardwise.fully_shard(block)
    return shardwise.fully_shard(model)


def main() -> None:
    options = command_line(__doc__, blocks=12, width=32, rounds=60).parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with fake_world(8):
        traced, untouched, again = (build(options.blocks, options.width) for _ in range(3))
        inputs = torch.randn(2, options.width)

        def us_a_block(model: nn.Module) -> Sample:
            began = time.perf_counter()
            model(inputs).sum().backward()
            return {"us": (time.perf_counter() - began) * 1e6 / options.blocks}

        def in_trace(_: int) -> Sample:
            with shardwise.trace(traced, on_all_ranks=False):
                return us_a_block(traced)

        kinds: dict[str, Step] = {
            "never traced": lambda _: us_a_block(untouched),
            "traced": in_trace,
            "not traced": lambda _: us_a_block(traced),
            "never traced again": lambda _: us_a_block(again),
        }
        times = alternate(kinds, warmup=5, steps=options.rounds)
    rows = [{"step": name, "us": vars(Spread.of(found["us"]))} for name, found in times.items()]
    print_table(rows, {"step": "step", "us": "us/block"})
    write_json(options.json, "trace_cost", vars(options), rows)


if __name__ == "__main__":
    main()
