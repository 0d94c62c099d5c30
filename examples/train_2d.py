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
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, Share, read_corpus, training_loader, validation_loader
from gpt import GPT, Linear
from processes import (
    Parser,
    check_above_0,
    check_dtype,
    check_sizes,
    check_tensor_parallel_sizes,
    choose_device,
    start_processes,
    world_size,
)
from report import History, progress_bar, show_step, write_report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from train_gpt import build_optimizer, evaluate, learning_rate, train_step

from shardwise import MixedPrecisionPolicy, explain, fully_shard

EVAL_BATCHES = 8


def main() -> None:
    """Set up, train, report."""
    settings = parse_settings()
    start_processes(settings.device)
    model = build_model(settings)
    parallelize(model, settings)
    shape = f"{settings.replicate} x {settings.shard} x {settings.tp} (replicate x shard x tp)"
    if dist.get_rank() == 0:
        print(f"device  {settings.device_choice}\nmesh    {shape}\n\n{explain(model)}\n", flush=True)
    history = train(model, read_corpus(), settings)
    write_report(settings, history, shape)
    dist.destroy_process_group()


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; `shard` is what `replicate` and `tp` leave of the processes."""
    parser = Parser("Train a byte-level GPT with tensor parallelism and sharding.")
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
    add("--out", type=Path, default=Path("runs/2d"), help="folder for the curve and the metrics")
    settings = parser.parse_args(arguments)
    with parser.refusing():
        check_above_0(settings, "tp", "replicate", "accumulate", "clip", "eval_every")
        if settings.tp is None:
            settings.tp = 1 if world_size() % (2 * settings.replicate) else 2
        settings.shard = world_size() // (settings.replicate * settings.tp)
        check_division(settings)
        settings.device, settings.device_choice = choose_device(settings.device)
        check_dtype(settings.dtype, settings.device)
    return settings


def check_division(settings: argparse.Namespace) -> None:
    """Refuse what does not divide over the mesh."""
    if settings.replicate * settings.shard * settings.tp != world_size():
        raise ValueError(
            f"--replicate {settings.replicate} times --tp {settings.tp} does not divide {world_size()} "
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

    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.head_size = width // heads
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.out = Linear(width, width, summands=2 * layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def build_model(settings: argparse.Namespace) -> GPT:
    """Build the same model on every rank; `parallelize` leaves each rank its part of it."""
    torch.manual_seed(settings.seed)
    sizes = {name: getattr(settings, name) for name in ("layers", "width", "heads")}
    model = GPT(**sizes, context=settings.context)
    for block in model.blocks:
        block.attention = HeadwiseAttention(**sizes)
    return model.to(settings.device)


# --- parallelism ----------------------------------------------------------------------------------


def parallelize(model: GPT, settings: argparse.Namespace) -> None:
    """Divide every layer over `tp` first; then shard what that has left to each process."""
    shape = (settings.replicate, settings.shard, settings.tp)
    mesh = init_device_mesh(settings.device.type, shape, mesh_dim_names=("replicate", "shard", "tp"))
    if settings.tp > 1:
        apply_tensor_parallelism(model, mesh["tp"])
    apply_sharding(model, mesh, settings)


def apply_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide matrices by heads and features, and what flows between the layers by positions.

    Every parameter takes part, also those of norms, which are the same on all ranks: so all are
    DTensors on one mesh, as the optimizer's operations on lists of them require.
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
    policy = MixedPrecisionPolicy()
    if settings.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # One dimension: sharded over it. Two: replicated over the first and sharded over the second.
    data_parallel = mesh["replicate", "shard"] if settings.replicate > 1 else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=data_parallel, mp_policy=policy)
    fully_shard(model, mesh=data_parallel, mp_policy=policy)


# --- training -------------------------------------------------------------------------------------


def train(model: GPT, corpus: Corpus, settings: argparse.Namespace) -> History:
    """Run all steps, with a validation every `eval_every` steps and after the last one."""
    optimizer = build_optimizer(model, settings.lr)
    # The ranks of one row of `tp` read the same windows.
    share = Share(dist.get_rank() // settings.tp, settings.replicate * settings.shard)
    validation, unigram = validation_loader(corpus, settings, share, EVAL_BATCHES)
    history = History(unigram, settings.batch * settings.context)
    with progress_bar(history, settings) as bar:
        for step, batch in enumerate(training_loader(corpus, settings, share)):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            loss, norm = train_step(model, optimizer, batch, settings)
            history.note_step(loss, norm, time.perf_counter() - began)
            done = step + 1
            if done % settings.eval_every == 0 or done == settings.steps:
                history.note_validation(evaluate(model, validation, settings))
            show_step(bar, history)
    return history


if __name__ == "__main__":
    main()
