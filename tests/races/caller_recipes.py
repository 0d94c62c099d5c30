"""Scenarios: other kinds of parameters, memory and collectives, and what a caller does between passes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from custom_comms import Comms
from models import WIDTH as SMALL_WIDTH
from models import Tower, average_into
from tensor_parallel import PLANS
from tensor_parallel import Stack as ParallelStack
from tensor_subclasses import RowScaled, TravelsLow, Wrapper
from tensor_subclasses import Stack as SubclassStack
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from races.scenarios import (
    DIRECT,
    LOW,
    MIXED,
    WIDTH,
    Recipe,
    Step,
    batch,
    forward_backward,
    mesh_of,
    scenario,
    sgd,
    tower,
    trained,
    training,
)
from races.simulation import Simulation
from shardwise import CommPolicy, CPUOffloadPolicy, FSDPModule
from shardwise.optim import FlatOptimizer
from shardwise.policies import LowPrecisionReduction, QuantizedAllGather, QuantizedReduction
from shardwise.strategies import register_comm_hook

# --- other kinds of parameters --------------------------------------------------------------------


def tensor_parallel(plan: str) -> Recipe:
    def recipe(_: Simulation) -> Step:
        mesh = mesh_of(4, 2, names=("data", "tp"))
        model = ParallelStack(WIDTH, 2 * WIDTH, WIDTH)
        PLANS[plan](model, mesh["tp"])
        return training(tower(model=model, mesh=mesh["data"]))

    return recipe


scenario("tensor parallel")(tensor_parallel("mlps"))
scenario("tensor and sequence parallel")(tensor_parallel("sequences"))


class Experts(nn.Module):
    """A block in which each rank uses other experts, or all of them, each rank in another order."""

    def __init__(self, count: int = 4, used: int = 2) -> None:
        super().__init__()
        self.used = used
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(count)
        )
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        for step in range(self.used):
            x = x + self.experts[(dist.get_rank() + step) % len(self.experts)](x)
        return x


class ExpertTower(Tower):
    def __init__(self, used: int = 2) -> None:
        super().__init__(WIDTH, 2 * WIDTH, depth=0)
        self.blocks = nn.ModuleList(Experts(used=used) for _ in range(2))


def experts(*shape: int, **options: Any) -> Any:
    model = ExpertTower()
    given = {"mesh": mesh_of(*shape or (8,)), "comm_policy": DIRECT, **options}
    for block in model.blocks:
        for expert in block.experts:  # type: ignore[union-attr]
            shardwise.fully_shard(expert, **given)
    made = tower(model=model, **given)
    for block in model.blocks:
        for expert in block.experts:  # type: ignore[union-attr]
            expert.set_may_be_unused()
    return made


@scenario("experts")
def routed(_: Simulation) -> Step:
    return training(experts())


@scenario("experts, hybrid")
def routed_hybrid(_: Simulation) -> Step:
    return training(experts(2, 4))


# Gradients come in another order on each rank; of those in use alone, some do not come at all.
scenario("experts in one group, all in use")(trained(model=partial(ExpertTower, used=4)))
scenario("experts in one group")(
    trained(model=ExpertTower, prepare=lambda model: model.set_reduce_scatter_unused_params(True))
)


def subclasses(kind: type[Wrapper]) -> Recipe:
    """What travels is what the class says."""

    def recipe(_: Simulation) -> Step:
        sharded = tower(model=SubclassStack(kind, 16, is_sharded=True), comm_policy=None)

        def step() -> nn.Module:
            sharded(torch.randn(4, SMALL_WIDTH, dtype=torch.float64)).square().mean().backward()
            return sharded

        return step

    return recipe


scenario("extension: bytes and scales")(subclasses(RowScaled))
scenario("extension: travels in low precision")(subclasses(TravelsLow))


def frozen() -> nn.Module:
    model = Tower(WIDTH, 2 * WIDTH)
    for block in model.blocks[1:]:
        block.requires_grad_(False)
    return model


scenario("frozen parameters")(trained(model=frozen))


class Averaging(Tower):
    """Averages a frozen block in the forward that uses it next, just before it is prefetched."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH)
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inlet(x))
        average_into(self.blocks[2], self.blocks[1])
        return self.outlet(self.blocks[2](self.blocks[1](x)))  # type: ignore[no-any-return]


scenario("averaged in forward")(trained(model=Averaging))

# --- other collectives ----------------------------------------------------------------------------


def hooked(hook: Any, *shape: int) -> Recipe:
    return trained(*shape, prepare=lambda model: register_comm_hook(model, None, hook))


def by_hand(state: None, grad: Tensor, output: Tensor) -> None:
    scaled = grad / dist.get_world_size()
    dist.reduce_scatter_tensor(output, scaled) if not hasattr(dist, "reduce_scatter_single") else (
        dist.reduce_scatter_single(output, scaled)
    )


scenario("int8 all-gathers")(trained(comm_policy=CommPolicy(quantized_all_gather=QuantizedAllGather())))
scenario("int8 reduction")(hooked(QuantizedReduction()))
scenario("int8 reduction, hybrid")(hooked(QuantizedReduction(), 2, 4))
scenario("low-precision reduction")(hooked(LowPrecisionReduction()))
scenario("low-precision reduction, hybrid")(hooked(LowPrecisionReduction(), 2, 4))
scenario("comm hook")(hooked(by_hand))
scenario("custom collectives")(trained(prepare=partial(Comms, returns_work=True)))
scenario("custom collectives that wait")(trained(prepare=partial(Comms, returns_work=False)))


@scenario("hook on its own stream")
def hook_on_a_stream(simulation: Simulation) -> Step:
    model = tower()
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5), stream=simulation.stream("hooks"))
    return training(model)


# --- offload --------------------------------------------------------------------------------------


# The host waits for the copy of each group's gradients, and for the last copies of the shards.
OFFLOAD = {"event_synchronize": 6}


def offloaded(*shape: int, pin_memory: bool = True, **options: Any) -> Recipe:
    return trained(*shape, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory), **options)


@torch.no_grad()
def edit(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.99)


def edit_after_a_forward(model: nn.Module, has_grad: bool) -> None:
    with torch.set_grad_enabled(has_grad):
        model(batch())
    edit(model)


scenario("offload", **OFFLOAD)(offloaded())
scenario("offload, mixed precision", **OFFLOAD)(offloaded(mp_policy=MIXED))
scenario("offload, low precision", **OFFLOAD)(offloaded(mp_policy=LOW))
scenario("offload, hybrid", **OFFLOAD)(offloaded(2, 4, mp_policy=MIXED))
scenario("offload, accumulation", event_synchronize=8)(offloaded(microbatches=2))
scenario("offload to pageable memory", **OFFLOAD, copy_to_the_host=4)(offloaded(pin_memory=False))


scenario("offload, edits after a forward without backward", event_synchronize=7)(
    offloaded(before=partial(edit_after_a_forward, has_grad=True))
)
scenario("offload, edits between passes", event_synchronize=7)(
    offloaded(before=partial(edit_after_a_forward, has_grad=False))
)


@scenario("offload, edits after a backward that did not reach all", event_synchronize=3)
def offload_with_frozen_blocks(simulation: Simulation) -> Step:
    """The gradient of the input goes through frozen blocks, which no reduction follows."""
    plain = Tower(WIDTH, 2 * WIDTH)
    plain.requires_grad_(False)
    plain.blocks[-1].requires_grad_(True)
    model = tower(model=plain, offload_policy=CPUOffloadPolicy())

    def step() -> nn.Module:
        on_device = batch().to(simulation.torch_device, non_blocking=True)
        model(on_device.requires_grad_()).square().mean().backward()
        edit(model)
        model.zero_grad()
        return model

    return step


# --- what a caller does ---------------------------------------------------------------------------


def edited_while_unsharded(model: nn.Module) -> None:
    with shardwise.unsharded(model):
        edit(model)


def evaluated(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(batch())
    model.train()


def inferred(model: nn.Module, forwards: int = 1) -> None:
    with shardwise.inference(model), torch.no_grad():
        for _ in range(forwards):
            model(batch())


def unsharded_by_hand(model: Any) -> None:
    handles = [block.unshard(async_op=True) for block in model.blocks]
    for handle in handles:
        handle.wait()


scenario("summon", equal=22)(trained(before=edited_while_unsharded))  # has a parameter been changed?
scenario("evaluation between steps")(trained(before=evaluated))
scenario("inference")(trained(before=partial(inferred, forwards=3)))
scenario("unshard by hand", copy_to_the_host=1)(trained(before=unsharded_by_hand))  # are they still the same?


@scenario("edits between forward and backward")
def edits_before_backward(_: Simulation) -> Step:
    """Through `.data`, as autograd refuses others; the backward gathers what is there now."""
    model = tower()

    def step() -> nn.Module:
        loss = model(batch()).square().mean()
        for param in model.parameters():
            param.to_local().data.mul_(0.99)
        loss.backward()
        model.zero_grad()
        return model

    return step


def assign_anew(model: nn.Module) -> None:
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().clone()))


@scenario("shards assigned anew")
def assigned(_: Simulation) -> Step:
    model = tower()

    def step() -> nn.Module:
        assign_anew(model)
        forward_backward(model)
        model.zero_grad()
        return model

    return step


@scenario("unshard on a side stream, of shards assigned anew", stream_synchronize=4, copy_to_the_host=1)
def assigned_and_unsharded(simulation: Simulation) -> Step:
    model = tower()
    side = simulation.stream("of the caller")

    def step() -> nn.Module:
        assign_anew(model)
        side.wait_stream(simulation.device.computing)
        with side:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard(async_op=True)
        forward_backward(model)
        model.zero_grad()
        return model

    return step


def two_forwards(keep: bool | None) -> Recipe:
    def recipe(_: Simulation) -> Step:
        model = tower(reshard_after_forward=keep)
        optimizer = sgd(model)

        def step() -> nn.Module:
            losses = [model(batch()).square().mean() for _ in range(2)]
            torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return model

        return step

    return recipe


scenario("two forwards before a backward")(two_forwards(None))
# Have the weights been changed between the two?
scenario("two forwards before a backward, kept", copy_to_the_host=1)(two_forwards(False))


@scenario("optimizer in backward")
def optimizer_in_backward(_: Simulation) -> Step:
    model = tower()

    def update(param: nn.Parameter) -> None:
        assert isinstance(param, DTensor)
        with torch.no_grad():
            param.to_local().add_(param.grad.to_local(), alpha=-0.01)  # type: ignore[union-attr]
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)

    def step() -> nn.Module:
        forward_backward(model)
        return model

    return step


def nothing(model: nn.Module) -> None:
    """Goes on with the next step."""


def summoned(model: nn.Module) -> None:
    with shardwise.unsharded(model, writeback=False), torch.no_grad():
        for param in model.parameters():
            param.sum()


class UnheardSGD:
    """An optimizer of nobody's: torch tells nobody of its steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(self) -> None:
        with torch.no_grad():
            for param in self._model.parameters():
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1)

    def zero_grad(self) -> None:
        self._model.zero_grad()


def beside(
    recipe: Callable[[], Any],
    then: Callable[[nn.Module], None] = nothing,
    make_optimizer: Callable[[nn.Module], Any] = sgd,
) -> Recipe:
    """The optimizer steps on a stream of its own while the computing stream goes on, to `then`."""

    def begin(simulation: Simulation) -> Step:
        model = recipe()
        optimizer = make_optimizer(model)
        side = simulation.stream("optimizer")

        def step() -> nn.Module:
            forward_backward(model)
            side.wait_stream(simulation.device.computing)
            with side:
                optimizer.step()
            model.set_post_optim_event(side.record_event())
            optimizer.zero_grad()
            unrelated = (
                torch.sin(batch().to(simulation.torch_device, non_blocking=True)) + 1
            )  # of a data pipeline
            del unrelated
            then(model)
            return model

        return step

    return begin


def kept_tower() -> Any:
    model = tower()
    model.set_reshard_after_backward(False)
    return model


scenario("optimizer on a side stream")(beside(tower))
scenario("optimizer on a side stream, mixed precision")(beside(lambda: tower(mp_policy=MIXED)))
scenario("optimizer on a side stream, hybrid")(beside(lambda: tower(2, 4, mp_policy=LOW)))
scenario("optimizer on a side stream, kept after backward")(beside(kept_tower))
scenario("optimizer of nobody's on a side stream, kept after backward", copy_to_the_host=1)(
    beside(kept_tower, make_optimizer=UnheardSGD)
)
scenario("optimizer on a side stream, summon")(beside(tower, summoned))
scenario("optimizer on a side stream, inference")(beside(tower, inferred))


@scenario("clipping")
def clipping(_: Simulation) -> Step:
    model = tower()
    optimizer = sgd(model)

    def step() -> nn.Module:
        forward_backward(model)
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return model

    return step


scenario("flat optimizer")(
    trained(
        optimizer=lambda model: FlatOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True))
    )
)


@scenario("manual finalization")
def manual_finalization(_: Simulation) -> Step:
    model = tower()
    model.set_manual_backward_finalization(True)
    optimizer = sgd(model)

    def step() -> nn.Module:
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            forward_backward(model)
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        optimizer.step()
        optimizer.zero_grad()
        return model

    return step
