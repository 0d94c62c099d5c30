"""An optimizer steps between a forward and its backward: refused as in plain PyTorch, whichever kernels it takes.

Kernels over lists of DTensors, and fused ones, leave the version counters as they are, by which autograd notices.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from meshed import refusal
from models import built, even_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from scenario import Side, same_as_plain
from torch import nn

from shardwise.optim import FlatOptimizer, Muon, WholeParameters

WAYS_TO_STEP: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def steps_before_its_backward(is_sharded: bool, how: dict[str, Any], reshard: bool | None = True) -> str:
    side = Side(is_sharded)
    model = side.shard_tower(built(even_tower), reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    side.step(model, optimizer, 0)
    loss = mean_of_squares(model, side.inputs(1))
    optimizer.step()
    return refusal(loss.backward)


@pytest.mark.parametrize("how", WAYS_TO_STEP, ids=str)
def test_a_step_before_the_backward_is_refused(world2: World, how: dict[str, Any]) -> None:
    """The weights are unsharded once more in backward, and those of the forward are gone."""
    for text in world2.run(steps_before_its_backward, True, how):
        assert "modified by an inplace operation" in text
    if "fused" not in how:  # plain tensors do not count fused steps either
        assert "modified by an inplace operation" in steps_before_its_backward(False, how)


@pytest.mark.parametrize(
    ("world", "how"), list(zip([2, 2, 1], WAYS_TO_STEP, strict=True)), indirect=["world"]
)
def test_by_default_the_weights_that_backward_begins_with_are_named(
    world: World, how: dict[str, Any]
) -> None:
    for text in world.run(steps_before_its_backward, True, how, None):
        names, found, advice = re.split(": changed in place |, so that ", text)
        root, last_block = "inlet.weight, inlet.bias, outlet.weight, outlet.bias", "blocks.2.norm.weight, "
        assert names.startswith(("RuntimeError: " + root, "RuntimeError: " + last_block))
        assert found.startswith("between the forward that used it and this backward (group '")
        assert_expected_inline(
            advice,
            """the gradient would be that of other weights. Run backward before the weights are changed, as by an optimizer's step.""",
        )


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = even_tower(), even_tower()

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return getattr(self, which)(x)


@same_as_plain(2)
@pytest.mark.parametrize("how", [{"foreach": False}, {"fused": True}], ids=str)
def test_what_was_left_out_of_the_step_still_has_its_backward(side: Side, how: dict[str, Any]) -> None:
    """One tower is stepped between the forward and the backward of the other, by the optimizer of both."""
    model = built(Two)
    side.shard(*model.first.blocks, model.first, *model.second.blocks, model.second, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    for step in range(2):
        optimizer.zero_grad()
        losses = [
            mean_of_squares(lambda x, w=which: model(x, w), side.inputs(step))
            for which in ("first", "second")
        ]
        for loss in losses:
            loss.backward()
            side.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    side.note_parameters(model)


STEPPERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.1),
    "flat": lambda params: FlatOptimizer(torch.optim.SGD(params, lr=0.1)),
    "whole": lambda params: WholeParameters(torch.optim.SGD, params, lr=0.1),
    "muon": lambda params: Muon(params, iteration_dtype=torch.float64),
}


@pytest.mark.parametrize("how", STEPPERS)
@same_as_plain(2)
def test_the_step_may_be_compiled(side: Side, how: str) -> None:
    """Of parameters that are kept unsharded: a step of the optimizer tells that they are stale."""
    model = side.shard_tower(built(even_tower), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)  # type: ignore[operator]
    optimizer = STEPPERS[how if side.is_sharded or how == "muon" else "torch"](model.parameters())
    step = torch.compile(optimizer.step, backend="eager") if side.is_sharded else optimizer.step
    for index in range(3):
        optimizer.zero_grad()
        loss = mean_of_squares(model, side.inputs(index))
        loss.backward()
        side.note_mean("loss", loss)
        step()
    side.note_parameters(model)


@pytest.mark.parametrize(
    ("how", "is_flat"), [*((how, False) for how in WAYS_TO_STEP), ({"foreach": True}, True)], ids=str
)
@on_ranks(2)
def test_a_step_changes_the_shards_as_well(how: dict[str, Any], is_flat: bool) -> None:
    side = Side(is_sharded=True)
    model = side.shard_tower(built(even_tower))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    if is_flat:
        optimizer = FlatOptimizer(optimizer)
    side.step(model, optimizer, 0)
    penalty = torch.stack([param.to_local().pow(2).sum() for param in model.parameters()]).sum()
    optimizer.step()
    text = refusal(penalty.backward)
    assert "modified inplace" in text or "modified by an inplace" in text
