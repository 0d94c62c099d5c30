"""The step on flat shards: the same numbers as without it, whatever happens to parameters between steps.

The reference is plain PyTorch in one process; where torch's optimizer steps on DTensors, to the bit as well.
Scenarios step plainly there and flat on the ranks: `kind.run(side.is_sharded)`.
"""

import copy
import gc
import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from arrangements import Way, world_of
from checkpointing import HALF, Net, Run, by_block, everything, first_half, second_half, uninterrupted
from comparing import assert_all_same
from dynamo import quiet_dynamo
from expecttest import assert_expected_inline
from harness import World
from meshed import Layout, device_mesh, refusal
from models import built, random_batch, shard_tower
from reference import OptimizerByName, full
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor

import shardwise
from shardwise import fully_shard
from shardwise.optim import FlatOptimizer
from shardwise.setup.validation import groups_in
from shardwise.torch_compat import dtensor


def flat(name: str, params: Any, **options: Any) -> FlatOptimizer:
    return FlatOptimizer(getattr(torch.optim, name)(params, **options))


def runs_of(optimizer: Any) -> list[int]:
    """How many parameters each tensor of the last step had."""
    return sorted(len(run.params) for run in optimizer._plan.runs)


class Kind(OptimizerByName):
    """One of those to be tested."""

    def run(self, is_flat: bool = True, **others: Any) -> Run:
        plain = getattr(torch.optim, self.name)
        return Run(optimizer=partial(flat, self.name) if is_flat else plain, options=self.options, **others)


BASES = [
    Kind("Adadelta"),
    Kind("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    Kind("Adam", {"amsgrad": True, "maximize": True}),
    Kind("AdamW", {"lr": 0.05, "weight_decay": 0.3}),
    Kind("Adamax"),
    Kind("ASGD", {"t0": 1.0}),
    Kind("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Kind("RAdam", {"lr": 0.05}),
    Kind("RMSprop", {"momentum": 0.9, "centered": True}),
    Kind("Rprop"),
    Kind("SGD", {"lr": 0.1}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]
WAYS_TO_STEP: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
KINDS = [
    Kind(kind.name, kind.options | how)
    for kind in BASES
    for how in WAYS_TO_STEP
    if "fused" not in how or kind.name in ("Adam", "AdamW", "Adagrad")  # torch's fused SGD takes no DTensor
]


def trained(run: Run, steps: int = 4) -> dict[str, Any]:
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, steps)
    return everything(model, optimizer)


@pytest.mark.sample(14)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_steps_as_in_plain_pytorch(world2: World, kind: Kind) -> None:
    want = trained(kind.run(is_flat=False))
    assert_all_same(world2.run(trained, kind.run()), want, 1e-10)


def steps_dtensors(kind: Kind) -> bool:
    """DTensor lacks the masks of Rprop, and the fused Adagrad (2.11 to 2.15)."""
    return kind.name != "Rprop" and not (kind.name == "Adagrad" and "fused" in kind.options)


@pytest.mark.parametrize("kind", list(filter(steps_dtensors, KINDS)), ids=str)
@pytest.mark.sample(13)
def test_every_kind_steps_as_on_dtensors_to_the_bit(world2: World, kind: Kind) -> None:
    want = world2.run(trained, kind.run(is_flat=False))
    # Fused kernels on the CPU round the last few elements of a tensor otherwise than the others.
    atol = 1e-13 if "fused" in kind.options else 0.0
    for got, expected in zip(world2.run(trained, kind.run()), want, strict=True):
        assert_all_same([got], expected, atol)


def forms(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        (key, type(value), tuple(value.shape), value.dtype, getattr(value, "placements", None))
        for values in optimizer.state.values()
        for key, value in values.items()
    ]


def forms_after_steps(run: Run) -> list[Any]:
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    assert list(optimizer.state) == [param for param in model.parameters() if param.requires_grad]
    return forms(optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind", [Kind("NAdam"), Kind("ASGD"), Kind("SGD", {"lr": 0.1, "momentum": 0.9})], ids=str
)
def test_state_looks_as_that_of_the_optimizer_without_it(world3: World, kind: Kind) -> None:
    got, want = world3.run(forms_after_steps, kind.run()), world3.run(forms_after_steps, kind.run(False))
    assert got == want
    assert got[0]


# --- how models are sharded -----------------------------------------------------------------------


def trained_in(way: Way | None, build: str, is_flat: bool) -> dict[str, Any]:
    from arrangements import built

    model = built(build) if way is None else way.model()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)
    optimizer = FlatOptimizer(optimizer) if is_flat else optimizer
    quiet_dynamo()
    for step in range(3):
        optimizer.zero_grad()
        width = 7 if build == "uneven" else 8
        model(random_batch(step, 6, width)).pow(2).mean().backward()  # the same batch on all ranks
        optimizer.step()
    return everything(model, optimizer)


WAYS = [
    Way(1),
    Way(2),
    Way(4),
    Way(4, build="odd"),
    Way(2, "blocks only"),
    Way(2, "ddp"),
    Way(4, "zero1", "even"),
    Way(2, "zero2"),
    Way(4, "hybrid", "odd"),
    Way(4, "tp", "even"),
    Way(3, "columns"),
    Way(2, "offload"),
    Way(2, "compiled"),
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_steps_models_sharded_in_any_way(way: Way, request: pytest.FixtureRequest) -> None:
    world = world_of(way, request)
    want = trained_in(None, way.build, is_flat=False)
    assert_all_same(world.run(trained_in, way, way.build, is_flat=True), want, 1e-10)


def trained_in_low_precision(is_flat: bool, options: dict[str, Any], name: str) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(0)
    model = Net()
    policy = shardwise.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options)
    shard_tower(model, mp_policy=policy)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
    optimizer = FlatOptimizer(optimizer) if is_flat else optimizer
    for step in range(3):
        optimizer.zero_grad()
        model(random_batch(step, 6, 6, torch.float32)).float().pow(2).mean().backward()
        optimizer.step()
    kept = {param.grad.dtype for param in model.parameters() if param.grad is not None}
    return everything(model, optimizer), kept


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "AdamW"), ({"reduce_dtype": torch.float32}, "AdamW"), ({"keep_low_precision_grads": True}, "SGD")],
    ids=str,
)
def test_mixed_precision_changes_nothing(world2: World, options: dict[str, Any], name: str) -> None:
    """To the bit, also where gradients are kept in bfloat16 and weights are float32."""
    want = world2.run(trained_in_low_precision, False, options, name)
    for got, expected in zip(world2.run(trained_in_low_precision, True, options, name), want, strict=True):
        assert_all_same([got[0]], expected[0], 0.0)
        assert got[1] == {torch.bfloat16 if "keep_low_precision_grads" in options else torch.float32}


@same_as_plain(2)
def test_gradients_may_add_up_be_zeroed_and_be_clipped(side: Side) -> dict[str, Any]:
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    for number in range(4):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        for part in range(2):  # gradients add up
            run.loss(model, 2 * number + part).backward()
        if dist.is_initialized():
            shardwise.clip_grad_norm_(model, 0.1)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return everything(model, optimizer)


# --- runs -----------------------------------------------------------------------------------------


class Even(nn.Module):
    """Two blocks whose shards leave no gap in worlds of 1, 2 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.outlet = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 2)[:, :8]
        for block in self.blocks:
            x = x + block(x)
        return self.outlet(x)


def runs_after_steps(run: Run) -> list[int]:
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    return runs_of(optimizer)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_is_one_tensor(size: int, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(f"world{size}")
    assert world.run(runs_after_steps, Kind("AdamW").run(build=Even)) == [[2, 4, 4]] * size


def test_uneven_shards_are_joined_across_their_padding(world2: World) -> None:
    """Rows of 'down' and of 'outlet' that the last rank lacks are too wide a gap."""
    first, second = world2.run(runs_after_steps, Kind("AdamW").run())
    assert sum(first) == sum(second) == 13
    assert len(first) < 8
    assert len(second) < 9


def padding_after_steps(kind: Kind) -> list[float]:
    """Bytes of flat shards that belong to no parameter."""
    run = kind.run()
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 4)
    found = []
    for group in groups_in(model):
        for bucket in group.buckets:
            rest = bucket.flat_shard.bytes.clone()
            for slot, view in zip(bucket.stored.slots, bucket.flat_shard.views, strict=True):
                rest[slot.shard_offset : slot.shard_offset + view.numel() * view.itemsize] = 0
            found.append(int(rest.sum()))
    return found


@pytest.mark.parametrize("kind", BASES, ids=str)
@pytest.mark.sample(2)
def test_padding_stays_zero(world2: World, kind: Kind) -> None:
    assert world2.run(padding_after_steps, kind) == [[0, 0, 0]] * 2


def test_without_eps_padding_is_left_out(world2: World) -> None:
    """There 0 / 0 would be written into it."""
    kind = Kind("Adam", {"eps": 0.0})
    assert world2.run(padding_after_steps, kind) == [[0, 0, 0]] * 2
    assert_all_same(world2.run(trained, kind.run()), trained(kind.run(is_flat=False)), 1e-10)


def number_of_plans(run: Run) -> int:
    model, optimizer = run.start(1)
    made = []
    replan = type(optimizer)._replan
    type(optimizer)._replan = lambda self: (made.append(1), replan(self))[1]
    try:
        run.train(model, optimizer, 0, 5)
        optimizer.param_groups[0]["lr"] = 0.3
        run.train(model, optimizer, 5, 5)
    finally:
        type(optimizer)._replan = replan
    return len(made)


def in_way(model: nn.Module, layout: Layout | None, kind: str) -> nn.Module:
    return Way(dist.get_world_size(), kind).spread(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", [Way(1), Way(2), Way(2, "ddp"), Way(4, "hybrid"), Way(2, "offload")], ids=str)
def test_runs_are_made_once(way: Way, request: pytest.FixtureRequest) -> None:
    world = world_of(way, request)
    run = Kind("AdamW", {"fused": True}).run(shard=partial(in_way, kind=way.kind))
    assert world.run(number_of_plans, run) == [1] * way.ranks


def runs_after_freezing_objects(run: Run) -> list[int]:
    model, optimizer = run.start(1)
    gc.collect()
    gc.freeze()
    try:
        run.loss(model, 0).backward()
        outlet = model.outlet.weight  # at another address, which is looked for
        outlet._local_tensor = outlet._local_tensor.clone()
        optimizer.step()
        assert runs_of(optimizer) == [1, 1, 4, 4]
        run.train(model, optimizer, 0)
    finally:
        gc.unfreeze()
    return runs_of(optimizer)


def test_gc_freeze_hides_nothing(world2: World) -> None:
    assert world2.run(runs_after_freezing_objects, Kind("AdamW").run(build=Even)) == [[2, 4, 4]] * 2


def labels_of_the_profiler() -> list[str]:
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 1)
    with torch.profiler.profile() as profile:
        optimizer.step()
    return [event.key for event in profile.key_averages() if event.key.startswith("Optimizer.")]


def test_a_profiler_shows_the_step(world1: World) -> None:
    assert world1.run(labels_of_the_profiler) == [["Optimizer.step#AdamW.step"]]


def state_bytes(run: Run) -> tuple[int, int]:
    """Of what the flat step holds, and of what belongs to parameters."""
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    assert all(run.flat.grad is None for run in optimizer._plan.runs)  # zero_grad() would not free them
    tensors = [t for values in optimizer._flat_state.values() for t in values.values() if t.dim()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    numels = [p.to_local().numel() for p in model.parameters() if p.requires_grad]
    return sum(storages.values()), 2 * 8 * sum(numels)


def test_state_is_there_once(world2: World) -> None:
    for held, needed in world2.run(state_bytes, Kind("AdamW").run()):
        assert needed <= held <= needed + 2 * 13 * 15 * 8


def addresses_when_shown() -> tuple[list[int], list[int]]:
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    found = []
    for number in range(2):
        run.train(model, optimizer, number, 1)
        values = [values["exp_avg"] for values in optimizer._flat_state.values()]
        found.append(sorted(value.data_ptr() for value in values if value.numel()))
        assert optimizer.state
    return found[0], found[1]


def test_state_that_was_looked_at_stays_where_it_is(world2: World) -> None:
    for before, after in world2.run(addresses_when_shown):
        assert before == after
        assert before


def memory_while_state_is_replaced() -> bool:
    """State that was shown and replaced, as one does to bring it to the host, frees the flat one.

    What this rank has is looked at and not the whole: after a collective, threads of gloo hold its inputs for a
    moment longer.
    """

    def local_state() -> dict[str, Any]:
        shown = (values for values in optimizer.state.values())
        return {
            f"{i} {k}": dtensor.plain(v).clone() for i, values in enumerate(shown) for k, v in values.items()
        }

    run = Kind("AdamW").run(build=Even)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    before = local_state()
    for values in optimizer.state.values():
        for key in values:
            values[key] = values[key].clone()
    is_freed = not optimizer._shown_views and not optimizer._flat_state and optimizer._plan is None
    assert_all_same([local_state()], before, 0.0)
    return is_freed


def test_replaced_state_frees_the_flat_one(world2: World) -> None:
    assert world2.run(memory_while_state_is_replaced) == [True, True]


# --- gradients that are missing, or different -----------------------------------------------------


def trained_with_gaps(run: Run, steps: int) -> dict[str, Any]:
    """Each step some parameters have no gradient, and their own step counts."""
    model, optimizer = run.start(1)
    for number in range(steps):
        optimizer.zero_grad()
        run.loss(model, number).backward()
        for index, param in enumerate(model.parameters()):
            if (index + number) % 3 == 0:
                param.grad = None
        optimizer.step()
    return everything(model, optimizer)


GAPPED = [
    Kind("AdamW", {"lr": 0.05, "foreach": True}),
    Kind("AdamW", {"lr": 0.05, "fused": True}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    Kind("ASGD", {"t0": 1.0}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", GAPPED, ids=str)
def test_parameters_without_gradient_are_skipped(world2: World, kind: Kind) -> None:
    want = trained_with_gaps(kind.run(is_flat=False), 7)
    assert_all_same(world2.run(trained_with_gaps, kind.run(), 7), want, 1e-10)


def frozen_and_thawed(is_flat: bool) -> tuple[dict[str, Any], Any]:
    run = Kind("AdamW").run(is_flat)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    model.blocks[0].up.weight.requires_grad_(False)
    model.inlet.bias.requires_grad_(True)
    run.train(model, optimizer, 2)
    model.blocks[0].up.weight.requires_grad_(True)
    run.train(model, optimizer, 4)
    return everything(model, optimizer), [group["params"] for group in optimizer.param_groups]


def frozen_and_thawed_flat() -> dict[str, Any]:
    return frozen_and_thawed(True)[0]


def test_parameters_may_be_frozen_and_thawed(world2: World) -> None:
    assert_all_same(world2.run(frozen_and_thawed_flat), frozen_and_thawed(False)[0], 1e-10)


@same_as_plain(2)
def test_a_step_without_gradients_does_nothing(side: Side) -> dict[str, Any]:
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    optimizer.step()
    assert not optimizer.state
    run.train(model, optimizer, 0)
    optimizer.zero_grad()
    optimizer.step()
    run.train(model, optimizer, 2)
    return everything(model, optimizer)


@same_as_plain(2)
def test_gradients_may_be_replaced(side: Side) -> dict[str, Any]:
    """A DTensor of the caller's own, one that is replicated, and one of all of them."""
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    for number in range(4):
        optimizer.zero_grad()
        run.loss(model, number).backward()
        up, down = model.blocks[0].up.weight, model.blocks[1].down.weight
        up.grad = up.grad * 0.5
        if isinstance(down.grad, DTensor):
            down.grad = down.grad.redistribute(placements=[Replicate()])
        if number > 1:
            for param in model.parameters():
                param.grad = None if param.grad is None else param.grad * 2
        optimizer.step()
    return everything(model, optimizer)


@same_as_plain(2)
def test_a_gradient_may_be_replaced_after_steps(side: Side) -> dict[str, Any]:
    """Of a parameter that is alone in its run, whose gradient has no neighbours to be told by."""
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    optimizer.zero_grad()
    run.loss(model, 2).backward()
    weight = model.inlet.weight
    if isinstance(weight.grad, DTensor):
        weight.grad = weight.grad.redistribute(placements=[Replicate()])
    optimizer.step()
    run.train(model, optimizer, 3)
    return everything(model, optimizer)


def gradients_in_memory_of_their_own(how: str) -> list[list[int]]:
    """How many parameters each tensor has in a step, before and after gradients were replaced."""
    run = Kind("SGD", {"lr": 0.1}).run(build=Even)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 1)
    found = [runs_of(optimizer)]
    memory = torch.ones(4096, dtype=torch.float64)
    for index, param in enumerate(model.parameters()):
        local = param.grad._local_tensor
        if how == "apart":
            param.grad = param.grad.clone()
        elif how == "side by side":
            own = torch.from_dlpack(local)
            param.grad = DTensor.from_local(own, param.device_mesh, param.placements, run_check=False)
        elif how == "side by side, described as before":
            param.grad = dtensor.make_dtensor(torch.from_dlpack(local), param.grad._spec)
        else:
            place = memory[index * 100 :][: local.numel()].view(local.shape)
            param.grad = dtensor.make_dtensor(place.copy_(local), param.grad._spec)
    before = {name: full(param) for name, param in model.named_parameters()}
    optimizer.step()
    found.append(runs_of(optimizer))
    for name, param in model.named_parameters():
        torch.testing.assert_close(full(param), before[name] - 0.1 * full(param.grad), rtol=0, atol=1e-15)
    return found


@pytest.mark.parametrize(
    "how",
    [
        "apart",
        "side by side",
        "side by side, described as before",
        "spread out in one memory, described as before",
    ],
)
def test_gradients_in_memory_of_their_own_are_not_joined(world2: World, how: str) -> None:
    """No tensor reaches from one memory into another, whatever lies between."""
    assert world2.run(gradients_in_memory_of_their_own, how) == [[[2, 4, 4], [1] * 10]] * 2


# --- other parameters beside ----------------------------------------------------------------------


class Mixed(nn.Module):
    """What fully_shard manages, what it ignores, and a DTensor that someone else has made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.ignored = nn.Parameter(torch.randn(6))
        self.other = nn.Parameter(torch.randn(6))
        self.tall = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.ignored
        other = self.other.full_tensor() if isinstance(self.other, DTensor) else self.other
        tall = self.tall.full_tensor() if isinstance(self.tall, DTensor) else self.tall
        return (x + other) @ tall.t()


@same_as_plain(2)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_plain_parameters_and_other_dtensors_are_stepped_beside(
    side: Side, options: dict[str, Any]
) -> dict[str, Any]:
    model = built(Mixed, seed=0)
    if dist.is_initialized():
        mesh = device_mesh((dist.get_world_size(),), ("shard",))
        model.other = nn.Parameter(distribute_tensor(model.other.detach(), mesh, [Replicate()]))
        model.tall = nn.Parameter(distribute_tensor(model.tall.detach(), mesh, [Shard(1)]))  # not contiguous
        ignored = {model.ignored, model.other, model.tall}
        fully_shard(model.blocks[0], mesh=mesh)
        warnings.filterwarnings("ignore", message=".*ignored_params contains trainable")  # of the same batch
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    optimizer = FlatOptimizer(optimizer) if side.is_sharded else optimizer
    for step in range(3):
        optimizer.zero_grad()
        model(random_batch(step, 6, 6)).pow(2).mean().backward()
        optimizer.step()
    return everything(model, optimizer)


def of_a_tensor_subclass(is_flat: bool) -> list[Tensor]:
    """A DTensor whose local tensor is no plain one, and has no memory of its own."""
    mesh = device_mesh((dist.get_world_size(),), ("shard",))
    local = TwoTensor(torch.ones(3, 2), torch.full((3, 2), 2.0))
    param = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    optimizer: Any = torch.optim.AdamW([param], lr=0.1)
    optimizer = FlatOptimizer(optimizer) if is_flat else optimizer
    for step in range(3):
        gradient = TwoTensor(torch.full((3, 2), step + 1.0), torch.full((3, 2), -1.0))
        param.grad = DTensor.from_local(gradient, mesh, [Shard(0)], run_check=False)
        optimizer.step()
        assert list(optimizer.state[param]) == ["step", "exp_avg", "exp_avg_sq"]
    values = [param, *optimizer.state[param].values()]
    locals_ = [value._local_tensor if isinstance(value, DTensor) else value for value in values]
    return [
        part for each in locals_ for part in ([each.a, each.b] if isinstance(each, TwoTensor) else [each])
    ]


def test_tensor_subclasses_are_stepped_as_they_are(world2: World) -> None:
    got, want = world2.run(of_a_tensor_subclass, True), world2.run(of_a_tensor_subclass, False)
    assert len(want[0]) == 7
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def grouped(is_flat: bool) -> tuple[dict[str, Any], Any]:
    """Weights and biases in two groups; a third is added later."""
    run = Run(build=Even)
    model, _ = run.start(1)
    blocks = [param for block in model.blocks for param in block.parameters()]
    matrices, others = ([p for p in blocks if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "betas": (0.5, 0.9)}]
    optimizer: Any = torch.optim.AdamW(groups, lr=0.05)
    optimizer = FlatOptimizer(optimizer) if is_flat else optimizer
    run.train(model, optimizer, 0)
    optimizer.add_param_group({"params": model.outlet.parameters(), "lr": 0.3})
    run.train(model, optimizer, 2)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4, 2]
    runs = runs_of(optimizer) if is_flat else None
    return everything(model, optimizer), runs


def test_runs_are_cut_where_groups_differ(world2: World) -> None:
    want, _ = grouped(False)
    for got, runs in world2.run(grouped, True):
        assert_all_same([got], want, 1e-10)
        assert runs == [2] * 5  # weights and biases of a block lie apart, by size


@same_as_plain(2)
def test_members_of_a_group_may_change(side: Side) -> dict[str, Any]:
    """One parameter leaves its group for two steps and comes back, with what it had."""
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    params = optimizer.param_groups[0]["params"]
    left = params.pop(4)
    run.train(model, optimizer, 2)
    params.insert(4, left)
    run.train(model, optimizer, 4)
    optimizer.param_groups[0]["params"] = params[:3] + params[6:]
    run.train(model, optimizer, 6)
    return everything(model, optimizer)


# --- the user's side ------------------------------------------------------------------------------


@same_as_plain(2)
def test_hyperparameters_are_followed(side: Side) -> dict[str, Any]:
    run = Kind("AdamW", {"lr": 0.05}).run(side.is_sharded)
    model, optimizer = run.start(1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)  # and betas
    for number in range(4):
        run.train(model, optimizer, number, 1)
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] = 0.1 * number
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01, dtype=torch.float64)
    run.train(model, optimizer, 4)
    return everything(model, optimizer)


def hooks_see() -> list[str]:
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    params = list(model.parameters())
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(which: Any, *_: Any) -> None:
            is_same = which is optimizer and all(
                a is b for a, b in zip(which.param_groups[0]["params"], params, strict=True)
            )
            seen.append(f"{name} {is_same} {len(which.state)}")

        return hook

    optimizer.register_step_pre_hook(note("before"))
    handle = optimizer.register_step_post_hook(note("after"))
    everywhere = register_optimizer_step_pre_hook(note("global"))
    optimizer.register_state_dict_pre_hook(note("saving"))
    optimizer.register_load_state_dict_post_hook(note("loaded"))
    run.train(model, optimizer, 0, 1)
    handle.remove()
    everywhere.remove()
    run.train(model, optimizer, 1, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    return seen


def test_hooks_run_once_and_see_the_users_side(world2: World) -> None:
    want = [
        "global True 0",
        "before True 0",
        "after True 13",
        "before True 13",
        "saving True 13",
        "loaded True 13",
    ]
    assert world2.run(hooks_see) == [want] * 2


def test_hooks_of_all_optimizers_run_as_well() -> None:
    optimizer = flat("AdamW", [nn.Parameter(torch.ones(2))])
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda which, *_: seen.append(which)),
        register_optimizer_step_post_hook(lambda which, *_: seen.append(which)),
    ]
    for handle in handles:
        optimizer.step()
        handle.remove()
    assert seen == [optimizer] * 3


@same_as_plain(2)
def test_a_closure_is_called_and_its_loss_returned(side: Side) -> dict[str, Any]:
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    losses = []
    for number in range(3):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = run.loss(model, number)
            loss.backward()
            return loss.detach()

        losses.append(optimizer.step(closure))
    assert all(loss.dim() == 0 and loss > 0 for loss in losses)
    return everything(model, optimizer)


@same_as_plain(2)
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_a_grad_scaler_skips_steps(side: Side, options: dict[str, Any]) -> dict[str, Any]:
    """A fused optimizer is handed scale and infinities, and takes care of them itself."""
    run = Kind("AdamW", {"lr": 0.05} | options).run(side.is_sharded)
    model, optimizer = run.start(1)
    kind = shardwise.GradScaler if dist.is_initialized() else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=2.0**10)
    for number in range(5):
        optimizer.zero_grad()
        loss = run.loss(model, number)
        scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
        if number == 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return everything(model, optimizer) | {"scale": scaler.get_scale()}


def a_step_between_forward_and_backward(how: dict[str, Any]) -> str:
    run = Kind("SGD", {"lr": 0.1} | how).run(build=Even, shard=kept_unsharded)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 1)
    loss = run.loss(model, 1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    run.train(model, optimizer, 2, 1)
    return refusal(loss.backward).split(":")[0]


def kept_unsharded(model: nn.Module, layout: Layout | None) -> nn.Module:
    return shard_tower(model, reshard_after_forward=False)


@pytest.mark.parametrize("how", WAYS_TO_STEP, ids=str)
def test_autograd_knows_that_a_step_has_changed_the_weights(world2: World, how: dict[str, Any]) -> None:
    assert world2.run(a_step_between_forward_and_backward, how) == ["RuntimeError"] * 2


# --- parameters that move -------------------------------------------------------------------------


@same_as_plain(2, atol=1e-6)
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "how",
    [
        "cast",
        "cast, and a gradient",
        "unsharded",
        "averaged",
        "replaced",
        "replaced, after a backward",
        "loaded",
    ],
)
def test_parameters_may_move(side: Side, how: str) -> dict[str, Any]:
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    is_sharded = dist.is_initialized()
    if how == "cast":
        model.float().double()
    elif how == "cast, and a gradient":
        model.float()
        model.double()
        run.loss(model, 9).backward()
    elif how == "unsharded" and is_sharded:
        with shardwise.unsharded(model):
            model.outlet.weight.data.mul_(2)
    elif how == "unsharded":
        model.outlet.weight.data.mul_(2)
    elif how == "averaged":
        ema = shardwise.state.EMA(model, 0.5)
        run.train(model, optimizer, 2)
        ema.update()
        with ema.swap():
            run.loss(model, 3)
    elif how == "replaced" and is_sharded:
        # Each shard at another address, as a caller may leave it behind.
        for param in model.parameters():
            with torch.no_grad():
                param._local_tensor = param._local_tensor.clone()
    elif how == "replaced, after a backward":
        optimizer.zero_grad()
        run.loss(model, 9).backward()
        if is_sharded:
            for param in model.parameters():
                param._local_tensor = param._local_tensor.clone()
        optimizer.step()
    elif how == "loaded":
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    run.train(model, optimizer, 4)
    return everything(model, optimizer)


@same_as_plain(2, atol=1e-6)
def test_models_may_be_converted(side: Side) -> dict[str, Any]:
    """To another dtype for good: the flat shards are laid out anew, with other padding."""
    run = Kind("SGD", {"lr": 0.1}).run(side.is_sharded)
    model, optimizer = run.start(1)
    for number, dtype in enumerate([torch.float64, torch.float64, torch.float32, torch.float32]):
        model.to(dtype)
        optimizer.zero_grad()
        model(random_batch(number, 6, 6, dtype)).square().mean().backward()  # the same batch on all ranks
        optimizer.step()
    return everything(model, optimizer)


def sharded_around_later() -> dict[str, Any]:
    run = Kind("AdamW").run()
    model = built(Net, seed=1)
    for block in model.blocks:
        fully_shard(block)
    optimizer = FlatOptimizer(torch.optim.AdamW([p for b in model.blocks for p in b.parameters()], lr=0.05))
    run.train(model.blocks, optimizer, 0, 0)
    model.blocks[0](random_batch(0, 6, 6)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    fully_shard(model)
    optimizer.add_param_group({"params": [*model.inlet.parameters(), *model.outlet.parameters()]})
    run.train(model, optimizer, 0)
    return everything(model, optimizer)


def the_same_plainly() -> dict[str, Any]:
    run = Run()
    model = built(Net, seed=1)
    optimizer = torch.optim.AdamW([p for b in model.blocks for p in b.parameters()], lr=0.05)
    model.blocks[0](random_batch(0, 6, 6)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [*model.inlet.parameters(), *model.outlet.parameters()]})
    run.train(model, optimizer, 0)
    return everything(model, optimizer)


def test_more_may_be_sharded_later(world2: World) -> None:
    assert_all_same(world2.run(sharded_around_later), the_same_plainly(), 1e-10)


@same_as_plain(2)
def test_model_and_optimizer_may_be_copied_together(side: Side) -> dict[str, Any]:
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    model, optimizer = copy.deepcopy((model, optimizer))
    run.train(model, optimizer, 2)
    assert isinstance(optimizer, torch.optim.AdamW)
    return everything(model, optimizer)


def test_it_is_pickled_as_what_it_is(world1: World) -> None:
    assert world1.run(pickled) == [("AdamW", True, 0.25)]


def pickled() -> tuple[str, bool, float]:
    plain = nn.Linear(3, 3)
    optimizer = flat("AdamW", plain.parameters(), lr=0.25)
    plain(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    again.step()
    return type(again).__name__, isinstance(again, FlatOptimizer), again.param_groups[0]["lr"]


# --- state in and out -----------------------------------------------------------------------------


def continued(run: Run, path: str, saver: str, loader: str) -> bool:
    """Half with one, saved; the other half with the other, and with the first: the same bits."""
    model, optimizer = replace(run, optimizer=OPTIMIZERS[saver]).start(1)
    run.train(model, optimizer, 0)
    shardwise.save_checkpoint(path, model, optimizer)
    other, fresh = replace(run, optimizer=OPTIMIZERS[loader]).start(2)
    shardwise.load_checkpoint(path, other, fresh)
    run.train(model, optimizer, HALF)
    run.train(other, fresh, HALF)
    assert_all_same([everything(other, fresh)], everything(model, optimizer), 0.0)
    return True


OPTIMIZERS: dict[str, Any] = {"flat": partial(flat, "AdamW"), "plain": torch.optim.AdamW}


@pytest.mark.sample(3)
@pytest.mark.parametrize("pair", [("flat", "plain"), ("plain", "flat"), ("flat", "flat")], ids="-".join)
def test_checkpoints_do_not_know(world2: World, world3: World, tmp_path: Path, pair: tuple[str, str]) -> None:
    run = Run(options={"lr": 0.05, "foreach": True})
    assert all(world2.run(continued, run, str(tmp_path / "step-1"), *pair))
    saved = replace(run, path=str(tmp_path / "step-2"), optimizer=OPTIMIZERS[pair[0]])
    world2.run(first_half, saved)
    loading = replace(saved, optimizer=OPTIMIZERS[pair[1]])
    want = uninterrupted(replace(run, optimizer=torch.optim.AdamW))
    assert_all_same(world3.run(second_half, loading), want, 1e-10)


def state_dicts_cross_over(first: str, second: str) -> bool:
    run = Run(options={"lr": 0.05, "foreach": True})
    model, optimizer = replace(run, optimizer=OPTIMIZERS[first]).start(1)
    run.train(model, optimizer, 0)
    torch.manual_seed(1)
    other = by_block(Net().double(), None)
    other.load_state_dict(model.state_dict())
    fresh = OPTIMIZERS[second](other.parameters(), lr=9.0)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run.train(model, optimizer, HALF)
    run.train(other, fresh, HALF)
    assert_all_same([everything(other, fresh)], everything(model, optimizer), 0.0)
    return True


@pytest.mark.sample(2)
@pytest.mark.parametrize("pair", [("flat", "plain"), ("plain", "flat"), ("flat", "flat")], ids="-".join)
def test_a_state_dict_is_that_of_the_optimizer_without_it(world2: World, pair: tuple[str, str]) -> None:
    assert all(world2.run(state_dicts_cross_over, *pair))


def state_shared_with_another() -> bool:
    """torch's optimizers take over the tensors of a state dict; here two would write into one memory."""
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    other, fresh = run.start(1)
    for each in (model, other):  # so that the bias between them is alone in its run
        each.blocks[0].up.weight.requires_grad_(False)
        each.blocks[0].down.weight.requires_grad_(False)
    run.train(model, optimizer, 0)
    fresh.load_state_dict(optimizer.state_dict())
    before = everything(model, optimizer)
    run.train(other, fresh, 2)
    assert_all_same([everything(model, optimizer)], before, 0.0)
    return True


def test_a_loaded_state_is_copied(world2: World) -> None:
    assert all(world2.run(state_shared_with_another))


def full_states(is_flat: bool) -> dict[str, Any]:
    run = Kind("AdamW").run(is_flat)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    model_state, state = shardwise.full_state_dict(model, optimizer)
    is_first = dist.get_rank() == 0
    other, fresh = run.start(2)
    shardwise.load_full_state_dict(other, model_state if is_first else None)
    shardwise.state.load_full_optimizer_state_dict(other, fresh, state if is_first else None)
    run.train(other, fresh, 2)
    return everything(other, fresh)


def test_full_states_go_in_and_out(world2: World) -> None:
    assert_all_same(world2.run(full_states, True), trained(Kind("AdamW").run(is_flat=False)), 1e-10)


def through_torchs_recipe(path: str) -> dict[str, Any]:
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    other, fresh = run.start(2)
    loaded = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(loaded, checkpoint_id=path)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, fresh, loaded["optimizer"])
    run.train(other, fresh, 2)
    return everything(other, fresh)


def test_torchs_checkpoints_work(world2: World, tmp_path: Path) -> None:
    want = trained(Kind("AdamW").run(is_flat=False))
    for got in world2.run(through_torchs_recipe, str(tmp_path / "checkpoint")):
        got.pop("inlet.bias step", None)  # torch's recipe gives state to what has had no gradient
        assert_all_same([{k: v for k, v in got.items() if not k.startswith("inlet.bias exp")}], want, 1e-10)


@same_as_plain(2)
def test_state_may_be_changed_by_hand(side: Side) -> dict[str, Any]:
    run = Kind("AdamW").run(side.is_sharded)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    first, second, third, *_ = [p for p in model.parameters() if p.requires_grad]
    optimizer.state[first]["exp_avg"].zero_()
    optimizer.state[second]["step"].fill_(7.0)
    optimizer.state[third]["exp_avg_sq"] = optimizer.state[third]["exp_avg_sq"] * 4
    run.train(model, optimizer, 2)
    optimizer.state[second].clear()
    optimizer.state.pop(third)
    run.train(model, optimizer, 4)
    optimizer.state.clear()
    run.train(model, optimizer, 6)
    return everything(model, optimizer)


def with_state_on_the_host(run: Run) -> dict[str, Any]:
    model, optimizer = run.start(1)
    shardwise.optim.offload_optimizer_state(optimizer, pin_memory=False)
    run.train(model, optimizer, 0, 4)
    return everything(model, optimizer)


def test_offloaded_state_works(world2: World) -> None:
    kind = Kind("AdamW")
    assert_all_same(world2.run(with_state_on_the_host, kind.run()), trained(kind.run(is_flat=False)), 1e-10)


@same_as_plain(2)
def test_an_optimizer_may_have_made_steps_before(side: Side) -> dict[str, Any]:
    run = Kind("AdamW").run(is_flat=False)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    if side.is_sharded:
        optimizer = FlatOptimizer(optimizer)
    run.train(model, optimizer, 2)
    return everything(model, optimizer)


# --- anything, in any order -----------------------------------------------------------------------


def drop_some_gradients(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        if random.random() < 0.3:
            param.grad = None
    optimizer.step()


def thaw_or_freeze(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    param = random.choice(list(model.parameters()))
    param.requires_grad_(not param.requires_grad)
    param.grad = None


def replace_a_gradient(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    param = random.choice(list(model.parameters()))
    param.grad = None if param.grad is None else param.grad * 0.5
    optimizer.step()


def change_hyperparameters(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    random.choice(optimizer.param_groups)["lr"] *= random.choice([0.5, 2.0])


def look_at_state(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert all(isinstance(values, dict) for values in optimizer.state.values())


def change_state(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        values = optimizer.state.get(param, {})
        for key in values:
            if random.random() < 0.3 and key != "step":
                values[key] = values[key] * 0.5
            elif random.random() < 0.1:
                values[key].zero_()


def save_and_load(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(saved)


def move_shards(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        if isinstance(param, DTensor) and random.random() < 0.5:
            param._local_tensor = param._local_tensor.clone()


def step_again(random: Random, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


ACTIONS = [
    drop_some_gradients,
    thaw_or_freeze,
    replace_a_gradient,
    change_hyperparameters,
    look_at_state,
    change_state,
    save_and_load,
    step_again,
]


@same_as_plain(2, atol=1e-7)  # averages that are set to zero by hand make small differences large
@pytest.mark.parametrize("kind", [GAPPED[0], GAPPED[2], Kind("NAdam")], ids=str)
@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(i, marks=pytest.mark.slow) for i in range(5, 16))]
)
@pytest.mark.thin(10923)
def test_anything_may_happen_between_steps(side: Side, kind: Kind, seed: int) -> dict[str, Any]:
    run = kind.run(is_flat=False)
    random = Random(seed)
    model, _ = run.start(1)
    params = list(model.parameters())
    groups = [{"params": params[:5]}, {"params": params[5:], "lr": 0.01}]
    optimizer: Any = run.optimizer(groups, **run.options)
    optimizer = FlatOptimizer(optimizer) if side.is_sharded else optimizer
    for number in range(12):
        optimizer.zero_grad(set_to_none=random.random() < 0.8)
        run.loss(model, number).backward()
        for action in random.sample(ACTIONS, 2):
            action(random, model, optimizer)
        if number % 4 == 3:
            move_shards(Random(seed), model, optimizer)
        run.train(model, optimizer, number, 1)
    return everything(model, optimizer)


# --- other classes, and what is refused -----------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """As one finds it outside of torch: state of its own form, and a count in the group."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("mean", torch.zeros_like(p))
                    state["calls"] = state.get("calls", 0) + 1
                    p.add_(torch.sign(state["mean"] * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                    state["mean"].mul_(0.99).add_(p.grad, alpha=0.01)


class MyAdamW(torch.optim.AdamW):
    pass


def lion(params: Any, is_flat: bool = True, **options: Any) -> torch.optim.Optimizer:
    optimizer = Lion(params, **options)
    return FlatOptimizer(optimizer, elementwise=True) if is_flat else optimizer


@same_as_plain(2)
def test_other_classes_are_admitted_by_an_argument(side: Side) -> dict[str, Any]:
    run = Run(optimizer=partial(lion, is_flat=side.is_sharded), options={"lr": 0.01})
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 4)
    return everything(model, optimizer) | {"count": optimizer.param_groups[0]["count"]}


def test_what_is_no_elementwise_optimizer_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    texts = [
        refusal(FlatOptimizer, model := nn.Linear(2, 2)),
        refusal(FlatOptimizer, torch.optim.LBFGS(params)),
        refusal(FlatOptimizer, torch.optim.Adafactor(params), elementwise=True),
        refusal(FlatOptimizer, torch.optim.Muon(params)),
        refusal(FlatOptimizer, torch.optim.SparseAdam(params)),
        refusal(FlatOptimizer, MyAdamW(params)),
        refusal(FlatOptimizer, torch.optim.AdamW(params), elementwise=1),
        refusal(FlatOptimizer, torch.optim.AdamW(params, differentiable=True)),
        refusal(FlatOptimizer, flat("AdamW", model.parameters())),
    ]
    scheduled = torch.optim.AdamW(params)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    assert_expected_inline(
        "\n".join([*texts, refusal(FlatOptimizer, scheduled)]),
        """\
TypeError: FlatOptimizer: optimizer is a Linear; pass a torch.optim.Optimizer.
ValueError: FlatOptimizer: LBFGS does not treat each element of a parameter by itself: it looks at all parameters together. So they cannot be stepped as one flat tensor. WholeParameters steps them whole.
ValueError: FlatOptimizer: Adafactor does not treat each element of a parameter by itself: it keeps sums over rows and columns. So they cannot be stepped as one flat tensor. WholeParameters steps them whole.
ValueError: FlatOptimizer: Muon does not treat each element of a parameter by itself: it orthogonalises whole matrices. So they cannot be stepped as one flat tensor. WholeParameters steps them whole.
ValueError: FlatOptimizer: SparseAdam does not treat each element of a parameter by itself: it takes sparse gradients only. So they cannot be stepped as one flat tensor. WholeParameters steps them whole.
ValueError: FlatOptimizer: test_flat_optimizer.MyAdamW is not known to treat each element of a parameter by itself; one that looks at whole parameters (norms, matrices) would compute something else on flat shards: use WholeParameters. If it does, pass elementwise=True. Known are SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD of torch.optim.
TypeError: FlatOptimizer: elementwise is 1, an int; pass True or False.
ValueError: FlatOptimizer: group 0 of AdamW is differentiable, but autograd does not see a step on flat shards. Use the optimizer without FlatOptimizer.
TypeError: FlatOptimizer: this AdamW is a FlatOptimizer already.
ValueError: FlatOptimizer: step() of this AdamW was wrapped, as learning rate schedulers do, and would go on stepping parameter by parameter. Make the FlatOptimizer first, and schedulers from it.""",
    )
    assert type(scheduled) is torch.optim.AdamW


def refused_in_a_step() -> list[str]:
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    before = everything(model, optimizer)
    weight = model.blocks[0].up.weight
    texts = []
    kept = weight.grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight.grad = torch.zeros(weight.shape, dtype=torch.float64)
        texts.append(refusal(optimizer.step))
        weight.grad = kept
        optimizer.state[weight]["exp_avg"] = torch.zeros(weight.shape)
        texts.append(refusal(optimizer.step))
    optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)
    optimizer.param_groups[0]["params"].append(weight)
    texts.append(refusal(optimizer.step))
    del optimizer.param_groups[0]["params"][-1]
    after = everything(model, optimizer)
    after["blocks.0.up.weight exp_avg"] = before["blocks.0.up.weight exp_avg"]
    assert_all_same([after], before, 0.0)
    return texts


def test_what_cannot_be_stepped_is_refused_by_name(world2: World) -> None:
    first, second = world2.run(refused_in_a_step)
    assert first == second
    assert_expected_inline(
        "\n".join(first),
        """\
TypeError: blocks.0.up.weight: .grad is a plain Tensor, where a DTensor is expected, as the parameter is one: nothing says which part of the whole this rank has. Assign only DTensors to .grad of sharded parameters, or None.
ValueError: blocks.0.up.weight: 'exp_avg' in the state of AdamW is a Tensor of shape (7, 6), where a DTensor of the parameter's shape, (7, 6), is expected: nothing says which part of the whole this rank has. Load full states with shardwise.state.load_full_optimizer_state_dict.
ValueError: FlatOptimizer: blocks.0.up.weight stands twice in group 0 of AdamW, and would be stepped twice. Leave one out.""",
    )


def after_an_error_in_a_step() -> dict[str, Any]:
    """Groups and state are the user's again."""
    run = Kind("AdamW", {"lr": 0.05}).run()
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = "much"
    refusal(optimizer.step)
    assert all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])
    optimizer.param_groups[0]["lr"] = 0.05
    for values in optimizer.state.values():
        values["step"].fill_(2.0)
    run.train(model, optimizer, 2)
    return everything(model, optimizer)


def test_an_error_in_a_step_leaves_the_users_side(world2: World) -> None:
    assert len(world2.run(after_an_error_in_a_step)[0]) > 13


# --- classes whose first base is another, and wrappers --------------------------------------------


class Abstract(ABC, torch.optim.Optimizer):
    """As the classes of some packages are made."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("beta", 0.5)

    @abstractmethod
    def update(self, gradient: Tensor, state: Any, beta: float) -> Tensor: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    beta = group.get("beta", 0.9)
                    param.add_(self.update(param.grad, self.state[param], beta), alpha=-group["lr"])


class SignMomentum(Abstract):
    """Elementwise, with state."""

    def update(self, gradient: Tensor, state: Any, beta: float) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(gradient))
        average.mul_(beta).add_(gradient, alpha=1 - beta)
        return average.sign() + 0.1 * average


def sign_momentum(params: Any, is_flat: bool = True, **options: Any) -> torch.optim.Optimizer:
    optimizer = SignMomentum(params, **options)
    return FlatOptimizer(optimizer, elementwise=True) if is_flat else optimizer


@same_as_plain(2)
def test_a_class_behind_an_abstract_one_is_stepped_flat(side: Side) -> dict[str, Any]:
    run = Run(optimizer=partial(sign_momentum, is_flat=side.is_sharded), options={"lr": 0.01})
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    optimizer = run.optimizer(model.parameters(), lr=1.0)
    optimizer.load_state_dict(state)
    assert isinstance(optimizer, SignMomentum)
    assert optimizer.param_groups[0]["beta"] == 0.5  # by the __setstate__ of its class
    assert repr(optimizer).startswith("FlatOptimizer(SignMomentum (" if side.is_sharded else "SignMomentum (")
    run.train(model, optimizer, 3, 3)
    return everything(model, optimizer)


class Wrapper(torch.optim.Optimizer):
    """Steps by another, as some packages do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}  # type: ignore[assignment]

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state


def test_an_optimizer_around_another_is_refused_and_left_as_it_was() -> None:
    wrapper = Wrapper(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    assert_expected_inline(
        refusal(FlatOptimizer, wrapper, elementwise=True),
        """ValueError: FlatOptimizer: Wrapper keeps no state of its own; it seems to step by another optimizer. Make that one a FlatOptimizer, before it is wrapped.""",
    )
    assert type(wrapper) is Wrapper
