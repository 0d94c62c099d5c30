"""What prefetching costs in memory, and what it brings, by the settings of `CommPolicy`.

Claim: all-gathers begun earlier hide behind the computation, for the memory of the groups unsharded ahead:
`prefetch` of them in forward and backward; with backward_prefetch "after" none beside the group in use.
What it brings depends on how long an all-gather takes beside the computation of a block. So the first table
is of the loopback interface as it is, and the second of one that passes --mbit megabits a second
(`tc tbf` in a network namespace of its own: needs root and iproute2; left out where it cannot be made).

How: one launch a table, 2 processes of one core, the GPT of step_time.py in all settings from one seed,
in turn, as there; times are medians over steps of the slower rank. Memory: the most bytes of unsharded
buffers and of full gradients that were allocated at once in a step, looked at after each event of the
schedule, in units of a block.

Refuted by: more unsharded groups than prefetch + 1 beside the root; different losses.

    python bench/claims/prefetch.py --json prefetch.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import torch
from common import Spread, alternate, gpt_parser, launch, print_table, slowest, write_json
from gpt import GPT, Trainer
from torch import nn

from shardwise import CommPolicy, shard_model
from shardwise.engine.module_state import sharded_module_states

SETTINGS = {
    "default": CommPolicy(),
    "prefetch=0": CommPolicy(prefetch=0),
    "prefetch=2": CommPolicy(prefetch=2),
    "prefetch=2, max_prefetched=1": CommPolicy(prefetch=2, max_prefetched=1),
    'backward "after"': CommPolicy(backward_prefetch="after"),
    "backward None": CommPolicy(backward_prefetch=None),
}
COLUMNS = {
    "setting": "setting",
    "step_ms": "step, ms",
    "ratio": "ratio to default",
    "forward": "unsharded in forward, blocks",
    "backward": "unsharded in backward, blocks",
    "gradients": "full gradients, blocks",
}


class Memory:
    """The most bytes that a schedule had in unsharded buffers and full gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.groups = [module_state.group for module_state in sharded_module_states(model)]
        self.phase = "forward"
        self.peaks = {"forward": 0, "backward": 0, "gradients": 0}

    def look(self, event: str, name: str) -> None:
        if event in ("forward", "backward"):
            self.phase = event
        buckets = [bucket for group in self.groups for bucket in group.unsharded.buckets]
        unsharded = sum(bucket.buffer._storage.nbytes() for bucket in buckets)
        waiting = [full.grad for group in self.groups for full in group.unsharded.full_params]
        flying = [g for group in self.groups for r in group.gradients.in_flight() for g in r.gradients]
        gradients = sum(g.untyped_storage().nbytes() for g in (*waiting, *flying) if g is not None)
        self.peaks[self.phase] = max(self.peaks[self.phase], unsharded)
        self.peaks["gradients"] = max(self.peaks["gradients"], gradients)


def trainer_of(policy: CommPolicy, options: argparse.Namespace) -> Trainer:
    torch.manual_seed(0)
    return Trainer(shard_model(GPT(options), comm_policy=policy), options)


def peaks_of(trainer: Trainer) -> dict[str, float]:
    """Of one more step, in blocks."""
    memory = Memory(trainer.model)
    root = sharded_module_states(trainer.model)[0].root
    root.observe(memory.look)
    trainer.timed_step(0)
    root.observe(None)
    block = sum(p.numel() * 4 for p in trainer.model.blocks[0].parameters())
    return {name: round(value / block, 2) for name, value in memory.peaks.items()}


def work(options: argparse.Namespace) -> tuple[Any, dict[str, dict[str, float]], bool]:
    trainers = {name: trainer_of(policy, options) for name, policy in SETTINGS.items()}
    steps = {name: trainer.timed_step for name, trainer in trainers.items()}
    times = alternate(steps, warmup=options.warmup, steps=options.steps)
    losses = {tuple(trainer.losses) for trainer in trainers.values()}
    return times, {name: peaks_of(trainer) for name, trainer in trainers.items()}, len(losses) == 1


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    ranks = launch(work, options)
    if not ranks[0][2]:
        raise SystemExit("The settings do not train the same: the times above compare nothing.")
    steps = slowest([times for times, _, _ in ranks], "step_ms")
    return [
        {
            "setting": name,
            "step_ms": vars(Spread.of(steps[name])),
            "ratio": vars(Spread.of(steps[name] / steps["default"])),
            **ranks[0][1][name],
        }
        for name in SETTINGS
    ]


def on_thin_wire(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same in a network namespace whose loopback is slow; nothing where that cannot be made."""
    if os.geteuid() != 0 or not (shutil.which("tc") and shutil.which("unshare")):
        print("\nno second table: a slow loopback needs root, unshare and tc (iproute2)")
        return []
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "rows.json")
        again = [
            sys.executable,
            __file__,
            "--mbit",
            "0",
            "--steps",
            str(options.steps),
            "--json",
            str(record),
        ]
        shape = (
            f"ip link set lo up && tc qdisc add dev lo root tbf rate {options.mbit}mbit burst 256k latency 1s"
        )
        script = f'{shape} && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", script, "sh", *again]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, capture_output=True, env=environment)
        if done.returncode:
            print(f"\nno second table: {done.stderr.decode().strip().splitlines()[-1:]}")
            return []
        return json.loads(record.read_text())["rows"]


def main() -> None:
    options = gpt_parser(__doc__, context=128, batch=4, steps=20, warmup=3, mbit=2000).parse_args()
    rows = measured(options)
    print(f"{options.processes} processes (gloo), float32, loopback as it is; median [quartiles]")
    print_table(rows, COLUMNS)
    thin = on_thin_wire(options) if options.mbit else []
    if thin:
        print(f"\nloopback of {options.mbit} Mbit/s")
        print_table(thin, COLUMNS)
    write_json(options.json, "prefetch", vars(options), rows, thin_wire=thin)


if __name__ == "__main__":
    main()
