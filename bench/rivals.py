"""Other libraries against shardwise, each with its own strategy of the same kind, in one launch.

Claim: a step of a 25 M parameter GPT takes as long with shardwise as with the fastest other library of the
kind, or less: every `ratio to ours` is 1.0 or above, except for torch's DDP.

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
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from common import (
    Spread,
    alternate,
    command_line,
    launch,
    loss_differences,
    print_table,
    refuse_differences,
    slowest,
    tune_peer,
    write_json,
)
from gpt import GPT, Trainer
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


class OfEngine(Trainer):
    def forward_backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.model.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.model.step()


Wrapped = tuple[Any, Any]
"""What is called for a loss, and what steps."""


def ours(model: GPT, kind: str) -> Wrapped:
    from shardwise import shard_model

    shard_model(model, strategy=kind)  # type: ignore[arg-type]
    return model, adamw(model)


def torch_ddp(model: GPT, kind: str) -> Wrapped:
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "ddp":
        return wrapped, adamw(model)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
    return wrapped, optimizer


def torch_fsdp1(model: GPT, kind: str) -> Wrapped:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=getattr(ShardingStrategy, "SHARD_GRAD_OP" if kind == "zero2" else "FULL_SHARD"),
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return wrapped, adamw(wrapped)


def torch_fsdp2(model: GPT, kind: str, is_tuned: bool = False) -> Wrapped:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False if kind == "zero2" else None)
    if is_tuned:
        tune_peer(model, model.blocks)
    return model, adamw(model)


def torch_fsdp2_tuned(model: GPT, kind: str) -> Wrapped:
    return torch_fsdp2(model, kind, is_tuned=True)


def fairscale(model: GPT, kind: str) -> Wrapped:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=3e-4)
    wrapped = ShardedDataParallel(model, optimizer)
    # Gradients are views of its buckets. With set_to_none, torch's default, they no longer are, and the
    # buckets send the sums of an earlier step.
    optimizer.zero_grad = partial(wrapped.zero_grad, set_to_none=False)
    return wrapped, optimizer


def deepspeed(model: GPT, kind: str) -> Wrapped:
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
    return made[0], made[0]


RIVALS: dict[str, tuple[Callable[[GPT, str], Wrapped], Sequence[str], str]] = {
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
    return [(kind, name) for kind in options.kinds for name in options.libraries if kind in RIVALS[name][1]]


# --- a launch -------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> tuple[Any, dict[str, list[float]], float]:
    warnings.simplefilter("ignore")  # of libraries about themselves
    trainers = {}
    for kind, name in variants_of(options):
        torch.manual_seed(0)
        run, optimizer = RIVALS[name][0](GPT(options), kind)
        trainers[f"{kind} {name}"] = (OfEngine if optimizer is run else Trainer)(
            run, options, optimizer=optimizer
        )
    steps = {label: trainer.timed_step for label, trainer in trainers.items()}
    times = alternate(steps, warmup=options.warmup, steps=options.steps)
    losses = {label: trainer.losses for label, trainer in trainers.items()}
    return times, losses, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def summarize(ranks: list[Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant; ratios are to ours of the kind, which comes first."""
    times = [times for times, _, _ in ranks]
    steps, first = slowest(times, "step_ms"), {}
    rows = []
    for kind, name in variants_of(options):
        label = f"{kind} {name}"
        processor = numpy.mean([of_rank[label]["processor_ms"] for of_rank in times], axis=0)
        rows.append(
            {
                "kind": kind,
                "library": name,
                "step_ms": vars(Spread.of(steps[label])),
                "ratio_to_ours": vars(Spread.of(steps[label] / first.setdefault(kind, steps[label]))),
                "processor_ms": vars(Spread.of(processor)),
                "last_loss": ranks[0][1][label][-1],
                "rss_mb": max(rss for _, _, rss in ranks),
            }
        )
    return rows


def resident_memory(options: argparse.Namespace) -> dict[tuple[str, str], float]:
    """The peak of each variant, in a launch of its own."""
    found = {}
    for kind, name in variants_of(options):
        alone = argparse.Namespace(
            **{**vars(options), "kinds": [kind], "libraries": [name], "steps": 3, "warmup": 0}
        )
        found[kind, name] = max(rss for _, _, rss in launch(work, alone))
    return found


def parse() -> argparse.Namespace:
    parser = command_line(__doc__, processes=2, context=128, batch=2, steps=20, warmup=3)
    parser.add_argument("--model", choices=MODELS, default="25m")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--libraries", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--rss", action="store_true", help="peaks of resident memory as well")
    options = parser.parse_args()
    vars(options).update(MODELS[options.model])
    options.libraries = [OURS, *(name for name in options.libraries if name != OURS)]
    return options


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Of the packages that are installed; the libraries of others are left out, with a line."""
    print("Megatron-FSDP is left out: it requires CUDA.")
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
    options = parse()
    found = versions(options)
    ranks = launch(work, options)
    rows = summarize(ranks, options)
    memory = resident_memory(options) if options.rss else {}
    for row in rows:
        row["rss_mb"] = memory.get((row["kind"], row["library"]))
    print(f"{options.model}, {options.processes} processes (gloo), {', '.join(map(' '.join, found.items()))}")
    print_table(rows, COLUMNS)
    losses = [of_rank for _, of_rank, _ in ranks]
    first, *others = losses[0]
    apart = loss_differences(losses, first, others)
    write_json(options.json, "rivals", vars(options), rows, versions=found, loss_difference=apart)
    refuse_differences(apart)


if __name__ == "__main__":
    main()
