"""Train the byte-level GPT of train_gpt.py on a mesh of three dimensions: pipeline, shards, tensor parallel.

    torchrun --nproc-per-node 8 examples/train_3d.py                   # 2 x 2 x 2
    torchrun --nproc-per-node 4 examples/train_3d.py --tp 1            # 2 stages or more x 2 shards
    torchrun --nproc-per-node 8 examples/train_3d.py --schedule 1F1B   # one stage a process, not two
    python examples/train_3d.py                                        # one process, the same losses

    mesh with 8 processes       pipe 0                              pipe 1
                                shard 0          shard 1            shard 0          shard 1
                                rank 0, rank 1   rank 2, rank 3     rank 4, rank 5   rank 6, rank 7
                                tp 0    tp 1     tp 0    tp 1       tp 0    tp 1     tp 0    tp 1
    computes                    stages 0 and 2                      stages 1 and 3
    of                          windows 0-7      windows 8-15       windows 0-7      windows 8-15

A stage is some blocks of the model; the first begins with the embeddings, and the last ends with the head.
The schedules are those of torch's own `torch.distributed.pipelining`. Each stage is divided over `tp` first,
as in train_2d.py, then by `fully_shard` over `shard`. With `shardwise.interop.PipelineStage` any schedule
unshards weights and reduces gradients once a step, not once a microbatch.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, Share, read_corpus, training_loader, validation_loader
from gpt import GPT
from processes import (
    Parser,
    check_above_0,
    check_sizes,
    check_tensor_parallel_sizes,
    choose_device,
    start_processes,
    world_size,
)
from report import History, progress_bar, show_step, write_report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from train_2d import apply_tensor_parallelism
from train_2d import build_model as build_headwise_model
from train_gpt import build_optimizer, learning_rate

from shardwise import fully_shard
from shardwise.interop import PipelineStage

EVAL_BATCHES = 8
BACK_AND_FORTH = ("ZBVZeroBubble", "DualPipeV")  # the first process has the first stage and the last


def main() -> None:
    """Set up, train, report."""
    settings = parse_settings()
    start_processes(settings.device)
    pipeline = parallelize(build_model(settings), settings)
    shape = f"{settings.pipe} x {settings.shard} x {settings.tp} (pipe x shard x tp), {settings.schedule}"
    if dist.get_rank() == 0:
        print(f"device  {settings.device_choice}\nmesh    {shape}\n", flush=True)
    history = train(pipeline, read_corpus(), settings)
    write_report(settings, history, shape)
    dist.destroy_process_group()


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; `shard` is what `pipe` and `tp` leave of the processes."""
    parser = Parser("Train a byte-level GPT with pipeline and tensor parallelism, and sharding.")
    add = parser.add_argument
    add(
        "--pipe", type=int, help="processes that have stages one behind the other; default: 2 if that divides"
    )
    add("--tp", type=int, help="processes that compute one stage together; default: 2 if that divides")
    add("--schedule", default="InterleavedZeroBubble", help="one of torch's, without 'Schedule' before it")
    add("--microbatches", type=int, default=4, help="per step, one behind the other")
    add("--layers", type=int, default=4, help="number of blocks, at least one for each stage")
    add("--width", type=int, default=128, help="features per position")
    add("--heads", type=int, default=4, help="attention heads; must divide --width")
    add("--context", type=int, default=128, help="bytes the model looks back at most")
    add("--batch", type=int, default=16, help="windows per step, all processes together")
    add("--steps", type=int, default=80, help="optimizer steps")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="fixes the weights and the batches")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto prefers cuda")
    add("--eval-every", type=int, default=80, help="steps between two validations")
    add("--out", type=Path, default=Path("runs/3d"), help="folder for the curve and the metrics")
    settings = parser.parse_args(arguments)
    with parser.refusing():
        check_above_0(settings, "pipe", "tp", "microbatches", "clip", "eval_every")
        if settings.pipe is None:
            settings.pipe = 1 if world_size() % 2 else 2
        if settings.tp is None:
            settings.tp = 1 if world_size() % (2 * settings.pipe) else 2
        settings.shard = world_size() // (settings.pipe * settings.tp)
        settings.stages_per_rank = stages_per_rank(settings.schedule)
        check_division(settings)
        settings.device, settings.device_choice = choose_device(settings.device)
    return settings


def stages_per_rank(schedule: str) -> int:
    """Two where each process has several stages; such schedules leave it idle for less time."""
    return 2 if issubclass(get_schedule_class(schedule), PipelineScheduleMulti) else 1


def check_division(settings: argparse.Namespace) -> None:
    """Refuse what does not divide over the mesh."""
    if settings.pipe * settings.shard * settings.tp != world_size():
        raise ValueError(
            f"--pipe {settings.pipe} times --tp {settings.tp} does not divide {world_size()} processes"
        )
    check_sizes(settings, settings.microbatches * settings.shard)
    check_tensor_parallel_sizes(settings)
    stages = settings.pipe * settings.stages_per_rank
    if settings.layers < stages:
        raise ValueError(
            f"--layers {settings.layers} are too few for {stages} stages; each takes one or more"
        )


# --- the model ------------------------------------------------------------------------------------


def build_model(settings: argparse.Namespace) -> GPT:
    """Build the same model on every rank, as train_2d.py does; `parallelize` keeps this rank's stages."""
    return build_headwise_model(settings)


class Stage(nn.Module):
    """Neighbouring blocks of a GPT; the first stage has the embeddings as well, and the last one the head."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        if index == 0:
            self.embed, self.position = model.embed, model.position
        layers = len(model.blocks)
        self.blocks = nn.ModuleList(model.blocks[i] for i in range(layers) if i * count // layers == index)
        if index == count - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed"):
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


# --- parallelism ----------------------------------------------------------------------------------


class Pipeline:
    """This rank's stages, the schedule that runs them, and where the rank is on the mesh."""

    def __init__(self, model: GPT, settings: argparse.Namespace) -> None:
        shape, names = (settings.pipe, settings.shard, settings.tp), ("pipe", "shard", "tp")
        mesh = init_device_mesh(settings.device.type, shape, mesh_dim_names=names)
        if settings.tp > 1:
            # The norm of all gradients is a sum over both: as one dimension, it is one all-reduce.
            mesh["shard", "tp"]._flatten("shard_tp")
        self.settings = settings
        self.group = mesh.get_group("pipe")
        self.place = mesh.get_local_rank("pipe")
        # The ranks that have stages of one pipeline, and those of `tp`, take the same windows.
        self.share = Share(mesh.get_local_rank("shard"), settings.shard)
        count = settings.pipe * settings.stages_per_rank
        indices = stages_of(self.place, count, settings)
        self.modules = nn.ModuleList(Stage(model, index, count) for index in indices)
        stages = []
        for index, module in zip(indices, self.modules, strict=True):
            if settings.tp > 1:
                apply_tensor_parallelism(module, mesh["tp"])
            # All microbatches use the weights of a stage, so it keeps them meanwhile.
            for block in module.blocks:
                fully_shard(block, mesh=mesh["shard"], reshard_after_forward=False)
            fully_shard(module, mesh=mesh["shard"], reshard_after_forward=False)
            stages.append(PipelineStage(module, index, count, settings.device, group=self.group))
        kind = get_schedule_class(settings.schedule)
        local = stages if settings.stages_per_rank > 1 else stages[0]
        self.schedule = kind(local, settings.microbatches, loss_fn=mean_loss)
        self.has_loss = count - 1 in indices

    def loss(self, windows: torch.Tensor, *, trains: bool) -> float:
        """The loss on a batch, of which this is the rank's share; if it ``trains``, gradients are left."""
        windows = windows.to(self.settings.device, non_blocking=True)
        losses: list[torch.Tensor] = []
        run = self.schedule.step if trains else self.schedule.eval
        # Others get theirs from the stage before. In one piece: torch 2.11 compares strides of microbatches.
        inputs = [windows[:, :-1].contiguous()] if self.place == 0 else []
        run(*inputs, target=windows[:, 1:], losses=losses)
        return self.mean_of(losses)

    def mean_of(self, losses: list[torch.Tensor]) -> float:
        """The mean of the microbatches' losses, which only ranks with the last stage have."""
        total = torch.zeros((), dtype=torch.float64, device=self.settings.device)
        if self.has_loss:
            total += torch.stack(losses).mean().detach()
        dist.all_reduce(total)
        return total.item() / (self.settings.shard * self.settings.tp)

    @torch.no_grad()
    def clip_gradients(self, largest: float) -> float:
        """Scale all gradients so that their norm, over all stages, is at most ``largest``; return it."""
        gradients = [param.grad for param in self.modules.parameters() if param.grad is not None]
        square = whole(nn.utils.get_total_norm(gradients)).double().square()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt().item()
        for gradient in gradients:
            gradient.mul_(min(1.0, largest / (norm + 1e-6)))
        return norm


def parallelize(model: GPT, settings: argparse.Namespace) -> Pipeline:
    """Keep this rank's stages of the model, divided over `tp` and `shard`."""
    return Pipeline(model, settings)


def whole(value: torch.Tensor) -> torch.Tensor:
    """The value of a DTensor, of which each rank may hold a part of a sum."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def stages_of(place: int, count: int, settings: argparse.Namespace) -> list[int]:
    """Which stages the ranks have at one place of the pipeline."""
    if settings.schedule in BACK_AND_FORTH:
        return [place, count - 1 - place]
    return [*range(place, count, settings.pipe)]


# --- training -------------------------------------------------------------------------------------


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(pipeline: Pipeline, corpus: Corpus, settings: argparse.Namespace) -> History:
    """Run all steps, with a validation every `eval_every` steps and after the last one."""
    optimizer = build_optimizer(pipeline.modules, settings.lr)
    validation, unigram = validation_loader(corpus, settings, pipeline.share, EVAL_BATCHES)
    history = History(unigram, settings.batch * settings.context)
    with progress_bar(history, settings) as bar:
        for step, batch in enumerate(training_loader(corpus, settings, pipeline.share)):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            loss = pipeline.loss(batch, trains=True)
            norm = pipeline.clip_gradients(settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            history.note_step(loss, norm, time.perf_counter() - began)
            done = step + 1
            if done % settings.eval_every == 0 or done == settings.steps:
                history.note_validation(evaluate(pipeline, validation))
            show_step(bar, history)
    return history


@torch.no_grad()
def evaluate(pipeline: Pipeline, validation: DataLoader) -> float:
    """Validation loss over all ranks."""
    losses = [pipeline.loss(batch, trains=False) for batch in validation]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
