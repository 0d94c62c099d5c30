"""A training script for torch's fully_shard, as one finds them: it knows of no other library.

A small language model with dropout and activation checkpointing, sharded block by block and computed in
bfloat16; gradients accumulated over microbatches and clipped; a learning rate schedule; evaluations in
between; checkpoints by torch.distributed.checkpoint, from which a run resumes. ``main`` returns what such
a script prints.

tests/parity/test_peer_script.py runs it as it stands, and with another name in the one line that imports torch's
fully_shard.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, LENGTH = 31, 16, 2, 8
BATCH, MICROBATCHES = 4, 2  # windows per rank and microbatch; microbatches per step


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """The perceptron's activations are always recomputed in backward; a wrapper does it for a whole block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def perceptron(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + checkpoint(self.perceptron, x, use_reentrant=False)


class LanguageModel(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.arange(LENGTH)[:, None] / 100 ** (torch.arange(WIDTH) / WIDTH)
        self.register_buffer("positions", angles.sin())
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def score(self, windows: Tensor) -> Tensor:
        """Nats per token. A method beside forward that runs on the parameters as well."""
        logits = LanguageModel.forward(self, windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def build_model(mesh: DeviceMesh, policy: MixedPrecisionPolicy, seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    model = LanguageModel()
    for i in range(0, len(model.blocks), 2):  # every other block is recomputed as a whole
        model.blocks[i] = checkpoint_wrapper(model.blocks[i], checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    *others, last = model.blocks
    for block in others:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard([last], mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # backward begins with it
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "score")
    return model


class Checkpoint(Stateful):
    """What DCP saves and loads in place: each rank its own shards."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        self.model, self.optimizer, self.root = model, optimizer, schedule
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        schedule = self.root.state_dict()
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.root.load_state_dict(state["schedule"])
        self.step = state["step"]


def draw_windows(seed: int, count: int) -> Tensor:
    """Walks of random stride through the vocabulary: the next token follows from the two before it."""
    generator = torch.Generator().manual_seed(seed)
    starts, strides = torch.randint(VOCABULARY, (2, count, 1), generator=generator)
    return (starts + strides % 3 * torch.arange(LENGTH + 1)) % VOCABULARY


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: LanguageModel) -> float:
    model.eval()
    loss = model.score(draw_windows(10_000 + dist.get_rank(), BATCH))
    model.train()
    return mean_over_ranks(loss)


def train_step(model: FSDPModule, optimizer: torch.optim.Optimizer, step: int) -> tuple[float, float]:
    losses = []
    for i in range(MICROBATCHES):
        seed = (step * MICROBATCHES + i) * dist.get_world_size() + dist.get_rank()
        torch.manual_seed(seed)  # of dropout: other masks on every rank, and the same ones when resumed
        windows = draw_windows(seed, BATCH)
        model.set_requires_gradient_sync(i == MICROBATCHES - 1)
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mean_over_ranks(torch.stack(losses).mean()), norm.full_tensor().item()


def main(
    *,
    mesh_shape: tuple[int, ...],
    precision: str = "bfloat16",
    steps: int = 4,
    save_at: int = 2,
    save_to: Path | None = None,
    resume_from: Path | None = None,
    seed: int = 0,
) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build_model(mesh, policy, seed)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 2) * (0.5 + 0.5 * math.cos(math.pi * step / (2 * steps))),
    )
    state = Checkpoint(model, optimizer, schedule)
    if resume_from is not None:
        dcp.load({"app": state}, checkpoint_id=resume_from)

    history: dict[str, list[float]] = {"loss": [], "norm": [], "validation": [], "lr": []}
    for step in range(state.step, steps):
        loss, norm = train_step(model, optimizer, step)
        schedule.step()
        history["loss"].append(loss)
        history["norm"].append(norm)
        history["lr"].append(schedule.get_last_lr()[0])
        history["validation"].append(evaluate(model))
        state.step = step + 1
        if save_to is not None and state.step == save_at:
            dcp.save({"app": state}, checkpoint_id=save_to)
    return history
