"""Where a training program runs: sharded in a world of clones or of threads, or plainly, to be compared with.

Only `side.shard` differs between them. Programs are short: three steps of a model of a few kilobytes, since
what counts is the order of what happens, and not its size.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from one_device.lanes import Lanes
from shardwise import fully_shard

ROWS = 16
"""Of the global batch: divisible by 8 clones and by up to 4 threads."""
WIDTH = 32
"""Of all models: rank 0 of 8 holds four rows. Clones of one alone would be equal, and their norm nothing."""
STEPS = 3

building = threading.Lock()
"""Ranks that are threads share torch's generator of random numbers, and on 2.11 its FakeTensorMode."""


@dataclass
class Side:
    """Where a recipe runs, and what it notes there.

    ``index`` and ``count``: which of so many parts of the batch it sees; a recipe with tensor parallelism
    changes them. ``prepare`` is called with the model before its optimizer is made.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    is_sharded: bool = False
    sees_all: bool = False
    lanes: Lanes = field(default_factory=Lanes)
    prepare: Callable[[nn.Module], None] = lambda model: None
    scale_experts: float = 1.0
    experts: tuple[int, ...] = (0, 1)
    width: int = WIDTH
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    model: Any = None

    def __post_init__(self) -> None:
        self.index, self.count = (0, 1) if self.sees_all else (self.rank, self.world)
        if self.device.type == "cuda":
            torch.cuda.init()  # a DeviceMesh would choose a device otherwise, and warn

    def build(self, make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Any:
        with building:
            torch.manual_seed(1234)
            model = make()
            return (model.to(dtype) if dtype is not None else model).to(self.device)

    def mesh(self, shape: tuple[int, ...] | None = None, *names: str) -> DeviceMesh:
        shape = shape or (self.world,)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names or ("shard",))

    def shard(self, model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
        """Each block, and the whole."""
        if self.is_sharded:
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh or self.mesh(), **options)
        return model

    def begin(self, model: Any) -> None:
        """Note what is trained, before its optimizer is made."""
        self.model = model
        self.prepare(model)
        self.lanes.watch(model)

    def inputs(self, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """The rows of a step that this side sees."""
        share = ROWS // (8 if self.sees_all else self.count)  # all clones see what rank 0 sees
        first = 0 if self.sees_all else self.index * share
        rows = models.random_batch(step, ROWS, self.width)[first : first + share]
        return rows.to(self.device, dtype)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs).double() - inputs.double().sum(-1, keepdim=True)).pow(2).mean()


def train(
    side: Side,
    model: Any,
    *,
    between: Callable[[int], None] = lambda step: None,
    microbatches: int = 1,
    dtype: torch.dtype = torch.float64,
    step_optimizer: Callable[[Any], None] | None = None,
) -> None:
    """SGD with momentum; ``between`` runs after each step."""
    side.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: side.lanes.enter("optimizer"))
    for step in range(STEPS):
        for micro in range(microbatches):
            if side.is_sharded and microbatches > 1:
                model.set_requires_gradient_sync(micro == microbatches - 1)
            loss = loss_of(model, side.inputs(10 * micro + step, dtype)) / microbatches
            loss.backward()
            side.losses.append(loss.detach())
        if step_optimizer is not None:
            step_optimizer(optimizer)
        else:
            with building:
                optimizer.step()
        optimizer.zero_grad()
        between(step)
