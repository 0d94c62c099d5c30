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
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import arrangements
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from arrangements import Way, world_of
from checkpointing import HALF, Net, Run, everything, first_half, second_half, uninterrupted
from comparing import assert_all_same, assert_equal
from dynamo import quiet_dynamo
from expecttest import assert_expected_inline
from harness import World
from meshed import Layout, device_mesh, refusal
from models import built, random_batch, shard_tower
from on_ranks import on_ranks
from reference import OptimizerByName, full
from scenario import Side, assert_same, same_as_plain
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
    return sorted(len(run.params) for run in optimizer._plan.runs)


def flat_if(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    return FlatOptimizer(optimizer) if side.is_sharded else optimizer


class Kind(OptimizerByName):
    def run(self, is_flat: bool = True, **others: Any) -> Run:
        plain = getattr(torch.optim, self.name)
        return Run(optimizer=partial(flat, self.name) if is_flat else plain, options=self.options, **others)


def trained_twice(**others: Any) -> tuple[Run, Any, Any]:
    """AdamW after two steps."""
    run = Kind("AdamW").run(**others)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    return run, model, optimizer


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
    if "fused" not in how or kind.name in ("Adam", "AdamW", "Adagrad", "SGD")
]


def trained(run: Run) -> dict[str, Any]:
    return trained_with_forms(run)[0]


def trained_with_forms(run: Run) -> tuple[dict[str, Any], list[Any]]:
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 4)
    names = {param: name for name, param in model.named_parameters()}
    forms = [
        (names[param], key, type(value), tuple(value.shape), value.dtype, getattr(value, "placements", None))
        for param, values in optimizer.state.items()
        for key, value in values.items()
    ]
    return everything(model, optimizer), forms


@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_steps_as_in_plain_pytorch_and_as_on_dtensors_to_the_bit(
    world2: World, kind: Kind
) -> None:
    """Its state also looks as on DTensors without it."""
    got = world2.run(trained_with_forms, kind.run())
    assert_all_same([values for values, _ in got], trained(kind.run(is_flat=False)), 1e-10)
    # Fused kernels on the CPU round the last few elements of a tensor otherwise than the others.
    atol = 1e-13 if "fused" in kind.options else 0.0
    on_dtensors = world2.run(trained_with_forms, kind.run(is_flat=False))
    assert_equal(got, on_dtensors, "on DTensors", atol)


# --- how models are sharded -----------------------------------------------------------------------


def trained_in(way: Way | None, build: str, is_flat: bool) -> dict[str, Any]:
    model = arrangements.built(build) if way is None else way.model()
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    optimizer = FlatOptimizer(optimizer) if is_flat else optimizer
    quiet_dynamo()
    for step in range(2):
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


@on_ranks(1, 2)
def test_a_group_is_one_tensor() -> None:
    *_, optimizer = trained_twice(build=Even)
    assert runs_of(optimizer) == [2, 4, 4]


@on_ranks(2)
def test_uneven_shards_are_joined_across_their_padding() -> None:
    """Rows of 'down' and of 'outlet' that the last rank lacks are too wide a gap."""
    *_, optimizer = trained_twice()
    found = runs_of(optimizer)
    assert sum(found) == 13
    assert len(found) < (8, 9)[dist.get_rank()]


def padding_after_steps(kind: Kind) -> list[float]:
    run = kind.run()
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 4)
    found = []
    for bucket in (bucket for group in groups_in(model) for bucket in group.buckets):
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


@pytest.mark.parametrize("way", [Way(1), Way(2, "ddp"), Way(2, "offload")], ids=str)
@on_ranks()
def test_runs_are_made_once(way: Way) -> None:
    run = Kind("AdamW", {"fused": True}).run(shard=lambda model, _: way.spread(model))
    model, optimizer = run.start(1)
    made = []
    replan = type(optimizer)._replan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer), "_replan", lambda self: (made.append(1), replan(self))[1])
        run.train(model, optimizer, 0, 5)
        optimizer.param_groups[0]["lr"] = 0.3
        run.train(model, optimizer, 5, 5)
    assert made == [1]


@on_ranks(2)
def test_gc_freeze_hides_nothing() -> None:
    run = Kind("AdamW").run(build=Even)
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
    assert runs_of(optimizer) == [2, 4, 4]


@on_ranks(1)
def test_a_profiler_shows_the_step() -> None:
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 1)
    with torch.profiler.profile() as profile:
        optimizer.step()
    labels = [event.key for event in profile.key_averages() if event.key.startswith("Optimizer.")]
    assert labels == ["Optimizer.step#AdamW.step"]


@on_ranks(2)
def test_state_is_there_once() -> None:
    _, model, optimizer = trained_twice()
    assert all(run.flat.grad is None for run in optimizer._plan.runs)  # zero_grad() would not free them
    tensors = [t for values in optimizer._flat_state.values() for t in values.values() if t.dim()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    numels = [p.to_local().numel() for p in model.parameters() if p.requires_grad]
    needed = 2 * 8 * sum(numels)
    assert needed <= sum(storages.values()) <= needed + 2 * 13 * 15 * 8


@on_ranks(2)
def test_state_that_was_looked_at_stays_where_it_is() -> None:
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    found = []
    for number in range(2):
        run.train(model, optimizer, number, 1)
        values = [values["exp_avg"] for values in optimizer._flat_state.values()]
        found.append(sorted(value.data_ptr() for value in values if value.numel()))
        assert optimizer.state
    assert found[0] == found[1]
    assert found[0]


@on_ranks(2)
def test_replaced_state_frees_the_flat_one() -> None:
    """State that was shown and replaced, as one does to bring it to the host.

    What this rank has is looked at and not the whole: after a collective, threads of gloo hold its inputs for a
    moment longer.
    """

    def local_state() -> dict[str, Any]:
        shown = (values for values in optimizer.state.values())
        return {
            f"{i} {k}": dtensor.plain(v).clone() for i, values in enumerate(shown) for k, v in values.items()
        }

    *_, optimizer = trained_twice(build=Even)
    before = local_state()
    for values in optimizer.state.values():
        for key in values:
            values[key] = values[key].clone()
    assert not optimizer._shown_views
    assert not optimizer._flat_state
    assert optimizer._plan is None
    assert_all_same([local_state()], before, 0.0)


# --- gradients in memory of their own -------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    "how",
    [
        "apart",
        "side by side",
        "side by side, described as before",
        "spread out in one memory, described as before",
    ],
)
def test_gradients_in_memory_of_their_own_are_not_joined(how: str) -> None:
    """No tensor reaches from one memory into another, whatever lies between."""
    run = Kind("SGD", {"lr": 0.1}).run(build=Even)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 1)
    assert runs_of(optimizer) == [2, 4, 4]
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
    assert runs_of(optimizer) == [1] * 10
    for name, param in model.named_parameters():
        torch.testing.assert_close(full(param), before[name] - 0.1 * full(param.grad), rtol=0, atol=1e-15)


# --- other parameters beside ----------------------------------------------------------------------


class Mixed(nn.Module):
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
    optimizer = flat_if(side, torch.optim.AdamW(model.parameters(), lr=0.05, **options))
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


@on_ranks(2)
def test_tensor_subclasses_are_stepped_as_they_are() -> None:
    got, want = of_a_tensor_subclass(is_flat=True), of_a_tensor_subclass(is_flat=False)
    assert len(want) == 7
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@same_as_plain(2)
def test_runs_are_cut_where_groups_differ(side: Side) -> dict[str, Any]:
    """Weights and biases in two groups; a third is added later."""
    run = Run(build=Even)
    model, _ = run.start(1)
    blocks = [param for block in model.blocks for param in block.parameters()]
    matrices, others = ([p for p in blocks if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "betas": (0.5, 0.9)}]
    optimizer = flat_if(side, torch.optim.AdamW(groups, lr=0.05))
    run.train(model, optimizer, 0)
    optimizer.add_param_group({"params": model.outlet.parameters(), "lr": 0.3})
    run.train(model, optimizer, 2)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4, 2]
    if side.is_sharded:
        assert runs_of(optimizer) == [2] * 5  # weights and biases of a block lie apart, by size
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


@on_ranks(2)
def test_hooks_run_once_and_see_the_users_side() -> None:
    """Those of this optimizer and those of all."""
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
    optimizer.register_state_dict_pre_hook(note("saving"))
    optimizer.register_load_state_dict_post_hook(note("loaded"))
    handles = [
        optimizer.register_step_post_hook(note("after")),
        register_optimizer_step_pre_hook(note("before all")),
        register_optimizer_step_post_hook(note("after all")),
    ]
    run.train(model, optimizer, 0, 1)
    for handle in handles:
        handle.remove()
    run.train(model, optimizer, 1, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [
        *("before all True 0", "before True 0", "after True 13", "after all True 13"),
        *("before True 13", "saving True 13", "loaded True 13"),
    ]


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


@on_ranks(2)
@pytest.mark.parametrize("how", WAYS_TO_STEP, ids=str)
def test_autograd_knows_that_a_step_has_changed_the_weights(how: dict[str, Any]) -> None:
    run = Kind("SGD", {"lr": 0.1} | how).run(build=Even, shard=kept_unsharded)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 1)
    loss = run.loss(model, 1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    run.train(model, optimizer, 2, 1)
    with pytest.raises(RuntimeError):
        loss.backward()


def kept_unsharded(model: nn.Module, layout: Layout | None) -> nn.Module:
    return shard_tower(model, reshard_after_forward=False)


# --- parameters that move -------------------------------------------------------------------------


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


@same_as_plain(2)
def test_more_may_be_sharded_later(side: Side) -> dict[str, Any]:
    model = built(Net, seed=1)
    side.shard(*model.blocks)
    params = [param for block in model.blocks for param in block.parameters()]
    optimizer = flat_if(side, torch.optim.AdamW(params, lr=0.05))
    model.blocks[0](random_batch(0, 6, 6)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    side.shard(model)
    optimizer.add_param_group({"params": [*model.inlet.parameters(), *model.outlet.parameters()]})
    Run().train(model, optimizer, 0)
    return everything(model, optimizer)


@on_ranks(1)
def test_it_is_pickled_as_what_it_is() -> None:
    plain = nn.Linear(3, 3)
    optimizer = flat("AdamW", plain.parameters(), lr=0.25)
    plain(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    again.step()
    assert type(again).__name__ == "AdamW"
    assert isinstance(again, FlatOptimizer)
    assert again.param_groups[0]["lr"] == 0.25


# --- state in and out -----------------------------------------------------------------------------


OPTIMIZERS: dict[str, Any] = {"flat": partial(flat, "AdamW"), "plain": torch.optim.AdamW}
RUN = Run(options={"lr": 0.05, "foreach": True})


def continued(path: str, saver: str, loader: str) -> bool:
    """Half with one, saved; the other half with the other, and with the first: the same bits.

    Saved by a checkpoint, and by a state dict.
    """
    model, optimizer = replace(RUN, optimizer=OPTIMIZERS[saver]).start(1)
    RUN.train(model, optimizer, 0)
    shardwise.save_checkpoint(path, model, optimizer)
    loading = replace(RUN, optimizer=OPTIMIZERS[loader])
    (other, fresh), (another, one_more) = loading.start(2), replace(loading, options={"lr": 9.0}).start(3)
    shardwise.load_checkpoint(path, other, fresh)
    another.load_state_dict(model.state_dict())
    one_more.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (other, fresh), (another, one_more)):
        RUN.train(*each, HALF)
    assert_all_same(
        [everything(other, fresh), everything(another, one_more)], everything(model, optimizer), 0.0
    )
    return True


@pytest.mark.parametrize("pair", [("flat", "plain"), ("plain", "flat")], ids="-".join)
def test_checkpoints_and_state_dicts_are_those_of_the_optimizer_without_it(
    world2: World, world3: World, tmp_path: Path, pair: tuple[str, str]
) -> None:
    assert all(world2.run(continued, str(tmp_path / "step-1"), *pair))
    saved = replace(RUN, path=str(tmp_path / "step-2"), optimizer=OPTIMIZERS[pair[0]])
    world2.run(first_half, saved)
    loading = replace(saved, optimizer=OPTIMIZERS[pair[1]])
    assert_all_same(world3.run(second_half, loading), uninterrupted(RUN), 1e-10)


@on_ranks(2)
def test_a_loaded_state_is_copied() -> None:
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


@on_ranks(2)
def test_full_states_go_in_and_out() -> None:
    run, model, optimizer = trained_twice()
    model_state, state = shardwise.full_state_dict(model, optimizer)
    is_first = dist.get_rank() == 0
    other, fresh = run.start(2)
    shardwise.load_full_state_dict(other, model_state if is_first else None)
    shardwise.state.load_full_optimizer_state_dict(other, fresh, state if is_first else None)
    run.train(other, fresh, 2)
    assert_all_same([everything(other, fresh)], trained(Kind("AdamW").run(is_flat=False)), 1e-10)


@on_ranks(2)
def test_torchs_checkpoints_work(tmp_path: Path) -> None:
    want = trained(Kind("AdamW").run(is_flat=False))
    path = str(tmp_path / "checkpoint")
    run, model, optimizer = trained_twice()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    other, fresh = run.start(2)
    loaded = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(loaded, checkpoint_id=path)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, fresh, loaded["optimizer"])
    run.train(other, fresh, 2)
    got = everything(other, fresh)
    got.pop("inlet.bias step", None)  # torch's recipe gives state to what has had no gradient
    assert_all_same([{k: v for k, v in got.items() if not k.startswith("inlet.bias exp")}], want, 1e-10)


@on_ranks(2)
def test_offloaded_state_works() -> None:
    run = Kind("AdamW").run()
    model, optimizer = run.start(1)
    shardwise.optim.offload_optimizer_state(optimizer, pin_memory=False)
    run.train(model, optimizer, 0, 4)
    assert_all_same([everything(model, optimizer)], trained(Kind("AdamW").run(is_flat=False)), 1e-10)


@same_as_plain(2)
def test_an_optimizer_may_have_made_steps_before(side: Side) -> dict[str, Any]:
    run = Kind("AdamW").run(is_flat=False)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    run.train(model, flat_if(side, optimizer), 2)
    return everything(model, optimizer)


# --- between steps, one thing or many in any order -------------------------------------------------


def add_up_and_clip(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    for number in range(2):
        run.loss(model, number).backward()
    clip = shardwise.clip_grad_norm_ if dist.is_initialized() else torch.nn.utils.clip_grad_norm_
    clip(model.parameters(), 0.1)
    optimizer.step()


def call_a_closure(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = run.loss(model, 0)
        loss.backward()
        return loss.detach()

    loss = optimizer.step(closure)
    assert loss.dim() == 0
    assert loss > 0


def step_without_gradients(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    before = len(optimizer.state)
    optimizer.zero_grad()
    optimizer.step()
    assert len(optimizer.state) == before


def step_again(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    optimizer.step()


def drop_some_gradients(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        if random.random() < 0.3:
            param.grad = None
    optimizer.step()


def freeze_and_thaw(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    """One that was frozen at first, and any other."""
    for param in (model.inlet.bias, random.choice(list(model.blocks.parameters()))):
        param.requires_grad_(not param.requires_grad)
        param.grad = None


def replace_gradients(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    weight = model.blocks[0].up.weight
    weight.grad = None if weight.grad is None else weight.grad * 0.5
    for weight in (model.blocks[1].down.weight, model.inlet.weight):  # the latter is alone in its run
        if isinstance(weight.grad, DTensor):
            weight.grad = weight.grad.redistribute(placements=[Replicate()])
    if random.random() < 0.5:
        for param in model.parameters():
            param.grad = None if param.grad is None else param.grad * 2
    optimizer.step()


def leave_the_group(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    """One parameter for a step, after which it has what it had."""
    params = optimizer.param_groups[0]["params"]
    left = params.pop(3)
    run.train(model, optimizer, 0, 1)
    params.insert(3, left)


def leave_the_group_for_good(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [*params[:2], *params[3:]]


def change_hyperparameters(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    random.choice(optimizer.param_groups)["lr"] *= random.choice([0.5, 2.0])


def look_at_state(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    assert all(isinstance(values, dict) for values in optimizer.state.values())


def change_state(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        values = optimizer.state.get(param, {})
        for key in values:
            if random.random() < 0.3 and key != "step":
                values[key] = values[key] * 0.5
            elif random.random() < 0.1:
                values[key].zero_()


def place_state_otherwise(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    for values in optimizer.state.values():
        for key, value in values.items():
            if isinstance(value, DTensor):
                values[key] = value.redistribute(placements=[Replicate()])


def forget_state(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    first, second, *_ = [param for param in model.blocks.parameters() if param.requires_grad]
    if random.random() < 0.2:
        optimizer.state.clear()
    optimizer.state[first].clear()
    optimizer.state.pop(second, None)


def save_and_load(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(saved)


def copy_both(random: Random, run: Run, model: nn.Module, optimizer: Any) -> Any:
    copies = copy.deepcopy((model, optimizer))
    assert type(copies[1]) is type(optimizer)
    return copies


def move_shards(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    """Each to another address, as a caller may leave it behind."""
    for param in model.parameters():
        if random.random() < 0.5 and isinstance(param, DTensor):
            param._local_tensor = param._local_tensor.clone()


def move_shards_before_a_step(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    run.loss(model, 0).backward()
    move_shards(random, run, model, optimizer)
    optimizer.step()


def change_full_parameters(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    with shardwise.unsharded(model) if dist.is_initialized() else nullcontext():
        model.outlet.weight.data.mul_(0.5)


def swap_averages(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    average = shardwise.state.EMA(model, 0.5)
    run.train(model, optimizer, 0, 1)
    average.update()
    with average.swap():
        run.loss(model, 0)


def load_the_model(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def cast(random: Random, run: Run, model: nn.Module, optimizer: Any) -> None:
    model.float().double()
    if random.random() < 0.5:
        run.loss(model, 0).backward()


ACTIONS = [
    *(add_up_and_clip, call_a_closure, step_without_gradients, step_again, drop_some_gradients),
    *(freeze_and_thaw, replace_gradients, leave_the_group, change_hyperparameters, look_at_state),
    *(change_state, forget_state, save_and_load, copy_both, move_shards, move_shards_before_a_step),
    *(change_full_parameters, swap_averages, load_the_model),
]
STEPPED = [
    Kind("AdamW", {"lr": 0.05, "foreach": True}),
    Kind("AdamW", {"lr": 0.05, "fused": True}),
    Kind("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    Kind("ASGD", {"t0": 1.0}),
]


def between_steps(side: Side, kind: Kind, action: Any) -> dict[str, Any]:
    run, random = kind.run(side.is_sharded), Random(0)
    model, optimizer = run.start(1)
    for number in range(4):
        model, optimizer = action(random, run, model, optimizer) or (model, optimizer)
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        run.loss(model, number).backward()
        optimizer.step()
    return everything(model, optimizer)


CASES = [
    *zip([*ACTIONS, leave_the_group_for_good, cast], cycle(STEPPED)),
    (place_state_otherwise, STEPPED[0]),
    # Cuts a group into runs, by what the kind keeps.
    *((drop_some_gradients, kind) for kind in STEPPED[1:]),
]


@pytest.mark.parametrize(
    ("action", "kind"), CASES, ids=[f"{action.__name__}-{kind}" for action, kind in CASES]
)
def test_it_steps_as_in_plain_pytorch_whatever_happens_between(
    world2: World, kind: Kind, action: Any
) -> None:
    assert_same(world2, between_steps, kind, action, atol=1e-6 if action is cast else 1e-10)


@same_as_plain(2, atol=1e-7)  # averages that are set to zero by hand make small differences large
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 32))]
)
def test_it_steps_as_in_plain_pytorch_in_any_order_of_what_happens(side: Side, seed: int) -> dict[str, Any]:
    kinds = [*STEPPED[:3], Kind("NAdam")]
    run = kinds[seed % len(kinds)].run(is_flat=False)
    random = Random(seed)
    model, _ = run.start(1)
    params = list(model.parameters())
    groups = [{"params": params[:5]}, {"params": params[5:], "lr": 0.01}]
    optimizer = flat_if(side, run.optimizer(groups, **run.options))
    for number in range(12):
        optimizer.zero_grad(set_to_none=random.random() < 0.8)
        run.loss(model, number).backward()
        for action in random.sample(ACTIONS, 2):
            model, optimizer = action(random, run, model, optimizer) or (model, optimizer)
        run.train(model, optimizer, number, 1)
    return everything(model, optimizer)


# --- other classes, and what is refused -----------------------------------------------------------


class MyAdamW(torch.optim.AdamW):
    pass


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
ValueError: FlatOptimizer: LBFGS does not treat each element of a parameter by itself: it looks at all parameters together. So its parameters cannot be stepped as one flat tensor. WholeParameters steps them whole.
ValueError: FlatOptimizer: Adafactor does not treat each element of a parameter by itself: it keeps sums over rows and columns. So its parameters cannot be stepped as one flat tensor. WholeParameters steps them whole.
ValueError: FlatOptimizer: Muon does not treat each element of a parameter by itself: it orthogonalises whole matrices. So its parameters cannot be stepped as one flat tensor. WholeParameters steps them whole.
ValueError: FlatOptimizer: SparseAdam does not treat each element of a parameter by itself: it accepts only sparse gradients. So its parameters cannot be stepped as one flat tensor. WholeParameters steps them whole.
ValueError: FlatOptimizer: test_flat_optimizer.MyAdamW is not known to treat each element of a parameter by itself. If it does, pass elementwise=True. If it looks at whole parameters (norms, matrices), use WholeParameters: it would compute something else on flat shards. Known are SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD of torch.optim.
TypeError: FlatOptimizer: elementwise is 1, an int; pass True or False.
ValueError: FlatOptimizer: group 0 of AdamW is differentiable, but autograd does not see a step on flat shards. Use the optimizer without FlatOptimizer.
TypeError: FlatOptimizer: this AdamW is a FlatOptimizer already.
ValueError: FlatOptimizer: step() of this AdamW was wrapped, as learning rate schedulers do, and would still step parameter by parameter. Create the FlatOptimizer first, and then schedulers for it.""",
    )
    assert type(scheduled) is torch.optim.AdamW


@on_ranks(2)
def test_what_cannot_be_stepped_is_refused_by_name() -> None:
    _, model, optimizer = trained_twice()
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
    assert_expected_inline(
        "\n".join(texts),
        """\
TypeError: blocks.0.up.weight: .grad is a plain Tensor, where a DTensor is expected, as the parameter is one: this rank cannot tell which part of the whole it holds. Assign only DTensors or None to .grad of sharded parameters.
ValueError: blocks.0.up.weight: 'exp_avg' in the state of AdamW is a Tensor of shape (7, 6), where a DTensor of the parameter's shape, (7, 6), is expected: this rank cannot tell which part of the whole it holds. Load full states with shardwise.state.load_full_optimizer_state_dict.
ValueError: FlatOptimizer: group 0 of AdamW has blocks.0.up.weight twice, and would step it twice. Leave one out.""",
    )


@on_ranks(2)
def test_an_error_in_a_step_leaves_the_users_side() -> None:
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
    assert len(everything(model, optimizer)) > 13


# --- classes whose first base is another, and wrappers --------------------------------------------


class Abstract(ABC, torch.optim.Optimizer):
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
    """Elementwise, with state, a number in it, and a count in the group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)

    def update(self, gradient: Tensor, state: Any, beta: float) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(gradient))
        average.mul_(beta).add_(gradient, alpha=1 - beta)
        state["calls"] = state.get("calls", 0) + 1
        return average.sign() + 0.1 * average


def sign_momentum(params: Any, is_flat: bool = True, **options: Any) -> torch.optim.Optimizer:
    optimizer = SignMomentum(params, **options)
    return FlatOptimizer(optimizer, elementwise=True) if is_flat else optimizer


@same_as_plain(2)
def test_other_classes_also_behind_an_abstract_one_are_admitted_by_an_argument(side: Side) -> dict[str, Any]:
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
    return everything(model, optimizer) | {"count": optimizer.param_groups[0]["count"]}


class Wrapper(torch.optim.Optimizer):
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
        """ValueError: FlatOptimizer: Wrapper keeps no state of its own; it seems to call the step of another optimizer. Make that one a FlatOptimizer before you wrap it.""",
    )
    assert type(wrapper) is Wrapper
