"""What the caller changes between a forward and its backward, or while gradients wait, is not lost in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from custom_comms import ReduceScatter
from expecttest import assert_expected_inline
from harness import World
from models import even_tower, random_batch
from refusals import assert_says
from scenario import Side, same_as_plain
from torch import nn

from shardwise import fully_shard


def changed_between(change: Callable[[Any], Any]) -> str:
    """The backward of an embedding does not read its weight, so that autograd sees no change of it."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    embedding = fully_shard(model[0], reshard_after_forward=True)
    loss = fully_shard(model)(torch.tensor([1, 2])).sum()
    change(embedding)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def reduce_otherwise(embedding: Any) -> None:
    embedding.set_custom_reduce_scatter(ReduceScatter(returns_work=True))


def test_a_backward_of_parameters_that_were_made_anew_is_refused(world2: World) -> None:
    for text in world2.run(changed_between, reduce_otherwise):
        assert_says(text, "0.weight: the group '0' was changed", "Change it between steps.")


@same_as_plain(2)
def test_a_setting_does_not_lose_reductions_in_flight(side: Side) -> None:
    torch.manual_seed(1234)
    model = side.shard_tower(even_tower().double())
    if side.is_sharded:
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
    model(side.inputs(0)).pow(2).mean().backward()
    if side.is_sharded:
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        model.blocks[0].set_may_be_unused(False)
        model.unshard()
        handle.wait()
        model.reshard()
    side.note_gradients(model)


def replaced_while_gradients_wait() -> list[str]:
    torch.manual_seed(1234)
    model = fully_shard(nn.Linear(8, 8, bias=False).double())
    model.set_requires_gradient_sync(False)
    model(random_batch(0, 4)).sum().backward()
    model.weight.grad = torch.ones_like(model.weight.detach())
    model.set_requires_gradient_sync(True)
    with pytest.warns(UserWarning, match="grad") as caught:
        model(random_batch(1, 4)).sum().backward()
    return [str(each.message) for each in caught]


def test_a_gradient_that_is_replaced_while_others_wait_is_told(world2: World) -> None:
    for texts in world2.run(replaced_while_gradients_wait):
        assert_expected_inline(
            "\n".join(texts),
            """weight: .grad was replaced while gradients of backward passes without synchronisation (set_requires_gradient_sync(False)) wait to be reduced. They are dropped, as if it had been set to None. Synchronise in the last backward before replacing .grad.""",
        )
