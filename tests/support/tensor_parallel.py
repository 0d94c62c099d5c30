"""A small model with a plan of tensor parallelism, sharded over data on top of it."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from meshed import Layout, gradients_of, layout_inputs, parameters_of, whole
from models import built, shard_tower
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise import MixedPrecisionPolicy


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """Norm and MLP, as a sequence-parallel block has them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 16, out: int = 4) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Layer(width, hidden) for _ in range(2))
        self.head = Mlp(width, hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# What is between them stays a DTensor: from a plain tensor nobody could tell the size of uneven parts.
MEGATRON = {"up": partial(ColwiseParallel, use_local_output=False), "down": RowwiseParallel}


def split_mlps(model: Stack, mesh: Any) -> None:
    """MLPs are split; the norms and the inlet stay plain tensors, and are sharded over the data only."""
    for mlp in [*(block.mlp for block in model.blocks), model.head]:
        parallelize_module(mlp, mesh, {name: style() for name, style in MEGATRON.items()})


def split_everything(model: Stack, mesh: Any) -> None:
    """No plain parameter is left: norms and inlet are replicated over the tensor-parallel ranks."""
    split_mlps(model, mesh)
    replicated = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Replicate(),
        use_local_output=True,
    )
    for module in [model.inlet, *(block.norm for block in model.blocks)]:
        distribute_module(module, mesh)
        parallelize_module(module, mesh, replicated)


def split_sequences(model: Stack, mesh: Any) -> None:
    """Between the MLPs each rank holds a part of the rows (here: of dimension 0, not 1)."""
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
            "mlp": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "mlp.up": ColwiseParallel(use_local_output=False),
            "mlp.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    distribute_module(model.inlet, mesh)
    entire = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    parallelize_module(model.inlet, mesh, entire)
    model.inlet.register_forward_hook(lambda module, args, output: output.redistribute(placements=[Shard(0)]))
    head = {
        "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
    }
    parallelize_module(model.head, mesh, head)


PLANS = {"mlps": split_mlps, "everything": split_everything, "sequences": split_sequences}


SIZES = {"even": (8, 16, 4), "uneven": (7, 10, 3), "few_rows": (5, 3, 1)}


@dataclass(frozen=True)
class Run:
    plan: str = "mlps"
    sizes: tuple[int, int, int] = SIZES["even"]
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    dim: int | None = None  # on which dimension matrices are sharded, for shard_placement_fn
    microbatches: int = 1
    clip: float | None = None
    steps: int = 2


def columns(param: nn.Parameter, dim: int) -> Shard | None:
    return Shard(dim) if param.ndim > 1 else None


def made(layout: Layout | None, run: Run) -> Stack:
    """The model, parallelised and sharded where there is a mesh."""
    model = built(Stack, *run.sizes)
    if layout is None:
        return model
    model.to(layout.device)
    PLANS[run.plan](model, layout.mesh()["tp"])
    options = {"mesh": layout.data_mesh(), **run.options}
    if run.dim is not None:
        options["shard_placement_fn"] = partial(columns, dim=run.dim)
    return shard_tower(model, **options)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(-1, keepdim=True)).pow(2).mean()


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True),
    "adamw_loop": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=False),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


def trained(layout: Layout | None, run: Run) -> dict[str, Any]:
    model = made(layout, run)
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())
    notes: dict[str, Any] = {}
    for step in range(run.steps):
        optimizer.zero_grad()
        for microbatch in range(run.microbatches):
            if layout is not None:
                model.set_requires_gradient_sync(microbatch == run.microbatches - 1)
            inputs = layout_inputs(layout, 10 * step + microbatch, run.sizes[0])
            loss_of(model, inputs).backward()
        if run.clip is not None:
            notes[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), run.clip))
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **parameters_of(model)}


def in_bfloat16(layout: Layout | None, microbatches: int, clip: float) -> dict[str, Any]:
    """bfloat16 computation, float32 reduction, accumulation and clipping at once."""
    torch.manual_seed(1234)
    model = Stack()
    if layout is not None:
        split_everything(model.to(layout.device), layout.mesh()["tp"])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard_tower(model, mesh=layout.data_mesh(), mp_policy=policy)
        assert all(param.dtype == torch.float32 for param in model.parameters())
    for microbatch in range(microbatches):
        if layout is not None:
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
        inputs = layout_inputs(layout, microbatch).float()
        (model(inputs).float() - inputs.sum(-1, keepdim=True)).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    return {"norm": whole(norm), **gradients_of(model)}
