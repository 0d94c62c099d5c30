"""Hooks that the caller registers after ``fully_shard``: what they see, and when."""

import copy
from typing import Any

import pytest
import torch
from models import built, even_tower
from reference import adamw, mean_of_squares
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def uses_weights(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Replaces the output of a block by one that depends on its weights once more."""
    assert not isinstance(module.up.weight, DTensor)
    return output * module.up.weight.mean() + module.down.bias


@same_as_plain(2)
@pytest.mark.parametrize(("copies", "reshard"), [(False, None), (True, True)])
def test_forward_hooks_registered_later_see_full_parameters(
    side: Side, copies: bool, reshard: bool | None
) -> None:
    model = built(even_tower)
    model.blocks[0].register_forward_hook(uses_weights)
    side.shard_tower(model, reshard_after_forward=reshard)
    if copies and side.is_sharded:
        model = copy.deepcopy(model)
    removed = model.blocks[0].register_forward_hook(lambda *_: pytest.fail("it was removed"))
    model.blocks[0].register_forward_hook(uses_weights)
    model.blocks[1].register_forward_pre_hook(lambda module, args: uses_weights(module, args, *args))
    removed.remove()
    optimizer = adamw(model)
    side.steps(model, optimizer, range(2))
    model.blocks[2].register_forward_hook(uses_weights)
    with torch.no_grad():
        side.note_rows("evaluated", model(side.inputs(5)))
    side.steps(model, optimizer, range(2, 4))


def loss_with_penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    if isinstance(penalty, DTensor):
        penalty = penalty.full_tensor()
    return mean_of_squares(model, inputs) + 0.1 * penalty


@same_as_plain(2)
def test_a_hook_after_accumulation_sees_the_complete_gradient_last(side: Side) -> None:
    """Plainly autograd adds up both gradients first, and the hook runs once."""
    model = side.shard_tower(built(even_tower))
    weight = model.blocks[1].up.weight
    seen: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().clone()))
    side.steps(model, adamw(model), range(2), loss_with_penalty)
    assert len(seen) == (4 if side.is_sharded else 2)
    for complete in seen[1::2] if side.is_sharded else seen:
        side.note("complete", complete)
