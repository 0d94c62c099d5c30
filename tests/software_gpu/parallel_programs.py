"""Pipelines and tensor parallelism on devices, beside plain torch in one process."""

from typing import Any

import torch
import torch.distributed as dist
from models import shard_tower
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise.interop import PipelineStage
from software_gpu.training import BF16, OFFLOAD, join, mesh_of

WIDTH, ROWS, STEPS = 24, 8, 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


def stages(count: int) -> list[Stage]:
    torch.manual_seed(3)
    return [Stage() for _ in range(count)]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def plain(count: int, dtype: torch.dtype | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of whole batches, and the weights after them. `dtype`: of rounded copies that compute."""
    model = nn.Sequential(*stages(count))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, target = batch_of(step)
        copies = {name: param.to(dtype) for name, param in model.named_parameters()}
        loss = mean_of_squares(torch.func.functional_call(model, copies, (x.to(dtype),)).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


# --- pipelines ------------------------------------------------------------------------------------


def pipelined(name: str, sharded: int, **settings: Any) -> float:
    """How far gradients and losses of a pipeline are off, whose stages are sharded over so many ranks."""
    world = dist.get_world_size()
    mesh = mesh_of((world // sharded, sharded), ("pipe", "shard"))
    depth, rank = mesh["pipe"].size(), mesh["pipe"].get_local_rank()
    is_single = name in ("GPipe", "1F1B")
    count = depth if is_single else 2 * depth
    if name == "ZBVZeroBubble":
        indices = [rank, count - 1 - rank]
    else:
        indices = list(range(rank, count, depth))
    modules: list[Any] = [stages(count)[index].cuda() for index in indices]
    for module in modules:
        shard_tower(module, mesh=mesh["shard"], **settings)
    device = torch.device("cuda", torch.cuda.current_device())
    local = [
        PipelineStage(module, index, count, device, group=mesh.get_group("pipe"))
        for module, index in zip(modules, indices, strict=True)
    ]
    kind: Any = getattr(schedules, f"Schedule{name}")
    schedule = kind(local[0] if is_single else local, 4, loss_fn=mean_of_squares)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.2, momentum=0.9)
    expected, weights = plain(count)
    part = mesh["shard"].get_local_rank()
    has_loss = count - 1 in indices
    off = [0.0]
    for step in range(STEPS):
        x, target = (whole.chunk(sharded)[part].cuda() for whole in batch_of(step))
        losses: list[Tensor] = []
        schedule.step(*([x] if rank == 0 else []), target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if has_loss:
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh.get_group("shard"))
            off.append(abs(mean.item() - expected[step]))
    for index, module in zip(indices, modules, strict=True):
        for key, value in (shardwise.full_state_dict(module) or {}).items():
            off.append((value.cpu() - weights[f"{index}.{key}"]).abs().max().item())
    return max(off)


# --- tensor parallelism ---------------------------------------------------------------------------


def tensor_parallel(dtype: torch.dtype | None = None, **settings: Any) -> float:
    """How far a model is off whose matrices are split over two ranks, and sharded over the others."""
    world = dist.get_world_size()
    mesh = mesh_of((world // 2, 2), ("data", "tensor"))
    (model,) = stages(1)
    model = model.cuda()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_tower(model, mesh=mesh["data"], **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)
    expected, weights = plain(1, dtype)
    part, off = mesh["data"].get_local_rank(), []
    for step in range(STEPS):
        x, target = (whole.chunk(world // 2)[part].cuda() for whole in batch_of(step))
        loss = mean_of_squares(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        off.append(abs(mean.item() - expected[step]))
    full = shardwise.full_state_dict(model) or {}
    off += [(value.cpu() - weights[f"0.{name}"]).abs().max().item() for name, value in full.items()]
    return max(off)


def differences(backend: str = "nccl") -> dict[str, float]:
    join(backend)
    world = dist.get_world_size()
    found = {}
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        found[name] = pipelined(name, world // 2)
        if world > 2:
            found[f"{name}, kept"] = pipelined(name, world // 2, reshard_after_forward=False)
    if world > 2:
        found["1F1B, offloaded"] = pipelined("1F1B", world // 2, offload_policy=OFFLOAD)
        found["tensor parallel"] = tensor_parallel()
        found["tensor parallel, kept"] = tensor_parallel(reshard_after_forward=False)
        found["tensor parallel, offloaded"] = tensor_parallel(offload_policy=OFFLOAD)
        found["tensor parallel, bfloat16"] = tensor_parallel(torch.bfloat16, mp_policy=BF16)
    return found
