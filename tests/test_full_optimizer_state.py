"""Full optimizer state, by name and by id: FSDP1's functions on the optimizers of torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arrangements import Way, built, same
from expecttest import assert_expected_inline
from harness import World
from meshed import refusal
from models import random_batch
from reference import mean_of_squares
from torch import Tensor, nn

from shardwise import (
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    rekey_optimizer_state_dict,
)

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, in another order than the model's."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def bare_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), amsgrad=True, foreach=True)


OPTIMIZERS: dict[str, Make] = {"adamw": adamw, "sgd": sgd, "bare sgd": bare_sgd, "amsgrad": amsgrad}
WAYS = [
    *(Way(1), Way(2), Way(3, build="even"), Way(4, "hybrid"), Way(4, "tp", "even"), Way(2, "zero2")),
    *(Way(2, "none"), Way(2, "columns")),
]
CASES = [(way, "adamw") for way in WAYS] + [(Way(2), kind) for kind in OPTIMIZERS if kind != "adamw"]
over_all_cases = pytest.mark.parametrize(("way", "kind"), CASES, ids=str)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """On the same batch everywhere, so that averages over ranks are what one process has."""
    optimizer.zero_grad()
    width = next(p for p in model.parameters() if p.dim() == 2).shape[1]
    mean_of_squares(model, random_batch(number, 4, width)).backward()
    optimizer.step()


def trained_plainly(way: Way, kind: str, steps: range) -> tuple[Any, Any]:
    model = built(way.build)
    optimizer = OPTIMIZERS[kind](model)
    for number in steps:
        step(model, optimizer, number)
    return model, optimizer


def world_of(way: Way, request: pytest.FixtureRequest) -> World:
    return request.getfixturevalue(f"world{way.ranks}")


def assert_close(got: Any, want: Any) -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_close(got[key], want[key])
    elif isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    else:
        assert got == want


# --- out ------------------------------------------------------------------------------------------


def states_by_id(way: Way, kind: str) -> Any:
    model = way.model()
    optimizer = OPTIMIZERS[kind](model)
    for number in range(2):
        step(model, optimizer, number)
    _, named = full_state_dict(model, optimizer, rank0_only=False)
    first = full_state_dict(model, optimizer)[1]
    numbered = rekey_optimizer_state_dict(named, model, optimizer, "id")
    back = rekey_optimizer_state_dict(numbered, model, optimizer, "name")
    return named, numbered, first, same(back, named)


@over_all_cases
def test_the_state_by_id_is_that_of_the_plain_optimizer(
    way: Way, kind: str, request: pytest.FixtureRequest
) -> None:
    model, optimizer = trained_plainly(way, kind, range(2))
    want = optimizer.state_dict()
    names = {id(p): n for n, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    for rank, (named, numbered, first, comes_back) in enumerate(
        world_of(way, request).run(states_by_id, way, kind)
    ):
        assert_close(numbered["state"], want["state"])
        assert numbered["param_groups"] == want["param_groups"]
        assert [name for group in named["param_groups"] for name in group["params"]] == order
        assert comes_back
        assert same(first, named) if rank == 0 else first == {}


# --- in -------------------------------------------------------------------------------------------


def gone_on(way: Way, kind: str, keys: str, everywhere: bool, first: Any, second: Any) -> Any:
    """Load what another run has come to, and make the next step."""
    model = way.model(seed=5)
    optimizer = OPTIMIZERS[kind](model)
    has_it = everywhere or dist.get_rank() == 0
    src_rank = None if everywhere else 0
    load_full_state_dict(model, first if has_it else None, src_rank=src_rank)
    if keys == "name":
        second = rekey_optimizer_state_dict(second, model, optimizer, "name")
    load_full_optimizer_state_dict(model, optimizer, second if has_it else None, src_rank=src_rank)
    step(model, optimizer, 2)
    return full_state_dict(model, rank0_only=False), [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("keys", "everywhere"), [("name", False), ("id", True)])
@over_all_cases
def test_a_plain_run_goes_on_sharded(
    way: Way, kind: str, keys: str, everywhere: bool, request: pytest.FixtureRequest
) -> None:
    model, optimizer = trained_plainly(way, kind, range(2))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as a schedule has it
    first, second = model.state_dict(), optimizer.state_dict()
    first = {name: value.clone() for name, value in first.items()}
    want = plain_step(way, kind, first, copy.deepcopy(second))
    for state, rates in world_of(way, request).run(gone_on, way, kind, keys, everywhere, first, second):
        assert rates == [group["lr"] for group in optimizer.param_groups]
        assert_close(state, want)


def plain_step(way: Way, kind: str, first: Any, second: Any) -> dict[str, Tensor]:
    model = built(way.build)
    optimizer = OPTIMIZERS[kind](model)
    model.load_state_dict(first)
    optimizer.load_state_dict(second)
    step(model, optimizer, 2)
    return model.state_dict()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_sharded_run_goes_on_plainly(world2: World, kind: str) -> None:
    """What `optim_state_dict` of FSDP1 and its rekeying were for."""
    way = Way(2)
    model, _ = trained_plainly(way, kind, range(3))
    (first, numbered), _ = world2.run(saved_after_two, way, kind)
    assert_close(plain_step(way, kind, first, numbered), model.state_dict())


def saved_after_two(way: Way, kind: str) -> Any:
    model = way.model()
    optimizer = OPTIMIZERS[kind](model)
    for number in range(2):
        step(model, optimizer, number)
    first, second = full_state_dict(model, optimizer)
    return first, rekey_optimizer_state_dict(second, model, optimizer, "id") if first else None


def with_frozen(way: Way) -> Any:
    """A parameter that was frozen when it was saved has no state, and begins anew."""
    model = way.model()
    model.outlet.requires_grad_(False)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    _, state = full_state_dict(model, optimizer, rank0_only=False)
    other = way.model()
    fresh = adamw(other)
    load_full_optimizer_state_dict(other, fresh, state, src_rank=None)
    step(other, fresh, 1)
    _, after = full_state_dict(other, fresh, rank0_only=False)
    return sorted(state["state"]), {name: int(own["step"]) for name, own in after["state"].items()}


def test_what_was_frozen_begins_anew(world2: World) -> None:
    for saved, steps in world2.run(with_frozen, Way(2)):
        assert not any(name.startswith("outlet") for name in saved)
        assert {n: s for n, s in steps.items() if n.startswith("outlet")} == {
            "outlet.weight": 1,
            "outlet.bias": 1,
        }
        assert steps["inlet.weight"] == 2


# --- what does not fit ----------------------------------------------------------------------------


def refusals() -> list[str]:
    model = Way(2).model()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    _, good = full_state_dict(model, optimizer, rank0_only=False)
    other = good | {"state": {"nope.weight": good["state"]["inlet.weight"]}}
    short = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    one_group = good | {"param_groups": [{**good["param_groups"][0], "params": sorted(good["state"])}]}
    wrong = {**good["state"], "inlet.weight": {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}
    of_sgd = {"state": {"inlet.weight": {"momentum_buffer": torch.ones(7, 7)}}, **one_group_of(good)}
    told = []
    for bad in (other, short, one_group, good | {"state": wrong}, of_sgd, {"model": 1}, None):
        told.append(refusal(load_full_optimizer_state_dict, model, optimizer, bad if is_first() else None))
    told += [
        refusal(rekey_optimizer_state_dict, good, model, optimizer, "number"),
        refusal(full_state_dict, model, torch.optim.SGD([nn.Parameter(torch.ones(2))])),
        refusal(full_state_dict, model, "adam"),
    ]
    assert same(full_state_dict(model, optimizer, rank0_only=False)[1], good)
    return told


def one_group_of(good: Any) -> Any:
    return {"param_groups": good["param_groups"]}


def is_first() -> bool:
    return dist.get_rank() == 0


def test_what_does_not_fit_is_refused_on_all_ranks(world2: World) -> None:
    first, second = world2.run(refusals)
    assert first == second
    assert_expected_inline(
        "\n".join(first),
        """\
StateMismatch: load_full_optimizer_state_dict: state of nope.weight, which this optimizer does not update.
RuntimeError: load_full_optimizer_state_dict: the state is of an optimizer with 2 parameters, and this one has 22.
StateMismatch: load_full_optimizer_state_dict: its groups are of [22] parameters, and those of this optimizer of [14, 8], or of others.
StateMismatch: load_full_optimizer_state_dict: inlet.weight (exp_avg) has shape (3,) there, where this optimizer has (7, 7).
StateMismatch: load_full_optimizer_state_dict: it holds momentum_buffer, and this optimizer keeps exp_avg, exp_avg_sq, step, so that it is of another kind.
RuntimeError: load_full_optimizer_state_dict: state is a dict with 'model', where the state of an optimizer has 'state' and 'param_groups'.
RuntimeError: load_full_optimizer_state_dict: state is a NoneType, where the state of an optimizer has 'state' and 'param_groups'.
ValueError: rekey_optimizer_state_dict: to is 'number'; pass 'name' or 'id'.
ValueError: SGD: parameter 0 of group 0, of shape (2,), is none of the model's, so its state has no name in a checkpoint. Build the optimizer from model.parameters(), after the model was sharded.
TypeError: full_state_dict: optimizer is a str, not a torch.optim.Optimizer.""",
    )
