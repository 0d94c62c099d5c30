"""Step time of two hosts with a thin wire between them. Started by two_hosts.sh, once on each host.

Claim: where communication takes about as long as computation, over a wire of 1 Gbit/s, a step takes shardwise
at most 0.50 of the time that it takes torch's FSDP2 ("the peer"): `ratio to peer` <= 0.50. And it is within
1.2 of the bound, which is max(compute, bytes / bandwidth).

How: two network namespaces joined by a veth pair, `tc tbf` on both ends, one process of one core in each,
gloo over that pair; a launch for each rate. In one launch the variants take turns step by step, from one
seed, a barrier before each step: `plain` (the model unsharded, computation alone), the peer as it comes, the
peer tuned by hand, and this library. A step is forward, backward, AdamW and zero_grad of a GPT of 25.5 M
float32 parameters; its time is the maximum over hosts.

Bound: `compute` is forward and backward of the plain row, while both hosts compute, and of its AdamW the
share of one of the ranks. `bytes` is what a rank has to send: every block but the last is all-gathered in
forward and in backward, the last and the root's group once, and every gradient goes to its owner, once.
`bandwidth` is that of the wire. (`measured` is what gloo gets of it: the fastest of a few large exchanges,
both directions at once, before and after the steps. Headers take 5 %; `share of its core` is CPU time over
time of the plain step: below 1, other programs ran there.) Batch and context are such that the two are
about equal at 1 Gbit/s on the machine this was written on: see `compute / wire`, and change --batch where
it is far from 1. (At 200 Mbit/s the wire is the bound.)

Refuted by: a ratio above 0.50, or step / bound above 1.2, at 1 Gbit/s; losses that differ by 1e-3 or more
(exits with 1). `sent` counts bytes on the wire, by the interface: a variant below the formula skips work.

What it cannot show: other transports than gloo's TCP; more than two hosts; latency (a veth pair has none).
The kernel's part of the transport runs on the cores that compute, so that the bound cannot quite be met.

    bench/claims/two_hosts.sh --json two_hosts.json
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import numpy
import torch
import torch.distributed as dist
from common import (
    LOSS_TOLERANCE,
    PLAIN,
    Sample,
    Spread,
    Step,
    alternate,
    gpt_parser,
    join,
    parse_variants,
    print_table,
    ratios_to_peer,
    slowest,
    write_json,
)
from gpt import GPT
from step_time import Trainer
from torch.distributed.device_mesh import init_device_mesh

PROCESSES = 2
LEAST_CORE_SHARE = 0.9
COLUMNS = {
    "rate_mbit": "wire, Mbit/s",
    "variant": "variant",
    "step_ms": "step, ms",
    "ratio_to_peer": "ratio to peer",
    "to_bound": "step / bound",
    "sent_mb": "sent a step, MB",
    "sent_formula_mb": "formula",
}
FACT_COLUMNS = {
    "rate_mbit": "wire, Mbit/s",
    "raw_mbit": "measured, Mbit/s",
    "raw_mbit_of_each": "of each transfer",
    "compute_ms": "compute, ms",
    "wire_ms": "bytes / bandwidth, ms",
    "compute_to_wire": "compute / wire",
    "bound_ms": "bound, ms",
    "core_share": "share of its core",
}


def sent_bytes() -> int:
    """Bytes that have left through this host's end of the wire, headers included."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def raw_mbit(num_mb: int) -> list[float]:
    """Payload per second and direction, of both at once, in Mbit/s: of a few transfers."""
    mine, theirs = torch.zeros(2, num_mb * 10**6 // 4)
    other = 1 - dist.get_rank()
    speeds = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        # Point to point: gloo's collectives copy on both sides, while the wire waits.
        for work in [dist.isend(mine, other), dist.irecv(theirs, other)]:
            work.wait()
        dist.barrier()
        speeds.append(mine.nbytes * 8 / 1e6 / (time.perf_counter() - start))
    return speeds


def bytes_to_send(options: argparse.Namespace) -> float:
    """What a rank has to send in a step: blocks all-gathered twice except the last, the root once, and every
    gradient once."""
    with torch.device("meta"):
        model = GPT(options)
    whole = sum(p.numel() * 4 for p in model.parameters())
    again = sum(p.numel() * 4 for block in model.blocks[:-1] for p in block.parameters())
    return (whole + again + whole) * (PROCESSES - 1) / PROCESSES


def counting(trainer: Trainer) -> Step:
    """A timed step that also counts what was sent until both hosts were done."""

    def step(index: int) -> Sample:
        dist.barrier()
        before, cpu = sent_bytes(), time.process_time()
        times = trainer.timed_step(index)
        cpu_ms = (time.process_time() - cpu) * 1e3
        dist.barrier()  # else what is still queued would count for the next variant
        return {**times, "cpu_ms": cpu_ms, "sent_mb": (sent_bytes() - before) / 1e6}

    return step


def worker(options: argparse.Namespace) -> None:
    """One host: train all variants in turn; rank 0 leaves its report in the folder."""
    join(options.rank, PROCESSES, str(options.folder))
    mesh = init_device_mesh("cpu", (PROCESSES,))
    raw = raw_mbit(options.raw_mb)
    trainers = {variant: Trainer(variant, options, mesh) for variant in options.variants}
    steps = {variant: counting(trainer) for variant, trainer in trainers.items()}
    times = alternate(steps, warmup=options.warmup, steps=options.steps)
    raw += raw_mbit(options.raw_mb)
    losses = {variant: trainer.losses for variant, trainer in trainers.items()}
    hosts: list[Any] = [None] * PROCESSES
    dist.all_gather_object(hosts, {"times": times, "losses": losses})
    if options.rank == 0:
        facts, rows = summarize([host["times"] for host in hosts], raw, options)
        report = {
            "facts": facts,
            "rows": rows,
            "loss_difference": disagreement([host["losses"] for host in hosts]),
        }
        print_report(report)
        Path(options.folder, "report.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def summarize(
    hosts: list[dict[str, dict[str, numpy.ndarray]]], raw: list[float], options: argparse.Namespace
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The bound and what it is made of; a row for each variant, times the maximum over hosts."""
    steps, sent = slowest(hosts, "step_ms"), slowest(hosts, "sent_mb")
    passes, updates = slowest(hosts, "forward_backward_ms"), slowest(hosts, "update_ms")
    compute = float(numpy.median(passes[PLAIN]) + numpy.median(updates[PLAIN]) / PROCESSES)
    payload = bytes_to_send(options)
    wire = payload * 8 / 1e6 / options.rate_mbit * 1e3
    bound = max(compute, wire)
    had = min(float(numpy.median(host[PLAIN]["cpu_ms"] / host[PLAIN]["step_ms"])) for host in hosts)
    facts = {
        "rate_mbit": options.rate_mbit,
        "raw_mbit": max(raw),  # a slower one had to wait for a core
        "raw_mbit_of_each": [round(speed) for speed in raw],
        "compute_ms": compute,
        "wire_ms": wire,
        "compute_to_wire": compute / wire,
        "bound_ms": bound,
        "core_share": had,
    }
    ratios = ratios_to_peer(steps)
    rows = [
        {
            "rate_mbit": options.rate_mbit,
            "variant": variant,
            "step_ms": vars(Spread.of(times)),
            "ratio_to_peer": vars(ratios[variant]) if variant in ratios else None,
            "to_bound": None if variant == PLAIN else vars(Spread.of(times / bound)),
            "sent_mb": float(numpy.median(sent[variant])),
            "sent_formula_mb": 0.0 if variant == PLAIN else payload / 1e6,
            "forward_backward_ms": vars(Spread.of(passes[variant])),
            "update_ms": vars(Spread.of(updates[variant])),
        }
        for variant, times in steps.items()
    ]
    return facts, rows


def disagreement(hosts: list[dict[str, list[float]]]) -> float:
    losses = numpy.array([[host[v] for v in host if v != PLAIN] for host in hosts])
    return float(numpy.max(losses.max(axis=1) - losses.min(axis=1)))


def print_report(report: dict[str, Any]) -> None:
    print(f"\nwire of {report['facts']['rate_mbit']} Mbit/s, gloo, float32; median [quartiles]")
    print_table([report["facts"]], FACT_COLUMNS)
    print()
    print_table(report["rows"], COLUMNS)
    if report["facts"]["core_share"] < LEAST_CORE_SHARE:
        print(
            "Other programs ran on these cores: the bound is too high, and the times are not worth keeping."
        )


def collect(options: argparse.Namespace) -> None:
    """Write the record of all rates; exit with 1 where the variants did not train the same."""
    reports = [json.loads(path.read_text()) for path in Path(options.collect).glob("*/report.json")]
    reports.sort(key=lambda report: -report["facts"]["rate_mbit"])
    rows = [row for report in reports for row in report["rows"]]
    difference = max(report["loss_difference"] for report in reports)
    facts = [report["facts"] for report in reports]
    kept = {
        name: value
        for name, value in vars(options).items()
        if name not in ("rank", "folder", "collect", "rate_mbit", "raw_mb")
    }
    write_json(options.json, "two_hosts", kept, rows, wires=facts, loss_difference=difference)
    if not difference < LOSS_TOLERANCE:
        raise SystemExit(f"Losses differ by {difference:.1e}: the times above compare nothing.")


def parse() -> argparse.Namespace:
    parser = gpt_parser(__doc__, context=128, batch=8, steps=7, warmup=2)
    parser.add_argument("--raw-mb", type=int, help="size of the transfer that measures the bandwidth, MB")
    parser.add_argument("--rank", type=int, choices=range(PROCESSES))
    parser.add_argument("--rate-mbit", type=int)
    parser.add_argument("--folder", type=Path, help="where the ranks meet, and rank 0 leaves its report")
    parser.add_argument("--collect", type=Path, help="folder of the folders of all rates")
    options = parse_variants(parser)
    if options.processes != PROCESSES:
        parser.error(f"--processes: there are two hosts of one process, got {options.processes}")
    if options.collect is None and None in (options.rank, options.rate_mbit, options.folder):
        parser.error("this part runs on one host; start both by bench/claims/two_hosts.sh")
    options.reduce_dtype = "float32"  # what step_time.py's trainer asks for
    if options.raw_mb is None and options.rate_mbit is not None:
        options.raw_mb = max(1, round(options.rate_mbit * 0.06))  # about half a second
    return options


def main() -> None:
    options = parse()
    if options.collect is not None:
        collect(options)
    else:
        worker(options)


if __name__ == "__main__":
    main()
