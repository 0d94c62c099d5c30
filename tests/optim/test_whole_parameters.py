"""Any optimizer class on whole parameters: the bits of the class in one process, however a model is spread.

A program is a user's script: it runs plainly in this process, where ``start`` gives it the plain model and the
class itself, and on all ranks, where it gets the sharded model and ``WholeParameters`` of the class. What it
returns must be equal to the bit, which ``bit_for_bit`` makes a test of. Gradients are functions of the parameters,
computed whole on every rank, since sums over ranks are rounded otherwise than sums over the batch.
"""

import copy
import functools
import inspect
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
from comparing import assert_all_same, assert_equal, same
from expecttest import assert_expected_inline
from harness import World
from meshed import parameters_of, refusal
from models import random_batch
from on_ranks import on_ranks
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
from shardwise.torch_compat.dtensor import placed_as, plain

SINGLE = {"single_owner": True}
TINY = {"batch_bytes": 1}  # a parameter a round


@dataclass(frozen=True)
class Kind:
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    whole: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "_".join(
            [self.kind.__name__, *(key for each in (self.options, self.whole) for key in each if key != "lr")]
        )


ADAFACTOR = Kind(torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1})
ADAGRAD = Kind(torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1})
ADAMW = Kind(torch.optim.AdamW, {"lr": 0.1, "foreach": True})
FUSED = Kind(torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "fused": True})
NADAM = Kind(torch.optim.NAdam, {"lr": 0.1, "foreach": True}, TINY)
SHAMPOO = Kind(Shampoo)
LISTS = Kind(Lists)
COUNTS = Kind(CountsInGroup)
NORMED = Kind(Normed, whole=SINGLE)


# --- programs ---------------------------------------------------------------------------------------


def start(way: Way, kind: Kind, *params: Any, seed: int = 0) -> tuple[Any, Any]:
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
    """Of sums, products and quotients: they are rounded the same in a shard as in the whole."""
    places = torch.arange(param.numel(), dtype=torch.float64).cos().view(param.shape)
    if isinstance(param, DTensor):
        places = distribute_tensor(places, param.device_mesh, param.placements, src_data_rank=None)
    values, places = plain(param.detach()), plain(places)
    values = values.double() * (number + 2) + places
    return values / (values * values + 1)


def set_gradients(model: nn.Module, number: int, skip: Callable[[str], bool] = lambda _: False) -> None:
    for name, param in model.named_parameters():
        param.grad = None
        if param.requires_grad and param.numel() and not skip(name):  # Adafactor fails on empty ones
            param.grad = placed_as(param, gradient(param, number).to(param.dtype))


def steps(model: nn.Module, optimizer: Any, numbers: range = range(3)) -> None:
    for number in numbers:
        set_gradients(model, number)
        optimizer.step()


def found(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = full_state_dict(model, optimizer, rank0_only=False)
    return {**weights, "the optimizer": state}


def bit_for_bit(the_way: Way | None = None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a program a test: it comes to the same bits on all ranks as in this process.

    Its first parameter is the way, which a mark of the test gives if this does not; the others are those of the test.
    """

    def decorate(program: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(request: Any, **arguments: Any) -> None:
            __tracebackhide__ = True
            way = the_way or arguments.pop("way")
            args = [arguments[name] for name in names]
            with one_thread():
                want = program(way, *args)
            for rank, got in enumerate(world_of(way, request).run(run_on_a_rank, test, way, *args)):
                assert_equal(got, want, f"rank {rank}")

        way, *names = inspect.signature(program).parameters
        asked = ["request", *names] if the_way else ["request", way, *names]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        )
        return test

    return decorate


def run_on_a_rank(test: Callable[..., Any], *args: Any) -> Any:
    return inspect.unwrap(test)(*args)


# --- the bits of one process --------------------------------------------------------------------------


@bit_for_bit()
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (Way(1), ADAFACTOR),
        (Way(2), Kind(torch.optim.Adafactor, {"lr": 0.1, "foreach": True, "maximize": True})),
        (Way(3), Kind(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False})),
        (Way(4), FUSED),
        (Way(3, build="odd"), NADAM),
        (Way(3, build="tied"), Kind(torch.optim.Rprop, {"lr": 0.01})),
        (Way(4, "tp", "even"), Kind(Shampoo, whole=TINY)),
        (Way(2, "columns"), LISTS),
        (Way(2, "ddp", "even"), COUNTS),
        (Way(2, "zero2"), Kind(CountsInItself)),
        (Way(2, "none"), ADAGRAD),
        (Way(2, "blocks only"), SHAMPOO),
        (Way(2, "offload"), NORMED),
        (Way(4, "hybrid", "odd"), Kind(Estimates, whole=SINGLE)),
        (Way(2), Kind(ByAttribute)),
    ],
    ids=str,
)
def test_a_step_has_the_bits_of_the_class_in_one_process(way: Way, kind: Kind) -> Any:
    model, optimizer = start(way, kind)
    if kind.kind is ByAttribute:
        model.inlet.weight.factor = 0.25
    steps(model, optimizer)
    return found(model, optimizer)


@bit_for_bit()
@pytest.mark.parametrize(
    ("way", "kind", "first"),
    [
        (Way(2), ADAFACTOR, 0),
        (Way(2), SHAMPOO, 1),
        (Way(3), FUSED, 1),
        (Way(4, "hybrid"), NADAM, 0),
        (Way(2), Kind(ChangesAtTimes), 1),  # groups that change in some steps
        pytest.param(
            Way(2),
            Kind(DecaysAll),
            1,
            marks=pytest.mark.xfail(strict=True, reason="only values with gradients come back from owners"),
        ),
    ],
    ids=str,
)
def test_parameters_without_gradients_stay(way: Way, kind: Kind, first: int) -> Any:
    """Or change, where the class changes them."""
    model, optimizer = start(way, kind)
    for number in range(first, 5):

        def has_none(name: str, number: int = number) -> bool:
            return number == 0 or (number < 4 and sum(map(ord, name)) % 3 == number % 3)

        set_gradients(model, number, has_none)
        optimizer.step()
    return found(model, optimizer)


def matrices_first(model: nn.Module) -> Any:
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "lr": 0.2},
        {"params": [named["blocks.0.norm.weight"]], "lr": torch.tensor(0.05)},
    ]


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


@bit_for_bit()
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (Way(1), ADAFACTOR),
        pytest.param(Way(2), ADAGRAD, marks=NEEDS_LATE_STATE),
        (Way(3, build="even"), COUNTS),
        (Way(4, "hybrid"), NORMED),
        (Way(2), Kind(torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1})),
        pytest.param(
            Way(1), Kind(CountsInItself), marks=pytest.mark.xfail(reason="a new group makes instances anew")
        ),
    ],
    ids=str,
)
def test_groups_come_and_schedulers_change_them(way: Way, kind: Kind) -> Any:
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


@bit_for_bit(Way(3))
@pytest.mark.parametrize("is_new", [False, True])
def test_a_parameter_may_move_to_another_group(way: Way, is_new: bool) -> Any:
    model, optimizer = start(way, Kind(torch.optim.AdamW, {"lr": 0.1}), matrices_first)
    steps(model, optimizer, range(2))
    first, *others = optimizer.param_groups
    moved = first["params"].pop()
    if is_new:
        optimizer.add_param_group({"params": [moved], "lr": 0.01})
    else:
        others[0]["params"].insert(0, moved)
        others[0]["lr"] = 0.01
    steps(model, optimizer, range(2, 4))
    return found(model, optimizer)


@bit_for_bit(Way(2))
@pytest.mark.parametrize(
    ("kind", "of_blocks", "of_grads"),
    [
        (NADAM, (torch.float64, torch.float32, torch.bfloat16), None),
        (LISTS, (torch.float32,) * 3, torch.bfloat16),
        (Kind(CountsInGroup, whole=TINY), (torch.bfloat16,) * 3, torch.float32),
    ],
    ids=["mixed", "lower", "higher"],
)
def test_parameters_and_gradients_have_the_dtypes_that_they_have(
    way: Way, kind: Kind, of_blocks: tuple[torch.dtype, ...], of_grads: torch.dtype | None
) -> Any:
    """As ``keep_low_precision_grads`` leaves them; the state tells in which dtype the class has seen them."""
    model = built(way.build)
    for block, dtype in zip(model.blocks, of_blocks, strict=True):
        block.to(dtype)
    if dist.is_initialized():
        model = way.spread(model)
    optimizer = made(kind, model.parameters())
    for number in range(3):
        for param in model.parameters():
            param.grad = None
            param.grad_dtype = of_grads or param.dtype
            param.grad = placed_as(param, gradient(param, number).to(param.grad_dtype))
        optimizer.step()
    return found(model, optimizer)


@bit_for_bit(Way(2))
def test_state_of_no_parameter_is_kept(way: Way) -> Any:
    """Also in an optimizer that goes on with the state of another."""
    kind = Kind(CountsBesideParameters)
    model, optimizer = start(way, kind)
    steps(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = made(kind, model.parameters())
    optimizer.load_state_dict(state)
    steps(model, optimizer, range(3, 5))
    return parameters_of(model)


@pytest.mark.parametrize("kind", [ADAFACTOR, NORMED], ids=str)
def test_without_a_process_group_it_is_the_class(kind: Kind) -> None:
    states = []
    for make in (kind.kind, partial(WholeParameters, kind.kind, **kind.whole)):
        model = built("uneven")
        optimizer = make(model.parameters(), **kind.options)
        steps(model, optimizer)
        states.append((parameters_of(model), optimizer.state_dict()["state"]))
    assert_equal(*states, "")


@bit_for_bit(Way(2))
def test_a_look_at_the_state_changes_nothing(way: Way) -> Any:
    """A script looks at the state of all parameters, to log it: a default dict then has it, empty, everywhere."""
    model, optimizer = start(way, SHAMPOO)
    steps(model, optimizer, range(2))
    for param in model.parameters():
        assert optimizer.state[param] is not None
    steps(model, optimizer, range(2, 4))
    return found(model, optimizer)


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
@pytest.mark.parametrize(
    ("way", "kind", "scaler_of"),
    [
        (Way(1), ADAFACTOR, "torch"),
        (Way(3), SHAMPOO, "shardwise"),
        (Way(4, "hybrid"), COUNTS, "torch"),
        (Way(2, "zero1"), NORMED, "torch"),
        (Way(2, "offload"), ADAFACTOR, "shardwise"),
    ],
    ids=str,
)
def test_a_script_trains_as_in_one_process(way: Way, kind: Kind, scaler_of: str, request: Any) -> None:
    """Not to the bit: ranks add up gradients, and their norm, in another order."""
    with one_thread():
        want = script(way, kind, scaler_of)
    assert want["scale"] == 2.0**9  # one step was skipped
    assert want["seen"] == ["before", "after"] * 3
    assert_all_same(world_of(way, request).run(script, way, kind, scaler_of), want, atol=1e-9)


# --- closures -----------------------------------------------------------------------------------------


def closure_of(model: nn.Module, calls: list[int], fails: Callable[[int], bool] = lambda _: False) -> Any:
    def closure() -> Tensor:
        calls.append(len(calls))
        if fails(len(calls)):
            raise FloatingPointError("the loss is NaN")
        for param in model.parameters():
            param.grad = placed_as(param, (plain(param.detach()) - 0.3) ** 3)
        return sum((full(param) - 0.3).pow(4).sum() / 4 for param in model.parameters())

    return closure


LBFGS = Kind(torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}, SINGLE)
LBFGS_WITH_LINE_SEARCH = Kind(
    LBFGS.kind, {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}, SINGLE
)


@bit_for_bit()
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (Way(1), LBFGS),
        (Way(2), LBFGS_WITH_LINE_SEARCH),
        (Way(4, "hybrid"), LBFGS),
        (Way(3), NORMED),
        (Way(2), SHAMPOO),  # no single owner
    ],
    ids=str,
)
def test_closures_are_called_as_in_one_process(way: Way, kind: Kind) -> Any:
    model, optimizer = start(way, kind)
    calls: list[int] = []
    losses = [optimizer.step(closure_of(model, calls)) for _ in range(3)]
    return {**found(model, optimizer), "calls": len(calls), "losses": list(map(float, losses))}


def failing_closure(way: Way, kind: Kind, rank: int, at: int) -> Any:
    model, optimizer = start(way, kind)
    calls: list[int] = []
    text = refusal(optimizer.step, closure_of(model, calls, lambda n: n == at and dist.get_rank() == rank))
    return text, len(calls)


@pytest.mark.parametrize(("rank", "at"), [(0, 1), (1, 3)], ids=["owner", "other"])
def test_a_closure_that_raises_on_one_rank_raises_on_all(rank: int, at: int, world2: World) -> None:
    for text, calls in world2.run(failing_closure, Way(2), LBFGS_WITH_LINE_SEARCH, rank, at):
        assert "the loss is NaN" in text
        assert calls <= at
    world2.close()  # the owner may have been in a collective


@bit_for_bit(Way(2))
def test_after_a_closure_that_raises_everywhere_the_next_step_runs(way: Way) -> Any:
    model, optimizer = start(way, Kind(torch.optim.SGD, whole=SINGLE))
    text = refusal(optimizer.step, closure_of(model, [], lambda n: n == 1))
    assert text == "FloatingPointError: the loss is NaN"
    optimizer.step(closure_of(model, []))
    return found(model, optimizer)


# --- copies, states, files ----------------------------------------------------------------------------


@bit_for_bit()
@pytest.mark.parametrize(
    ("way", "kind"),
    [(Way(3, build="even"), LISTS), (Way(4, "hybrid"), ADAFACTOR)],
    ids=str,
)
def test_a_deep_copy_goes_on(way: Way, kind: Kind) -> Any:
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


@bit_for_bit(Way(2, "none"))
def test_a_pickle_goes_on(way: Way) -> Any:
    model, optimizer = start(way, ADAFACTOR)
    steps(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=False)
    steps(model, optimizer, range(2, 4))
    return found(model, optimizer)


@bit_for_bit()
@pytest.mark.parametrize(
    ("way", "kind"),
    [(Way(1), ADAFACTOR), (Way(1), NORMED), (Way(2), ADAGRAD), (Way(3), FUSED), (Way(3), LISTS)],
    ids=str,
)
def test_a_state_dict_goes_on_where_it_was_made(way: Way, kind: Kind) -> Any:
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


def first_half(way: Way, kind: Kind, path: str, is_plain: bool) -> Any:
    model, optimizer = begun(way, kind, is_plain)
    steps(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer).wait()
    return full_state_dict(model, optimizer, rank0_only=False)


def second_half(way: Way, kind: Kind, path: str, full_states: Any, is_plain: bool) -> Any:
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


def on(way: Way, request: Any, program: Callable[..., Any], *args: Any) -> Any:
    if way == ONE_PROCESS:
        with one_thread():
            return [program(way, *args)]
    return world_of(way, request).run(program, way, *args)


@pytest.mark.parametrize(
    ("here", "there", "kind", "plain"),
    [
        (Way(2), Way(1), NORMED, ""),
        (Way(1), Way(4, "hybrid"), FUSED, ""),
        (Way(4, "tp", "even"), Way(3, build="even"), SHAMPOO, ""),
        (Way(3, build="odd"), Way(2, build="odd"), LISTS, ""),
        (ONE_PROCESS, Way(3), ADAFACTOR, ""),
        (Way(3), ONE_PROCESS, COUNTS, ""),
        (Way(2), Way(3), ADAMW, "here"),
        (Way(4, "hybrid"), Way(1), ADAMW, "there"),
    ],
    ids=str,
)
def test_states_go_from_any_world_into_any_other(
    here: Way, there: Way, kind: Kind, plain: str, tmp_path: Path, request: Any
) -> None:
    """Where it is ``plain``, the class itself steps on shards."""
    with one_thread():
        model, optimizer = start(here, kind)
        steps(model, optimizer, range(4))
        want = found(model, optimizer)
    path = str(tmp_path / "saved")
    states, *_ = on(here, request, first_half, kind, path, plain == "here")
    for results in on(there, request, second_half, kind, path, states, plain == "there"):
        for got, source in zip(results, ("checkpoint", "full states"), strict=True):
            assert_equal(got, want, source)


def path_in(folder: Path) -> str:
    return str(folder / ("ranks" if dist.is_initialized() else "plain"))


@NEEDS_LATE_STATE
@bit_for_bit(Way(2))
def test_a_state_that_is_there_before_the_first_step_is_saved(way: Way, tmp_path: Path) -> Any:
    """Adagrad has its state from the beginning, whole or not."""
    kind = ADAGRAD
    model, optimizer = start(way, kind)
    save_checkpoint(path_in(tmp_path), model, optimizer).wait()
    optimizer = kind.kind(model.parameters(), **kind.options)
    load_checkpoint(path_in(tmp_path), model, optimizer)
    steps(model, optimizer)
    return parameters_of(model)


@bit_for_bit(Way(3))
def test_two_optimizers_share_a_model_and_a_checkpoint(way: Way, tmp_path: Path) -> Any:
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
    save_checkpoint(path_in(tmp_path), model, optimizers).wait()
    model, optimizers = begin(1)
    load_checkpoint(path_in(tmp_path), model, optimizers)
    train(model, optimizers, range(2, 4))
    return parameters_of(model)


@bit_for_bit(Way(2))
def test_the_state_may_be_offloaded(way: Way) -> Any:
    model, optimizer = start(way, SHAMPOO)
    offload_optimizer_state(optimizer, pin_memory=False)
    steps(model, optimizer)
    return found(model, optimizer)


@on_ranks(4)
def test_the_state_is_divided_by_the_ranks() -> None:
    model, optimizer = start(Way(4), FUSED)
    steps(model, optimizer)
    own = sum(each.numel() for state in optimizer.state.values() for each in state.values() if each.dim())
    total = torch.tensor(own)
    dist.all_reduce(total)
    assert total == 3 * sum(param.numel() for param in model.parameters())
    assert own < 0.3 * total


# --- failures -----------------------------------------------------------------------------------------


def failing_step(way: Way, kind: Kind) -> Any:
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


@pytest.mark.parametrize(
    ("way", "what"), [(Way(3), "a class that raises"), *((Way(2), what) for what in FAILURES)], ids=str
)
def test_a_first_step_that_fails_on_one_owner_fails_everywhere_and_changes_nothing(
    way: Way, what: str, request: Any
) -> None:
    ran = world_of(way, request).run(failing_step, way, FAILURES[what])
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


@bit_for_bit(Way(2))
def test_after_a_first_step_that_failed_the_next_one_runs(way: Way) -> Any:
    """On a single owner; plainly there was no such step."""
    is_plain = not dist.is_initialized()
    model, optimizer = start(way, Kind(Raises, {} if is_plain else {"numel": 49, "at": 1}))
    set_gradients(model, 0)
    assert is_plain or refusal(optimizer.step)
    steps(model, optimizer, range(1, 3))
    return parameters_of(model)


# --- what is refused ----------------------------------------------------------------------------------


def of(*params: Any, kind: Any = Shampoo, **options: Any) -> WholeParameters:
    return WholeParameters(kind, list(params) or Way(2).model().parameters(), **options)


def pick(usual: Any, other: Any) -> Any:
    return other if dist.get_rank() else usual


def norms_of_a_later_group() -> Any:
    model = Way(2).model()
    groups = [{"params": model.inlet.parameters()}, {"params": model.outlet.parameters(), "normed": True}]
    of(*groups, kind=NormedByGroup)


def another_order_on_a_rank() -> Any:
    params = [block.up.weight for block in Way(2, build="even").model().blocks]
    of(*pick(params, params[::-1]))


def another_group_on_a_rank() -> Any:
    model = Way(2).model()
    of(*model.inlet.parameters()).add_param_group({"params": pick(model.outlet.bias, model.outlet.weight)})


def gradients_on_one_rank() -> Any:
    model = Way(2).model()
    optimizer = of(*model.parameters())
    set_gradients(model, 0)
    model.inlet.bias.grad = pick(model.inlet.bias.grad, None)
    optimizer.step()


def a_sharded_state() -> Any:
    model = Way(2).model()
    sharded = torch.optim.AdamW(model.parameters(), foreach=True)
    steps(model, sharded, range(1))
    of(*model.parameters(), kind=torch.optim.AdamW).load_state_dict(sharded.state_dict())


def sharded_after_it() -> Any:
    model = built("uneven")
    optimizer = of(*model.parameters())
    Way(2).spread(model)
    set_gradients(model, 0)
    optimizer.step()


def gradients_that_wait() -> Any:
    model = Way(2).model()
    optimizer = of(*model.parameters())
    with shardwise.no_sync(model):
        mean_of_squares(model, random_batch(0, 4, 7)).backward()
    optimizer.step()


REFUSED: dict[str, Callable[[], Any]] = {
    "class is no optimizer": lambda: of(kind=nn.Linear),
    "instance for class": lambda: of(kind=torch.optim.SGD([torch.ones(1)], lr=0.1)),
    "itself": lambda: of(kind=WholeParameters),
    "unknown option of torch": lambda: of(kind=torch.optim.Adafactor, momentum=0.9),
    "a negative batch": lambda: of(batch_bytes=-1),
    "owners of several meshes": lambda: of(
        *Way(2, "blocks only").model().parameters(), kind=Normed, single_owner=True
    ),
    "norm without a single owner": lambda: of(kind=Normed),
    "norms of a later group": norms_of_a_later_group,
    "closure without a single owner": lambda: of(kind=torch.optim.LBFGS),
    "other options on a rank": lambda: of(lr=0.1 + dist.get_rank()),
    "another order on a rank": another_order_on_a_rank,
    "fewer on a rank": lambda: of(*list(Way(2).model().parameters())[dist.get_rank() :]),
    "another group on a rank": another_group_on_a_rank,
    "gradients on one rank": gradients_on_one_rank,
    "a sharded state": a_sharded_state,
    "sharded after it": sharded_after_it,
    "gradients that wait": gradients_that_wait,
}


@on_ranks(2)
def test_what_is_refused_and_how() -> None:
    first = [refusal(act) for act in REFUSED.values()]
    assert_expected_inline(
        "\n\n".join(f"{title.upper()}\n{wrapped(text)}" for title, text in zip(REFUSED, first, strict=True)),
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

A NEGATIVE BATCH
ValueError: WholeParameters: batch_bytes is -1; pass a number of bytes
above 0.

OWNERS OF SEVERAL MESHES
ValueError: WholeParameters: single_owner=True needs all parameters on
the same ranks, but parameter 0 of group 0 and norm.weight are not.
Give some of them to another optimizer.

NORM WITHOUT A SINGLE OWNER
ValueError: WholeParameters: with these options Normed uses all
parameters to step each of them (norms, estimates), but each owner has
only some. Pass single_owner=True, which gives all of them to one
rank.

NORMS OF A LATER GROUP
ValueError: WholeParameters: with these options NormedByGroup uses all
parameters to step each of them (norms, estimates), but each owner has
only some. Pass single_owner=True, which gives all of them to one
rank.

CLOSURE WITHOUT A SINGLE OWNER
ValueError: WholeParameters: LBFGS calls a closure within its step,
after changing all parameters. Pass single_owner=True, which gives all
of them to one rank.

OTHER OPTIONS ON A RANK
ValueError: WholeParameters: ranks disagree on the optimizer: rank 0
has 'Shampoo with lr=0.1', rank 1 has 'Shampoo with lr=1.1'. Pass the
same on all ranks.

ANOTHER ORDER ON A RANK
ValueError: WholeParameters: ranks disagree on parameters: rank 0 has
['blocks.0.up.weight', 'blocks.1.up.weight', 'blocks.2.up.weight'],
rank 1 has ['blocks.2.up.weight', 'blocks.1.up.weight',
'blocks.0.up.weight']. Pass the same on all ranks.

FEWER ON A RANK
ValueError: WholeParameters: ranks disagree on param groups: rank 0
has ['22 with lr=0.1'], rank 1 has ['21 with lr=0.1']. Pass the same
on all ranks.

ANOTHER GROUP ON A RANK
ValueError: WholeParameters.add_param_group: ranks disagree on
parameters: rank 0 has ['inlet.weight', 'inlet.bias', 'outlet.bias'],
rank 1 has ['inlet.weight', 'inlet.bias', 'outlet.weight']. Pass the
same on all ranks.

GRADIENTS ON ONE RANK
ValueError: WholeParameters.step: ranks disagree on what to leave out:
rank 0 has [], rank 1 has ['inlet.bias']. Pass the same on all ranks.

A SHARDED STATE
ValueError: inlet.weight: 'exp_avg' in its state is a DTensor, but
WholeParameters keeps state whole, on one rank. Load a full state, or
a sharded one with shardwise.load_checkpoint.

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


@on_ranks(2)
def test_random_numbers_are_the_callers() -> None:
    """After a class was tried out; devices have generators of their own."""
    seeded: list[Any] = []
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        WholeParameters(Shampoo, [nn.Parameter(torch.ones(3, 3))])
    assert same(torch.rand(1), want)
    assert seeded == []


@bit_for_bit(Way(2))
def test_a_class_with_nan_is_not_taken_for_one_that_looks_across(way: Way) -> Any:
    model, optimizer = start(way, Kind(Sign))
    steps(model, optimizer, range(1))
    return found(model, optimizer)
