"""The reference every parity test compares with: plain PyTorch, one process, the global batch.

A `Recipe` says how to build a model and what a step computes. `plain_run` trains it unsharded;
`sharded_run` trains it under `fully_shard` on each rank's part of the same batch. Both return the
same record: losses, the gradients of every step, the parameters at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from comparing import assert_equal
from models import built
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import fully_shard


@dataclass(frozen=True)
class Recipe:
    """One training run. All callables are module-level functions: recipes travel by pickle."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Tensor]  # (step, global batch size) -> inputs
    loss: Callable[[nn.Module, Tensor], Tensor] = None  # type: ignore[assignment]
    blocks: Callable[[nn.Module], list[Any]] = None  # type: ignore[assignment]
    steps: int = 3
    batch_size: int = 12  # divisible by 1, 2, 3 and 4 ranks
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)  # of fully_shard, for the blocks

    def model(self) -> nn.Module:
        return built(self.build).to(self.dtype)

    def but(self, **changes: Any) -> "Recipe":
        return replace(self, **changes)


@dataclass
class Record:
    losses: list[float]
    gradients: list[dict[str, Tensor | None]]
    parameters: dict[str, Tensor]


def mean_of_squares(model: nn.Module, inputs: Tensor) -> Tensor:
    """A loss that is a mean over the batch, as averaging gradients over ranks presumes."""
    return (model(inputs) - inputs.sum(dim=-1, keepdim=True)).pow(2).mean()


def children_named_blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.blocks)


class LocalAdamW(torch.optim.AdamW):
    """AdamW whose arithmetic is over the local tensors of DTensors; its state are DTensors, as AdamW's own.

    DTensor decides anew for every list of shapes how each operation is sharded: 0.1 s of each rank for a first
    step of AdamW, two fifths of the time of the tests of `engine` and `parity`. What torch's optimizers do with
    our DTensors is tested in `optim`, `parity/test_parity.py` and `parity/test_peer_script.py`.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)  # fills lists of parameters, gradients and state
        for tensors in lists:
            tensors[:] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return has_complex


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return LocalAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)


def full(tensor: Tensor | None) -> Tensor | None:
    """The whole of a tensor, sharded or not, on the host and safe from later changes."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # from the host, where offloaded
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def train(model: nn.Module, recipe: Recipe, rank: int, world: int) -> Record:
    loss_of = recipe.loss or mean_of_squares
    optimizer = adamw(model)
    record = Record([], [], {})
    share = recipe.batch_size // world
    for step in range(recipe.steps):
        inputs = recipe.batch(step, recipe.batch_size)[rank * share : (rank + 1) * share]
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        record.gradients.append({n: full(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        record.losses.append(loss.item())
    record.parameters = {n: full(p) for n, p in model.named_parameters()}  # type: ignore[misc]
    return record


def plain_run(recipe: Recipe) -> Record:
    return train(recipe.model(), recipe, rank=0, world=1)


def shard(model: nn.Module, recipe: Recipe) -> nn.Module:
    for block in (recipe.blocks or children_named_blocks)(model):
        fully_shard(block, **recipe.options)
    return fully_shard(model, **recipe.options)


def sharded_run(recipe: Recipe) -> Record:
    """Runs on every rank of a world."""
    model = shard(recipe.model(), recipe)
    record = train(model, recipe, dist.get_rank(), dist.get_world_size())
    mean = torch.tensor(record.losses, dtype=torch.float64)
    dist.all_reduce(mean)
    record.losses = (mean / dist.get_world_size()).tolist()
    return record


def assert_same_training(world: Any, recipe: Recipe, atol: float = 1e-10, **run: Any) -> list[Record]:
    """Train plainly here and sharded on `world`; every loss, gradient and parameter must agree."""
    expected = plain_run(recipe)
    records = world.run(sharded_run, recipe, **run)
    for record in records:
        assert_same_record(record, expected, atol)
    return records


def assert_same_record(actual: Record, expected: Record, atol: float = 1e-10) -> None:
    rtol = 0.0 if atol <= 1e-9 else 1e-4
    torch.testing.assert_close(actual.losses, expected.losses, rtol=rtol, atol=atol)
    assert_equal(actual.gradients, expected.gradients, "gradients, by step", atol, rtol)
    assert_equal(actual.parameters, expected.parameters, "after training", atol, rtol)


@dataclass(frozen=True)
class OptimizerByName:
    """An optimizer by its name in torch.optim, and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "_".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])
