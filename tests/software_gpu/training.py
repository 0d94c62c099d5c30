"""What programs train on software GPUs: a model, its batches, and meshes over the ranks."""

import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffloadPolicy()


class Block(nn.Module):
    """Odd sizes, a norm and a scalar."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the tokens that it is given."""

    def __init__(self, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.out(x).float().flatten(0, 1), tokens.flatten())


def sharded_model(**settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """By `shard_model`, and its optimizer."""
    torch.manual_seed(0)
    model: Any = Model().cuda()
    shardwise.shard_model(model, **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        loss = model(tokens(step, dist.get_rank()).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def tokens(batch: int, rank: int) -> Tensor:
    return torch.randint(0, 17, (4, 8), generator=torch.Generator().manual_seed(100 * batch + rank))


def join(backend: str = "nccl") -> DeviceMesh:
    """A mesh over all ranks, each on the device of its number."""
    if not dist.is_initialized():
        device = torch.device("cuda", int(os.environ["RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group(backend, device_id=device)
    return init_device_mesh("cuda", (dist.get_world_size(),))


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One for all cases of a process: each has process groups of its own."""
    return init_device_mesh("cuda", shape, mesh_dim_names=names)
