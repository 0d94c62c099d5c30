"""Scenarios: settings of `fully_shard`, and strategies."""

from functools import partial
from typing import Any

from models import Tower
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from races.scenarios import (
    DIRECT,
    LOW,
    MIXED,
    WIDTH,
    Recipe,
    Step,
    forward_backward,
    mesh_of,
    scenario,
    sgd,
    tower,
    trained,
    training,
)
from races.simulation import Simulation
from shardwise import CommPolicy

# --- settings -------------------------------------------------------------------------------------


class Checkpointed(Tower):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(WIDTH, 2 * WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return self.outlet(x)


def prefetching(count: int) -> CommPolicy:
    return CommPolicy(packing_limit_bytes=1024, part_bytes=0, prefetch=count)


RECIPES: dict[str, Recipe] = {
    "packed": trained(comm_policy=None),
    "direct": trained(),
    "one communicator for all": trained(prepare=lambda model: model.set_separate_reduce_scatter_group(False)),
    "prefetch 0": trained(comm_policy=prefetching(0)),
    "prefetch 2": trained(comm_policy=prefetching(2)),
    "mixed precision": trained(mp_policy=MIXED),
    "low precision": trained(mp_policy=LOW),
    "hybrid": trained(2, 4),
    "hybrid, mixed precision": trained(2, 4, mp_policy=MIXED),
    "hybrid, low precision": trained(2, 4, mp_policy=LOW),
    "uneven rows": trained(model=partial(Tower, WIDTH, 131)),
    "accumulation": trained(microbatches=3),
    "accumulation, mixed precision": trained(mp_policy=MIXED, microbatches=3),
    "checkpointing": trained(model=partial(Checkpointed, use_reentrant=False)),
    "reentrant checkpointing": trained(model=partial(Checkpointed, use_reentrant=True)),
    "parts kept until backward": trained(reshard_after_forward=2),
    "parts kept until backward, mixed precision": trained(reshard_after_forward=2, mp_policy=MIXED),
    "parts kept between microbatches": trained(reshard_after_forward=2, microbatches=3),
    "kept until backward": trained(reshard_after_forward=False),
    "kept storage": trained(prepare=lambda model: model.set_keep_unsharded_storage(True)),
    "kept after backward": trained(prepare=lambda model: model.set_reshard_after_backward(False)),
}
for _name, _recipe in RECIPES.items():
    scenario(_name)(_recipe)


@scenario("hybrid, all-reduce of every third backward")
def rare_all_reduce(_: Simulation) -> Step:
    model = tower(2, 4)
    stepping = sgd(model)

    def step() -> nn.Module:
        for index in range(3):
            model.set_requires_all_reduce(index == 2)
            forward_backward(model)
        stepping.step()
        stepping.zero_grad()
        return model

    return step


# --- strategies -----------------------------------------------------------------------------------


def strategy(name: str, *shape: int) -> Recipe:
    def recipe(_: Simulation) -> Step:
        model: Any = Tower(WIDTH, 2 * WIDTH)
        mesh = mesh_of(*shape or (8,))
        return training(shardwise.shard_model(model, strategy=name, mesh=mesh, comm_policy=DIRECT))  # type: ignore[arg-type]

    return recipe


for _name in ("ddp", "zero1", "zero2", "zero3"):
    scenario(_name)(strategy(_name))
scenario("hybrid_zero2")(strategy("hybrid_zero2", 2, 4))
