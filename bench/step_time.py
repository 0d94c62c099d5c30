"""Time of a training step over gloo, and the bytes copied around its collectives.

Claim: on two processes of one core each, a step of a 25 M parameter GPT in float32 takes
shardwise at most 0.65 of the time it takes torch's FSDP2 ("the peer"): `ratio to peer` <= 0.65.
And for parameters that divide evenly and are too large to be worth packing it copies nothing
around its collectives, where the peer copies each parameter in and out. `peer tuned` is the peer with all
that its users can set by hand (`tune_peer` in common.py); ratios are to the peer as it comes.

How: one launch. Every rank holds every variant, from the same seed, and runs them in turn; a
barrier stands before each timed step. A step is forward, backward, AdamW, zero_grad. Its time is
the maximum over ranks, the table shows the median over steps. Each rank has its own data, the
same for all variants.

Floor: the larger of two rows, and near their sum on one machine, where the transport burns the
cores that compute. `plain` is the same module unsharded and without communication: compute alone,
on as many busy cores. (Its AdamW updates all parameters, a sharded one its share: compare `forward
+ backward`, and 1/processes of `update`.) `wire` is bytes / bandwidth, measured: what any sharding
sends that gathers in forward and again in backward (but for the last block, which backward begins
with, and the root), one collective per block and for the root, on buffers that exist, its
reductions as the all-to-all that sends their bytes just once.

Refuted by: a ratio above 0.65 that stands out of the noise (`--noise` runs a second instance of
the peer: how far is it from 1.0?); loss trajectories that differ by 1e-3 or more, which exits
with 1; copied bytes above the peer's.

Losses: in float32 the two add up in different orders, on two processes not even that. With
`--reduce-dtype bf16` every gradient that is sent is rounded to 8 bits, and the peer rounds each partial sum
again; but AdamW divides by the gradient's own size, and rounding is as often up as down: on 4 processes the
losses of bf16 were 2e-5 from those of float32, and from one another. So 1e-3 serves both: it is 40 times
what rounding does, and far below what a wrong sum does (a model that learns from its own rank's data alone
was 2e-2 off after 12 steps).

Copies: see copies.py for what is counted, how, and what a dispatch mode cannot see. Each column
of bytes is what the variant has beyond `plain`, operator by operator, in one more step after the
timing; --json names the operators. `in transport` is what gloo copies inside the collectives,
from the profiler; but the copy that its reduce-scatter makes when waited for, one shard, falls
under `copied` as aten.copy_, whoever calls it.

What it cannot show: real networks, GPUs. Four processes on fewer cores wait for each other: their times
compare the variants, not the number of processes.

    python bench/step_time.py --noise --json step_time_2.json
    python bench/step_time.py --processes 4 --json step_time_4.json
    python bench/step_time.py --reduce-dtype bf16 --json step_time_2_bf16.json
    python bench/step_time.py --model 100m --steps 10 --json step_time_2_100m.json

    python bench/step_time.py --processes 4 --model 100m --variants plain peer ours --steps 10

The model of 100 M parameters takes much memory, as every process holds all variants, `plain` whole: plain,
peer and ours took 13 GB on 2 processes, 22 GB on 4.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from common import (
    PEER_TUNED,
    PLAIN,
    VARIANTS,
    Sample,
    Spread,
    Step,
    alternate,
    choose_variants,
    find_library,
    join,
    launch,
    leave,
    print_noise,
    print_table,
    ratios_to_peer,
    refuse_differences,
    shard,
    write_json,
)
from copies import Copies, count_copies, count_transport_copies
from gpt import GPT, batch_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WIRE = "wire"
MODELS = {
    "25m": {"layers": 8, "width": 512, "heads": 8, "vocab": 256},
    "100m": {"layers": 12, "width": 768, "heads": 12, "vocab": 10240},
}
DTYPES = {"float32": None, "bf16": torch.bfloat16}
MEASURES = ("step_ms", "forward_backward_ms", "update_ms")
TIME_COLUMNS = {
    "variant": "variant",
    "step_ms": "step, ms",
    "ratio_to_peer": "ratio to peer",
    "forward_backward_ms": "forward + backward, ms",
    "update_ms": "update, ms",
    "last_loss": "last loss",
}
COPY_COLUMNS = {
    "variant": "variant",
    "parameters_mb": "parameters, MB",
    "copied_mb": "copied, MB",
    "in_transport_mb": "in transport, MB",
    "arithmetic_mb": "arithmetic, MB",
    "filled_mb": "filled, MB",
    "other_mb": "other, MB",
    "collectives": "collectives",
}


def build(variant: str, options: argparse.Namespace, mesh: DeviceMesh) -> tuple[GPT, list[str]]:
    """The same model from the same seed on every rank, sharded as the variant says; what was set by hand."""
    torch.manual_seed(0)
    model = GPT(options)
    settings: dict[str, Any] = {"mesh": mesh}
    if variant != PLAIN and options.reduce_dtype != "float32":
        policy = find_library(variant).MixedPrecisionPolicy
        settings["mp_policy"] = policy(reduce_dtype=DTYPES[options.reduce_dtype])
    return model, shard(variant, model, model.blocks, **settings)


class Trainer:
    """One variant's model, optimizer and losses on this rank."""

    def __init__(self, variant: str, options: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.options, self.rank = options, dist.get_rank()
        self.model, self.tuned = build(variant, options, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.losses: list[float] = []

    def forward_backward(self, index: int) -> Tensor:
        seed = index * self.options.processes + self.rank
        loss = self.model(*batch_of(seed, self.options))
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed_step(self, index: int) -> Sample:
        """A step after a barrier, so that no variant pays for the one before it."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.forward_backward(index)
        middle = time.perf_counter()
        self.update()
        end = time.perf_counter()
        self.losses.append(loss.item())
        times = (end - start, middle - start, end - middle)
        return {name: seconds * 1e3 for name, seconds in zip(MEASURES, times, strict=True)}

    def copies(self) -> tuple[Copies, Copies]:
        """Of one step; its two halves apart, so that AdamW cannot hide what backward does."""
        copies = count_copies(lambda: self.forward_backward(0))
        if not copies.saw_backward:
            raise RuntimeError("The dispatch mode saw no operator of backward; counts are wrong.")
        return copies, count_copies(self.update)

    def transport_copies(self) -> int | None:
        num_bytes = count_transport_copies(lambda: self.forward_backward(0))
        self.update()
        return num_bytes


class Wire:
    """The collectives of a step and nothing else."""

    def __init__(self, model: GPT, num_ranks: int) -> None:
        blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        root = sum(p.numel() for p in model.parameters()) - sum(blocks)
        chunks = [-(-numel // num_ranks) for numel in (*blocks, root)]
        self.shards = [torch.zeros(chunk) for chunk in chunks]
        self.full = [torch.zeros(chunk * num_ranks) for chunk in chunks]
        self.received = [torch.zeros_like(full) for full in self.full]
        self.gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def timed_step(self, _: int) -> Sample:
        """Gather the blocks twice, the last and the root once; send every gradient to its owner."""
        dist.barrier()
        start = time.perf_counter()
        works = [
            self.gather(full, shard, async_op=True)
            for full, shard in (
                *zip(self.full, self.shards, strict=True),
                *zip(self.full[:-2], self.shards[:-2], strict=True),
            )
        ]
        works += [
            dist.all_to_all_single(received, full, async_op=True)
            for received, full in zip(self.received, self.full, strict=True)
        ]
        for work in works:
            work.wait()
        return {"step_ms": (time.perf_counter() - start) * 1e3}


@dataclass
class RankRecord:
    """What one rank found out about one variant."""

    times: dict[str, numpy.ndarray]
    losses: list[float]
    copies: tuple[Copies, Copies]
    in_transport: int | None


@dataclass
class RankReport:
    """All that one rank found out."""

    records: dict[str, RankRecord]
    wire: dict[str, numpy.ndarray]


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One process: train all variants in turn; rank 0 leaves the rows in the folder."""
    join(rank, options.processes, folder)
    mesh = init_device_mesh("cpu", (options.processes,))
    trainers = {variant: Trainer(variant, options, mesh) for variant in options.variants}
    steps: dict[str, Step] = {variant: trainer.timed_step for variant, trainer in trainers.items()}
    steps[WIRE] = Wire(trainers[PLAIN].model, options.processes).timed_step
    times = alternate(steps, warmup=options.warmup, steps=options.steps)
    records = {
        variant: RankRecord(times[variant], trainer.losses, trainer.copies(), trainer.transport_copies())
        for variant, trainer in trainers.items()
    }
    reports: list[Any] = [None] * options.processes
    dist.all_gather_object(reports, RankReport(records, times[WIRE]))
    num_bytes = sum(p.numel() * 4 for p in trainers[PLAIN].model.parameters())
    ranks = [report.records for report in reports]
    wire = {"variant": WIRE, **slowest([report.wire for report in reports])}
    report = {
        "rows": [*summarize(ranks, num_bytes), wire],
        "loss_difference": disagreement(ranks),
        "peer_tuned_with": trainers[PEER_TUNED].tuned if PEER_TUNED in trainers else [],
    }
    leave(rank, folder, report)


def slowest(ranks: list[dict[str, numpy.ndarray]]) -> dict[str, dict[str, float]]:
    """Each measure's spread over steps of its maximum over ranks."""
    return {name: vars(Spread.of(numpy.max([times[name] for times in ranks], axis=0))) for name in ranks[0]}


def summarize(ranks: list[dict[str, RankRecord]], parameter_bytes: int) -> list[dict[str, Any]]:
    """One row per variant: times are the maximum over ranks, bytes are rank 0's."""
    variants = list(ranks[0])
    steps = {v: numpy.max([rank[v].times["step_ms"] for rank in ranks], axis=0) for v in variants}
    ratios = ratios_to_peer(steps)
    return [
        {
            "variant": v,
            **slowest([rank[v].times for rank in ranks]),
            "ratio_to_peer": vars(ratios[v]) if v in ratios else None,
            "last_loss": ranks[0][v].losses[-1],
            "parameters_mb": parameter_bytes / 1e6,
            **copy_cells(ranks[0][v], ranks[0][PLAIN]),
        }
        for v in variants
    ]


def copy_cells(record: RankRecord, plain: RankRecord) -> dict[str, Any]:
    """Megabytes beyond the plain step by kind, and the operators that copied them."""
    passes, update = (mine.beyond(its) for mine, its in zip(record.copies, plain.copies, strict=True))
    beyond = passes + update
    own_part = beyond.total("in transport")
    in_transport = None if record.in_transport is None else record.in_transport + own_part
    return {
        "copied_mb": beyond.total("copied") / 1e6,
        "in_transport_mb": None if in_transport is None else in_transport / 1e6,
        "arithmetic_mb": beyond.total("arithmetic") / 1e6,
        "filled_mb": beyond.total("filled") / 1e6,
        "other_mb": beyond.total("other") / 1e6,
        "collectives": beyond.num_collectives,
        "mb_by_operator": {
            op: num_bytes / 1e6
            for counter in beyond.num_bytes.values()
            for op, num_bytes in counter.most_common()
        },
    }


def disagreement(ranks: list[dict[str, RankRecord]]) -> dict[str, float]:
    """The largest difference of a loss from the first sharded variant's, over steps and ranks."""
    losses = {v: numpy.array([rank[v].losses for rank in ranks]) for v in ranks[0]}
    _, first, *others = losses
    return {
        f"{first} against {other}": float(numpy.max(numpy.abs(losses[first] - losses[other])))
        for other in others
    }


def parse() -> argparse.Namespace:
    """The command line; options of the model's size that are given go before those of --model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="25m")
    for name in MODELS["25m"]:
        parser.add_argument(f"--{name}", type=int, help="instead of the model's")
    for name, default in {"processes": 2, "context": 128, "batch": 2, "steps": 30, "warmup": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--reduce-dtype", choices=DTYPES, default="float32", help="in which gradients are summed"
    )
    parser.add_argument("--noise", action="store_true", help="a second instance of the peer")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, size in MODELS[options.model].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    options.variants = choose_variants(options.variants, noise=options.noise)
    return options


def main() -> None:
    """Launch, print the tables and the check of the losses, write the record."""
    options = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
    report = launch(worker, options)
    rows, differences = report["rows"], report["loss_difference"]
    print(
        f"{options.processes} processes (gloo), {rows[0]['parameters_mb'] / 4:.1f} M parameters of float32, "
        f"gradients summed in {options.reduce_dtype}, median [quartiles] of {options.steps}"
    )
    print_table(rows, TIME_COLUMNS)
    print("\nBytes of one step on rank 0, beyond the plain step")
    print_table([row for row in rows if row["variant"] != WIRE], COPY_COLUMNS)
    print_noise(rows)
    if report["peer_tuned_with"]:
        print(f"{PEER_TUNED} with: {', '.join(report['peer_tuned_with'])}")
    write_json(options.json, "step_time", vars(options), **report)
    refuse_differences(differences)


if __name__ == "__main__":
    main()
