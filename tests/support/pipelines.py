"""A small model in stages, trained by schedules of torch's pipelines, and whole in one process.

pipe 0          pipe 1              schedules that give each rank two stages
stage 0, 2      stage 1, 3          in turn (interleaved, looped)
stage 0, 3      stage 1, 2          or there and back (ZBV, DualPipeV)
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from events import observe
from meshed import device_mesh
from models import WIDTH, Block, random_batch, shard_tower
from reference import full
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwise import CPUOffloadPolicy
from shardwise.interop import PipelineStage, follow_unshard_actions

ROWS = 8  # of a global batch
SINGLE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
STEPS = 2


class Stage(nn.Module):
    """Two blocks behind a layer of the stage's own."""

    checkpoints = False
    ties = False

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.inlet(x) if self.ties else x


def stages(pipeline: "Pipeline") -> nn.ModuleList:
    torch.manual_seed(1234)
    model = nn.ModuleList(Stage() for _ in range(pipeline.num_stages)).double()
    for stage in model:
        stage.checkpoints, stage.ties = pipeline.checkpoints, pipeline.ties
        if pipeline.freezes:
            stage.inlet.bias.requires_grad_(False)
            stage.blocks[0].up.weight.requires_grad_(False)
    return model


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).sum()


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    return random_batch(step, ROWS), random_batch(step + 100, ROWS)


@dataclass(frozen=True)
class Pipeline:
    """One way to train the stages. Travels by pickle."""

    schedule: str
    mesh: tuple[int, ...] = (2, 2)
    names: tuple[str, ...] = ("pipe", "shard")
    data: tuple[str, ...] = ("shard",)
    reshard: bool | None = False
    microbatches: int = 4
    accumulate: int = 1  # steps of the schedule before a step of the optimizer
    mean: bool = True
    syncs: bool = True  # in each step of the schedule, not only in the last before the optimizer's
    follows: bool = False
    kind: type = PipelineStage
    freezes: bool = False  # one matrix and one bias of each stage
    checkpoints: bool = False
    ties: bool = False  # the stage uses one layer twice
    evaluates: bool = False  # after each step
    device: str = "cpu"
    offloads: bool = False

    def __str__(self) -> str:
        return self.schedule

    @property
    def num_stages(self) -> int:
        return self.mesh[0] * (1 if self.schedule in SINGLE else 2)

    @property
    def has_neighbours(self) -> bool:
        """Whether two stages that follow each other are on one rank."""
        return self.schedule in V_SHAPED or (self.mesh[0] == 1 and self.schedule not in SINGLE)

    def indices(self, rank: int) -> list[int]:
        """The stages of pipeline rank ``rank``."""
        if self.schedule in SINGLE:
            return [rank]
        if self.schedule in V_SHAPED:
            return [rank, self.num_stages - 1 - rank]
        return [rank, rank + self.mesh[0]]


@dataclass
class Trained:
    """What a rank has seen: gradients of each optimizer's step by stage and name, and what the last step did."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evaluations: list[list[float]] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)


class CountCollectives(TorchDispatchMode):
    """Counts what is started by anyone; what ranks send to one another by themselves is not collective."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def plain(pipeline: Pipeline) -> Trained:
    """The same steps of the whole batch, in this process."""
    model, trained = stages(pipeline), Trained()
    loss_of = mean_of_squares if pipeline.mean else sum_of_squares
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS * pipeline.accumulate):
        x, target = batch_of(step)
        for stage in model:
            x = stage(x)
        loss = loss_of(x, target)
        loss.backward()
        trained.losses.append(loss.item())
        if (step + 1) % pipeline.accumulate == 0:
            trained.gradients.append({name: full(p.grad) for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return trained


def pipelined(pipeline: Pipeline) -> Trained:
    """What this rank sees of them, with its part of the batch and its stages."""
    mesh, trained = device_mesh(pipeline.mesh, pipeline.names, pipeline.device), Trained()
    rank, data = mesh.get_local_rank("pipe"), mesh[pipeline.data]
    indices, everything = pipeline.indices(rank), stages(pipeline)
    modules = [everything[index].to(pipeline.device) for index in indices]
    options = {"offload_policy": CPUOffloadPolicy()} if pipeline.offloads else {}
    for module in modules:
        shard_tower(module, mesh=data, reshard_after_forward=pipeline.reshard, **options)
        if not pipeline.mean:
            module.set_gradient_divide_factor(1.0)
    schedule = schedule_of(pipeline, modules, indices, mesh.get_group("pipe"))
    if pipeline.follows:
        follow_unshard_actions(schedule)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.01)
    seat = dist.get_rank() % data.size()
    for step in range(STEPS * pipeline.accumulate):
        is_last = (step + 1) % pipeline.accumulate == 0
        for module in modules:
            module.set_requires_gradient_sync(pipeline.syncs or is_last)
        if step == STEPS * pipeline.accumulate - 1:
            trained.collectives.clear()  # the first step has compared plans
            for module in modules:
                observe(module, lambda event, name: trained.events.update([event]))
        x, target = (whole.chunk(data.size())[seat].to(pipeline.device) for whole in batch_of(step))
        losses: list[Tensor] = []
        with CountCollectives(trained.collectives):
            schedule.step(*([x] if rank == 0 else []), target=target, losses=losses)
        trained.losses.append(sum(loss.item() for loss in losses))
        if pipeline.evaluates:
            with torch.no_grad():
                schedule.eval(*([x] if rank == 0 else []), target=target, losses=losses)
            trained.evaluations.append([loss.item() for loss in losses])
        if is_last:
            params = zip(indices, modules, strict=True)
            trained.gradients.append(
                {f"{i}.{name}": full(p.grad) for i, m in params for name, p in m.named_parameters()}
            )
            optimizer.step()
            optimizer.zero_grad()
    return trained


def schedule_of(pipeline: Pipeline, modules: list[nn.Module], indices: list[int], group: Any) -> Any:
    device = torch.device(pipeline.device)
    local = [
        pipeline.kind(module, index, pipeline.num_stages, device, group=group)
        for module, index in zip(modules, indices, strict=True)
    ]
    kind = getattr(schedules, f"Schedule{pipeline.schedule}")
    return kind(
        local[0] if pipeline.schedule in SINGLE else local,
        pipeline.microbatches,
        loss_fn=mean_of_squares if pipeline.mean else sum_of_squares,
        scale_grads=pipeline.mean,
    )
