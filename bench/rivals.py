"""Other libraries against shardwise, each with its own strategy of the same kind, in one launch.

Claim: a step of a 25 M parameter GPT takes as long with shardwise as with the fastest other library of the
kind, or less: every `ratio to ours` is 1.0 or above, but for torch's DDP.

    kind    others
    ddp     torch's DistributedDataParallel
    zero1   torch's DDP with ZeroRedundancyOptimizer; FairScale's ShardedDDP with OSS; DeepSpeed's ZeRO-1
    zero2   torch's FSDP1 (SHARD_GRAD_OP) and FSDP2 (reshard_after_forward=False); DeepSpeed's ZeRO-2
    zero3   torch's FSDP1 and FSDP2, FSDP2 with all that its users can set by hand; DeepSpeed's ZeRO-3

How: as step_time.py. Every process holds all variants, from the same seed, and runs them in turn; a barrier
stands before each step, which is forward, backward, AdamW, zero_grad. Times are the maximum over ranks; the
ratio is to our strategy of the kind in the same round. `processor` is what a process and its threads used of
its processor, on average over ranks. What is not installed is left out, with a line. --rss measures the peak
of resident memory, each variant in a launch of its own.

Refuted by: a ratio below 1.0 that stands out of the quartiles; losses that differ by 1e-3 or more, which
exits with 1.

What it cannot show: GPUs, networks.

    python bench/rivals.py --json rivals.json
    python bench/rivals.py --rss
"""

import argparse
import importlib.metadata
import importlib.util
import os
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from common import (
    Sample,
    Spread,
    alternate,
    join,
    launch,
    leave,
    print_table,
    refuse_differences,
    tune_peer,
    write_json,
)
from gpt import GPT, batch_of
from step_time import MODELS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

KINDS = ("ddp", "zero1", "zero2", "zero3")
OURS = "shardwise"
COLUMNS = {
    "kind": "kind",
    "library": "library",
    "step_ms": "step, ms",
    "ratio_to_ours": "ratio to ours",
    "processor_ms": "processor, ms",
    "last_loss": "last loss",
    "rss_mb": "peak RSS, MB",
}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


# --- what is compared -----------------------------------------------------------------------------

Train = Callable[[Callable[[Any], Tensor]], Tensor]
"""Runs a step: is given a function of a model that returns its loss, and returns the loss."""


def plainly(model: Any, optimizer: Any) -> Train:
    def train(loss_of: Callable[[Any], Tensor]) -> Tensor:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def ours(model: GPT, kind: str) -> Train:
    from shardwise import shard_model

    shard_model(model, strategy=kind)  # type: ignore[arg-type]
    return plainly(model, adamw(model))


def torch_ddp(model: GPT, kind: str) -> Train:
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "ddp":
        return plainly(wrapped, adamw(model))
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
    return plainly(wrapped, optimizer)


def torch_fsdp1(model: GPT, kind: str) -> Train:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=getattr(ShardingStrategy, "SHARD_GRAD_OP" if kind == "zero2" else "FULL_SHARD"),
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return plainly(wrapped, adamw(wrapped))


def torch_fsdp2(model: GPT, kind: str, is_tuned: bool = False) -> Train:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False if kind == "zero2" else None)
    if is_tuned:
        tune_peer(model, model.blocks)
    return plainly(model, adamw(model))


def torch_fsdp2_tuned(model: GPT, kind: str) -> Train:
    return torch_fsdp2(model, kind, is_tuned=True)


def fairscale(model: GPT, kind: str) -> Train:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=3e-4)
    wrapped = ShardedDataParallel(model, optimizer)

    def train(loss_of: Callable[[Any], Tensor]) -> Tensor:
        loss = loss_of(wrapped)
        loss.backward()
        optimizer.step()
        # Gradients are views of its buckets. With set_to_none, torch's default, they are no longer, and the
        # buckets send the zeros or sums of an earlier step.
        wrapped.zero_grad(set_to_none=False)
        return loss.detach()

    return train


def deepspeed(model: GPT, kind: str) -> Train:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by the import
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    import deepspeed as library

    library.utils.logger.setLevel("ERROR")
    config = {
        "train_micro_batch_size_per_gpu": 1,  # is used to count samples
        "zero_optimization": {"stage": int(kind[-1])},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 unless it says otherwise, which is more work, and another training
    }
    made = library.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)
    engine = made[0]

    def train(loss_of: Callable[[Any], Tensor]) -> Tensor:
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return train


RIVALS: dict[str, tuple[Callable[[GPT, str], Train], Sequence[str], str]] = {
    OURS: (ours, KINDS, "shardwise"),
    "DDP": (torch_ddp, ("ddp", "zero1"), "torch"),
    "FSDP1": (torch_fsdp1, ("zero2", "zero3"), "torch"),
    "FSDP2": (torch_fsdp2, ("zero2", "zero3"), "torch"),
    "FSDP2 tuned": (torch_fsdp2_tuned, ("zero3",), "torch"),
    "FairScale": (fairscale, ("zero1",), "fairscale"),
    "DeepSpeed": (deepspeed, ("zero1", "zero2", "zero3"), "deepspeed"),
}
"""How each library is set up, for which kinds, and the package that has to be installed."""


def variants_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(kind, library), ours first in each kind."""
    return [(kind, name) for kind in options.kinds for name in options.libraries if kind in RIVALS[name][1]]


# --- a launch -------------------------------------------------------------------------------------


def timed_steps(options: argparse.Namespace, train: Train, losses: list[float]) -> Callable[[int], Sample]:
    rank = dist.get_rank()

    def step(index: int) -> Sample:
        batch = batch_of(index * options.processes + rank, options)
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        loss = train(lambda model: model(*batch))
        times = {
            "step_ms": (time.perf_counter() - start) * 1e3,
            "processor_ms": (time.process_time() - used) * 1e3,
        }
        losses.append(loss.item())
        return times

    return step


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One process: all variants in turn."""
    join(rank, options.processes, folder)
    warnings.simplefilter("ignore")  # of libraries about themselves
    losses: dict[str, list[float]] = {}
    steps = {}
    for kind, name in variants_of(options):
        torch.manual_seed(0)
        label = f"{kind} {name}"
        losses[label] = []
        steps[label] = timed_steps(options, RIVALS[name][0](GPT(options), kind), losses[label])
    times = alternate(steps, warmup=options.warmup, steps=options.steps)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    reports: list[Any] = [None] * options.processes
    dist.all_gather_object(reports, (times, losses, rss))
    leave(rank, folder, summarize(reports, options))


def summarize(reports: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    def over_ranks(label: str, measure: str, combine: Any) -> Any:
        return combine([times[label][measure] for times, _, _ in reports], axis=0)

    rows, first = [], {}
    for kind, name in variants_of(options):
        label = f"{kind} {name}"
        steps = over_ranks(label, "step_ms", numpy.max)
        first.setdefault(kind, steps)
        rows.append(
            {
                "kind": kind,
                "library": name,
                "step_ms": vars(Spread.of(steps)),
                "ratio_to_ours": vars(Spread.of(steps / first[kind])),
                "processor_ms": vars(Spread.of(over_ranks(label, "processor_ms", numpy.mean))),
                "last_loss": reports[0][1][label][-1],
                "rss_mb": max(rss for _, _, rss in reports),
            }
        )
    labels = list(reports[0][1])
    losses = {label: numpy.array([of_rank[label] for _, of_rank, _ in reports]) for label in labels}
    apart = {
        f"{labels[0]} against {label}": float(numpy.max(numpy.abs(losses[labels[0]] - losses[label])))
        for label in labels[1:]
    }
    return {"rows": rows, "loss_difference": apart}


def resident_memory(options: argparse.Namespace) -> dict[tuple[str, str], float]:
    """The peak of each variant, in a launch of its own."""
    found = {}
    for kind, name in variants_of(options):
        alone = argparse.Namespace(
            **{**vars(options), "kinds": [kind], "libraries": [name], "steps": 3, "warmup": 0}
        )
        (row,) = launch(worker, alone)["rows"]
        found[kind, name] = row["rss_mb"]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="25m")
    for name, default in {"processes": 2, "context": 128, "batch": 2, "steps": 20, "warmup": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--libraries", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--rss", action="store_true", help="peaks of resident memory as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    vars(options).update(MODELS[options.model])
    options.libraries = [OURS, *(name for name in options.libraries if name != OURS)]
    return options


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Of the packages that are installed; the libraries of others are left out, with a line."""
    found = {}
    for name in list(options.libraries):
        package = RIVALS[name][2]
        if importlib.util.find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed.")
            options.libraries.remove(name)
        else:
            found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    """Launch, print the table and the check of the losses, write the record."""
    options = parse()
    found = versions(options)
    report = launch(worker, options)
    rows = report["rows"]
    memory = resident_memory(options) if options.rss else {}
    for row in rows:
        row["rss_mb"] = memory.get((row["kind"], row["library"]))
    print(f"{options.model}, {options.processes} processes (gloo), {', '.join(map(' '.join, found.items()))}")
    print_table(rows, COLUMNS)
    write_json(
        options.json,
        "rivals",
        vars(options),
        rows,
        versions=found,
        **{"loss_difference": report["loss_difference"]},
    )
    refuse_differences(report["loss_difference"])


if __name__ == "__main__":
    main()
