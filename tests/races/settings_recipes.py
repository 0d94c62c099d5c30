"""Scenarios: settings of `fully_shard`, and strategies."""

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
    training,
)
from races.simulation import Simulation
from shardwise import CommPolicy

# --- settings -------------------------------------------------------------------------------------


@scenario("packed")
def packed(_: Simulation) -> Step:
    return training(tower(comm_policy=None))


@scenario("direct")
def direct(_: Simulation) -> Step:
    return training(tower())


@scenario("one communicator for all")
def one_communicator(_: Simulation) -> Step:
    model = tower()
    model.set_separate_reduce_scatter_group(False)
    return training(model)


@scenario("prefetch 0")
def without_prefetch(_: Simulation) -> Step:
    return training(tower(comm_policy=CommPolicy(packing_limit_bytes=1024, part_bytes=0, prefetch=0)))


@scenario("prefetch 2")
def far_prefetch(_: Simulation) -> Step:
    return training(tower(comm_policy=CommPolicy(packing_limit_bytes=1024, part_bytes=0, prefetch=2)))


@scenario("mixed precision")
def mixed(_: Simulation) -> Step:
    return training(tower(mp_policy=MIXED))


@scenario("low precision")
def low(_: Simulation) -> Step:
    return training(tower(mp_policy=LOW))


@scenario("hybrid")
def hybrid(_: Simulation) -> Step:
    return training(tower(2, 4))


@scenario("hybrid, mixed precision")
def hybrid_mixed(_: Simulation) -> Step:
    return training(tower(2, 4, mp_policy=MIXED))


@scenario("hybrid, low precision")
def hybrid_low(_: Simulation) -> Step:
    return training(tower(2, 4, mp_policy=LOW))


@scenario("uneven rows")
def uneven(_: Simulation) -> Step:
    return training(tower(model=Tower(WIDTH, 131)))


@scenario("accumulation")
def accumulation(_: Simulation) -> Step:
    return training(tower(), microbatches=3)


@scenario("accumulation, mixed precision")
def accumulation_mixed(_: Simulation) -> Step:
    return training(tower(mp_policy=MIXED), microbatches=3)


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


class Checkpointed(Tower):
    """Blocks that are computed again in backward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return self.outlet(x)


class ReentrantCheckpointed(Checkpointed):
    use_reentrant = True


@scenario("checkpointing")
def checkpointing(_: Simulation) -> Step:
    return training(tower(model=Checkpointed(WIDTH, 2 * WIDTH)))


@scenario("reentrant checkpointing")
def reentrant(_: Simulation) -> Step:
    return training(tower(model=ReentrantCheckpointed(WIDTH, 2 * WIDTH)))


@scenario("parts kept until backward")
def kept_parts(_: Simulation) -> Step:
    return training(tower(reshard_after_forward=2))


@scenario("parts kept until backward, mixed precision")
def kept_parts_mixed(_: Simulation) -> Step:
    return training(tower(reshard_after_forward=2, mp_policy=MIXED))


@scenario("kept until backward")
def kept(_: Simulation) -> Step:
    return training(tower(reshard_after_forward=False))


@scenario("kept storage")
def kept_storage(_: Simulation) -> Step:
    model = tower()
    model.set_keep_unsharded_storage(True)
    return training(model)


@scenario("kept after backward")
def kept_after_backward(_: Simulation) -> Step:
    model = tower()
    model.set_reshard_after_backward(False)
    return training(model)


# --- strategies -----------------------------------------------------------------------------------


def strategy(name: str, *shape: int) -> Recipe:
    def recipe(_: Simulation) -> Step:
        model: Any = Tower(WIDTH, 2 * WIDTH)
        mesh = mesh_of(*shape or (8,))
        return training(shardwise.shard_model(model, strategy=name, mesh=mesh, comm_policy=DIRECT))  # type: ignore[arg-type]

    return recipe


for _name in ("ddp", "zero2", "zero3"):
    scenario(_name)(strategy(_name))
scenario("zero1")(strategy("zero1"))
scenario("hybrid_zero2")(strategy("hybrid_zero2", 2, 4))
