"""A load that fails half-way leaves a mark: nobody computes with, saves or exports half of a model's weights."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arrangements import Way, built
from comparing import assert_equal
from expecttest import assert_expected_inline
from meshed import refusal
from on_ranks import on_ranks
from torch import Tensor, nn

from shardwise import full_state_dict, fully_shard, load_full_state_dict, save_checkpoint
from shardwise.state import EMA, iter_full_parameters, save_safetensors

X = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(2, 7)


def breaking(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield next(iter(state.items()))
    raise OSError("the network is gone")


def half_loaded(model: nn.Module) -> None:
    """Everywhere the same, by an iterator that fails on the first rank."""
    good = built("uneven", 1).state_dict()
    source = breaking(good) if not dist.is_initialized() or dist.get_rank() == 0 else None
    assert "network is gone" in refusal(load_full_state_dict, model, source)


@on_ranks(2)
def test_half_a_model_is_of_no_use() -> None:
    model = Way(2).model()
    half_loaded(model)
    told = {
        "forward": refusal(model, X),
        "a block's forward": refusal(model.blocks[0], X),
        "a copy's forward": refusal(deepcopy(model), X),
        "full state": refusal(full_state_dict, model),
        "walk": refusal(iter_full_parameters, model),
        "files": refusal(save_safetensors, model, "never"),
        "checkpoint": refusal(save_checkpoint, "never", model),
        "average": refusal(EMA, model),
    }
    assert all("network is gone" in text for text in told.values()), told
    assert_expected_inline(
        told["forward"] + "\n" + told["full state"],
        """\
RuntimeError: Tower: the model is only partly loaded, because an earlier load failed (OSError: the network is gone). Load a complete checkpoint before the next forward.
RuntimeError: full_state_dict: the model is only partly loaded, because an earlier load failed (OSError: the network is gone): its values are a mix of old and new ones. Load a complete checkpoint first.""",
    )


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "by its own method"])
@on_ranks(2)
def test_only_all_of_its_values_cure_it(is_full: bool) -> None:
    model = Way(2).model()
    half_loaded(model)
    good = built("uneven", 1).state_dict()
    load_full_state_dict(model, {}, src_rank=None, strict=False)
    assert not can_run(model)
    for state in (dict(list(good.items())[:3]), good):
        if is_full:
            load_full_state_dict(model, state, src_rank=None, strict=state is good)
        else:
            model.load_state_dict(state, strict=state is good)
        assert can_run(model) == (state is good)
    assert_equal(full_state_dict(model, rank0_only=False), good)


def can_run(model: nn.Module) -> bool:
    try:
        model(X)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "a part"])
@on_ranks(2)
def test_models_without_groups_of_their_own_are_marked_as_well(is_plain: bool) -> None:
    """A plain model, and a part of a sharded one that is no group of its own."""
    model: Any = built("uneven")
    part = model if is_plain else model.blocks[0]
    good = {name: value.clone() for name, value in part.state_dict().items()}
    if not is_plain:
        fully_shard(model)
    assert can_run(model)
    refusal(load_full_state_dict, part, breaking(good) if dist.get_rank() == 0 else None)
    assert not can_run(model)
    if is_plain:  # by its own method as well
        model.load_state_dict({"inlet.weight": good["inlet.weight"]}, strict=False)
        assert not can_run(model)
        model.load_state_dict(good)
        assert can_run(model)
        refusal(load_full_state_dict, part, breaking(good) if dist.get_rank() == 0 else None)
        assert not can_run(model)
    load_full_state_dict(part, good, src_rank=None)
    assert can_run(model)
