"""Bad calls on a sharded module are refused, in words that help, and change nothing."""

import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from models import Tower, random_batch
from refusals import SHARDED, Calling, assert_says, refusal, refusals, sharded_tower, tower
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import fully_shard, register_fsdp_forward_method

# --- what is called on a sharded module -----------------------------------------------------------


FLAGS = [
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_is_last_backward",
]


@pytest.mark.parametrize(
    ("value", "told"),
    [("no", "'no', a str"), (0, "0, an int"), (None, "None"), (torch.tensor(True), "a Tensor")],
    ids=["text", "number", "None", "tensor"],
)
@pytest.mark.parametrize("setter", FLAGS)
def test_a_setter_refuses_what_is_not_a_bool(world1: World, setter: str, value: Any, told: str) -> None:
    text = refusal(world1, Calling(setter, (value,)), build=sharded_tower, **SHARDED)
    assert_says(text, f"TypeError: {setter}: ", f"is {told}; pass True or False")


@pytest.mark.parametrize(
    "call",
    [
        Calling("unshard", kwargs={"async_op": "no"}),
        Calling("set_requires_gradient_sync", (True,), {"recurse": "no"}),
        Calling("set_reshard_after_forward", (True,), {"recurse": "no"}),
        Calling("set_reshard_after_backward", (True,), {"recurse": "no"}),
        Calling("set_gradient_divide_factor", (1.0,), {"recurse": "no"}),
        Calling("set_requires_all_reduce", (True,), {"recurse": "no"}),
        Calling("set_reduce_scatter_unused_params", (True,), {"recurse": "no"}),
        Calling("set_reduce_ignored_params", (True,), {"recurse": "no"}),
    ],
    ids=lambda call: call.method,
)
def test_the_other_flags_are_checked_as_well(world1: World, call: Calling) -> None:
    text = refusal(world1, call, build=sharded_tower, **SHARDED)
    assert_says(text, "TypeError", next(iter(call.kwargs)), "'no'", "True or False")


@pytest.mark.parametrize("value", ["2", 0, 0.0, -1, True, None, float("nan"), float("inf")], ids=repr)
def test_a_divide_factor_is_a_number_above_0(world1: World, value: Any) -> None:
    call = Calling("set_gradient_divide_factor", (value,))
    text = refusal(world1, call, build=sharded_tower, **SHARDED)
    assert_says(text, "Error: set_gradient_divide_factor: ", repr(value), "a number above 0")


def test_the_words_for_a_wrong_divide_factor(world2: World) -> None:
    call = Calling("set_gradient_divide_factor", (0,))
    assert_expected_inline(
        refusals(world2, call, build=sharded_tower, **SHARDED),
        """\
ValueError: set_gradient_divide_factor: factor is 0; pass a number
above 0: the number of ranks averages, 1.0 sums.""",
    )


@dataclass(frozen=True)
class Prefetching:
    """`blocks.0` is told what to unshard ahead: a list of the modules of these names, or something else."""

    direction: str
    names: tuple[str, ...] | None = None
    other: Any = None

    @property
    def setter(self) -> str:
        return f"set_modules_to_{self.direction}_prefetch"

    def __call__(self, model: nn.Module) -> None:
        chosen = self.other if self.names is None else [model.get_submodule(name) for name in self.names]
        getattr(model.blocks[0], self.setter)(chosen)


both_directions = pytest.mark.parametrize("direction", ["forward", "backward"])


@both_directions
@pytest.mark.parametrize("other", [None, "blocks.1", 3, {"blocks.1": None}], ids=repr)
def test_what_is_no_list_cannot_be_prefetched(world1: World, direction: str, other: Any) -> None:
    call = Prefetching(direction, other=other)
    text = refusal(world1, call, build=sharded_tower, **SHARDED)
    assert_says(text, f"TypeError: {call.setter}: ", type(other).__name__, "pass a list of sharded modules")


@both_directions
def test_a_module_of_its_own_cannot_be_prefetched(world1: World, direction: str) -> None:
    text = refusal(world1, PrefetchingWithoutList(direction), build=sharded_tower, **SHARDED)
    assert_says(text, "TypeError", direction, "Block", "pass a list of sharded modules")


@dataclass(frozen=True)
class PrefetchingWithoutList:
    direction: str

    def __call__(self, model: nn.Module) -> None:
        getattr(model.blocks[0], f"set_modules_to_{self.direction}_prefetch")(model.blocks[1])


@both_directions
def test_an_unsharded_module_cannot_be_prefetched_and_is_pointed_out(world1: World, direction: str) -> None:
    call = Prefetching(direction, names=("blocks.1", "blocks.1.up"))
    text = refusal(world1, call, build=sharded_tower, **SHARDED)
    assert_says(text, f"{call.setter}: ", "Linear", "not sharded", "Call fully_shard on it first")
    assert "[1]" in text or "blocks.1.up" in text, f"which Linear? {text}"


@both_directions
def test_a_module_of_another_model_cannot_be_prefetched(world1: World, direction: str) -> None:
    """At the call, or at the latest when it would be prefetched, and in words."""
    for text in world1.run(prefetch_from_another_model, direction):
        assert text.startswith(("ValueError", "RuntimeError")), text
        assert_says(text, "prefetch", "blocks.1")


def prefetch_from_another_model(direction: str) -> str:
    model, other = sharded_tower(), sharded_tower()
    try:
        getattr(model.blocks[0], f"set_modules_to_{direction}_prefetch")([other.blocks[1]])
        model(random_batch(0, 4)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@dataclass(frozen=True)
class Registering:
    """`register_fsdp_forward_method` for the part of the model called `on`."""

    name: Any
    on: str = ""

    def __call__(self, model: nn.Module) -> None:
        register_fsdp_forward_method(model.get_submodule(self.on), self.name)


def register_for_no_module(model: nn.Module) -> None:
    register_fsdp_forward_method(model.parameters(), "forward")  # type: ignore[arg-type]


def register_for_a_class(model: nn.Module) -> None:
    register_fsdp_forward_method(Tower, "forward")  # type: ignore[arg-type]


@pytest.mark.parametrize("on", ["", "inlet"])
@pytest.mark.parametrize("name", ["generate", "training", ""])
def test_only_a_method_can_be_registered_as_a_forward(world1: World, name: str, on: str) -> None:
    text = refusal(world1, Registering(name, on), build=sharded_tower, **SHARDED)
    owner = "Linear" if on else "Tower"
    assert_says(text, "ValueError: register_fsdp_forward_method: ", owner, f"no method '{name}'")


@pytest.mark.parametrize(
    ("name", "told"),
    [(3, "3, an int"), (None, "None"), (Tower.forward, "a function")],
    ids=["int", "None", "function"],
)
def test_a_forward_method_is_registered_by_its_name(world1: World, name: Any, told: str) -> None:
    text = refusal(world1, Registering(name), build=sharded_tower, **SHARDED)
    assert_says(text, f"TypeError: register_fsdp_forward_method: method_name is {told}")


def test_a_forward_method_is_registered_for_a_module(world1: World) -> None:
    acts = [register_for_no_module, register_for_a_class]
    assert_expected_inline(
        refusals(world1, *acts, build=sharded_tower, **SHARDED),
        """\
TypeError: register_fsdp_forward_method: module is a generator; pass
an nn.Module.

TypeError: register_fsdp_forward_method: module is the class Tower;
pass an nn.Module.""",
    )


def change_an_unsharded_weight(model: nn.Module) -> None:
    model.unshard()
    try:
        with torch.no_grad():
            model.inlet.weight.zero_()
    finally:
        model.reshard()


def test_f03_a_change_of_an_unsharded_weight_that_would_be_lost_is_refused(world2: World) -> None:
    assert_expected_inline(
        refusals(world2, change_an_unsharded_weight, build=sharded_tower, **SHARDED),
        """\
RuntimeError: inlet.weight: changed in place while unsharded (group
'Tower'). Inside forward a module sees an unsharded copy, which is now
freed, so the change would be lost. Change the sharded parameter
outside of forward, under torch.no_grad().""",
    )


def copy_shallowly(model: nn.Module) -> None:
    copy.copy(model)


def pickle_it(model: nn.Module) -> None:
    pickle.dumps(model)


def pickle_a_block_of_it(model: nn.Module) -> None:
    pickle.dumps({"block": model.blocks[0]})


def save_it_whole(model: nn.Module) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("act", [copy_shallowly, pickle_it, pickle_a_block_of_it, save_it_whole])
def test_f34_a_sharded_model_is_neither_pickled_nor_copied_shallowly_and_says_so(
    world1: World, act: Any
) -> None:
    text = refusal(world1, act, build=sharded_tower, **SHARDED)
    assert_says(text, "NotImplementedError", "blocks.0" if act is pickle_a_block_of_it else "Tower")
    assert_says(text, "Use copy.deepcopy", "state_dict()")


def tower_with_blocks_in_a_list() -> nn.Module:
    model = tower()
    fully_shard([model.blocks[0], model.blocks[1]])
    return fully_shard(model)


def copy_one_of_a_list(model: nn.Module) -> None:
    copy.deepcopy(model.blocks[1])


def unshard_and_copy_one_of_a_list(model: nn.Module) -> None:
    model.blocks[1].unshard()
    try:
        copy.deepcopy(model.blocks[1])
    finally:
        is_hidden = isinstance(model.blocks[1].up.weight, DTensor)
        model.blocks[1].reshard()
        assert not is_hidden, "the failed copy has hidden what was unsharded"


@pytest.mark.parametrize("act", [copy_one_of_a_list, unshard_and_copy_one_of_a_list])
def test_f34_a_group_is_not_copied_in_part(world2: World, act: Any) -> None:
    text = refusal(world2, act, build=tower_with_blocks_in_a_list, **SHARDED)
    assert_says(
        text, "RuntimeError: copy.deepcopy", "belongs to a group", "Copy the module around all of them"
    )
