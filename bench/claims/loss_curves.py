"""The loss curve of examples/train_gpt.py in other ways of training it: does it learn as well?

Claim: with torch's own `fully_shard` (`--peer torch`) the losses are the same up to rounding; with
gradients and weights sent in fewer bytes (`--send-gradients`, `--send-weights`) validation is as good as
exact, within what another seed makes; with Muon it is better than with AdamW at the same learning rate. SOAP
(`--optimizer soap`, that of pytorch_optimizer) is there to be compared.

How: the example's model, weights, batches and schedule, in a loop that takes either implementation, so that
neither depends on the other. It has the example's options, except those of its loop alone (checkpoints,
traces, accumulation). Writes metrics.json and loss.png into --out, as the example does; `pictures.py` draws
optimizers.svg from them, and `compression.py` reads the loss.

Refuted by: losses of `--peer torch` further than 1e-3 from ours; compression.py has the rest.

    torchrun --nproc-per-node 2 bench/claims/loss_curves.py --steps 200 --eval-every 25 --optimizer muon
    torchrun --nproc-per-node 2 bench/claims/loss_curves.py --steps 100 --eval-every 25 --optimizer soap
    torchrun --nproc-per-node 2 bench/claims/loss_curves.py --send-gradients int8
    torchrun --nproc-per-node 2 bench/claims/loss_curves.py --peer torch
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
import torch.distributed as dist
import train_gpt
from corpus import Corpus, read_corpus, training_loader, validation_loader
from gpt import GPT
from processes import Parser, mean_over_ranks, share_of_rank, start_processes
from report import History, progress_bar, show_step, write_report

LEFT_OUT = ("checkpoint_dir", "resume", "trace", "recompute", "compile", "peak_tflops")


def main() -> None:
    settings = parse_settings()
    start_processes(settings.device)
    model, optimizer = MAKERS[settings.peer](settings)
    history = train(model, optimizer, read_corpus(), settings)
    write_report(
        settings, history, f"{settings.peer}, {settings.optimizer}, {dist.get_world_size()} processes"
    )
    dist.destroy_process_group()


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    parser: Parser = train_gpt.command_line()
    parser.description = "Train the example's GPT in another way."
    add = parser.add_argument
    add("--peer", choices=["shardwise", "torch"], default="shardwise", help="whose fully_shard")
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="muon: for matrices of blocks")
    add("--send-gradients", choices=["as-is", "bf16", "int8"], default="as-is", help="on the wire")
    add("--send-weights", choices=["as-is", "int8"], default="as-is", help="on the wire")
    settings = train_gpt.parse_settings(parser, arguments)
    with parser.refusing():
        check(settings)
    return settings


def check(settings: argparse.Namespace) -> None:
    """Refuse what the loop here, or torch's fully_shard, does not do."""
    for name in LEFT_OUT:
        if getattr(settings, name):
            raise ValueError(f"--{name.replace('_', '-')} is for examples/train_gpt.py, and not done here")
    if settings.accumulate != 1:
        raise ValueError("--accumulate is for examples/train_gpt.py, and not done here")
    if settings.peer == "torch" and settings.optimizer != "adamw":
        raise ValueError(
            f"--optimizer {settings.optimizer} needs shardwise, and --peer torch leaves it out; choose one"
        )
    if settings.optimizer == "soap" and importlib.util.find_spec("pytorch_optimizer") is None:
        raise ValueError("--optimizer soap needs pytorch_optimizer: pip install pytorch-optimizer")
    chosen = (settings.strategy, settings.send_gradients, settings.send_weights)
    if settings.peer == "torch" and chosen != ("zero3", "as-is", "as-is"):
        raise ValueError("--peer torch goes with strategy zero3, and sends everything as it is")


def ours(settings: argparse.Namespace) -> tuple[GPT, torch.optim.Optimizer]:
    """The example's model with what is asked for on the wire, and an optimizer."""
    from shardwise import CommPolicy
    from shardwise.policies import LowPrecisionReduction, QuantizedAllGather, QuantizedReduction
    from shardwise.strategies import register_comm_hook

    sends_int8 = settings.send_weights == "int8"
    policy = CommPolicy(quantized_all_gather=QuantizedAllGather()) if sends_int8 else None
    model = train_gpt.build_model(settings, comm_policy=policy)
    if settings.send_gradients == "bf16":
        register_comm_hook(model, None, LowPrecisionReduction(torch.bfloat16))
    elif settings.send_gradients == "int8":
        register_comm_hook(model, None, QuantizedReduction())
    return model, OPTIMIZERS[settings.optimizer](model, settings)


def peer(settings: argparse.Namespace) -> tuple[GPT, torch.optim.Optimizer]:
    """The same weights, sharded as strategy zero3 does, by torch's own fully_shard."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    options: dict[str, Any] = {}
    if settings.dtype == "bf16":
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    torch.manual_seed(settings.seed)
    sizes = {name: getattr(settings, name) for name in ("layers", "width", "heads", "context")}
    model = GPT(**sizes).to(settings.device)
    options["mesh"] = dist.init_device_mesh(settings.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    return model, build_adamw(model, settings)


MAKERS = {"shardwise": ours, "torch": peer}


def build_adamw(model: GPT, settings: argparse.Namespace) -> torch.optim.Optimizer:
    return train_gpt.build_optimizer(model, settings.lr)


def build_muon(model: GPT, settings: argparse.Namespace) -> torch.optim.Optimizer:
    """Muon for the matrices of blocks, AdamW for the rest."""
    from shardwise.optim import Muon

    lr = settings.lr
    return Muon(
        model.named_parameters(),
        lr=lr,
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate suits both
        adamw={"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True},
        row_blocks=rows_of_fused_matrices,
    )


def build_soap(model: GPT, settings: argparse.Namespace) -> torch.optim.Optimizer:
    """SOAP for all parameters, each stepped by its owner; the weights of the example's AdamW decay."""
    from pytorch_optimizer import SOAP

    from shardwise.optim import WholeParameters

    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in build_adamw(model, settings).param_groups
    ]
    return WholeParameters(SOAP, groups, lr=settings.lr, betas=(0.9, 0.95))


OPTIMIZERS = {"adamw": build_adamw, "muon": build_muon, "soap": build_soap}


def rows_of_fused_matrices(name: str, param: torch.Tensor) -> list[int] | None:
    """Tell Muon that queries, keys and values are three matrices in one."""
    return [param.shape[1]] * 3 if name.endswith("qkv.weight") else None


def train(
    model: GPT, optimizer: torch.optim.Optimizer, corpus: Corpus, settings: argparse.Namespace
) -> History:
    """All steps with torch's own clipping, which every sharded model takes."""
    validation, unigram = validation_loader(corpus, settings, share_of_rank(), train_gpt.EVAL_BATCHES)
    history = History(unigram, settings.batch * settings.context)
    with progress_bar(history, settings) as bar:
        for step, batch in enumerate(training_loader(corpus, settings, share_of_rank())):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = train_gpt.learning_rate(step, settings)
            loss = train_gpt.mean_loss(model, batch, settings.device)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            history.note_step(mean_over_ranks(loss), norm.full_tensor().item(), time.perf_counter() - began)
            done = step + 1
            if done % settings.eval_every == 0 or done == settings.steps:
                history.note_validation(train_gpt.evaluate(model, validation, settings))
            show_step(bar, history)
    return history


if __name__ == "__main__":
    main()
