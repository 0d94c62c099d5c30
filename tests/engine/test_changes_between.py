"""What the caller changes between a forward and its backward, or while gradients wait, is not lost in silence."""

from functools import partial

import pytest
import torch
from custom_comms import ReduceScatter
from expecttest import assert_expected_inline
from meshed import refusal
from models import built, even_tower, random_batch, shard_tower
from on_ranks import on_ranks
from refusals import assert_says
from scenario import Side, same_as_plain
from torch import nn

from shardwise import fully_shard


@on_ranks(2)
def test_a_backward_of_parameters_that_were_made_anew_is_refused() -> None:
    """The backward of an embedding does not read its weight, so that autograd sees no change of it."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    embedding = fully_shard(model[0], reshard_after_forward=True)
    loss = fully_shard(model)(torch.tensor([1, 2])).sum()
    embedding.set_custom_reduce_scatter(ReduceScatter(returns_work=True))
    assert_says(refusal(loss.backward), "0.weight: the group '0' was changed", "Change it between steps.")


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


@on_ranks(2)
def test_communication_is_not_changed_while_gradients_wait() -> None:
    model = fully_shard(nn.Linear(8, 8).double())
    model.set_requires_gradient_sync(False)
    model(random_batch(0, 4)).sum().backward()
    change = partial(model.set_custom_reduce_scatter, ReduceScatter(returns_work=True))
    assert_says(refusal(change), "communication cannot be changed", "gradients deferred", "between steps")
    model.set_requires_gradient_sync(True)
    model(random_batch(1, 4)).sum().backward()
    change()


@on_ranks(1)
def test_a_frozen_weight_that_changes_before_its_backward_is_told_where_it_is_not_copied() -> None:
    model = built(even_tower)
    model.blocks[1].requires_grad_(False)
    shard_tower(model, reshard_after_forward=False)
    loss = model(random_batch(0, 4)).sum()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    assert_says(refusal(loss.backward), "RuntimeError: blocks.1.up.weight", "changed")


@on_ranks(2)
def test_a_model_that_is_moved_to_the_meta_device_cannot_run() -> None:
    model = shard_tower(built(even_tower))
    model(random_batch(0, 4)).sum().backward()
    model.to("meta")
    assert refusal(model, random_batch(0, 4)).startswith("RuntimeError: Cannot run forward: ")


@on_ranks(2)
def test_a_gradient_that_is_replaced_while_others_wait_is_told() -> None:
    torch.manual_seed(1234)
    model = fully_shard(nn.Linear(8, 8, bias=False).double())
    model.set_requires_gradient_sync(False)
    model(random_batch(0, 4)).sum().backward()
    model.weight.grad = torch.ones_like(model.weight.detach())
    model.set_requires_gradient_sync(True)
    with pytest.warns(UserWarning, match="grad") as caught:
        model(random_batch(1, 4)).sum().backward()
    assert_expected_inline(
        "\n".join([str(each.message) for each in caught]),
        """weight: .grad was replaced while gradients of backward passes without synchronisation (set_requires_gradient_sync(False)) wait to be reduced. They are dropped, as if it had been set to None. Synchronise in the last backward before replacing .grad.""",
    )
