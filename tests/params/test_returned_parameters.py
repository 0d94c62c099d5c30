"""Parameters that a model returns are copies, whichever of its groups they are of, and where
a rank computes on its shards themselves, changes of these are noticed.
"""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from failure_models import Chain, block
from harness import World
from models import built, even_tower
from scenario import Side, assert_same, same_as_plain
from torch import Tensor, nn


class ReturnsWeights(Chain):
    """Returns weights as they are and as views: of an inner block, of the last one, or of its own."""

    def __init__(self, whose: str) -> None:
        super().__init__(block, block, block)
        self.whose = whose

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        weight = self.outlet.weight if self.whose == "own" else self.blocks[-(self.whose == "last")].up.weight
        return y, [weight, weight.t(), weight.detach()]


def several_forwards_before_a_backward(side: Side, whose: tuple[str, ...], options: Any) -> None:
    for each in whose:
        model = side.shard_tower(built(ReturnsWeights, each), **options)
        for step in range(2):
            with torch.no_grad():
                _, first = model(side.inputs(step))
            side.note("without gradients", [weight.tolist() for weight in first])
            loss = torch.zeros((), dtype=torch.float64)
            for microbatch in range(3):
                y, weights = model(side.inputs(microbatch))
                loss = loss + y.pow(2).mean() + sum((w * w).mean() for w in weights)
                with torch.no_grad():
                    _, later = model(side.inputs(microbatch))
            loss.backward()
            side.note("after backward", [weight.tolist() for weight in (*first, *weights, *later)])
            side.note_mean("loss", loss)
            side.note_gradients(model)
            side.assert_settled(model)


@pytest.mark.parametrize(("world", "reshard"), [(1, None), (2, True), (1, False)], indirect=["world"])
def test_a_model_may_return_parameters_of_any_group(world: World, reshard: bool | None) -> None:
    """Where a block is freed before its model returns, its weights are shards by then."""
    whose = ("inner", "last", "own") if reshard is False else ("own",)
    assert_same(world, several_forwards_before_a_backward, whose, {"reshard_after_forward": reshard})


class Special(nn.Parameter):
    """A parameter of a class of its own."""


class ReturnsSpecial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Special(torch.arange(8.0))

    def forward(self, x: Tensor) -> Any:
        return x * self.weight, self.weight


@same_as_plain(2)
def test_a_parameter_of_a_class_of_its_own_is_copied_too(side: Side) -> None:
    model = side.shard(built(ReturnsSpecial), reshard_after_forward=True)
    y, weight = model(side.inputs(0))
    side.note("the weight", weight.tolist())
    ((y * y).mean() + weight.prod()).backward()
    side.note_gradients(model)


def change_between(is_seen: bool, is_sharded: bool, reshard: bool | None) -> str:
    """The weights change between forward and a backward of which no output has told, or one has."""
    side = Side(is_sharded)
    model = built(even_tower)
    side.shard_tower(model, reshard_after_forward=reshard)
    hidden: list[Tensor] = []
    model.outlet.register_forward_hook(lambda module, args, out: hidden.append(out) or out * 1)
    output = model(side.inputs(0))
    with torch.no_grad():
        model.outlet.weight.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        (output if is_seen else hidden[0]).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("reshard", [None, True, False])
def test_where_a_rank_is_alone_changed_weights_are_noticed(world1: World, reshard: bool | None) -> None:
    """They are computed with where they are stored: the gradient would be of other weights."""
    assert "modified by an inplace operation" in change_between(True, False, None)
    (seen,) = world1.run(change_between, True, True, reshard)
    (hidden,) = world1.run(change_between, False, True, reshard)
    # A group that is resharded is unsharded again, in its place, and autograd finds that by the versions.
    assert seen == hidden or (reshard and "modified by an inplace operation" in seen)
    assert_expected_inline(
        hidden,
        """outlet.weight: changed in place between the forward that used it and this backward (group 'Tower'), so that the gradient would be that of other weights. Run backward before the weights are changed, as by an optimizer's step.""",
    )
