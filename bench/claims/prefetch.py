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
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import numpy
import torch
import torch.distributed as dist
from common import Spread, alternate, gpt_parser, join, launch, leave, print_table, write_json
from gpt import GPT, batch_of
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
        """Heard at each event."""
        if event in ("forward", "backward"):
            self.phase = event
        buckets = [bucket for group in self.groups for bucket in group.unsharded.buckets]
        unsharded = sum(bucket.buffer._storage.nbytes() for bucket in buckets)
        waiting = [full.grad for group in self.groups for full in group.unsharded.full_params]
        flying = [g for group in self.groups for r in group.gradients.in_flight() for g in r.gradients]
        gradients = sum(g.untyped_storage().nbytes() for g in (*waiting, *flying) if g is not None)
        self.peaks[self.phase] = max(self.peaks[self.phase], unsharded)
        self.peaks["gradients"] = max(self.peaks["gradients"], gradients)


class Trainer:
    """One setting's model and optimizer on this rank."""

    def __init__(self, policy: CommPolicy, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.options = options
        self.model = shard_model(GPT(options), comm_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.losses: list[float] = []

    def timed_step(self, index: int) -> dict[str, float]:
        """A step after a barrier."""
        batch = batch_of(index * self.options.processes + dist.get_rank(), self.options)
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return {"step_ms": (time.perf_counter() - start) * 1e3}

    def peaks(self) -> dict[str, float]:
        """Of one more step, in blocks."""
        memory = Memory(self.model)
        root = sharded_module_states(self.model)[0].root
        root.observe(memory.look)
        self.timed_step(0)
        root.observe(None)
        block = sum(p.numel() * 4 for p in self.model.blocks[0].parameters())
        return {name: round(value / block, 2) for name, value in memory.peaks.items()}


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One process; rank 0 leaves the rows in the folder."""
    join(rank, options.processes, folder)
    trainers = {name: Trainer(policy, options) for name, policy in SETTINGS.items()}
    steps = {name: trainer.timed_step for name, trainer in trainers.items()}
    times = alternate(steps, warmup=options.warmup, steps=options.steps)
    peaks = {name: trainer.peaks() for name, trainer in trainers.items()}
    ranks: list[Any] = [None] * options.processes
    dist.all_gather_object(ranks, {name: t["step_ms"] for name, t in times.items()})
    slowest = {name: numpy.max([each[name] for each in ranks], axis=0) for name in SETTINGS}
    rows = [
        {
            "setting": name,
            "step_ms": vars(Spread.of(slowest[name])),
            "ratio": vars(Spread.of(slowest[name] / slowest["default"])),
            **peaks[name],
        }
        for name in SETTINGS
    ]
    losses = {tuple(trainer.losses[: options.steps]) for trainer in trainers.values()}
    leave(rank, folder, {"rows": rows, "agree": len(losses) == 1})


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One table."""
    report = launch(worker, options)
    if not report["agree"]:
        raise SystemExit("The settings do not train the same: the times above compare nothing.")
    return report["rows"]


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
    """Both tables, and the record."""
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
