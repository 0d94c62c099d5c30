"""Training on software GPUs beside plain torch in one process: the same losses, and the same weights."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import shard_tower
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy

STEPS = 3


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


Results = tuple[list[float], dict[str, Tensor]]


def plain(accumulated: int = 1, max_norm: float | None = None, **unused: Any) -> Results:
    """Losses of this rank's batches, and the weights, of training on all ranks' batches without devices."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(STEPS):
        losses.append(model(tokens(step * accumulated, rank)).item())
        for batch in range(step * accumulated, (step + 1) * accumulated):
            for r in range(world):
                (model(tokens(batch, r)) / world / accumulated).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def sharded(
    mesh: DeviceMesh,
    accumulated: int = 1,
    max_norm: float | None = None,
    optimizer: dict[str, Any] | None = None,
    no_sync: bool = False,
    prepare: Callable[[Any], None] | None = None,
    **settings: Any,
) -> tuple[list[float], Any, torch.optim.Optimizer]:
    """The same with fully_shard on devices."""
    torch.manual_seed(0)
    model: Any = Model().cuda()
    shard_tower(model, mesh=mesh, **settings)
    if prepare is not None:
        prepare(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, **(optimizer or {}))
    losses = []
    for step in range(STEPS):
        for number in range(accumulated):
            if no_sync:
                model.set_requires_gradient_sync(number == accumulated - 1)
            loss = model(tokens(step * accumulated + number, dist.get_rank()).cuda())
            if number == 0:
                losses.append(loss.detach())
            (loss / accumulated).backward()
        if max_norm is not None:
            shardwise.clip_grad_norm_(model.parameters(), max_norm)
        adamw.step()
        adamw.zero_grad()
    return [loss.item() for loss in losses], model, adamw


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# By name: the settings of `sharded` (of `plain`, where it knows them).
CASES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "clipped, fused": {"max_norm": 0.1, "optimizer": {"fused": True}},
    "accumulated": {"accumulated": 2},
    "accumulated without sync": {"accumulated": 2, "no_sync": True},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "offloaded, accumulated, clipped": {
        "offload_policy": CPUOffloadPolicy(),
        "accumulated": 2,
        "max_norm": 0.1,
    },
    "bfloat16": {"mp_policy": BF16},
    "foreach": {"optimizer": {"foreach": True}},
    "capturable": {"optimizer": {"capturable": True}},
    "separate reductions": {"prepare": lambda model: model.set_separate_reduce_scatter_group(True)},
}


def difference(case: str, mesh: DeviceMesh) -> float:
    """The largest one between losses and weights of both; not a number if either has one."""
    settings = CASES[case]
    losses, weights = plain(**settings)
    here, model, _ = sharded(mesh, **settings)
    full = shardwise.full_state_dict(model)
    off = [abs(a - b) for a, b in zip(losses, here, strict=True)]
    off += [(full[name].cpu().float() - weights[name]).abs().max().item() for name in (full or {})]
    return torch.tensor(off).max().item()


def differences(cases: list[str], backend: str = "nccl") -> dict[str, float]:
    """Of many cases: a process takes seconds to start, a case a part of one."""
    mesh = join(backend)
    return {case: difference(case, mesh) for case in cases}


def strategies(names: list[str]) -> dict[str, float]:
    """The same for `shard_model`."""
    join()
    losses, _ = plain()
    off = {}
    for name in names:
        torch.manual_seed(0)
        model: Any = Model().cuda()
        shardwise.shard_model(model, strategy=name)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        here = []
        for step in range(STEPS):
            loss = model(tokens(step, dist.get_rank()).cuda())
            loss.backward()
            adamw.step()
            adamw.zero_grad()
            here.append(loss.item())
        off[name] = max(abs(a - b) for a, b in zip(losses, here, strict=True))
    return off


def checkpoint(folder: Path) -> float:
    """Of the next loss, between a model that goes on and one that is loaded."""
    mesh = join()
    _, model, adamw = sharded(mesh)
    shardwise.save_checkpoint(folder, model, adamw)

    def next_losses(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(STEPS, STEPS + 2):
            loss = model(tokens(step, dist.get_rank()).cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = next_losses(model, adamw)
    _, other, optimizer = sharded(mesh, max_norm=1e-3)
    shardwise.load_checkpoint(folder, other, optimizer)
    return max(abs(a - b) for a, b in zip(expected, next_losses(other, optimizer), strict=True))
