"""Full optimizer state, by name and by id: FSDP1's functions on the optimizers of torch."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arrangements import Way, built
from checkpointing import Pair
from comparing import assert_equal, same
from expecttest import assert_expected_inline
from meshed import refusal
from models import random_batch
from on_ranks import on_ranks
from reference import LocalAdamW, mean_of_squares
from torch import nn

from shardwise import full_state_dict, fully_shard, load_full_state_dict
from shardwise.state import load_full_optimizer_state_dict, rekey_optimizer_state_dict

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, in another order than the model's."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return LocalAdamW(groups, lr=0.01, weight_decay=0.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def bare_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), amsgrad=True, foreach=True)


OPTIMIZERS: dict[str, Make] = {"adamw": adamw, "sgd": sgd, "bare sgd": bare_sgd, "amsgrad": amsgrad}


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


# --- out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "kind"),
    [(Way(4, "tp", "even"), "adamw"), (Way(3, build="even"), "adamw"), (Way(2, "columns"), "amsgrad")],
    ids=str,
)
@on_ranks()
def test_the_state_by_id_is_that_of_the_plain_optimizer(way: Way, kind: str) -> None:
    plain, plain_optimizer = trained_plainly(way, kind, range(2))
    want = plain_optimizer.state_dict()
    names = {id(p): n for n, p in plain.named_parameters()}
    order = [names[id(p)] for group in plain_optimizer.param_groups for p in group["params"]]
    model = way.model()
    optimizer = OPTIMIZERS[kind](model)
    for number in range(2):
        step(model, optimizer, number)
    _, named = full_state_dict(model, optimizer, rank0_only=False)
    assert_equal(full_state_dict(model, optimizer)[1], named if dist.get_rank() == 0 else {})
    assert [name for group in named["param_groups"] for name in group["params"]] == order
    numbered = rekey_optimizer_state_dict(named, model, optimizer, "id")
    assert_equal(numbered["state"], want["state"], atol=1e-10)
    assert numbered["param_groups"] == want["param_groups"]
    assert_equal(rekey_optimizer_state_dict(numbered, model, optimizer, "name"), named)


# --- in -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "kind", "keys", "everywhere"),
    [
        *((Way(4, "hybrid"), "adamw", "name", False), (Way(3, build="even"), "adamw", "id", True)),
        *((Way(4, "tp", "even"), "adamw", "name", False), (Way(2, "none"), "adamw", "id", True)),
        *((Way(2, "columns"), "sgd", "id", True), (Way(2, "zero2"), "bare sgd", "name", False)),
        (Way(2), "amsgrad", "name", True),
    ],
    ids=str,
)
@on_ranks()
def test_a_plain_run_goes_on_sharded(way: Way, kind: str, keys: str, everywhere: bool) -> None:
    plain, plain_optimizer = trained_plainly(way, kind, range(2))
    for group in plain_optimizer.param_groups:
        group["lr"] *= 0.5  # as a schedule has it
    rates = [group["lr"] for group in plain_optimizer.param_groups]
    second = copy.deepcopy(plain_optimizer.state_dict())
    model = way.model(seed=5)
    optimizer = OPTIMIZERS[kind](model)
    has_it = everywhere or dist.get_rank() == 0
    src_rank = None if everywhere else 0
    load_full_state_dict(model, plain.state_dict() if has_it else None, src_rank=src_rank)
    if keys == "name":
        second = rekey_optimizer_state_dict(second, model, optimizer, "name")
    load_full_optimizer_state_dict(model, optimizer, second if has_it else None, src_rank=src_rank)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    step(plain, plain_optimizer, 2)
    step(model, optimizer, 2)
    assert_equal(full_state_dict(model, rank0_only=False), plain.state_dict(), atol=1e-10)


@on_ranks(2)
def test_what_was_frozen_begins_anew() -> None:
    model, other = Way(2).model(), Way(2).model()
    model.outlet.requires_grad_(False)
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer, 0)
    _, state = full_state_dict(model, optimizer, rank0_only=False)
    assert not any(name.startswith("outlet") for name in state["state"])
    load_full_optimizer_state_dict(other, fresh, state, src_rank=None)
    step(other, fresh, 1)
    _, after = full_state_dict(other, fresh, rank0_only=False)
    steps = {name: int(own["step"]) for name, own in after["state"].items()}
    assert steps == {name: 1 if name.startswith("outlet") else 2 for name, _ in other.named_parameters()}


# --- another order ------------------------------------------------------------------------------------


def in_order(model: nn.Module, order: str) -> torch.optim.Optimizer:
    """As ``adamw``, with parameters and groups in another order."""
    groups = adamw(model).param_groups
    groups = [{**group, "params": group["params"][::-1]} for group in groups]
    return LocalAdamW(groups[::-1] if order == "both" else groups)


@pytest.mark.parametrize(("order", "keys"), [("both", "name"), ("reversed in groups", "id")])
@on_ranks(2)
def test_state_finds_its_parameters_in_another_order(order: str, keys: str) -> None:
    """Optimizers pair parameters by place: in a wrong order the state of one goes to another, silently."""
    want, _ = trained_plainly(Way(2), "adamw", range(3))
    way = Way(2)
    model = way.model()
    first, other = adamw(model), in_order(model, order)
    for number in range(2):
        step(model, first, number)
    weights, state = full_state_dict(model, first, rank0_only=False)
    by_id = rekey_optimizer_state_dict(state, model, other, "id")
    again = rekey_optimizer_state_dict(by_id, model, other, "name")
    assert same(rekey_optimizer_state_dict(again, model, other, "id"), by_id)
    assert same(rekey_optimizer_state_dict(again, model, first, "name"), state)
    load_full_optimizer_state_dict(model, other, by_id if keys == "id" else state if is_first() else None)
    assert same(full_state_dict(model, other, rank0_only=False)[1], again)
    step(model, other, 2)
    assert_equal(full_state_dict(model, rank0_only=False), want.state_dict(), atol=1e-10)
    plain = built("uneven")
    plain.load_state_dict(weights)
    optimizer = in_order(plain, order)
    optimizer.load_state_dict(by_id)
    step(plain, optimizer, 2)
    assert_equal(plain.state_dict(), want.state_dict(), atol=1e-10)


def test_ids_ascend_and_groups_keep_their_own_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, two = (list(each.named_parameters(prefix=name)) for name, each in model.named_children())
    saved = torch.optim.SGD([{"params": one, "lr": 0.1}, {"params": two, "lr": 0.2}])
    other = torch.optim.SGD([{"params": two[::-1], "lr": 0.3}, {"params": one, "lr": 0.4}])
    named = rekey_optimizer_state_dict(saved.state_dict(), model, saved, "name")
    groups = rekey_optimizer_state_dict(named, model, other, "id")["param_groups"]
    assert [(group["params"], group["lr"], group["param_names"]) for group in groups] == [
        ([0, 1], 0.2, ["1.bias", "1.weight"]),
        ([2, 3], 0.1, ["0.weight", "0.bias"]),
    ]


def test_rekeying_refuses_other_groups_under_its_own_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, two = (list(each.parameters()) for each in model)
    saved = torch.optim.SGD([{"params": one}, {"params": two}], lr=0.1)
    named = rekey_optimizer_state_dict(saved.state_dict(), model, saved, "name")
    crossed = torch.optim.SGD([{"params": [one[0], two[1]]}, {"params": [two[0], one[1]]}], lr=0.1)
    some = torch.optim.SGD(one, lr=0.1)
    more = rekey_optimizer_state_dict(some.state_dict(), model, some, "name")
    told = [
        refusal(rekey_optimizer_state_dict, named, model, crossed, "id"),
        refusal(rekey_optimizer_state_dict, named, model, some, "id"),
        refusal(rekey_optimizer_state_dict, more, model, saved, "id"),
        refusal(rekey_optimizer_state_dict, {"a": 1}, model, saved, "id"),
        refusal(rekey_optimizer_state_dict, named, model, "sgd", "id"),
    ]
    assert_expected_inline(
        "\n".join(told),
        """\
ValueError: rekey_optimizer_state_dict: 0.weight and 1.weight share a param group in the saved state, and are in two groups of the optimizer. Build the optimizer with the same groups as the one that was saved.
ValueError: rekey_optimizer_state_dict: the optimizer has other parameters; saved only: 1.weight, 1.bias. Nothing was loaded.
ValueError: rekey_optimizer_state_dict: the optimizer has other parameters; not saved: 1.weight, 1.bias. Nothing was loaded.
RuntimeError: rekey_optimizer_state_dict: state is a dict with 'a', where the state of an optimizer has 'state', a dict for each parameter, and 'param_groups', a list of dicts with 'params' in each.
TypeError: rekey_optimizer_state_dict: optimizer is 'sgd', a str; pass a torch.optim.Optimizer.""",
    )


# --- states of other forms ------------------------------------------------------------------------


class Keeping(torch.optim.Optimizer):
    """Descends, and keeps state as ``form`` says."""

    def __init__(self, params: Any, form: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.form = form

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(self.kept(param))
                param -= group["lr"] * param.grad

    def kept(self, param: Any) -> dict[str, Any]:
        grad = param.grad.detach().clone()
        if self.form == "local":
            return {"mine": grad.to_local()}
        if self.form == "nested local":
            return {"mine": {"deep": [grad.to_local()]}}
        if self.form == "other dtypes":
            return {"history": [grad.float()], "counts": {"seen": torch.tensor([1 << 20])}}
        return {
            "history": [grad, 2 * grad],
            "means": {"first": (grad + 1, torch.tensor(1.5))},
            "beta": (1, 2),
        }


@on_ranks(2)
def test_state_of_a_ranks_own_is_not_taken_for_the_whole() -> None:
    told = []
    for form in ("local", "nested local"):
        model = Way(2).model()
        optimizer = Keeping(model.parameters(), form)
        step(model, optimizer, 0)
        told.append(refusal(full_state_dict, model, optimizer))
    assert_expected_inline(
        "\n".join(told),
        """\
ValueError: rank 0: inlet.weight: Keeping keeps 'mine' of it as a plain tensor of shape (4, 7), but the parameter is sharded: this rank cannot tell which part of the whole it holds. shardwise.optim.WholeParameters keeps such state whole, so that it can be saved. (ranks 0, 1 failed)
ValueError: rank 0: inlet.weight: Keeping keeps 'mine' of it as a plain tensor of shape (4, 7), but the parameter is sharded: this rank cannot tell which part of the whole it holds. shardwise.optim.WholeParameters keeps such state whole, so that it can be saved. (ranks 0, 1 failed)""",
    )


@pytest.mark.parametrize("is_stepped", [False, True])
@on_ranks(2)
def test_nested_state_is_gathered_and_loaded(is_stepped: bool) -> None:
    plain, model = built("uneven"), Way(2).model()
    expected, optimizer, fresh = (Keeping(each.parameters(), "nested") for each in (plain, model, model))
    step(plain, expected, 0)
    step(model, optimizer, 0)
    names = [name for name, _ in plain.named_parameters()]
    want = {names[index]: own for index, own in expected.state_dict()["state"].items()}
    _, saved = full_state_dict(model, optimizer, rank0_only=False)
    assert_equal(saved["state"], want, atol=1e-10)
    if is_stepped:
        step(model, fresh, 1)
    load_full_optimizer_state_dict(model, fresh, saved if is_first() else None)
    assert_equal(full_state_dict(model, fresh, rank0_only=False)[1], saved, atol=1e-10)


def test_nested_state_keeps_its_dtypes() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    first, second = (Keeping(model.parameters(), "other dtypes") for _ in range(2))
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    first.step()
    _, saved = full_state_dict(model, first)
    load_full_optimizer_state_dict(model, second, saved)
    assert_equal(full_state_dict(model, second)[1], saved, atol=1e-10)


@pytest.mark.parametrize(("is_stepped", "foreach"), [(False, True), (True, False)])
@on_ranks(2)
def test_the_state_of_a_scalar_parameter(is_stepped: bool, foreach: bool) -> None:
    torch.manual_seed(0)
    plain = Pair(4, 4).double()
    optimizer = torch.optim.AdamW(plain.parameters())
    for number in range(2):
        step(plain, optimizer, number)
    torch.manual_seed(0)
    model = fully_shard(Pair(4, 4).double())
    first = torch.optim.AdamW(model.parameters(), foreach=foreach)
    step(model, first, 0)
    weights, state = full_state_dict(model, first, rank0_only=False)
    other = torch.optim.AdamW(model.parameters(), foreach=foreach)
    if is_stepped:
        step(model, other, 5)
        load_full_state_dict(model, weights, src_rank=None)
    load_full_optimizer_state_dict(model, other, state if is_first() else None)
    step(model, other, 1)
    assert_equal(full_state_dict(model, rank0_only=False), plain.state_dict(), atol=1e-10)


@on_ranks(2)
def test_a_tied_parameter_goes_by_any_of_its_names() -> None:
    model = Way(2, build="tied").model()
    optimizer = torch.optim.AdamW([model.embed.weight])
    model(torch.tensor([1, 2, 3, 4])).sum().backward()
    optimizer.step()
    _, state = full_state_dict(model, optimizer, rank0_only=False)
    (group,) = state["param_groups"]
    assert (list(state["state"]), group["params"]) == (["embed.weight"], ["embed.weight"])
    renamed = {
        "state": {"head.weight": state["state"]["embed.weight"]},
        "param_groups": [{**group, "params": ["head.weight"]}],
    }
    fresh = torch.optim.AdamW([model.embed.weight])
    load_full_optimizer_state_dict(model, fresh, renamed if is_first() else None)
    assert_equal(full_state_dict(model, fresh, rank0_only=False)[1], state)


@on_ranks(2)
def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    model = Way(2).model()
    rates = [torch.tensor(0.25), torch.tensor(0.5)]
    first, second = (torch.optim.AdamW(model.parameters(), lr=rate, foreach=False) for rate in rates)
    step(model, first, 0)
    _, state = full_state_dict(model, first, rank0_only=False)
    rates[0].fill_(9.0)  # what was saved is a copy
    load_full_optimizer_state_dict(model, second, state if is_first() else None)
    for optimizer in (state, {"param_groups": second.param_groups}):
        assert_equal(optimizer["param_groups"][0]["lr"], torch.tensor(0.25))


# --- what does not fit ----------------------------------------------------------------------------


def is_first() -> bool:
    return dist.get_rank() == 0


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    model = Way(2).model()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    _, good = full_state_dict(model, optimizer, rank0_only=False)
    other = good | {"state": {"nope.weight": good["state"]["inlet.weight"]}}
    short = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    one_group = good | {"param_groups": [{**good["param_groups"][0], "params": sorted(good["state"])}]}
    wrong = {**good["state"], "inlet.weight": {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}
    of_sgd = {
        "state": {"inlet.weight": {"momentum_buffer": torch.ones(7, 7)}},
        "param_groups": good["param_groups"],
    }
    told = []
    groups = {"param_groups": good["param_groups"]}
    malformed = (
        *({"model": 1}, None, {"state": {}, "param_groups": [{}]}, {"state": {0: None}, **groups}),
        *({"state": 3, **groups}, {"state": {0: {}}, **groups}, {"state": {}, "param_groups": None}),
    )
    for bad in (other, short, one_group, good | {"state": wrong}, of_sgd, *malformed):
        told.append(refusal(load_full_optimizer_state_dict, model, optimizer, bad if is_first() else None))
    told += [
        refusal(rekey_optimizer_state_dict, good, model, optimizer, "number"),
        refusal(full_state_dict, model, torch.optim.SGD([nn.Parameter(torch.ones(2))])),
        refusal(full_state_dict, model, "adam"),
    ]
    assert same(full_state_dict(model, optimizer, rank0_only=False)[1], good)
    assert_expected_inline(
        "\n".join(told),
        """\
ValueError: load_full_optimizer_state_dict: the optimizer has other parameters; saved only: nope.weight. Nothing was loaded.
RuntimeError: rank 0: load_full_optimizer_state_dict: the state is of an optimizer with 2 parameters, and this one has 22. Build it over the same parameters.
ValueError: load_full_optimizer_state_dict: inlet.weight and inlet.bias share a param group in the saved state, and are in two groups of the optimizer. Build the optimizer with the same groups as the one that was saved.
ValueError: load_full_optimizer_state_dict: 'exp_avg' of inlet.weight has shape (3,), but (7, 7) here; the shape of the parameter is (7, 7). So it is unknown how the ranks share this state. Take a step with the optimizer before loading, so that its state shows how.
ValueError: load_full_optimizer_state_dict: the state holds momentum_buffer, but this optimizer keeps exp_avg, exp_avg_sq, step: it is the state of another kind of optimizer.
RuntimeError: rank 0: load_full_optimizer_state_dict: state is a dict with 'model', where the state of an optimizer has 'state', a dict for each parameter, and 'param_groups', a list of dicts with 'params' in each.
RuntimeError: rank 0: load_full_optimizer_state_dict: state is a NoneType, where the state of an optimizer has 'state', a dict for each parameter, and 'param_groups', a list of dicts with 'params' in each.
RuntimeError: rank 0: load_full_optimizer_state_dict: state is a dict with 'state', 'param_groups', where the state of an optimizer has 'state', a dict for each parameter, and 'param_groups', a list of dicts with 'params' in each.
RuntimeError: rank 0: load_full_optimizer_state_dict: state is a dict with 'state', 'param_groups', where the state of an optimizer has 'state', a dict for each parameter, and 'param_groups', a list of dicts with 'params' in each.
RuntimeError: rank 0: load_full_optimizer_state_dict: state is a dict with 'state', 'param_groups', where the state of an optimizer has 'state', a dict for each parameter, and 'param_groups', a list of dicts with 'params' in each.
RuntimeError: rank 0: load_full_optimizer_state_dict: a state identifies its parameters by names or by ids, but not by both.
RuntimeError: rank 0: load_full_optimizer_state_dict: state is a dict with 'state', 'param_groups', where the state of an optimizer has 'state', a dict for each parameter, and 'param_groups', a list of dicts with 'params' in each.
ValueError: rekey_optimizer_state_dict: to is 'number'; pass 'name' or 'id'.
ValueError: SGD: parameter 0 of group 0, of shape (2,), does not belong to the model, so its state has no name in a checkpoint. Build the optimizer from model.parameters(), after the model was sharded.
TypeError: full_state_dict: optimizer is 'adam', a str; pass a torch.optim.Optimizer.""",
    )


@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_refused_on_all_before_anything_is_loaded() -> None:
    model = Way(2).model()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    _, good = full_state_dict(model, optimizer, rank0_only=False)
    wrong = {**good["state"], "inlet.weight": {"exp_avg": torch.ones(7, 1)}}
    fresh = adamw(model)
    strange = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    told = [
        refusal(load_full_optimizer_state_dict, model, fresh, each, src_rank=None)
        for each in (good if is_first() else good | {"state": wrong}, good if is_first() else {})
    ]
    for bad in (strange, "adam"):
        chosen = fresh if is_first() else bad
        told.append(refusal(load_full_optimizer_state_dict, model, chosen, good))
        told.append(refusal(full_state_dict, model, chosen))
    told.append(refusal(load_full_optimizer_state_dict, model, fresh, good, src_rank=7))
    assert not fresh.state
    assert_expected_inline(
        "\n".join([re.sub(r"this rank \(\d\)", "this rank", text) for text in told]),
        """\
ValueError: rank 1: load_full_optimizer_state_dict: 'exp_avg' of inlet.weight has shape (7, 1); the shape of the parameter is (7, 7). So it is unknown how the ranks share this state. Take a step with the optimizer before loading, so that its state shows how.
RuntimeError: rank 1: load_full_optimizer_state_dict: state is a dict with nothing in it, where the state of an optimizer has 'state', a dict for each parameter, and 'param_groups', a list of dicts with 'params' in each.
ValueError: rank 1: SGD: parameter 0 of group 0, of shape (2,), does not belong to the model, so its state has no name in a checkpoint. Build the optimizer from model.parameters(), after the model was sharded.
ValueError: rank 1: SGD: parameter 0 of group 0, of shape (2,), does not belong to the model, so its state has no name in a checkpoint. Build the optimizer from model.parameters(), after the model was sharded.
TypeError: rank 1: load_full_optimizer_state_dict: optimizer is 'adam', a str; pass a torch.optim.Optimizer.
TypeError: rank 1: full_state_dict: optimizer is 'adam', a str; pass a torch.optim.Optimizer.
ValueError: rank 7 does not hold this model: this rank shares it with [0, 1], and those with others perhaps. Name one of the ranks that were given the model, by its global rank.""",
    )


@on_ranks(2)
def test_what_was_loaded_in_inference_mode_trains() -> None:
    """A load may stand where somebody has just evaluated."""
    model, other = Way(2).model(), Way(2).model(seed=3)
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer, 0)
    first, second = full_state_dict(model, optimizer, rank0_only=False)
    with torch.inference_mode():
        load_full_state_dict(other, first, src_rank=None)
        load_full_optimizer_state_dict(other, fresh, second, src_rank=None)
    for each, each_optimizer in ((model, optimizer), (other, fresh)):
        step(each, each_optimizer, 1)
    assert_equal(full_state_dict(other, rank0_only=False), full_state_dict(model, rank0_only=False))
