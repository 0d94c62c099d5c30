"""Bad calls on a sharded module are refused, in words that help, and change nothing."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from meshed import outcome
from models import Tower, random_batch
from on_ranks import on_ranks
from refusals import SHARDED, assert_refused, assert_says, refusal, refusals, refused, sharded_tower, tower
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import fully_shard, register_fsdp_forward_method

sharded = partial(refused, build=sharded_tower, **SHARDED)


def calling(method: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda model: getattr(model, method)(*args, **kwargs)


def prefetching(direction: str, choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: getattr(model.blocks[0], f"set_modules_to_{direction}_prefetch")(choose(model))


def registering(name: Any, on: str = "") -> Callable[[Any], Any]:
    return lambda model: register_fsdp_forward_method(model.get_submodule(on), name)


# --- flags and factors ----------------------------------------------------------------------------

FLAGS = [
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_is_last_backward",
]
NO_BOOLS = [("no", "'no', a str"), (0, "0, an int"), (None, "None"), (torch.tensor(True), "a Tensor")]
RECURSING = {
    "set_requires_gradient_sync": True,
    "set_reshard_after_forward": True,
    "set_reshard_after_backward": True,
    "set_gradient_divide_factor": 1.0,
    "set_requires_all_reduce": True,
    "set_reduce_scatter_unused_params": True,
    "set_reduce_ignored_params": True,
}
NO_COPY = ("NotImplementedError", "Use copy.deepcopy", "state_dict()")

REFUSED = {
    **{
        f"{flag}={told}": sharded(
            calling(flag, value), f"TypeError: {flag}: ", f"is {told}; pass True or False"
        )
        for flag in FLAGS
        for value, told in NO_BOOLS
    },
    "unshard, async_op": sharded(
        calling("unshard", async_op="no"), "TypeError", "async_op", "'no'", "True or False"
    ),
    **{
        f"{setter}, recurse": sharded(
            calling(setter, value, recurse="no"), "TypeError", "recurse", "'no'", "True or False"
        )
        for setter, value in RECURSING.items()
    },
    **{
        f"factor {factor!r}": sharded(
            calling("set_gradient_divide_factor", factor),
            "Error: set_gradient_divide_factor: ",
            *(repr(factor), "a number above 0"),
        )
        for factor in ("2", 0.0, -1, True, None, float("nan"), float("inf"))
    },
    "factor 0": sharded(
        calling("set_gradient_divide_factor", 0),
        "ValueError: set_gradient_divide_factor: factor is 0; pass a number above 0: the number of ranks "
        "averages, 1.0 sums.",
    ),
    # --- what is unsharded ahead
    **{
        f"{direction} prefetch of {other!r}": sharded(
            prefetching(direction, lambda _, other=other: other),
            f"TypeError: set_modules_to_{direction}_prefetch: ",
            *("None" if other is None else type(other).__name__, "pass a list of sharded modules"),
        )
        for direction in ("forward", "backward")
        for other in (None, "blocks.1", 3, {"blocks.1": None})
    },
    **{
        f"{direction} prefetch of a module alone": sharded(
            prefetching(direction, lambda model: model.blocks[1]),
            *("TypeError", direction, "Block", "pass a list of sharded modules"),
        )
        for direction in ("forward", "backward")
    },
    **{
        f"{direction} prefetch of what is not sharded": sharded(
            prefetching(direction, lambda model: [model.blocks[1], model.blocks[1].up]),
            f"set_modules_to_{direction}_prefetch: ",
            *("[1]", "Linear", "not sharded", "Call fully_shard on it first"),
        )
        for direction in ("forward", "backward")
    },
    # --- methods that stand for forward
    **{
        f"method {name!r} of a {owner}": sharded(
            registering(name, on),
            "ValueError: register_fsdp_forward_method: ",
            *(owner, f"no method '{name}'"),
        )
        for name in ("generate", "training", "")
        for on, owner in (("", "Tower"), ("inlet", "Linear"))
    },
    **{
        f"method {told}": sharded(
            registering(name), f"TypeError: register_fsdp_forward_method: method_name is {told}"
        )
        for name, told in ((3, "3, an int"), (None, "None"), (Tower.forward, "a function"))
    },
    "method of a generator": sharded(
        lambda model: register_fsdp_forward_method(model.parameters(), "forward"),
        "TypeError: register_fsdp_forward_method: module is a generator; pass an nn.Module.",
    ),
    "method of a class": sharded(
        lambda model: register_fsdp_forward_method(Tower, "forward"),
        "TypeError: register_fsdp_forward_method: module is the class Tower; pass an nn.Module.",
    ),
    # --- copies that are none
    "copy.copy": sharded(copy.copy, *NO_COPY, "Tower"),
    "pickle": sharded(pickle.dumps, *NO_COPY, "Tower"),
    "pickle of a block": sharded(
        lambda model: pickle.dumps({"block": model.blocks[0]}), *NO_COPY, "blocks.0"
    ),
    "torch.save": sharded(lambda model: torch.save(model, io.BytesIO()), *NO_COPY, "Tower"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_and_says_what_would_do(world1: World, case: str) -> None:
    assert_refused(world1, __name__, case)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@on_ranks(1)
def test_a_module_of_another_model_cannot_be_prefetched(direction: str) -> None:
    """At the call, or at the latest when it would be prefetched, and in words."""
    model, other = sharded_tower(), sharded_tower()

    def train() -> None:
        prefetching(direction, lambda _: [other.blocks[1]])(model)
        model(random_batch(0, 4)).sum().backward()

    text = outcome(train)
    assert text.startswith(("ValueError", "RuntimeError")), text
    assert_says(text, "prefetch", "blocks.1")


# --- changes and copies ---------------------------------------------------------------------------


def change_an_unsharded_weight(model: nn.Module) -> None:
    model.unshard()
    try:
        with torch.no_grad():
            model.inlet.weight.zero_()
    finally:
        model.reshard()


def test_a_change_of_an_unsharded_weight_that_would_be_lost_is_refused(world2: World) -> None:
    assert_expected_inline(
        refusals(world2, change_an_unsharded_weight, build=sharded_tower, **SHARDED),
        """\
RuntimeError: inlet.weight: changed in place while unsharded (group
'Tower'). Inside forward a module sees an unsharded copy, which is now
freed, so the change would be lost. Change the sharded parameter
outside of forward, under torch.no_grad().""",
    )


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
def test_a_group_is_not_copied_in_part(world2: World, act: Any) -> None:
    text = refusal(world2, act, build=tower_with_blocks_in_a_list, **SHARDED)
    assert_says(
        text, "RuntimeError: copy.deepcopy", "belongs to a group", "Copy the module around all of them"
    )
