"""Optimizers through checkpoints: what one does next, after loading, is what it would have done anyway."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import HALF, Net, Pair, Run, everything, first_half, second_half, uninterrupted
from comparing import assert_all_same, assert_equal
from harness import World
from meshed import refusal
from on_ranks import on_ranks
from reference import OptimizerByName
from torch import Tensor, nn

import shardwise
from shardwise import fully_shard, load_checkpoint, save_checkpoint


class Kind(OptimizerByName):
    @property
    def atol(self) -> float:
        """Muon orthogonalises in bfloat16, where the order of sums shows."""
        return 1e-3 if self.name == "Muon" else 1e-10

    def run(self, path: Path) -> Run:
        build = Matrices if self.name == "Muon" else Net
        return Run(
            build=build,
            optimizer=getattr(torch.optim, self.name),
            options=self.options,
            path=str(path / "step-2"),
        )


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


KINDS = [
    Kind("Adadelta"),
    Kind("Adagrad"),
    Kind("Adam", {"amsgrad": True}),
    Kind("Adam", {"foreach": True}),
    Kind("AdamW", {"fused": True}),
    Kind("AdamW", {"capturable": False, "weight_decay": 0.3}),
    Kind("Adamax"),
    Kind("ASGD", {"t0": 1.0}),
    Kind("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Kind("RAdam"),
    Kind("RMSprop", {"momentum": 0.9, "centered": True}),
    Kind("Rprop"),
    Kind("SGD"),
    Kind("SGD", {"momentum": 0.9, "dampening": 0.3}),
    Kind("SGD", {"momentum": 0.9, "nesterov": True}),
    Kind("Muon"),
]
# These cannot step on sharded parameters at all, whatever the checkpoint.
CANNOT_STEP = {
    "Adafactor": "DTensor cannot raise a norm that is yet to be summed to a power in place",
    "LBFGS": "flattens all gradients into one vector of a rank's own",
    "SparseAdam": "takes sparse gradients only",
}


def test_all_optimizers_of_torch_are_listed() -> None:
    found = {name for name, cls in vars(torch.optim).items() if inspect.isclass(cls)}
    assert found - {"Optimizer"} == {kind.name for kind in KINDS} | set(CANNOT_STEP)


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(
    world2: World, world3: World, tmp_path: Path, kind: Kind
) -> None:
    run = kind.run(tmp_path)
    want = uninterrupted(run)
    saving = world2.run(first_half, run)
    assert_all_same(saving, want, kind.atol)
    for rank, got in enumerate(world2.run(second_half, run)):
        assert_all_same([got], saving[rank], 0.0)  # to the bit
    assert_all_same(world3.run(second_half, run), want, kind.atol)
    assert_all_same([second_half(run)], want, kind.atol)


def test_without_ranks_adafactor_goes_on_as_well(tmp_path: Path) -> None:
    run = Kind("Adafactor").run(tmp_path)
    assert_all_same([first_half(run)], uninterrupted(run), 0.0)
    assert_all_same([second_half(run)], uninterrupted(run), 0.0)


def never_stepped(run: Run) -> dict[str, Any]:
    model, optimizer = run.start(1)
    save_checkpoint(run.path, model, optimizer)
    run.train(model, optimizer, 0)
    return everything(model, optimizer)


def after_steps_of_its_own(run: Run) -> dict[str, Any]:
    """Loading forgets what the optimizer has done before."""
    model, optimizer = run.start(2)
    run.train(model, optimizer, 7)
    load_checkpoint(run.path, model, optimizer)
    run.train(model, optimizer, 0)
    return everything(model, optimizer)


def test_an_optimizer_that_never_stepped_is_saved_as_such(world2: World, tmp_path: Path) -> None:
    run = Kind("SGD", {"momentum": 0.9, "dampening": 0.3}).run(tmp_path)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    want = everything(model, optimizer)
    assert_all_same(world2.run(never_stepped, run), want, 1e-10)
    assert_all_same(world2.run(after_steps_of_its_own, run), want, 1e-10)
    assert_all_same([after_steps_of_its_own(run)], want, 1e-10)


def forms(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        {
            key: (type(value), value.shape, value.dtype, getattr(value, "placements", None))
            for key, value in each.items()
        }
        for each in optimizer.state.values()
    ]


@pytest.mark.parametrize("kind", [Kind("ASGD"), Kind("NAdam")], ids=str)
@on_ranks(2)
def test_a_loaded_state_has_the_form_that_steps_give_it(tmp_path: Path, kind: Kind) -> None:
    """A scalar parameter's averages are sharded tensors as it is; its step count is a plain number."""
    run = kind.run(tmp_path)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    save_checkpoint(run.path, model, optimizer)
    other, fresh = run.start(2)
    load_checkpoint(run.path, other, fresh)
    assert forms(optimizer)
    assert forms(fresh) == forms(optimizer)


def net_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def goes_on_from_full_states(run: Run, states: tuple[Any, Any]) -> dict[str, Any]:
    model, optimizer = run.start(2)
    shardwise.load_full_state_dict(model, states[0])
    shardwise.state.load_full_optimizer_state_dict(model, optimizer, states[1])
    run.train(model, optimizer, HALF)
    return everything(model, optimizer)


def full_states(run: Run) -> tuple[Any, Any]:
    model, optimizer = run.start(2)
    load_checkpoint(run.path, model, optimizer)
    return shardwise.full_state_dict(model, optimizer)


def test_an_optimizer_that_made_its_state_on_the_meta_device_is_loaded(world2: World, tmp_path: Path) -> None:
    """Adagrad makes its state when it is built: on the meta device where the model is there."""
    run = Kind("Adagrad").run(tmp_path)
    world2.run(first_half, run)
    states = world2.run(full_states, run)[0]
    late = replace(run, build=net_on_meta)
    assert_all_same(world2.run(second_half, late), uninterrupted(run), 1e-10)
    assert_all_same(world2.run(goes_on_from_full_states, late, states), uninterrupted(run), 1e-10)


# --- groups ---------------------------------------------------------------------------------------


def two_optimizers(run: Run, does_load: bool) -> dict[str, Any]:
    model, _ = run.start(1 + does_load)
    params = dict(model.named_parameters())
    first = torch.optim.Adam([p for n, p in params.items() if "blocks" in n], lr=0.1)
    second = torch.optim.SGD([p for n, p in params.items() if "blocks" not in n], lr=0.1, momentum=0.9)
    start = 0
    if does_load:
        start = load_checkpoint(run.path, model, [first, second]).shared["step"]
    for number in range(start, 4):
        if number == 2 and not does_load:
            save_checkpoint(run.path, model, (each for each in (first, second)), shared={"step": 2})
        first.zero_grad(), second.zero_grad()
        run.loss(model, number).backward()
        first.step(), second.step()
    return everything(model, first)


def test_several_optimizers_share_a_checkpoint(world2: World, world3: World, tmp_path: Path) -> None:
    run = Run(path=str(tmp_path / "checkpoint"))
    want = world2.run(two_optimizers, run, False)[0]
    assert_all_same(world3.run(two_optimizers, run, True), want, 1e-10)
    assert_all_same([two_optimizers(run, True)], want, 1e-10)


# --- frozen and unfrozen --------------------------------------------------------------------------


class InTuples(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["pair"] = (torch.zeros_like(param), torch.ones_like(param))
        return super().step(closure)


@on_ranks(2)
def test_shards_in_a_tuple_are_not_saved(tmp_path: Path) -> None:
    run = Run(path=str(tmp_path / "checkpoint"), optimizer=InTuples)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    told = refusal(save_checkpoint, run.path, model, optimizer)
    assert "the optimizer keeps 'pair' of inlet.weight as a tuple of shards" in told


@on_ranks(2)
def test_state_has_the_dtype_that_was_saved_whatever_is_there(tmp_path: Path) -> None:
    """State in float32, loaded over state in bfloat16."""
    model = fully_shard(nn.Linear(4, 4).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    saved = state["momentum_buffer"] = state["momentum_buffer"].float() + 2.0**-20
    save_checkpoint(tmp_path / "x", model, optimizer)
    state["momentum_buffer"] = saved.bfloat16()
    load_checkpoint(tmp_path / "x", model, optimizer)
    assert_equal(optimizer.state[model.weight]["momentum_buffer"].to_local(), saved.to_local())


@on_ranks(2)
def test_a_group_without_parameters_gets_its_hyperparameters(tmp_path: Path) -> None:
    """A group that is filled later, and has a schedule already."""
    model = fully_shard(nn.Linear(4, 4))

    def made(lr: float, later: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [*model.parameters()], "lr": lr}, {"params": [], "lr": later}])

    save_checkpoint(tmp_path / "x", model, made(0.1, 7.0))
    loaded = made(0.2, 0.3)
    load_checkpoint(tmp_path / "x", model, loaded)
    assert [group["lr"] for group in loaded.param_groups] == [0.1, 7.0]


def only_trained(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for param in params if param.requires_grad], **options)


def refused_with_another(run: Run, strict: bool = True) -> str:
    model, optimizer = run.start(2)
    before = everything(model, optimizer)
    text = refusal(load_checkpoint, run.path, model, optimizer, strict=strict)
    assert_all_same([everything(model, optimizer)], before, 0.0)
    return text.replace(run.path, "PATH")


def test_parameters_that_join_later_are_named_or_left_alone(world2: World, tmp_path: Path) -> None:
    run = Run(path=str(tmp_path / "checkpoint"), optimizer=only_trained)
    joined = replace(run, optimizer=torch.optim.Adam)
    world2.run(first_half, run)
    assert set(world2.run(refused_with_another, joined)) == {
        "ValueError: PATH: the optimizer has other parameters; not saved: inlet.bias. Nothing "
        "was loaded. strict=False keeps the state of those not saved."
    }
    assert_all_same(world2.run(second_half, joined, strict=False), uninterrupted(run), 1e-10)


class OneBlock(Pair):
    def __init__(self) -> None:
        super().__init__(6, 7)


def offloaded(params: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, **options)
    shardwise.optim.offload_optimizer_state(optimizer, pin_memory=False)
    return optimizer


def test_state_in_host_memory_is_saved_and_loaded(world2: World, tmp_path: Path) -> None:
    run = Run(build=OneBlock, path=str(tmp_path / "checkpoint"), optimizer=offloaded)
    world2.run(first_half, run)
    assert_all_same(
        world2.run(second_half, run), uninterrupted(replace(run, optimizer=torch.optim.AdamW)), 1e-10
    )
