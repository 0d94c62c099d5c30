"""Time of a training step over gloo, and the bytes copied around its collectives.

Claim: on two processes of one core each, a step of a 25 M parameter GPT in float32 takes
shardwise at most 0.65 of the time it takes torch's FSDP2 ("the peer"): `ratio to peer` <= 0.65.
And for parameters that divide evenly and are too large to be worth packing it copies nothing
around its collectives, where the peer copies each parameter in and out. `peer tuned` is the peer with all
that its users can set by hand (`tune_peer` in common.py); ratios are to the peer as it comes.

Floor: the larger of the rows `plain` (compute alone, on as many busy cores) and `wire` (the collectives
alone, measured), and near their sum on one machine, where the transport burns the cores that compute.

Refuted by: a ratio above 0.65 that stands out of the noise (`--noise` runs a second instance of
the peer: how far is it from 1.0?); loss trajectories that differ by 1e-3 or more, which exits
with 1; copied bytes above the peer's. How it is measured, and what it cannot show: README.md.

    python bench/step_time.py --noise --json step_time_2.json
    python bench/step_time.py --processes 4 --json step_time_4.json
    python bench/step_time.py --reduce-dtype bf16 --json step_time_2_bf16.json
    python bench/step_time.py --model 100m --steps 10 --json step_time_2_100m.json
    python bench/step_time.py --processes 4 --model 100m --variants plain peer ours --steps 10
"""

import argparse
import os
import time
from typing import Any

import gpt
import torch
import torch.distributed as dist
from common import (
    PEER_TUNED,
    PLAIN,
    Sample,
    Spread,
    Step,
    alternate,
    command_line,
    find_library,
    launch,
    loss_differences,
    parse_variants,
    print_noise,
    print_table,
    ratios_to_peer,
    refuse_differences,
    shard,
    slowest,
    write_json,
)
from copies import Copies, count_copies, count_transport_copies
from gpt import GPT
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


class Trainer(gpt.Trainer):
    """One variant: the same model from the same seed on every rank; ``tuned``: what was set by hand."""

    def __init__(self, variant: str, options: argparse.Namespace, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        model = GPT(options)
        settings: dict[str, Any] = {"mesh": mesh}
        if variant != PLAIN and options.reduce_dtype != "float32":
            policy = find_library(variant).MixedPrecisionPolicy
            settings["mp_policy"] = policy(reduce_dtype=DTYPES[options.reduce_dtype])
        self.tuned = shard(variant, model, model.blocks, **settings)
        super().__init__(model, options)

    def copies(self) -> tuple[Copies, Copies, int | None]:
        """Of one step; its two halves apart, so that AdamW cannot hide what backward does; in transport."""
        copies = count_copies(lambda: self.forward_backward(self.batch(0)))
        if not copies.saw_backward:
            raise RuntimeError("The dispatch mode saw no operator of backward; counts are wrong.")
        update = count_copies(self.update)
        in_transport = count_transport_copies(lambda: self.forward_backward(self.batch(0)))
        self.update()
        return copies, update, in_transport


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


def work(options: argparse.Namespace) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (options.processes,))
    trainers = {variant: Trainer(variant, options, mesh) for variant in options.variants}
    steps: dict[str, Step] = {variant: trainer.timed_step for variant, trainer in trainers.items()}
    steps[WIRE] = Wire(trainers[PLAIN].model, options.processes).timed_step
    return {
        "times": alternate(steps, warmup=options.warmup, steps=options.steps),
        "losses": {variant: trainer.losses for variant, trainer in trainers.items()},
        "copies": {variant: trainer.copies() for variant, trainer in trainers.items()},
        "parameters_mb": sum(p.numel() * 4 for p in trainers[PLAIN].model.parameters()) / 1e6,
        "peer_tuned_with": trainers[PEER_TUNED].tuned if PEER_TUNED in trainers else [],
    }


def summarize(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per variant: times are the maximum over ranks, bytes are rank 0's."""
    times, first = [rank["times"] for rank in ranks], ranks[0]
    steps = slowest(times, "step_ms")
    ratios = ratios_to_peer(steps)
    halves = {
        name: slowest([{v: t[v] for v in first["losses"]} for t in times], name) for name in MEASURES[1:]
    }
    rows: list[dict[str, Any]] = [
        {
            "variant": v,
            "step_ms": vars(Spread.of(steps[v])),
            **{name: vars(Spread.of(half[v])) for name, half in halves.items()},
            "ratio_to_peer": vars(ratios[v]) if v in ratios else None,
            "last_loss": losses[-1],
            "parameters_mb": first["parameters_mb"],
            **copy_cells(first["copies"][v], first["copies"][PLAIN]),
        }
        for v, losses in first["losses"].items()
    ]
    return [*rows, {"variant": WIRE, "step_ms": vars(Spread.of(steps[WIRE]))}]


Copied = tuple[Copies, Copies, int | None]


def copy_cells(record: Copied, plain: Copied) -> dict[str, Any]:
    """Megabytes beyond the plain step by kind, and the operators that copied them."""
    passes, update = (mine.beyond(its) for mine, its in zip(record[:2], plain[:2], strict=True))
    beyond = passes + update
    own_part = beyond.total("in transport")
    in_transport = None if record[2] is None else record[2] + own_part
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


def parse() -> argparse.Namespace:
    parser = command_line(__doc__, processes=2, context=128, batch=2, steps=30, warmup=4)
    parser.add_argument("--model", choices=MODELS, default="25m")
    for name in MODELS["25m"]:
        parser.add_argument(f"--{name}", type=int, help="instead of the model's")
    parser.add_argument(
        "--reduce-dtype", choices=DTYPES, default="float32", help="in which gradients are summed"
    )
    options = parse_variants(parser)
    for name, size in MODELS[options.model].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    return options


def main() -> None:
    options = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
    ranks = launch(work, options)
    rows, tuned = summarize(ranks), ranks[0]["peer_tuned_with"]
    losses = [rank["losses"] for rank in ranks]
    _, first, *others = options.variants
    differences = loss_differences(losses, first, others)
    print(
        f"{options.processes} processes (gloo), {rows[0]['parameters_mb'] / 4:.1f} M parameters of float32, "
        f"gradients summed in {options.reduce_dtype}, median [quartiles] of {options.steps}"
    )
    print_table(rows, TIME_COLUMNS)
    print("\nBytes of one step on rank 0, beyond the plain step")
    print_table([row for row in rows if row["variant"] != WIRE], COPY_COLUMNS)
    print_noise(rows)
    if tuned:
        print(f"{PEER_TUNED} with: {', '.join(tuned)}")
    more = {"loss_difference": differences, "peer_tuned_with": tuned}
    write_json(options.json, "step_time", vars(options), rows, **more)
    refuse_differences(differences)


if __name__ == "__main__":
    main()
