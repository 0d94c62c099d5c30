"""Ways to train, each on rank 0 of eight simulated ranks.

A recipe builds a sharded model on the device and returns a function that takes one step. `run` takes a few steps and
returns what happened. To add one: a function with `@scenario`. `host_waits`: how often, and for what, the host waits
for the device in a steady step; where that is not never, a comment says why.

Parameters are sent one by one (`DIRECT`) or packed, and gradients in several parts, so that as much as possible is in
flight at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Tower, shard_tower
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from races.collectives import Launch
from races.device import DEVICE_TYPE, DeviceTensor, Site, on_host, unseen
from races.reports import Finding
from races.simulation import Simulation
from shardwise import CommPolicy, MixedPrecisionPolicy

WIDTH = 64
DIRECT = CommPolicy(packing_limit_bytes=1024, part_bytes=0)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

Step = Callable[[], nn.Module]
"""Takes one step and returns the model."""
Recipe = Callable[[Simulation], Step]


@dataclass(frozen=True)
class Scenario:
    """A recipe, and how often the host waits for the device in each step but the first ones."""

    name: str
    recipe: Recipe
    host_waits: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Outcome:
    findings: list[Finding]
    host_waits: dict[str, int]  # in the last step
    launches: list[Launch]
    num_checks: int
    unwritten: list[str]  # parameters and gradients that are NaN in the end
    sites: set[Site]  # where streams were ordered


def run(scenario: Scenario, rank: int = 0, steps: int = 3, dropped: Site | None = None) -> Outcome:
    """`steps` steps of `scenario` on one rank, without one of the waits if one is `dropped`."""
    torch.manual_seed(0)
    with Simulation(rank) as simulation:
        simulation.device.dropped = dropped
        step = scenario.recipe(simulation)
        for _ in range(steps):
            simulation.blocks.clear()
            model = step()
            if dropped is not None and simulation.findings:
                break
        waits = simulation.host_waits
        unwritten = names_of_nan(model)
    return Outcome(
        simulation.findings,
        dict(waits),
        simulation.network.launches,
        simulation.memory.num_checks,
        unwritten,
        simulation.device.sites,
    )


def names_of_nan(model: nn.Module) -> list[str]:
    found: list[str] = []
    for name, param in model.named_parameters():
        for what, tensor in ((name, param.detach()), (f"{name}.grad", param.grad)):
            if tensor is None:
                continue
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if type(local) not in (Tensor, nn.Parameter, DeviceTensor):
                continue
            with unseen():
                if bool(on_host(local).isnan().any()):
                    found.append(what)
    return found


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, **host_waits: int) -> Callable[[Recipe], Recipe]:
    """Register a recipe. Names of waits are written with underscores."""

    def register(recipe: Recipe) -> Recipe:
        waits = {what.replace("_", " "): count for what, count in host_waits.items()}
        SCENARIOS[name] = Scenario(name, recipe, waits)
        return recipe

    return register


# --- what recipes are made of ---------------------------------------------------------------------


def mesh_of(*shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
    return init_device_mesh(DEVICE_TYPE, shape, mesh_dim_names=names[-len(shape) :])


def tower(*shape: int, model: nn.Module | None = None, **options: Any) -> Any:
    """A tower with its blocks sharded over a mesh of `shape`; parameters travel directly.

    Reductions have process groups of their own, as they have on NCCL without being asked.
    """
    made: Any = Tower(WIDTH, 2 * WIDTH) if model is None else model
    given = {"mesh": mesh_of(*shape or (8,)), "comm_policy": DIRECT, **options}
    sharded = shard_tower(made, **given)
    sharded.set_separate_reduce_scatter_group()
    return sharded


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=True)


def batch() -> Tensor:
    return torch.randn(4, WIDTH)


def forward_backward(model: nn.Module) -> None:
    model(batch()).float().square().mean().backward()


def training(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, microbatches: int = 1) -> Step:
    stepping = sgd(model) if optimizer is None else optimizer

    def step() -> nn.Module:
        for index in range(microbatches):
            if microbatches > 1:
                model.set_requires_gradient_sync(index == microbatches - 1)  # type: ignore[operator]
            forward_backward(model)
        stepping.step()
        stepping.zero_grad()
        return model

    return step


def trained(
    *shape: int,
    model: Callable[[], nn.Module] | None = None,
    prepare: Callable[[Any], object] | None = None,
    before: Callable[[Any], object] | None = None,
    optimizer: Callable[[nn.Module], Any] = sgd,
    microbatches: int = 1,
    **options: Any,
) -> Recipe:
    """Training a tower, or `model()`. `prepare`: what is done to it once; `before`: what is before each step."""

    def recipe(_: Simulation) -> Step:
        sharded = tower(*shape, model=None if model is None else model(), **options)
        if prepare is not None:
            prepare(sharded)
        train = training(sharded, optimizer(sharded), microbatches)

        def step() -> nn.Module:
            if before is not None:
                before(sharded)
            return train()

        return step

    return recipe
