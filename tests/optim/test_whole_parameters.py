"""Any optimizer class on whole parameters: the bits of the class in one process, however a model is spread.

A program is a user's script: it runs plainly in this process, where ``start`` gives it the plain model and the
class itself, and on all ranks, where it gets the sharded model and ``WholeParameters`` of the class. What it
returns must be equal to the bit. Gradients are functions of the parameters, computed whole on every rank, since
sums over ranks are rounded otherwise than sums over the batch.
"""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arrangements import Way, built, world_of
from comparing import assert_equal, same
from expecttest import assert_expected_inline
from harness import World
from meshed import parameters_of, refusal
from models import random_batch
from reference import full, mean_of_squares
from refusals import wrapped
from scenario import one_thread
from strange_optimizers import (
    ByAttribute,
    ChangesAtTimes,
    CountsBesideParameters,
    CountsInGroup,
    CountsInItself,
    DecaysAll,
    Estimates,
    EstimatesUnseen,
    Lists,
    Normed,
    NormedByGroup,
    Raises,
    Replaces,
    Shampoo,
    Sign,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise
from shardwise import full_state_dict, load_checkpoint, save_checkpoint
from shardwise.optim import WholeParameters, offload_optimizer_state
from shardwise.state import EMA, load_full_optimizer_state_dict

SINGLE = {"single_owner": True}
NOT_ALL_ON_THE_SAME_RANKS = ("none", "blocks only", "tp")  # no rank could own all parameters
TINY = {"batch_bytes": 1}  # a parameter a round


@dataclass(frozen=True)
class Kind:
    """A class with its options, and those of ``WholeParameters``. Travels by pickle."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    whole: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "_".join(
            [self.kind.__name__, *(key for each in (self.options, self.whole) for key in each if key != "lr")]
        )


KINDS = [
    Kind(torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
    Kind(torch.optim.Adafactor, {"lr": 0.1, "foreach": True, "maximize": True}),
    Kind(torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    Kind(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False}),
    Kind(torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "fused": True}),
    Kind(torch.optim.NAdam, {"lr": 0.1, "foreach": True}, TINY),
    Kind(torch.optim.Rprop, {"lr": 0.01}),
    Kind(Shampoo),
    Kind(Shampoo, whole=TINY),
    Kind(Lists),
    Kind(CountsInGroup),
    Kind(CountsInItself),
    Kind(Normed, whole=SINGLE),
    Kind(Estimates, whole=SINGLE),
]
SHAMPOO = Kind(Shampoo)
WAYS = [
    *(Way(1), Way(2), Way(2, build="even"), Way(3), Way(4), Way(3, build="odd"), Way(3, build="tied")),
    *(Way(4, "hybrid"), Way(4, "tp", "even"), Way(2, "columns"), Way(2, "ddp", "even"), Way(2, "zero2")),
    *(Way(2, "none"), Way(2, "blocks only"), Way(2, "offload"), Way(4, "hybrid", "odd")),
]


# --- programs ---------------------------------------------------------------------------------------


def start(way: Way, kind: Kind, *params: Any, seed: int = 0) -> tuple[Any, Any]:
    """The model and its optimizer: plain ones where there are no ranks."""
    is_plain = not dist.is_initialized()
    model = built(way.build, seed) if is_plain else way.model(seed)
    for param in model.parameters() if is_plain else ():
        param.data = param.data.contiguous()  # as a DTensor's is: norms add up in the order of memory
    groups = params[0](model) if params else model.parameters()
    return model, made(kind, groups)


def made(kind: Kind, params: Any) -> Any:
    if not dist.is_initialized():
        return kind.kind(params, **kind.options)
    return WholeParameters(kind.kind, params, **kind.whole, **kind.options)


def gradient(param: Tensor, number: int) -> Tensor:
    whole = full(param)
    assert whole is not None
    places = torch.arange(whole.numel(), dtype=torch.float64).view_as(whole)
    return (whole * (number + 2) + places.sin()).cos().to(whole.dtype)


def set_gradient(param: Tensor, value: Tensor) -> None:
    if isinstance(param, DTensor):
        value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    param.grad = value


def set_gradients(model: nn.Module, number: int, skip: Callable[[str], bool] = lambda _: False) -> None:
    for name, param in model.named_parameters():
        param.grad = None
        if param.requires_grad and param.numel() and not skip(name):  # Adafactor fails on empty ones
            set_gradient(param, gradient(param, number))


def steps(model: nn.Module, optimizer: Any, numbers: range = range(3)) -> None:
    for number in numbers:
        set_gradients(model, number)
        optimizer.step()


def found(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All that a run has come to, whole, the same on all ranks."""
    _, state = full_state_dict(model, optimizer, rank0_only=False)
    return {**parameters_of(model), "the optimizer": state}


def assert_as_plain(request: Any, way: Way, program: Callable[..., Any], *args: Any) -> None:
    """The program comes to the same bits on all ranks as in this process."""
    with one_thread():
        want = program(way, *args)
    for rank, got in enumerate(world_of(way, request).run(program, way, *args)):
        assert_equal(got, want, f"rank {rank}")


# --- the bits of one process --------------------------------------------------------------------------


def trained(way: Way, kind: Kind) -> Any:
    model, optimizer = start(way, kind)
    steps(model, optimizer)
    return found(model, optimizer)


@pytest.mark.thin(16)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_has_the_bits_of_the_class_in_one_process(way: Way, kind: Kind, request: Any) -> None:
    if kind.whole == SINGLE and way.kind in NOT_ALL_ON_THE_SAME_RANKS:
        pytest.skip("no rank could own all parameters")
    assert_as_plain(request, way, trained, kind)


def sometimes(way: Way, kind: Kind, first: int) -> Any:
    """A step without gradients, steps with some, one with all."""
    model, optimizer = start(way, kind)
    for number in range(first, 5):
        set_gradients(model, number, lambda name, n=number: n == 0 or (n < 4 and hash_of(name) % 3 == n % 3))
        optimizer.step()
    return found(model, optimizer)


def hash_of(name: str) -> int:
    return sum(map(ord, name))


@pytest.mark.thin(6)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4], KINDS[5], SHAMPOO, KINDS[9], KINDS[10]], ids=str)
@pytest.mark.parametrize("way", [Way(2), Way(3), Way(4, "hybrid")], ids=str)
def test_parameters_without_gradients_stay(way: Way, kind: Kind, first: int, request: Any) -> None:
    assert_as_plain(request, way, sometimes, kind, first)


def matrices_first(model: nn.Module) -> Any:
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "lr": 0.2},
        {"params": [named["blocks.0.norm.weight"]], "lr": torch.tensor(0.05)},
    ]


def scheduled_groups(way: Way, kind: Kind) -> Any:
    """Groups with options of their own, a scheduler, another group in the middle, one that is frozen then."""
    model, optimizer = start(way, kind, matrices_first)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    steps(model, optimizer, range(2))
    scheduler.step()
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in known], "lr": 0.01})
    steps(model, optimizer, range(2, 4))
    model.inlet.weight.requires_grad_(False)
    steps(model, optimizer, range(4, 6))
    model.inlet.weight.requires_grad_(True)
    steps(model, optimizer, range(6, 7))
    return found(model, optimizer)


def adagrad_makes_state_late() -> bool:
    """Whether torch's own steps parameters that it has no state of: not in 2.11."""
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adagrad([param])
    optimizer.state.clear()
    param.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


NEEDS_LATE_STATE = pytest.mark.skipif(not adagrad_makes_state_late(), reason="Adagrad of torch 2.11")


@pytest.mark.thin(6)
@pytest.mark.parametrize(
    "kind",
    [
        *(KINDS[0], KINDS[9], KINDS[10], KINDS[12]),
        pytest.param(KINDS[2], marks=NEEDS_LATE_STATE),
        Kind(torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        pytest.param(KINDS[11], marks=pytest.mark.xfail(reason="a new group makes instances anew")),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", [Way(1), Way(2), Way(3, build="even"), Way(4, "hybrid")], ids=str)
def test_groups_come_and_schedulers_change_them(way: Way, kind: Kind, request: Any) -> None:
    assert_as_plain(request, way, scheduled_groups, kind)


class Mixed(nn.Module):
    """A dtype for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(5, 5).to(d) for d in (torch.float64, torch.float32, torch.bfloat16)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x


def mixed_dtypes(way: Way, kind: Kind) -> Any:
    torch.manual_seed(0)
    model: nn.Module = Mixed()
    if dist.is_initialized():
        model = way.spread(model)
    optimizer = made(kind, model.parameters())
    steps(model, optimizer)
    return found(model, optimizer)


@pytest.mark.parametrize("kind", [KINDS[3], KINDS[5], KINDS[9]], ids=str)
def test_parameters_of_several_dtypes(kind: Kind, request: Any) -> None:
    assert_as_plain(request, Way(3), mixed_dtypes, kind)


def low_precision_gradients(way: Way, kind: Kind, dtypes: tuple[torch.dtype, torch.dtype]) -> Any:
    """As ``keep_low_precision_grads`` leaves them; the state tells in which dtype the class has seen them."""
    of_params, of_grads = dtypes
    torch.manual_seed(0)
    model: nn.Module = built(way.build, dtype=of_params)
    if dist.is_initialized():
        model = way.spread(model)
    optimizer = made(kind, model.parameters())
    for number in range(3):
        for param in model.parameters():
            param.grad = None
            param.grad_dtype = of_grads
            set_gradient(param, gradient(param, number).to(of_grads))
        optimizer.step()
    return found(model, optimizer)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=["lower", "higher"]
)
@pytest.mark.parametrize("kind", [KINDS[9], Kind(CountsInGroup, whole=TINY)], ids=str)
def test_gradients_have_the_dtype_that_they_have(kind: Kind, dtypes: Any, request: Any) -> None:
    assert_as_plain(request, Way(2), low_precision_gradients, kind, dtypes)


def with_attributes(way: Way) -> Any:
    """What a caller says of parameters by attributes."""
    model, optimizer = start(way, Kind(ByAttribute))
    model.inlet.weight.factor = 0.25
    steps(model, optimizer)
    return found(model, optimizer)


def test_classes_see_attributes_of_parameters(request: Any) -> None:
    assert_as_plain(request, Way(2), with_attributes)


def beside_parameters(way: Way) -> Any:
    """Also in an optimizer that goes on with the state of another."""
    kind = Kind(CountsBesideParameters)
    model, optimizer = start(way, kind)
    steps(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = made(kind, model.parameters())
    optimizer.load_state_dict(state)
    steps(model, optimizer, range(3, 5))
    return parameters_of(model)


def test_state_of_no_parameter_is_kept(request: Any) -> None:
    assert_as_plain(request, Way(2), beside_parameters)


@pytest.mark.xfail(strict=True, reason="only values of parameters that have gradients come back from owners")
def test_parameters_without_gradients_change_where_the_class_changes_them(request: Any) -> None:
    assert_as_plain(request, Way(2), sometimes, Kind(DecaysAll), 1)


def test_groups_change_in_some_steps(request: Any) -> None:
    assert_as_plain(request, Way(2), sometimes, Kind(ChangesAtTimes), 1)


@pytest.mark.parametrize("kind", [KINDS[0], SHAMPOO, KINDS[12]], ids=str)
def test_without_a_process_group_it_is_the_class(kind: Kind) -> None:
    states = []
    for make in (kind.kind, partial(WholeParameters, kind.kind, **kind.whole)):
        model = built("uneven")
        optimizer = make(model.parameters(), **kind.options)
        steps(model, optimizer)
        states.append((parameters_of(model), optimizer.state_dict()["state"]))
    assert_equal(*states, "")


def touched(way: Way, kind: Kind) -> Any:
    """A script looks at the state of all parameters, to log it: a default dict then has it, empty, everywhere."""
    model, optimizer = start(way, kind)
    steps(model, optimizer, range(2))
    for param in model.parameters():
        assert optimizer.state[param] is not None
    steps(model, optimizer, range(2, 4))
    return found(model, optimizer)


def test_a_look_at_the_state_changes_nothing(request: Any) -> None:
    assert_as_plain(request, Way(2), touched, SHAMPOO)


# --- a training script --------------------------------------------------------------------------------


def script(way: Way, kind: Kind, scaler_of: str) -> Any:
    """Scaled losses, one of them infinite on the last rank alone; clipping, hooks, a scheduler, an average."""
    is_plain = not dist.is_initialized()
    rank, world = (0, 1) if is_plain else (dist.get_rank(), dist.get_world_size())
    model, optimizer = start(way, kind)
    average = EMA(model, decay=0.5)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
    scaler = (torch.amp.GradScaler if scaler_of == "torch" else shardwise.GradScaler)(
        "cpu", init_scale=2.0**10
    )
    for number in range(4):
        batch = random_batch(number, 12, model.inlet.in_features)
        if number == 1:
            batch[-1] *= 1e300
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        share = 12 // world
        scaler.scale(mean_of_squares(model, batch[rank * share : (rank + 1) * share])).backward()
        scaler.unscale_(optimizer)
        shardwise.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update()
    with average.swap():
        averages = parameters_of(model)
    return {**parameters_of(model), "averages": averages, "seen": seen, "scale": scaler.get_scale()}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.thin(6)
@pytest.mark.parametrize("scaler_of", ["torch", "shardwise"])
@pytest.mark.parametrize("kind", [KINDS[0], SHAMPOO, KINDS[10], KINDS[12]], ids=str)
@pytest.mark.parametrize(
    "way",
    [Way(1), Way(2), Way(3), Way(4, "hybrid"), Way(2, "zero1"), Way(2, "zero2"), Way(2, "offload")],
    ids=str,
)
def test_a_script_trains_as_in_one_process(way: Way, kind: Kind, scaler_of: str, request: Any) -> None:
    """Not to the bit: ranks add up gradients, and their norm, in another order."""
    with one_thread():
        want = script(way, kind, scaler_of)
    assert want["scale"] == 2.0**9  # one step was skipped
    assert want["seen"] == ["before", "after"] * 3
    for got in world_of(way, request).run(script, way, kind, scaler_of):
        assert (got["seen"], got["scale"]) == (want["seen"], want["scale"])
        for each in (got, got["averages"]):
            reference = want if each is got else want["averages"]
            for name, value in each.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-9)


# --- closures -----------------------------------------------------------------------------------------


def closure_of(model: nn.Module, calls: list[int], fails: Callable[[int], bool] = lambda _: False) -> Any:
    def closure() -> Tensor:
        calls.append(len(calls))
        if fails(len(calls)):
            raise FloatingPointError("the loss is NaN")
        wholes = [full(param) for param in model.parameters()]
        for param, whole in zip(model.parameters(), wholes, strict=True):
            set_gradient(param, (whole - 0.3) ** 3)
        return sum((whole - 0.3).pow(4).sum() / 4 for whole in wholes)

    return closure


LBFGS = Kind(torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}, SINGLE)


def with_closure(way: Way, kind: Kind) -> Any:
    model, optimizer = start(way, kind)
    calls: list[int] = []
    losses = [optimizer.step(closure_of(model, calls)) for _ in range(3)]
    return {**found(model, optimizer), "calls": len(calls), "losses": list(map(float, losses))}


@pytest.mark.parametrize(
    "kind", [LBFGS, Kind(torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}, SINGLE), SHAMPOO, KINDS[12]], ids=str
)
@pytest.mark.parametrize("way", [Way(1), Way(2), Way(3), Way(4, "hybrid")], ids=str)
def test_closures_are_called_as_in_one_process(way: Way, kind: Kind, request: Any) -> None:
    assert_as_plain(request, way, with_closure, kind)


def failing_closure(way: Way, kind: Kind, rank: int, at: int) -> Any:
    """Then the step is tried again."""
    model, optimizer = start(way, kind)
    calls: list[int] = []
    text = refusal(optimizer.step, closure_of(model, calls, lambda n: n == at and dist.get_rank() == rank))
    return text, len(calls)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_closure_that_raises_on_one_rank_raises_on_all(rank: int, at: int, world2: World) -> None:
    for text, calls in world2.run(failing_closure, Way(2), LBFGS, rank, at):
        assert "the loss is NaN" in text
        assert calls <= at
    world2.close()  # the owner may have been in a collective


def closure_failing_everywhere(way: Way, kind: Kind) -> Any:
    model, optimizer = start(way, kind)
    text = refusal(optimizer.step, closure_of(model, [], lambda n: n == 1))
    calls: list[int] = []
    optimizer.step(closure_of(model, calls))
    return text, len(calls), found(model, optimizer)


def test_after_a_closure_that_raises_everywhere_the_next_step_runs(world2: World) -> None:
    one, other = world2.run(closure_failing_everywhere, Way(2), Kind(torch.optim.SGD, whole=SINGLE))
    assert one[0] == "FloatingPointError: the loss is NaN" == other[0]
    assert_equal(one[1:], other[1:], "ranks")
    assert one[1] == 1


# --- copies, states, files ----------------------------------------------------------------------------


def deep_copied(way: Way, kind: Kind) -> Any:
    """A copy after a group was added, when owners are not those that a new optimizer would have."""
    model, optimizer = start(way, kind, lambda model: model.blocks[0].parameters())
    steps(model, optimizer, range(2))
    optimizer.add_param_group(
        {"params": [p for p in model.parameters() if p not in set(model.blocks[0].parameters())]}
    )
    steps(model, optimizer, range(2, 4))
    model, optimizer = copy.deepcopy((model, optimizer))
    steps(model, optimizer, range(4, 6))
    return found(model, optimizer)


@pytest.mark.parametrize("kind", [KINDS[0], SHAMPOO, KINDS[9]], ids=str)
@pytest.mark.parametrize("way", [Way(2), Way(3, build="even"), Way(4, "hybrid")], ids=str)
def test_a_deep_copy_goes_on(way: Way, kind: Kind, request: Any) -> None:
    assert_as_plain(request, way, deep_copied, kind)


def pickled(way: Way, kind: Kind) -> Any:
    model, optimizer = start(way, kind)
    steps(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=False)
    steps(model, optimizer, range(2, 4))
    return found(model, optimizer)


def test_a_pickle_goes_on(request: Any) -> None:
    assert_as_plain(request, Way(2, "none"), pickled, KINDS[0])


def reloaded(way: Way, kind: Kind) -> Any:
    """What this rank has, into a new optimizer of the same ranks."""
    model, optimizer = start(way, kind)
    steps(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = made(kind, model.parameters())
    optimizer.load_state_dict(state)
    steps(model, optimizer, range(2, 4))
    state = optimizer.state_dict()
    steps(model, optimizer, range(4, 5))  # what was given is the optimizer's own
    optimizer.load_state_dict(state)
    steps(model, optimizer, range(5, 6))
    return found(model, optimizer)


STATES = [KINDS[0], KINDS[2], KINDS[4], SHAMPOO, KINDS[9], KINDS[10], KINDS[12]]


@pytest.mark.thin(7)
@pytest.mark.parametrize("kind", STATES, ids=str)
@pytest.mark.parametrize("way", [Way(1), Way(2), Way(3), Way(4, "hybrid")], ids=str)
def test_a_state_dict_goes_on_where_it_was_made(way: Way, kind: Kind, request: Any) -> None:
    assert_as_plain(request, way, reloaded, kind)


def first_half(way: Way, kind: Kind, path: str, is_plain: bool) -> Any:
    model, optimizer = begun(way, kind, is_plain)
    steps(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer).wait()
    return full_state_dict(model, optimizer, rank0_only=False)


def second_half(way: Way, kind: Kind, path: str, full_states: Any, is_plain: bool) -> Any:
    """From the checkpoint, and from full states."""
    results = []
    for source in ("checkpoint", "full states"):
        model, optimizer = begun(way, kind, is_plain, seed=1)
        if source == "checkpoint":
            load_checkpoint(path, model, optimizer)
        else:
            shardwise.load_full_state_dict(model, full_states[0], src_rank=None)
            load_full_optimizer_state_dict(model, optimizer, full_states[1], src_rank=None)
        steps(model, optimizer, range(2, 4))
        results.append(found(model, optimizer))
    return results


def begun(way: Way, kind: Kind, is_plain: bool, seed: int = 0) -> tuple[Any, Any]:
    """``is_plain``: the class itself on shards, as a user has it who changes to ``WholeParameters``."""
    model, optimizer = start(way, kind, seed=seed)
    return model, kind.kind(model.parameters(), **kind.options) if is_plain else optimizer


ONE_PROCESS = Way(0)
HERE_AND_THERE = [
    (Way(4), Way(3)),
    (Way(3), Way(2)),
    (Way(2), Way(1)),
    (Way(1), Way(4, "hybrid")),
    (Way(4, "tp", "even"), Way(3, build="even")),
    (Way(3, build="odd"), Way(2, build="odd")),
    (ONE_PROCESS, Way(3)),
    (Way(3), ONE_PROCESS),
]


def on(way: Way, request: Any, program: Callable[..., Any], *args: Any) -> Any:
    if way == ONE_PROCESS:
        with one_thread():
            return [program(way, *args)]
    return world_of(way, request).run(program, way, *args)


@pytest.mark.thin(14)
@pytest.mark.parametrize("kind", STATES, ids=str)
@pytest.mark.parametrize(("here", "there"), HERE_AND_THERE, ids=lambda way: str(way))
def test_states_go_from_any_world_into_any_other(
    here: Way, there: Way, kind: Kind, tmp_path: Path, request: Any
) -> None:
    if kind.whole == SINGLE and here.kind in NOT_ALL_ON_THE_SAME_RANKS:
        pytest.skip("no rank could own all parameters")
    with one_thread():
        model, optimizer = start(here, kind)
        steps(model, optimizer, range(4))
        want = found(model, optimizer)
    states, *_ = on(here, request, first_half, kind, str(tmp_path / "saved"), False)
    for results in on(there, request, second_half, kind, str(tmp_path / "saved"), states, False):
        for got, source in zip(results, ("checkpoint", "full states"), strict=True):
            assert_equal(got, want, source)


@pytest.mark.parametrize("is_sharded_first", [True, False], ids=["sharded first", "whole first"])
@pytest.mark.parametrize(("here", "there"), [(Way(2), Way(3)), (Way(4, "hybrid"), Way(1))], ids=str)
def test_adamw_goes_from_shards_to_owners_and_back(
    here: Way, there: Way, is_sharded_first: bool, tmp_path: Path, request: Any
) -> None:
    kind = Kind(torch.optim.AdamW, {"lr": 0.1, "foreach": True})
    with one_thread():
        model, optimizer = start(here, kind)
        steps(model, optimizer, range(4))
        want = found(model, optimizer)
    states, *_ = on(here, request, first_half, kind, str(tmp_path / "saved"), is_sharded_first)
    for results in on(
        there, request, second_half, kind, str(tmp_path / "saved"), states, not is_sharded_first
    ):
        for got in results:
            assert_equal(got, want, "")


def saved_before_a_step(way: Way, kind: Kind, path: str) -> Any:
    """Adagrad has its state from the beginning, whole or not."""
    model, optimizer = start(way, kind)
    save_checkpoint(path, model, optimizer).wait()
    optimizer = kind.kind(model.parameters(), **kind.options)
    load_checkpoint(path, model, optimizer)
    steps(model, optimizer)
    return found(model, optimizer)


@NEEDS_LATE_STATE
def test_a_state_that_is_there_before_the_first_step_is_saved(tmp_path: Path, request: Any) -> None:
    with one_thread():
        model, optimizer = start(Way(2), KINDS[2])
        steps(model, optimizer)
        want = parameters_of(model)
    for got in request.getfixturevalue("world2").run(
        saved_before_a_step, Way(2), KINDS[2], str(tmp_path / "saved")
    ):
        assert {name: same(got[name], value) for name, value in want.items()} == dict.fromkeys(want, True)


def two_optimizers(way: Way, path: str) -> Any:
    """Matrices by Shampoo, the rest by AdamW; saved and loaded together."""

    def begin(seed: int) -> Any:
        model = built(way.build, seed) if not dist.is_initialized() else way.model(seed)
        params = list(model.parameters())
        rest = torch.optim.AdamW([p for p in params if p.dim() < 2], lr=0.1, foreach=True)
        return model, [made(SHAMPOO, [p for p in params if p.dim() > 1]), rest]

    def train(model: Any, optimizers: Any, numbers: range) -> None:
        for number in numbers:
            set_gradients(model, number)
            for optimizer in optimizers:
                optimizer.step()

    model, optimizers = begin(0)
    train(model, optimizers, range(2))
    save_checkpoint(path, model, optimizers).wait()
    model, optimizers = begin(1)
    load_checkpoint(path, model, optimizers)
    train(model, optimizers, range(2, 4))
    return parameters_of(model)


def test_two_optimizers_share_a_model_and_a_checkpoint(tmp_path: Path, request: Any) -> None:
    with one_thread():
        want = two_optimizers(Way(3), str(tmp_path / "plain"))
    for got in request.getfixturevalue("world3").run(two_optimizers, Way(3), str(tmp_path / "saved")):
        assert_equal(got, want, "")


def offloaded(way: Way, kind: Kind) -> Any:
    model, optimizer = start(way, kind)
    offload_optimizer_state(optimizer, pin_memory=False)
    steps(model, optimizer)
    return found(model, optimizer)


def test_the_state_may_be_offloaded(request: Any) -> None:
    assert_as_plain(request, Way(2), offloaded, SHAMPOO)


def state_elements(way: Way) -> int:
    model, optimizer = start(way, KINDS[4])
    steps(model, optimizer)
    return sum(each.numel() for state in optimizer.state.values() for each in state.values() if each.dim())


def test_the_state_is_divided_by_the_ranks(world4: World) -> None:
    whole = state_elements(Way(4))
    parts = world4.run(state_elements, Way(4))
    assert sum(parts) == whole
    assert max(parts) < 0.3 * whole


# --- failures -----------------------------------------------------------------------------------------


def failing_step(way: Way, kind: Kind) -> Any:
    """A first step that fails, and what it has changed."""
    model, optimizer = start(way, kind)
    before = parameters_of(model)
    set_gradients(model, 0)
    text = refusal(optimizer.step)
    changed = [name for name, value in parameters_of(model).items() if not same(value, before[name])]
    return text, changed


FAILURES = {
    "a class that raises": Kind(Raises, {"numel": 49}),
    "a class that replaces": Kind(Replaces),
    "a class that estimates": Kind(EstimatesUnseen),
    "a class that estimates, by rounds": Kind(EstimatesUnseen, whole=TINY),
    "no line search alone": Kind(torch.optim.LBFGS, {}, SINGLE),
}


@pytest.mark.parametrize("kind", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("way", [Way(2), Way(3)], ids=str)
def test_a_first_step_that_fails_on_one_owner_fails_everywhere_and_changes_nothing(
    way: Way, kind: Kind, request: Any
) -> None:
    ran = world_of(way, request).run(failing_step, way, kind)
    assert all(changed == [] for _, changed in ran), ran
    assert len({text.removeprefix("on rank 0: ").removeprefix("on rank 1: ") for text, _ in ran}) <= 2, ran


def failing_later(way: Way) -> str:
    """Nothing is asked of the other ranks afterwards: they have stopped in the middle of a round."""
    model, optimizer = start(way, Kind(Raises, {"numel": 49, "at": 3}))
    steps(model, optimizer, range(2))
    set_gradients(model, 2)
    return refusal(optimizer.step)


def test_a_later_step_that_fails_on_one_owner_fails_everywhere(world2: World) -> None:
    for text in world2.run(failing_later, Way(2)):
        assert "no step 3 for (7, 7)" in text
    world2.close()


def failed_then_good(way: Way) -> Any:
    """The step after one in which a single owner has failed."""
    model, optimizer = start(way, Kind(Raises, {"numel": 49, "at": 1}))
    set_gradients(model, 0)
    failed = refusal(optimizer.step) if dist.is_initialized() else None
    return failed, [steps(model, optimizer, range(1, 3)), parameters_of(model)][1]


def test_after_a_first_step_that_failed_the_next_one_runs(world2: World) -> None:
    with one_thread():
        model, optimizer = start(Way(2), Kind(Raises))
        steps(model, optimizer, range(1, 3))
        want = parameters_of(model)
    for _, got in world2.run(failed_then_good, Way(2)):
        assert_equal(got, want, "")


# --- what is refused ----------------------------------------------------------------------------------


def class_is_no_optimizer() -> Any:
    return WholeParameters(nn.Linear, Way(2).model().parameters())


def instance_for_class() -> Any:
    params = list(Way(2).model().parameters())
    return WholeParameters(torch.optim.SGD(params, lr=0.1), params)


def unknown_option_of_torch() -> Any:
    return WholeParameters(torch.optim.Adafactor, Way(2).model().parameters(), momentum=0.9)


def bad_value_of_an_option() -> Any:
    return WholeParameters(torch.optim.Adafactor, Way(2).model().parameters(), lr=-1.0)


def nothing_at_all() -> Any:
    return WholeParameters(Shampoo, [])


def one_parameter_twice() -> Any:
    model = Way(2).model()
    return WholeParameters(Shampoo, [{"params": [model.inlet.weight]}, {"params": [model.inlet.weight]}])


def a_negative_batch() -> Any:
    return WholeParameters(Shampoo, Way(2).model().parameters(), batch_bytes=-1)


def owners_of_several_meshes() -> Any:
    return WholeParameters(Normed, Way(2, "blocks only").model().parameters(), single_owner=True)


def norm_without_a_single_owner() -> Any:
    return WholeParameters(Normed, Way(2).model().parameters())


def norms_of_a_later_group() -> Any:
    model = Way(2).model()
    groups = [{"params": model.inlet.parameters()}, {"params": model.outlet.parameters(), "normed": True}]
    return WholeParameters(NormedByGroup, groups)


def closure_without_a_single_owner() -> Any:
    return WholeParameters(torch.optim.LBFGS, Way(2).model().parameters())


def itself() -> Any:
    return WholeParameters(WholeParameters, Way(2).model().parameters())


def other_options_on_a_rank() -> Any:
    return WholeParameters(Shampoo, Way(2).model().parameters(), lr=0.1 + dist.get_rank())


def other_order_on_a_rank() -> Any:
    params = list(Way(2, build="even").model().blocks.parameters())
    return WholeParameters(Shampoo, params[::-1] if dist.get_rank() else params)


def alike_in_another_order_on_a_rank() -> Any:
    blocks = Way(2, build="even").model().blocks
    params = [block.up.weight for block in blocks]
    return WholeParameters(Shampoo, params[::-1] if dist.get_rank() else params)


def fewer_on_a_rank() -> Any:
    params = list(Way(2).model().parameters())
    return WholeParameters(Shampoo, params[dist.get_rank() :])


def another_class_on_a_rank() -> Any:
    return WholeParameters((Shampoo, Lists)[dist.get_rank()], Way(2).model().parameters())


def another_group_on_a_rank() -> Any:
    model = Way(2).model()
    optimizer = WholeParameters(Shampoo, model.inlet.parameters())
    optimizer.add_param_group({"params": model.outlet.weight if dist.get_rank() else model.outlet.bias})


def gradients_on_one_rank() -> Any:
    model = Way(2).model()
    optimizer = WholeParameters(Shampoo, model.parameters())
    set_gradients(model, 0)
    if dist.get_rank():
        model.inlet.bias.grad = None
    optimizer.step()


def a_sharded_state() -> Any:
    model = Way(2).model()
    sharded = torch.optim.AdamW(model.parameters(), foreach=True)
    steps(model, sharded, range(1))
    WholeParameters(torch.optim.AdamW, model.parameters()).load_state_dict(sharded.state_dict())


def two_optimizers_over_one_parameter() -> Any:
    model = Way(2).model()
    first = WholeParameters(Shampoo, model.parameters())
    second = WholeParameters(Lists, [model.inlet.weight])
    set_gradients(model, 0)
    first.step()
    second.step()


def sharded_after_it() -> Any:
    model = built("uneven")
    optimizer = WholeParameters(Shampoo, model.parameters())
    Way(2).spread(model)
    set_gradients(model, 0)
    optimizer.step()


def gradients_that_wait() -> Any:
    model = Way(2).model()
    optimizer = WholeParameters(Shampoo, model.parameters())
    with shardwise.no_sync(model):
        mean_of_squares(model, random_batch(0, 4, 7)).backward()
    optimizer.step()


REFUSED = [
    *(class_is_no_optimizer, instance_for_class, itself, unknown_option_of_torch),
    *(
        bad_value_of_an_option,
        nothing_at_all,
        one_parameter_twice,
        a_negative_batch,
        owners_of_several_meshes,
    ),
    *(
        norm_without_a_single_owner,
        norms_of_a_later_group,
        closure_without_a_single_owner,
        other_options_on_a_rank,
        other_order_on_a_rank,
    ),
    *(alike_in_another_order_on_a_rank, fewer_on_a_rank, another_class_on_a_rank, another_group_on_a_rank),
    *(
        gradients_on_one_rank,
        a_sharded_state,
        two_optimizers_over_one_parameter,
        sharded_after_it,
        gradients_that_wait,
    ),
]


def what_is_told() -> list[str]:
    table = []
    for act in REFUSED:
        try:
            act()
            table.append("accepted")
        except Exception as error:
            table.append(f"{type(error).__name__}: {error}")
    return table


def test_what_is_refused_and_how(world2: World) -> None:
    ran = world2.run(what_is_told)
    lines = []
    for act, one, other in zip(REFUSED, *ran, strict=True):
        title = act.__name__.replace("_", " ").upper()
        told = (
            [wrapped(one)]
            if one == other
            else [f"rank {i}: {wrapped(each)}" for i, each in enumerate((one, other))]
        )
        lines.append("\n".join([title, *told]))
    assert_expected_inline(
        "\n\n".join(lines),
        """\
CLASS IS NO OPTIMIZER
TypeError: WholeParameters: optimizer_class is the class Linear; pass
a subclass of torch.optim.Optimizer, not an instance, and its options
beside it.

INSTANCE FOR CLASS
TypeError: WholeParameters: optimizer_class is a SGD; pass a subclass
of torch.optim.Optimizer, not an instance, and its options beside it.

ITSELF
TypeError: WholeParameters: WholeParameters steps sharded parameters
by itself.

UNKNOWN OPTION OF TORCH
TypeError: Adafactor.__init__() got an unexpected keyword argument
'momentum'

BAD VALUE OF AN OPTION
ValueError: Learning rate should be >= 0 but is: -1.0

NOTHING AT ALL
ValueError: optimizer got an empty parameter list

ONE PARAMETER TWICE
ValueError: some parameters appear in more than one parameter group

A NEGATIVE BATCH
ValueError: WholeParameters: batch_bytes is -1; pass a number of bytes
above 0.

OWNERS OF SEVERAL MESHES
ValueError: WholeParameters: single_owner=True, but not all parameters
are on the same ranks: parameter 0 of group 0 and norm.weight are not.
Leave some to another optimizer.

NORM WITHOUT A SINGLE OWNER
ValueError: WholeParameters: Normed with these options steps a
parameter by what it finds in others (norms, estimates over all), of
which each owner has some. Pass single_owner=True, which gives all of
them to one rank.

NORMS OF A LATER GROUP
ValueError: WholeParameters: NormedByGroup with these options steps a
parameter by what it finds in others (norms, estimates over all), of
which each owner has some. Pass single_owner=True, which gives all of
them to one rank.

CLOSURE WITHOUT A SINGLE OWNER
ValueError: WholeParameters: LBFGS calls a closure in its step, with
all parameters as it wants them. Pass single_owner=True, which gives
all of them to one rank.

OTHER OPTIONS ON A RANK
ValueError: WholeParameters: ranks disagree on the optimizer: rank 0
has 'Shampoo with lr=0.1', rank 1 has 'Shampoo with lr=1.1'. Pass the
same on all ranks.

OTHER ORDER ON A RANK
ValueError: WholeParameters: ranks disagree on parameters: rank 0 has
['blocks.0.norm.weight', 'blocks.0.norm.bias', 'blocks.0.up.weight',
'blocks.0.up.bias', 'blocks.0.down.weight', 'blocks.0.down.bias',
'blocks.1.norm.weight', 'blocks.1.norm.bias', 'blocks.1.up.weight',
'blocks.1.up.bias', 'blocks.1.down.weight', 'blocks.1.down.bias',
'blocks.2.norm.weight', 'blocks.2.norm.bias', 'blocks.2.up.weight',
'blocks.2.up.bias', 'blocks.2.down.weight', 'blocks.2.down.bias'],
rank 1 has ['blocks.2.down.bias', 'blocks.2.down.weight',
'blocks.2.up.bias', 'blocks.2.up.weight', 'blocks.2.norm.bias',
'blocks.2.norm.weight', 'blocks.1.down.bias', 'blocks.1.down.weight',
'blocks.1.up.bias', 'blocks.1.up.weight', 'blocks.1.norm.bias',
'blocks.1.norm.weight', 'blocks.0.down.bias', 'blocks.0.down.weight',
'blocks.0.up.bias', 'blocks.0.up.weight', 'blocks.0.norm.bias',
'blocks.0.norm.weight']. Pass the same on all ranks.

ALIKE IN ANOTHER ORDER ON A RANK
ValueError: WholeParameters: ranks disagree on parameters: rank 0 has
['blocks.0.up.weight', 'blocks.1.up.weight', 'blocks.2.up.weight'],
rank 1 has ['blocks.2.up.weight', 'blocks.1.up.weight',
'blocks.0.up.weight']. Pass the same on all ranks.

FEWER ON A RANK
ValueError: WholeParameters: ranks disagree on param groups: rank 0
has ['22 with lr=0.1'], rank 1 has ['21 with lr=0.1']. Pass the same
on all ranks.

ANOTHER CLASS ON A RANK
ValueError: WholeParameters: ranks disagree on the optimizer: rank 0
has 'Shampoo with no options', rank 1 has 'Lists with no options'.
Pass the same on all ranks.

ANOTHER GROUP ON A RANK
ValueError: WholeParameters.add_param_group: ranks disagree on
parameters: rank 0 has ['inlet.weight', 'inlet.bias', 'outlet.bias'],
rank 1 has ['inlet.weight', 'inlet.bias', 'outlet.weight']. Pass the
same on all ranks.

GRADIENTS ON ONE RANK
ValueError: WholeParameters.step: ranks disagree on what to leave out:
rank 0 has [], rank 1 has ['inlet.bias']. Pass the same on all ranks.

A SHARDED STATE
ValueError: inlet.weight: 'exp_avg' in its state is a DTensor, where
WholeParameters has state whole, on one rank. Load sharded states with
shardwise.load_checkpoint, or full ones.

TWO OPTIMIZERS OVER ONE PARAMETER
ValueError: inlet.weight: another WholeParameters, which is still
there, has stepped it. Delete that one and what holds it, such as a
scheduler, or leave the parameter out of one of them.

SHARDED AFTER IT
RuntimeError: inlet.weight: this is the full parameter, as it was
before fully_shard or inside unsharded(). Its shard stands in the
module now, and no gradient comes here any more. Was the optimizer
built before fully_shard? Build it after, from model.parameters().

GRADIENTS THAT WAIT
RuntimeError: inlet.weight: gradients of backward passes without
synchronisation (no_sync, set_requires_gradient_sync(False),
set_requires_all_reduce(False)) wait to be reduced; .grad does not
contain them yet. Run the last backward with synchronisation before
.grad is read or changed, gradients are clipped or an optimizer steps;
or call zero_grad().""",
    )


def randomness() -> Any:
    """Of the process, after a class was tried out: devices have generators of their own."""
    seeded: list[Any] = []
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        WholeParameters(Shampoo, [nn.Parameter(torch.ones(3, 3))])
    return same(torch.rand(1), want), seeded


def test_random_numbers_are_the_callers(world2: World) -> None:
    assert world2.run(randomness) == [(True, [])] * 2


def nan_where_one_process_has_it(way: Way) -> Any:
    model, optimizer = start(way, Kind(Sign))
    steps(model, optimizer, range(1))
    return found(model, optimizer)


def test_a_class_with_nan_is_not_taken_for_one_that_looks_across(request: Any) -> None:
    assert_as_plain(request, Way(2), nan_where_one_process_has_it)
