"""Train a small byte-level GPT whose weights are sharded over all processes.

    python examples/train_gpt.py                                # one process
    torchrun --nproc-per-node 2 examples/train_gpt.py           # the same run, shared by two
    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy zero2 --accumulate 4 --recompute
    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 5 --trace runs/trace   # open step.html
    torchrun --nproc-per-node 8 examples/train_gpt.py --layers 24 --width 1536 --heads 16 \
        --context 1024 --batch 64 --lr 3e-4 --dtype bf16 --compile block       # eight GPUs

If a process dies, torchrun restarts all of them, and they continue from the last checkpoint. The losses are
those of an uninterrupted run. Up to rounding, they are also the same on another number of processes, and with
another --strategy, --accumulate or --compile:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoint-dir runs/saved --resume

Told to end by SIGTERM, as by a scheduler, it saves at that step and exits; the same command goes on then.

Runs on CPUs and on CUDA GPUs, needs no data but the Python installation itself, and takes about two minutes
with the defaults on two CPU cores. To train something else, change the model (gpt.py) and the data
(corpus.py); processes.py has what comes before training, report.py what is shown of it.
"""

import argparse
import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, read_corpus, training_loader, validation_loader
from gpt import GPT, Block, generate
from processes import (
    Parser,
    check_above_0,
    check_dtype,
    check_sizes,
    check_unchanged,
    choose_device,
    mean_over_ranks,
    random_states,
    set_random_states,
    share_of_rank,
    start_processes,
    world_size,
)
from report import History, peak_flops, progress_bar, show_step, traced, utilization, write_report
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from shardwise import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    explain,
    inference,
    latest_checkpoint,
    load_checkpoint,
    materialize,
    no_sync,
    save_checkpoint,
    shard_model,
)
from shardwise.ranks import StopSignal

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "zero3_hpz", "hybrid", "hybrid_zero2"]
EVAL_BATCHES = 32
SAMPLE_BYTES = 300
TRACED_STEP = 4  # or the last: the first ones record the order of blocks, and compile

# What the losses depend on, beside the model. A run that went on with others would be neither old nor new.
COURSE = ("heads", "context", "batch", "steps", "lr", "seed")


def main() -> None:
    """Set up, train, sample, report."""
    settings = parse_settings(command_line())
    start_processes(settings.device)
    corpus = read_corpus()
    model = build_model(settings)
    if dist.get_rank() == 0:
        print(summary(model, corpus, settings), flush=True)
    history = train(model, corpus, settings)
    if history.steps_done == settings.steps:
        sample = sample_of(model, settings)
        if dist.get_rank() == 0:
            print(f"\nA sample:\n{sample}")
        write_report(settings, history, f"{settings.strategy}, {world_size()} x {settings.device.type}")
    elif dist.get_rank() == 0:
        saved = "nothing is saved" if settings.checkpoint_dir is None else "saved; --resume goes on"
        print(f"told to stop at step {history.steps_done} of {settings.steps}: {saved}", flush=True)
    dist.destroy_process_group()


# --- what is asked for ----------------------------------------------------------------------------


def command_line() -> Parser:
    """What can be asked for."""
    parser = Parser("Train a byte-level GPT, sharded over all processes, on Python's own sources.")
    add = parser.add_argument
    add("--layers", type=int, default=4, help="number of blocks")
    add("--width", type=int, default=128, help="features per position")
    add("--heads", type=int, default=4, help="attention heads; must divide --width")
    add("--context", type=int, default=128, help="bytes the model looks back at most")
    add("--batch", type=int, default=16, help="windows per step, all processes together")
    add("--accumulate", type=int, default=1, help="microbatches per step, with one reduction of gradients")
    add("--steps", type=int, default=600, help="optimizer steps")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="fixes the weights, the batches and the sample")
    add("--strategy", choices=STRATEGIES, default="zero3", help="what each process holds and sends")
    add("--dtype", choices=["float32", "bf16"], default="float32", help="to compute in; weights stay float32")
    add("--recompute", action="store_true", help="activations in backward, block by block, to save memory")
    add("--compile", choices=["block", "model"], help="a graph for each, by torch.compile")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto prefers cuda")
    add("--workers", type=int, default=0, help="processes that load data for each one that trains")
    add("--peak-tflops", type=float, help="of one device, to show MFU; known for some GPUs")
    add("--eval-every", type=int, default=100, help="steps between two validations")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for the curve and the metrics")
    add("--checkpoint-dir", type=Path, help="folder to save checkpoints to; none without")
    add("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--trace", type=Path, help="folder for a trace of a step: a file a rank, and a page of all")
    return parser


def parse_settings(parser: Parser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; `device` becomes a torch.device."""
    settings = parser.parse_args(arguments)
    with parser.refusing():
        check_above_0(settings, "accumulate", "clip", "eval_every", "checkpoint_every", "peak_tflops")
        check_sizes(settings, shares=world_size() * settings.accumulate)
        if settings.workers < 0:
            raise ValueError("--workers must be 0 or above")
        if settings.resume and settings.checkpoint_dir is None:
            raise ValueError("--resume needs --checkpoint-dir: the folder to go on from, and to save to")
        settings.device, settings.device_choice = choose_device(settings.device)
        check_dtype(settings.dtype, settings.device)
    return settings


def summary(model: GPT, corpus: Corpus, settings: argparse.Namespace) -> str:
    """Say what is about to be trained, on what and how; the table shows what each rank holds."""
    peak = peak_flops(settings)
    mfu = "not shown, as the peak of this device is unknown: --peak-tflops tells it"
    if peak is not None:
        mfu = f"shown, of {peak / 1e12:.4g} TFLOP/s a device"
    microbatch = settings.batch // world_size() // settings.accumulate
    return (
        f"model     {sum(p.numel() for p in model.parameters()):,} parameters, in {settings.dtype}\n"
        f"data      {len(corpus.train):,} bytes; each step {settings.batch} windows of {settings.context}: "
        f"{world_size()} ranks x {settings.accumulate} microbatches x {microbatch}\n"
        f"device    {settings.device_choice}\n"
        f"MFU       {mfu}\n"
        f"strategy  {settings.strategy}\n\n{explain(model)}\n"
    )


# --- the model ------------------------------------------------------------------------------------


def empty_model(settings: argparse.Namespace, *, recompute: bool) -> GPT:
    """A model on the meta device, which needs no memory at any size."""
    sizes = {name: getattr(settings, name) for name in ("layers", "width", "heads", "context")}
    with torch.device("meta"):
        return GPT(**sizes, recompute=recompute)


def build_model(settings: argparse.Namespace, **more: Any) -> GPT:
    """Shard an empty model, then give values to the parts that are here: no rank ever holds all of it.

    The values are the same on any number of ranks. `more` goes to `shard_model`.
    """
    model = empty_model(settings, recompute=settings.recompute)
    policy = None
    if settings.dtype == "bf16":  # all-gather and compute in bf16, sum gradients in float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_model(model, strategy=settings.strategy, wrap=Block, mp_policy=policy, **more)
    torch.manual_seed(settings.seed)
    materialize(model)
    if settings.compile == "block":
        for block in model.blocks:
            block.compile()
    elif settings.compile == "model":
        model.compile()
    return model


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Make AdamW over the sharded parameters: its state is sharded because they are."""
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]  # norms: not pulled towards zero
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, settings: argparse.Namespace) -> float:
    """Rise linearly over the first tenth of the steps, then fall along a cosine to a tenth."""
    warm_up = max(1, settings.steps // 10)
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def flops_per_token(settings: argparse.Namespace) -> float:
    """Count the operations of forward and backward, but not those of recomputing activations."""
    model = empty_model(settings, recompute=False)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, settings.context, dtype=torch.long)).sum().backward()
    return counter.get_total_flops() / settings.context


def sample_of(model: GPT, settings: argparse.Namespace) -> str:
    """Continue a function; on all ranks, as a forward all-gathers weights.

    The weights stay unsharded for all forwards. None of these is compiled: each is one byte longer.
    """
    stance = torch.compiler.set_stance("force_eager") if settings.compile else contextlib.nullcontext()
    with stance, inference(model):
        return generate(model, b"def ", SAMPLE_BYTES, settings.seed).decode(errors="replace")


# --- training -------------------------------------------------------------------------------------


def train(model: GPT, corpus: Corpus, settings: argparse.Namespace) -> History:
    """Run the steps that are not done yet, with validations and checkpoints in between and at the end."""
    optimizer = build_optimizer(model, settings.lr)
    validation, unigram = validation_loader(corpus, settings, share_of_rank(), EVAL_BATCHES)
    history = History(unigram, settings.batch * settings.context)
    if settings.checkpoint_dir is not None:
        resume(model, optimizer, history, settings)

    first, flops = history.steps_done, flops_per_token(settings)
    loader = training_loader(corpus, settings, share_of_rank(), first)
    to_trace = None if settings.trace is None else min(first + TRACED_STEP, settings.steps - 1)
    with StopSignal() as stop, progress_bar(history, settings) as bar:
        for step, batch in enumerate(loader, first):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            with traced(model, settings.trace) if step == to_trace else contextlib.nullcontext():
                loss, norm = train_step(model, optimizer, batch, settings)
            history.note_step(loss, norm, time.perf_counter() - began)

            done, is_stopping = step + 1, stop.requested()
            if done % settings.eval_every == 0 or done == settings.steps:
                history.note_validation(evaluate(model, validation, settings))
            show_step(bar, history, **utilization(history, flops, settings))
            is_last = done == settings.steps or is_stopping
            if settings.checkpoint_dir is not None and (is_last or done % settings.checkpoint_every == 0):
                save(model, optimizer, history, settings, asynchronous=not is_last)
            if is_stopping:
                break
    return history


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, batch: torch.Tensor, settings: argparse.Namespace
) -> tuple[float, float]:
    """Learn from this rank's windows; return loss and norm of the gradient over all ranks.

    The last backward averages the gradients over the ranks, the norm is that of all shards, and the optimizer
    updates the shard that is here.
    """
    losses = []
    for i, microbatch in enumerate(batch.chunk(settings.accumulate), 1):
        with contextlib.nullcontext() if i == settings.accumulate else no_sync(model):
            loss = mean_loss(model, microbatch, settings.device) / settings.accumulate
            loss.backward()
        losses.append(loss.detach())
    norm = clip_grad_norm_(model, settings.clip)
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(torch.stack(losses).sum()), norm.item()  # here the host waits for the device


def mean_loss(model: nn.Module, windows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Nats per byte over windows that are each (context + 1) bytes long."""
    windows = windows.to(device, non_blocking=True)
    logits = model(windows[:, :-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 is too coarse for a loss
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, validation: DataLoader, settings: argparse.Namespace) -> float:
    """Validation loss over all ranks, which must hold equally many batches: forwards all-gather."""
    losses = [mean_loss(model, batch, settings.device) for batch in validation]
    return mean_over_ranks(torch.stack(losses).mean())


# --- checkpoints ----------------------------------------------------------------------------------
# A run that goes on from a checkpoint is to be the run that was never broken, bit for bit. So all that the
# next step depends on is saved: weights, the optimizer's state, torch's random state on each rank, and the
# history, whose length says how many steps are done. Batches and the learning rate follow from the step.


def save(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    history: History,
    settings: argparse.Namespace,
    *,
    asynchronous: bool,
) -> None:
    """Save, if asynchronous while training goes on. A save that dies leaves the one before it in place."""
    save_checkpoint(
        settings.checkpoint_dir / f"step-{history.steps_done:08}",
        model,
        optimizer,
        states={"history": history},
        shared={"settings": {name: getattr(settings, name) for name in COURSE}},
        per_rank=random_states(),
        asynchronous=asynchronous,
        keep=2,  # the newest one, and one more should a disk lose that
    )


def resume(
    model: GPT, optimizer: torch.optim.Optimizer, history: History, settings: argparse.Namespace
) -> None:
    """Go on from the newest checkpoint, if that is asked for and there is one."""
    path = latest_checkpoint(settings.checkpoint_dir)
    if path is None:
        return
    if not settings.resume:
        raise FileExistsError(
            f"{path} is there already. Give --resume to go on from it, or another --checkpoint-dir: "
            f"a later --resume could not tell the checkpoints of two runs apart."
        )
    loaded = load_checkpoint(path, model, optimizer, states={"history": history})
    check_unchanged(settings, loaded.shared["settings"])
    if loaded.per_rank is not None:  # else as many other ranks have saved, and the seed's state stays
        set_random_states(loaded.per_rank)
    if dist.get_rank() == 0:
        print(f"resumed at step {history.steps_done} from {path}", flush=True)


if __name__ == "__main__":
    main()
