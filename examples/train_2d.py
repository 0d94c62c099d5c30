"""Train the byte-level GPT of train_gpt.py with its weights divided in two ways at once.

    torchrun --nproc-per-node 4 examples/train_2d.py                 # 2 shards x 2 tensor parallel
    torchrun --nproc-per-node 4 examples/train_2d.py --tp 4          # tensor parallel alone
    torchrun --nproc-per-node 8 examples/train_2d.py --replicate 2   # 2 replicas x 2 shards x 2
    python examples/train_2d.py                                      # one process, the same losses

    mesh with 4 processes          shard 0             shard 1
                                rank 0   rank 1     rank 2   rank 3
                                tp 0     tp 1       tp 0     tp 1
    reads                       windows 0-7         windows 8-15
    computes                    heads    heads      heads    heads
                                0, 1     2, 3       0, 1     2, 3

The processes of one row of `tp` compute one and the same batch together: each has some of the heads
and some of the perceptron's features, and between these layers a part of the positions. This is
torch's own `parallelize_module`; it comes first and leaves parameters that are DTensors on `tp`.
`fully_shard` then divides what each process has left over `shard`, as without tensor parallelism,
and the parameters become DTensors on both dimensions. Optimizer and clipping need to know of neither.
"""

import argparse
import dataclasses
import importlib
import os
import time
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, draw_offsets, read_corpus, unigram_cross_entropy, windows_at
from gpt import GPT, Attention
from report import History, verdict
from settings import check_dtype, check_sizes, check_tensor_parallel_sizes, choose_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from train_gpt import build_optimizer, learning_rate, mean_over_ranks, start_processes, validation_batches

PRINT_EVERY = 10  # steps


def main() -> None:
    """Set up, train, print how it went."""
    settings = parse_settings()
    start_processes(settings.device)
    model = build_model(settings)
    parallelize(model, settings)
    history = train(model, read_corpus(), settings)
    if dist.get_rank() == 0:
        tokens_per_s = history.tokens_per_s(settings.batch * settings.context)
        shape = f"{settings.replicate} x {settings.shard} x {settings.tp}"
        print(f"\n{verdict(history)}\n")
        print(f"{settings.peer}, {shape} (replicate x shard x tp), {tokens_per_s:,.0f} tokens/s")
    dist.destroy_process_group()


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; `shard` is what `replicate` and `tp` leave of the processes."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with tensor parallelism and sharding.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tp", type=int, help="processes that compute one batch together; default: 2 if that divides")
    add("--replicate", type=int, default=1, help="copies of the sharded model: hybrid sharding")
    add("--layers", type=int, default=3, help="number of blocks")
    add("--width", type=int, default=128, help="features per position")
    add("--heads", type=int, default=4, help="attention heads; must divide --width")
    add("--context", type=int, default=128, help="bytes the model looks back at most")
    add("--batch", type=int, default=16, help="windows per step, all processes together")
    add("--accumulate", type=int, default=1, help="microbatches per step, with one reduction of gradients")
    add("--steps", type=int, default=80, help="optimizer steps")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="fixes the weights and the batches")
    add("--dtype", choices=["float32", "bf16"], default="float32", help="bf16: a MixedPrecisionPolicy")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto prefers cuda")
    add("--eval-every", type=int, default=80, help="steps between two validations")
    add("--peer", choices=["shardwise", "torch"], default="shardwise", help="whose fully_shard")
    settings = parser.parse_args(arguments)
    settings.optimizer = "adamw"  # the only one here; examples/train_gpt.py has others
    try:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
        if settings.tp is None:
            settings.tp = 1 if world_size % (2 * settings.replicate) else 2
        settings.shard = world_size // (settings.replicate * settings.tp)
        check_division(settings, world_size)
        settings.device = choose_device(settings.device)
        check_dtype(settings.dtype, settings.device)
    except ValueError as refusal:
        parser.error(str(refusal))
    return settings


def check_division(settings: argparse.Namespace, world_size: int) -> None:
    """Refuse what does not divide over the mesh."""
    for name in ("tp", "replicate", "accumulate"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if settings.replicate * settings.shard * settings.tp != world_size:
        raise ValueError(
            f"--replicate {settings.replicate} times --tp {settings.tp} does not divide {world_size} "
            f"processes"
        )
    # A microbatch divides over the processes that do not compute it together.
    check_sizes(settings, settings.accumulate * settings.replicate * settings.shard)
    check_tensor_parallel_sizes(settings)


# --- the model ------------------------------------------------------------------------------------


class HeadwiseAttention(nn.Module):
    """`gpt.Attention` with one matrix each for queries, keys and values.

    Then equal parts of each matrix's rows are whole heads, and the same ones of all three. How many
    heads are here follows from what the matrices return: all of them, or this process's.
    """

    def __init__(self, packed: Attention):
        super().__init__()
        width = packed.out.in_features
        self.head_size = width // packed.heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = packed.out
        with torch.no_grad():
            rows_of_three = packed.qkv.weight.chunk(3)
            for linear, rows in zip((self.query, self.key, self.value), rows_of_three, strict=True):
                linear.weight.copy_(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def build_model(settings: argparse.Namespace) -> GPT:
    """Build the same model on every rank, with the weights that train_gpt.py begins with."""
    torch.manual_seed(settings.seed)
    model = GPT(
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        context=settings.context,
    )
    for block in model.blocks:
        block.attention = HeadwiseAttention(block.attention)
    return model.to(settings.device)


# --- parallelism ----------------------------------------------------------------------------------


def parallelize(model: GPT, settings: argparse.Namespace) -> None:
    """Divide every layer over `tp` first; then shard what that has left to each process."""
    shape = (settings.replicate, settings.shard, settings.tp)
    mesh = init_device_mesh(settings.device.type, shape, mesh_dim_names=("replicate", "shard", "tp"))
    if settings.tp > 1:
        # The norm of all gradients is a sum over both: as one dimension, it is one all-reduce.
        mesh["shard", "tp"]._flatten("shard_tp")
        apply_tensor_parallelism(model, mesh["tp"])
    apply_sharding(model, mesh, settings)


def apply_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide matrices by heads and features, and what flows between the layers by positions.

    Every parameter takes part, also those of norms, which are the same on all ranks: so all are
    DTensors on one mesh, as the norm of all gradients requires.
    """
    by_position = Shard(1)  # of (batch, length, width)
    around_blocks = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=by_position),
        # Positions have no batch dimension: the result is (length, width).
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=by_position, output_layouts=Replicate()),
    }
    # A stage of train_3d.py has some of them.
    here = {name: style for name, style in around_blocks.items() if hasattr(model, name)}
    parallelize_module(model, mesh, here)
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                # Every head looks at all positions; gathered once for the three matrices.
                "attention": PrepareModuleInput(input_layouts=by_position, desired_input_layouts=Replicate()),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=by_position),
                "mlp_norm": SequenceParallel(),
                "mlp_in": ColwiseParallel(input_layouts=by_position),
                "mlp_out": RowwiseParallel(output_layouts=by_position),
            },
        )


def apply_sharding(model: GPT, mesh: DeviceMesh, settings: argparse.Namespace) -> None:
    """Shard what tensor parallelism has left to each process, block by block."""
    library = import_library(settings.peer)
    policy = library.MixedPrecisionPolicy()
    if settings.dtype == "bf16":
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # One dimension: sharded over it. Two: replicated over the first and sharded over the second.
    data_parallel = mesh["replicate", "shard"] if settings.replicate > 1 else mesh["shard"]
    for block in model.blocks:
        library.fully_shard(block, mesh=data_parallel, mp_policy=policy)
    if settings.dtype == "bf16":
        policy = dataclasses.replace(policy, output_dtype=torch.float32)  # for the loss
    library.fully_shard(model, mesh=data_parallel, mp_policy=policy)


def import_library(peer: str) -> ModuleType:
    """Import one implementation and not the other, so that neither can lean on the other."""
    return importlib.import_module("torch.distributed.fsdp" if peer == "torch" else "shardwise")


# --- training -------------------------------------------------------------------------------------


def train(
    model: GPT,
    corpus: Corpus,
    settings: argparse.Namespace,
    report: Callable[[str], None] = print,
) -> History:
    """Run all steps, with a validation every `eval_every` steps and after the last one."""
    optimizer = build_optimizer(model, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    validation = validation_batches(corpus, settings)[::4]
    history = History(unigram=unigram_cross_entropy(corpus.train, torch.cat(validation)[:, 1:]))
    for step in range(settings.steps):
        began = time.perf_counter()
        offsets = draw_offsets(corpus.train, settings.context, settings.batch, generator)
        windows = windows_at(corpus.train, rows_of_this_rank(offsets, settings), settings.context)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings.lr, settings.steps)
        loss, norm = train_step(model, optimizer, windows, settings)
        history.train_loss.append(loss)
        history.step_seconds.append(time.perf_counter() - began)

        done = step + 1
        if done % settings.eval_every == 0 or done == settings.steps:
            history.val_steps.append(done)
            history.val_loss.append(evaluate(model, validation, settings))
        if dist.get_rank() == 0 and (done == 1 or done % PRINT_EVERY == 0 or done == settings.steps):
            report(f"step {done:4}   loss {loss:.6f}   gradient norm {norm:.6f}")
    return history


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, windows: torch.Tensor, settings: argparse.Namespace
) -> tuple[float, float]:
    """Learn from this rank's windows; return loss and norm of the gradient over all ranks."""
    losses = []
    for i, microbatch in enumerate(windows.chunk(settings.accumulate)):
        if settings.accumulate > 1:
            model.set_requires_gradient_sync(i == settings.accumulate - 1)
        loss = mean_loss(model, microbatch, settings) / settings.accumulate
        loss.backward()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=settings.clip)
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(torch.stack(losses).sum()), whole(norm).item()


def whole(value: torch.Tensor) -> torch.Tensor:
    """The value of a DTensor, of which each rank may hold a part of a sum."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mean_loss(model: GPT, windows: torch.Tensor, settings: argparse.Namespace) -> torch.Tensor:
    """Nats per byte over windows that are each (context + 1) bytes long."""
    windows = windows.to(settings.device)
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: GPT, batches: list[torch.Tensor], settings: argparse.Namespace) -> float:
    """Validation loss over all ranks."""
    losses = [mean_loss(model, rows_of_this_rank(batch, settings), settings) for batch in batches]
    return mean_over_ranks(torch.stack(losses).mean())


def rows_of_this_rank(batch: torch.Tensor, settings: argparse.Namespace) -> torch.Tensor:
    """Take this rank's share of a global batch: the same one as the other ranks of its `tp` row."""
    return batch.chunk(settings.replicate * settings.shard)[dist.get_rank() // settings.tp]


if __name__ == "__main__":
    main()
