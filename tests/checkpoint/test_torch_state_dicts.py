"""``get_state_dict`` and ``set_state_dict`` of torch.distributed.checkpoint in all their options, on our shards.

A run is interrupted, its states go through them into another model, and what it does next is what plain PyTorch
does in one process without interruption. docs/guides/checkpoints.md has the table.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import HALF, Net, NoScalars, Run, Tied, everything, uninterrupted
from comparing import assert_all_same, assert_equal
from harness import World
from meshed import Layout
from on_ranks import on_ranks
from reference import full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from shardwise import full_state_dict, load_full_state_dict
from shardwise.state import load_full_optimizer_state_dict

ATOL = 1e-12
Options = Mapping[str, bool]


@dataclass(frozen=True)
class Way:
    """How states are taken and given: by one call for model and optimizer, or by one for each."""

    read: Options
    write: Options
    apart: bool = False

    def get(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        options = StateDictOptions(**self.read)
        if not self.apart:
            return get_state_dict(model, optimizer, options=options)
        return (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )

    def set(self, model: nn.Module, optimizer: torch.optim.Optimizer, states: tuple[Any, Any]) -> None:
        options = StateDictOptions(**self.write)
        if self.apart:
            set_model_state_dict(model, states[0], options=options)
            set_optimizer_state_dict(model, optimizer, states[1], options=options)
        else:
            set_state_dict(
                model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
            )


FULL = {"full_state_dict": True}
OFFLOAD = {"cpu_offload": True}
FLAT = {"flatten_optimizer_state_dict": True}
FROM_RANK_0 = {"broadcast_from_rank0": True}
WAYS = {
    "sharded": Way({}, {}),
    "sharded, on the host": Way(OFFLOAD, OFFLOAD),
    "sharded, flat": Way(FLAT, FLAT),
    "sharded, flat, on the host": Way(FLAT | OFFLOAD, FLAT | OFFLOAD),
    "sharded, apart": Way({}, {}, apart=True),
    "full": Way(FULL, FULL),
    "full, from rank 0": Way(FULL, FULL | FROM_RANK_0),
    "full, on rank 0 alone, apart": Way(FULL | OFFLOAD, FULL | OFFLOAD | FROM_RANK_0, apart=True),
}


RUNS = {
    "frozen": Run(NoScalars),
    "scalars": Run(Net),
    "tied": Run(Tied),
    "hybrid": Run(NoScalars, layout=Layout((2, 2))),
}


def half(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    optimizer.zero_grad()
    return model, optimizer


def goes_on(run: Run, way: Way) -> tuple[set[str], tuple[Any, Any], dict[str, Any]]:
    """The kinds of the tensors in the states that have a shape; full states; and what the second half ends with."""
    states = way.get(*half(run))
    kinds = {type(each).__name__ for each in tensors_in(states) if each.dim() > 0}
    assert all(each.device.type == "cpu" for each in tensors_in(states))
    full_states = states if "full_state_dict" in way.read else ({}, {})
    full_states = copy.deepcopy(full_states)
    model, optimizer = run.start(2)
    way.set(model, optimizer, states)
    run.train(model, optimizer, HALF)
    return kinds, full_states, everything(model, optimizer)


def tensors_in(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@pytest.mark.parametrize(
    ("kind", "world", "way"),
    [
        ("scalars", 2, "sharded"),
        ("tied", 2, "sharded, on the host"),
        ("scalars", 2, "sharded, flat"),
        ("tied", 2, "sharded, flat, on the host"),
        ("hybrid", 4, "sharded, apart"),
        ("frozen", 2, "full"),
        ("tied", 2, "full, from rank 0"),
        ("frozen", 2, "full, on rank 0 alone, apart"),
    ],
    indirect=["world"],
)
def test_a_run_goes_on(world: World, kind: str, way: str) -> None:
    run = RUNS[kind]
    found = world.run(goes_on, run, WAYS[way])
    assert_all_same([got for *_, got in found], uninterrupted(replace(run, layout=None)), ATOL)
    if way.startswith("full"):  # plain models give and take the same
        assert_equal(found[0][1], WAYS[way].get(*half(run)), atol=ATOL)
    tensors = {"Tensor"} if way.startswith("full") else {"DTensor"}
    buffers = set() if kind == "tied" else {"Tensor"}
    for rank, (kinds, *_) in enumerate(found):
        assert kinds == (set() if "alone" in way and rank > 0 else tensors | buffers)


# --- options of one side --------------------------------------------------------------------------


@on_ranks(2)
def test_frozen_parameters_may_be_left_out() -> None:
    run = Run(Net)
    model, optimizer = half(run)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    states = get_state_dict(model, optimizer, options=options)
    left_out = model.state_dict().keys() - states[0].keys()
    fresh, fresh_optimizer = run.start(2)
    frozen = everything(fresh, fresh_optimizer)["inlet.bias"]
    missing = set_model_state_dict(fresh, states[0], options=options).missing_keys
    set_optimizer_state_dict(fresh, fresh_optimizer, states[1], options=options)
    assert set(missing) == left_out
    with torch.no_grad():
        assert torch.equal(everything(fresh, fresh_optimizer)["inlet.bias"], frozen)
        fresh.inlet.bias.copy_(model.inlet.bias)
    run.train(fresh, fresh_optimizer, HALF)
    got = everything(fresh, fresh_optimizer)
    assert left_out == {"inlet.bias"}
    assert_all_same([got], uninterrupted(Run(Net)), ATOL)


@pytest.mark.parametrize("keeps_prefixes", [True, False])
@on_ranks(2)
def test_states_of_a_block(keeps_prefixes: bool) -> None:
    model, _ = half(Run(Net))
    block = model.blocks[1]
    options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=keeps_prefixes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about submodules
        state = get_model_state_dict(model, submodules={block}, options=options)
    prefix = "blocks.1." if keeps_prefixes else ""
    assert_equal(state, {prefix + name: value.full_tensor() for name, value in block.state_dict().items()})


LACKING = "blocks.0.up.weight"


def set_without_a_key(options: dict[str, bool]) -> tuple[str, list[str]]:
    """What a strict call says, and the keys that one which is not returns as missing."""
    model, other = [Run(Net).start(seed)[0] for seed in (1, 2)]
    state = get_model_state_dict(model, options=StateDictOptions(**options))
    del state[LACKING]
    text = ""
    try:
        set_model_state_dict(other, dict(state), options=StateDictOptions(**options))
    except RuntimeError as error:
        text = str(error)
    found = set_model_state_dict(other, dict(state), options=StateDictOptions(**options, strict=False))
    values = [{name: full(param) for name, param in each.named_parameters()} for each in (model, other)]
    assert {name for name in values[0] if not torch.equal(values[0][name], values[1][name])} == {LACKING}
    return text, found.missing_keys


@pytest.mark.parametrize("options", [{}, FULL | FROM_RANK_0], ids=["sharded", "from rank 0"])
def test_strict_refuses_what_is_missing_by_name(world2: World, options: dict[str, bool]) -> None:
    for text, missing in world2.run(set_without_a_key, options):
        assert f'Missing key(s) in state_dict: "{LACKING}"' in text
        assert missing == ([] if options else [LACKING])  # torch fills it with what is there


# --- files ----------------------------------------------------------------------------------------


class App(Stateful):
    """What torch's recipe has a training script save."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = state["step"]


def saves(run: Run, asynchronously: bool) -> None:
    """Steps follow while the writer runs: it must have copies by then."""
    model, optimizer = half(run)
    app = App(model, optimizer)
    app.step = HALF
    if asynchronously:
        group = dist.new_group(backend="gloo")  # the writer's own: training goes on in the others
        saving = dcp.async_save({"app": app}, checkpoint_id=run.path, process_group=group)
        run.train(model, optimizer, HALF)
        saving.result()
        dist.destroy_process_group(group)
    else:
        dcp.save({"app": app}, checkpoint_id=run.path)


def loads(run: Run) -> dict[str, Any]:
    app = App(*run.start(2))
    dcp.load({"app": app}, checkpoint_id=run.path)
    run.train(app.model, app.optimizer, app.step)
    return everything(app.model, app.optimizer)


@pytest.mark.parametrize("asynchronously", [False, True])
def test_stateful_objects_change_the_number_of_ranks(
    world2: World, world3: World, tmp_path: Path, asynchronously: bool
) -> None:
    run = replace(Run(Net), path=str(tmp_path / "saved"))
    first, second = (world3, world2) if asynchronously else (world2, world3)
    first.run(saves, run, asynchronously)
    assert_all_same(second.run(loads, run), uninterrupted(run), ATOL)


# --- what works where torch fails -----------------------------------------------------------------


@pytest.mark.parametrize(("build", "reader"), [(Net, "ours"), (Tied, "ours"), (Net, "torch's")])
@on_ranks(2)
def test_our_loaders_take_full_states_of_either(build: type[nn.Module], reader: str) -> None:
    run = Run(build)
    model, optimizer = half(run)
    if reader == "ours":
        states = full_state_dict(model, optimizer)
    else:
        states = get_state_dict(model, optimizer, options=StateDictOptions(**FULL, **OFFLOAD))
    model_state, optimizer_state = states if dist.get_rank() == 0 else (None, None)
    fresh, fresh_optimizer = run.start(2)
    load_full_state_dict(fresh, model_state)
    load_full_optimizer_state_dict(fresh, fresh_optimizer, optimizer_state)
    run.train(fresh, fresh_optimizer, HALF)
    assert_all_same([everything(fresh, fresh_optimizer)], uninterrupted(run), ATOL)
