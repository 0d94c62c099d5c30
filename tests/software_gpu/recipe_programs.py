"""Ways to train a small model, each on devices and by plain torch in one process: a table of recipes.

Both sides run the same loop. Plain torch trains on the batches of all ranks, without devices.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from models import shard_tower
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import CommPolicy, CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy
from shardwise.optim import FlatOptimizer, Muon, is_hidden_matrix, offload_optimizer_state
from shardwise.policies import LowPrecisionReduction, QuantizedAllGather, QuantizedReduction
from shardwise.strategies import register_comm_hook
from software_gpu.training import BF16, OFFLOAD, Block, Model, join, mesh_of, tokens

STEPS = 4

# --- models ---------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block that keeps its input alone, and is run again in backward."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


def checkpointed(use_reentrant: bool) -> nn.Module:
    model = Model()
    model.blocks = nn.ModuleList(Checkpointed(block, use_reentrant) for block in model.blocks)
    return model


def tied() -> nn.Module:
    model = Model()
    model.out.weight = model.embedding.weight
    return model


def frozen() -> nn.Module:
    """A whole block, a matrix and a bias."""
    model = Model()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    model.blocks[2].down.bias.requires_grad_(False)
    return model


class Few(Block):
    """Parameters of which some ranks have no rows: one row, three rows, none at all."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.one = nn.Parameter(torch.randn(1, width))
        self.three = nn.Parameter(torch.randn(3, 5))
        self.none = nn.Parameter(torch.empty(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.one * self.three.sin().sum() + self.none.sum()


def few_rows() -> nn.Module:
    model = Model()
    model.blocks = nn.ModuleList(Few(48) for _ in range(3))
    return model


# --- optimizers: of the plain side, and of the sharded one ----------------------------------------

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def offloaded_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    offload_optimizer_state(optimizer)
    return optimizer


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(model.named_parameters(), lr=0.02, adamw={"lr": 0.01}, iteration_dtype=torch.float64)


class PlainMuon(torch.optim.Optimizer):
    """Muon as its source has it, of whole matrices in their own dtype; AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        matrices = [param for name, param in named.items() if is_hidden_matrix(name, param)]
        chosen = {id(param) for param in matrices}
        self.adamw = torch.optim.AdamW([p for p in named.values() if id(p) not in chosen], lr=0.01)
        super().__init__(matrices, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.adamw.step()
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momentum.lerp_(param.grad, 0.05)
            x = param.grad.lerp(momentum, 0.95)
            is_tall = len(x) > len(x.T)
            x = x.T if is_tall else x
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if is_tall else x
            param.mul_(1 - 0.02 * 0.1).sub_(x, alpha=0.02 * max(1, len(x) / len(x.T)) ** 0.5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adamw.zero_grad()
        super().zero_grad()


# --- recipes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    model: Callable[[], nn.Module] = Model
    optimizer: MakeOptimizer = sgd  # AdamW hides a factor that all gradients have
    plain_optimizer: MakeOptimizer | None = None  # None: `optimizer`
    settings: dict[str, Any] = field(default_factory=dict)  # of fully_shard, or of shard_model
    strategy: str | None = None  # of shard_model, which then shards
    hybrid: bool = False  # on a mesh of two replicas
    prepare: Callable[[Any], Any] = lambda model: None  # after sharding
    accumulated: int = 1
    syncs: bool = True  # in each backward, or only in the last before a step
    max_norm: float | None = None
    dtype: torch.dtype | None = None  # of computation; plain torch computes with rounded copies
    double: bool = False  # everything in float64
    scaled: bool = False  # by a gradient scaler; in the second step, gradients of one rank are infinite
    tolerance: float = 2e-5
    is_exact: bool = True  # the same numbers as plain torch, up to the order of sums


def with_hook(hook: Any) -> Callable[[Any], None]:
    return lambda model: register_comm_hook(model, None, hook)


def compiled_blocks(model: Any) -> None:
    """Inductor's kernels need a real GPU; this back end calls those of ATen."""
    for block in model.blocks:
        block.compile(backend="aot_eager")


FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
# Weights that differ by the order of a sum may be rounded to other neighbours: 1/256 of a weight or two.
ROUNDED = Recipe(dtype=torch.bfloat16, tolerance=2e-3)

RECIPES: dict[str, Recipe] = {
    **{name: Recipe(strategy=name) for name in ("zero1", "zero2", "zero3", "ddp")},
    "kept": Recipe(settings={"reshard_after_forward": False}),
    "accumulated": Recipe(accumulated=2),
    "accumulated without sync": Recipe(accumulated=2, syncs=False),
    "offloaded": Recipe(settings={"offload_policy": OFFLOAD}),
    "offloaded, accumulated, clipped": Recipe(
        settings={"offload_policy": OFFLOAD}, accumulated=2, max_norm=0.1
    ),
    "separate reductions": Recipe(prepare=lambda model: model.set_separate_reduce_scatter_group(True)),
    "hybrid": Recipe(hybrid=True),
    "hybrid, kept": Recipe(hybrid=True, settings={"reshard_after_forward": False}),
    "hybrid, accumulated without sync": Recipe(hybrid=True, accumulated=2, syncs=False, max_norm=0.1),
    "hybrid, offloaded, clipped": Recipe(hybrid=True, settings={"offload_policy": OFFLOAD}, max_norm=0.1),
    "hybrid, bfloat16": replace(ROUNDED, hybrid=True, settings={"mp_policy": BF16}),
    "replicated": Recipe(settings={"dp_mesh_dims": DataParallelMeshDims(replicate="ranks")}),
    "resharded to half": Recipe(settings={"reshard_after_forward": "half"}),
    "resharded to half, accumulated without sync": Recipe(
        settings={"reshard_after_forward": "half"}, accumulated=3, syncs=False
    ),
    "resharded to half, bfloat16": replace(
        ROUNDED, settings={"reshard_after_forward": "half", "mp_policy": BF16}
    ),
    "bfloat16": replace(ROUNDED, settings={"mp_policy": BF16}),
    "bfloat16, kept": replace(ROUNDED, settings={"mp_policy": BF16, "reshard_after_forward": False}),
    "bfloat16, accumulated, clipped": replace(
        ROUNDED, settings={"mp_policy": BF16}, accumulated=2, max_norm=0.1
    ),
    "bfloat16, offloaded": replace(ROUNDED, settings={"mp_policy": BF16, "offload_policy": OFFLOAD}),
    "bfloat16, reduced in it": replace(
        ROUNDED, settings={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, tolerance=1e-2
    ),
    "float16, scaled": Recipe(dtype=torch.float16, settings={"mp_policy": FP16}, scaled=True, tolerance=5e-4),
    "scaled, clipped": Recipe(scaled=True, max_norm=0.1),
    "scaled, hybrid, offloaded": Recipe(scaled=True, hybrid=True, settings={"offload_policy": OFFLOAD}),
    "offloaded, not pinned": Recipe(settings={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "offloaded, kept": Recipe(settings={"offload_policy": OFFLOAD, "reshard_after_forward": False}),
    "offloaded, fused": Recipe(
        settings={"offload_policy": OFFLOAD}, optimizer=functools.partial(adamw, fused=True)
    ),
    "AdamW": Recipe(optimizer=adamw),
    "foreach": Recipe(optimizer=functools.partial(adamw, foreach=True), plain_optimizer=adamw),
    "fused": Recipe(optimizer=functools.partial(adamw, fused=True), plain_optimizer=adamw, max_norm=0.1),
    "optimizer's state offloaded": Recipe(optimizer=offloaded_state, plain_optimizer=adamw),
    "checkpointed": Recipe(model=functools.partial(checkpointed, False)),
    "checkpointed, reentrant": Recipe(model=functools.partial(checkpointed, True)),
    "checkpointed, activations offloaded": Recipe(
        strategy="zero3", settings={"activation_checkpointing": True, "activation_offloading": True}
    ),
    "tied": Recipe(model=tied),
    "tied, hybrid": Recipe(model=tied, hybrid=True),
    "frozen": Recipe(model=frozen),
    "frozen, offloaded, accumulated": Recipe(
        model=frozen, settings={"offload_policy": OFFLOAD}, accumulated=2
    ),
    "few rows": Recipe(model=few_rows),
    "few rows, hybrid, clipped": Recipe(model=few_rows, hybrid=True, max_norm=0.1),
    # torch's own has no rule for DTensors.
    "flat, fused SGD": Recipe(
        optimizer=lambda model: FlatOptimizer(sgd(model, fused=True)), plain_optimizer=sgd
    ),
    "capturable": Recipe(optimizer=functools.partial(adamw, capturable=True), plain_optimizer=adamw),
    "flat": Recipe(optimizer=lambda model: FlatOptimizer(adamw(model)), plain_optimizer=adamw),
    "flat, fused": Recipe(
        optimizer=lambda model: FlatOptimizer(adamw(model, fused=True)), plain_optimizer=adamw, max_norm=0.1
    ),
    "flat, capturable": Recipe(
        optimizer=lambda model: FlatOptimizer(adamw(model, capturable=True)), plain_optimizer=adamw
    ),
    "flat, offloaded": Recipe(
        optimizer=lambda model: FlatOptimizer(adamw(model)),
        plain_optimizer=adamw,
        settings={"offload_policy": OFFLOAD},
    ),
    "Muon": Recipe(optimizer=muon, plain_optimizer=PlainMuon, double=True, tolerance=1e-8),
    "Muon, hybrid": Recipe(
        optimizer=muon, plain_optimizer=PlainMuon, double=True, tolerance=1e-8, hybrid=True
    ),
    "compiled blocks": Recipe(prepare=compiled_blocks),
    "compiled blocks, bfloat16": replace(ROUNDED, prepare=compiled_blocks, settings={"mp_policy": BF16}),
    "in parts": Recipe(settings={"comm_policy": CommPolicy(part_bytes=0, packing_limit_bytes=0)}),
    "far ahead": Recipe(settings={"comm_policy": CommPolicy(prefetch=2)}),
    "not ahead": Recipe(settings={"comm_policy": CommPolicy(prefetch=0, backward_prefetch="after")}),
    "storage kept": Recipe(prepare=lambda model: model.set_keep_unsharded_storage(True)),
    "reduced in bfloat16": Recipe(prepare=with_hook(LowPrecisionReduction()), tolerance=2e-2, is_exact=False),
    "reduced as int8": Recipe(prepare=with_hook(QuantizedReduction()), tolerance=2e-2, is_exact=False),
    "gathered as int8": Recipe(
        settings={"comm_policy": CommPolicy(quantized_all_gather=QuantizedAllGather())},
        tolerance=5e-2,
        is_exact=False,
    ),
}

# --- both sides -----------------------------------------------------------------------------------

Results = tuple[list[float], dict[str, Tensor]]  # losses of this rank's batches, and the weights at the end


def new_model(recipe: Recipe) -> nn.Module:
    torch.manual_seed(0)
    model = recipe.model()
    return model.double() if recipe.double else model


def factor(recipe: Recipe, step: int, rank: int) -> float:
    """Of the loss of a rank: in the second step of a scaled recipe one overflows."""
    return 1e38 if recipe.scaled and step == 1 and rank == 0 else 1.0


def loss_with_copies(model: nn.Module, batch: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return model(batch)
    copies = {name: param.to(dtype) for name, param in model.named_parameters()}
    return torch.func.functional_call(model, copies, (batch,))


def finish_step(recipe: Recipe, model: Any, optimizer: Any, scaler: Any, clip: Callable[..., Any]) -> None:
    if recipe.max_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip(model.parameters(), recipe.max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def plain(recipe: Recipe, steps: int = STEPS) -> Results:
    model = new_model(recipe)
    optimizer = (recipe.plain_optimizer or recipe.optimizer)(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if recipe.scaled else None
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(steps):
        for number in range(step * recipe.accumulated, (step + 1) * recipe.accumulated):
            for r in range(world):
                loss = loss_with_copies(model, tokens(number, r), recipe.dtype)
                if r == rank:
                    losses.append(loss.item())
                loss = loss * factor(recipe, step, r) / world / recipe.accumulated
                (loss if scaler is None else scaler.scale(loss)).backward()
        finish_step(recipe, model, optimizer, scaler, nn.utils.clip_grad_norm_)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def sharded(recipe: Recipe, mesh: DeviceMesh, settings: dict[str, Any]) -> Results:
    model: Any = new_model(recipe).cuda()
    if recipe.strategy is None:
        shard_tower(model, mesh=mesh, **settings)
    else:
        shardwise.shard_model(model, strategy=recipe.strategy, **settings)
    recipe.prepare(model)
    optimizer = recipe.optimizer(model)
    scaler = shardwise.GradScaler("cuda", init_scale=2.0**8) if recipe.scaled else None
    losses = []
    for step in range(STEPS):
        for number in range(step * recipe.accumulated, (step + 1) * recipe.accumulated):
            is_last = number == (step + 1) * recipe.accumulated - 1
            with nullcontext() if recipe.syncs or is_last else shardwise.no_sync(model):
                loss = model(tokens(number, dist.get_rank()).cuda())
                losses.append(loss.detach())
                loss = loss * factor(recipe, step, dist.get_rank()) / recipe.accumulated
                (loss if scaler is None else scaler.scale(loss)).backward()
        finish_step(recipe, model, optimizer, scaler, shardwise.clip_grad_norm_)
    full = shardwise.full_state_dict(model) or {}
    return [loss.item() for loss in losses], {name: value.cpu() for name, value in full.items()}


def largest_difference(these: Results, those: Results) -> float:
    """Between losses and between weights; not a number if one side has one. Weights are on rank 0 alone."""
    off = [abs(a - b) for a, b in zip(these[0], those[0], strict=True)]
    off += [(a - those[1][name]).abs().max().item() for name, a in these[1].items() if a.numel()]
    return torch.tensor(off).max().item()


def wrong_by(name: str, mesh: DeviceMesh) -> float | None:
    """How far a recipe is off, in units of what is allowed. None: it has no meaning with so few ranks."""
    recipe, world = RECIPES[name], dist.get_world_size()
    settings = copy.copy(recipe.settings)
    if recipe.hybrid:
        mesh = mesh_of((2, world // 2), ("replicate", "shard"))
    elif "dp_mesh_dims" in settings:
        mesh = mesh_of((world,), ("ranks",))
    if settings.get("reshard_after_forward") == "half":
        if world < 4:
            return None
        settings["reshard_after_forward"] = world // 2
    off = largest_difference(sharded(recipe, mesh, settings), plain(recipe))
    if not recipe.is_exact and dist.get_rank() == 0:
        assert off > 1e-6, "fewer bytes round"
    return off / recipe.tolerance


def wrong(names: Iterable[str], backend: str = "nccl") -> dict[str, float]:
    """Of each recipe that has a meaning here, how far it is off in units of its tolerance."""
    mesh = join(backend)
    found = {}
    for name in names:
        try:
            off = wrong_by(name, mesh)
        except Exception as error:
            error.add_note(f"in the recipe {name!r}")
            raise
        if off is not None:
            found[name] = off
    return found
