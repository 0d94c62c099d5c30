"""FSDPModule: unsharding by hand, and what each setter does and reaches."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from events import counts, events_of
from expecttest import assert_expected_inline
from meshed import refusal
from models import random_batch
from on_ranks import on_ranks
from torch import nn
from towers import (
    GROUPS,
    ROOT,
    assert_close,
    attribute,
    backward,
    gradients,
    names_of_dtensors,
    plain_gradients,
    plain_tower,
    sharded_tower,
)

from shardwise import fully_shard

# --- unshard and reshard --------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "async_op"), [(1, False), (2, True), (3, False)], indirect=["world"])
@on_ranks()
def test_between_unshard_and_reshard_a_module_sees_its_full_parameters(async_op: bool) -> None:
    values = dict(plain_tower().named_parameters())
    model = sharded_tower()
    everything = names_of_dtensors(model)
    registered = dict(model.named_parameters())
    handle = model.unshard(async_op=async_op)
    handle.wait()
    # Its own group only: the blocks stay as they were.
    assert names_of_dtensors(model) == [name for name in values if name not in ROOT]
    for name in ROOT:
        param = attribute(model, name)
        assert torch.equal(param.detach(), values[name].detach())
        assert type(param) is nn.Parameter
        assert param.requires_grad
    assert all(registered[name] is param for name, param in model.named_parameters())
    model.reshard()
    assert everything == names_of_dtensors(model) == list(values)


@on_ranks(2)
def test_an_asynchronous_unshard_shows_its_result_after_the_wait() -> None:
    sharded = [name for name, _ in plain_tower().blocks[1].named_parameters()]
    model = sharded_tower()
    handle = model.blocks[1].unshard(async_op=True)
    views = [names_of_dtensors(model.blocks[1])]
    handle.wait()
    handle.wait()
    views.append(names_of_dtensors(model.blocks[1]))
    model.blocks[1].reshard()
    handle.wait()
    views.append(names_of_dtensors(model.blocks[1]))
    model.blocks[1].reshard()
    assert views == [sharded, [], sharded]


@pytest.mark.parametrize(("async_op", "waits"), [(False, False), (True, True), (True, False)])
@on_ranks(2)
def test_forward_uses_what_was_unsharded_by_hand(async_op: bool, waits: bool) -> None:
    model = sharded_tower()
    events = events_of(model)
    for module in (model, model.blocks[0], model.blocks[0]):
        handle = module.unshard(async_op=async_op)
        if waits:
            handle.wait()
    backward(model)
    got = gradients(model)
    forward = events[: events.index("forward blocks.1")]
    assert counts(forward, "unshard") == {"Tower": 1, "blocks.0": 1, "blocks.1": 1}
    assert events.index("unshard blocks.0") < events.index("forward Tower")
    # Once used, it is freed as ever.
    assert "free blocks.0" in forward
    assert_close(got, plain_gradients(0))


@on_ranks(2)
def test_what_was_unsharded_by_hand_stays_until_a_forward_has_used_it() -> None:
    everything = [name for name, _ in plain_tower().named_parameters()]
    model = sharded_tower()
    model.unshard()
    with torch.no_grad():
        model(random_batch(0, 4))
    freed = names_of_dtensors(model)
    model.blocks[2].unshard()
    with torch.no_grad():
        model.blocks[0](random_batch(0, 4))
    assert freed == everything
    assert names_of_dtensors(model.blocks[2]) == []


@on_ranks(2)
def test_what_the_caller_freed_between_forward_and_backward_is_unsharded_again() -> None:
    model = sharded_tower(reshard_after_forward=False)
    loss = model(random_batch(0, 4)).pow(2).mean()
    for module in (model, *model.blocks):
        module.reshard()
    assert names_of_dtensors(model) == [name for name, _ in model.named_parameters()]
    loss.backward()
    assert_close(gradients(model), plain_gradients(0))


@on_ranks(2)
def test_a_block_may_be_unsharded_while_its_parent_is_sharded() -> None:
    model = plain_tower()
    for block in model.blocks:
        fully_shard(block)
    model.blocks[1].unshard()
    fully_shard(model)
    unsharded = names_of_dtensors(model.blocks[1])
    backward(model)
    assert names_of_dtensors(model) == [name for name, _ in model.named_parameters()]
    got = gradients(model)
    assert unsharded == []
    assert_close(got, plain_gradients(0))


@on_ranks(2)
def test_modules_of_one_group_are_unsharded_together() -> None:
    names = [name for name, _ in plain_tower().blocks[0].named_parameters()]
    model = plain_tower()
    first, second, third = model.blocks
    fully_shard([first, third])
    fully_shard(model)
    third.unshard()
    assert [names_of_dtensors(block) for block in (first, second, third)] == [[], names, []]


# --- set_requires_gradient_sync -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "recurse", "reduced"),
    [
        ("", True, []),
        ("", False, ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.1", True, ["Tower", "blocks.0", "blocks.2"]),
    ],
)
@on_ranks(2)
def test_groups_told_not_to_synchronise_do_not_reduce(on: str, recurse: bool, reduced: list[str]) -> None:
    model = sharded_tower()
    model.get_submodule(on).set_requires_gradient_sync(False, recurse=recurse)
    events = events_of(model)
    backward(model)
    assert sorted(counts(events, "reduce")) == reduced


@on_ranks(2)
def test_a_setting_made_before_the_parent_is_sharded_stays() -> None:
    want = plain_gradients(0)
    model = plain_tower()
    for block in model.blocks:
        fully_shard(block)
    model.blocks[0].set_requires_gradient_sync(False)
    model.blocks[1].set_gradient_divide_factor(16.0)
    model.blocks[2].set_reshard_after_forward(False)
    model.blocks[2].set_reshard_after_backward(False)
    fully_shard(model)
    events = events_of(model)
    backward(model)
    got = gradients(model.blocks[1:])
    assert "reduce blocks.0" not in events
    assert "reduce blocks.1" in events
    assert "free blocks.1" in events
    assert "free blocks.2" not in events
    assert_close({"w": got["0.up.weight"]}, {"w": want["blocks.1.up.weight"]}, 2 / 16)
    assert_close({"w": got["1.up.weight"]}, {"w": want["blocks.2.up.weight"]})


# --- set_reshard_after_forward and _backward ------------------------------------------------------


@pytest.mark.parametrize(
    ("after_forward", "on", "recurse", "unshards"),
    [
        (True, "", True, [2, 2, 2, 2]),
        (False, "", True, [1, 1, 1, 1]),
        (True, "", False, [2, 1, 1, 1]),
        (False, "", False, [1, 2, 2, 2]),
        (True, "blocks.1", True, [1, 1, 2, 1]),
        (False, "blocks.1", True, [2, 2, 1, 2]),
    ],
)
@on_ranks(2)
def test_what_is_freed_after_forward_is_unsharded_again_for_backward(
    after_forward: bool, on: str, recurse: bool, unshards: list[int]
) -> None:
    model = sharded_tower()
    model.set_reshard_after_forward(not after_forward)
    model.get_submodule(on).set_reshard_after_forward(after_forward, recurse=recurse)
    events = events_of(model)
    backward(model)
    assert counts(events, "unshard") == dict(zip(GROUPS, unshards, strict=True))


@pytest.mark.parametrize(
    ("on", "recurse", "unsharded"),
    [("", True, []), ("", False, GROUPS[1:]), ("blocks.1", True, ["Tower", "blocks.0", "blocks.2"])],
)
@on_ranks(2)
def test_what_is_kept_after_backward_is_not_unsharded_by_the_next_forward(
    on: str, recurse: bool, unsharded: list[str]
) -> None:
    model = sharded_tower(reshard_after_forward=False)
    model.get_submodule(on).set_reshard_after_backward(False, recurse=recurse)
    backward(model)
    events = events_of(model)
    output = model(random_batch(1, 4))
    torch.testing.assert_close(output, plain_tower()(random_batch(1, 4)), rtol=0, atol=1e-10)
    unshards = counts(events, "unshard")
    model.set_reshard_after_backward(True)
    output.sum().backward()
    assert names_of_dtensors(model) == [name for name, _ in model.named_parameters()]
    assert unshards == dict.fromkeys(unsharded, 1)


# --- microbatches ---------------------------------------------------------------------------------


@on_ranks(2)
def test_microbatches_are_reduced_as_asked_for_and_divided_once() -> None:
    """Each backward that synchronises ends with its reductions, whether it is said to be the last or not."""
    model = sharded_tower()
    model.set_gradient_divide_factor(8.0)
    events = events_of(model)
    reduced = []
    for step, (syncs, is_last) in enumerate([(False, True), (True, False), (True, True)]):
        model.set_requires_gradient_sync(syncs)
        model.set_is_last_backward(is_last)
        events.clear()
        backward(model, step)
        reduced.append(counts(events, "reduced"))
    assert reduced == [{}, dict.fromkeys(GROUPS, 1), dict.fromkeys(GROUPS, 1)]
    assert_close(gradients(model), plain_gradients(0, 1, 2), 2 / 8)


# --- prefetch lists -------------------------------------------------------------------------------


@on_ranks(2)
def test_forward_unshards_ahead_what_the_caller_chose_in_the_first_step_already() -> None:
    """Also where it is chosen before the root is sharded."""
    model = plain_tower()
    for block in model.blocks:
        fully_shard(block)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    fully_shard(model)
    events = events_of(model)
    backward(model)
    at = events.index("forward blocks.0")
    assert events[:at] == [
        *("unshard Tower", "forward Tower"),
        *("unshard blocks.0", "unshard blocks.1", "unshard blocks.2"),
    ]


@on_ranks(2)
def test_an_empty_list_stops_its_own_module_from_unsharding_ahead() -> None:
    model = sharded_tower()
    backward(model)
    model.blocks[0].set_modules_to_forward_prefetch([])
    events = events_of(model)
    backward(model)
    assert events.index("unshard blocks.0") < events.index("forward Tower")
    assert events.index("unshard blocks.1") > events.index("forward blocks.0")
    assert events.index("unshard blocks.2") < events.index("forward blocks.1")
    for module in (model, *model.blocks):
        module.set_modules_to_forward_prefetch([])
        module.set_modules_to_backward_prefetch([])
    events.clear()
    backward(model)
    begun = [event.split() for event in events if event.startswith(("unshard", "forward", "backward"))]
    following = [(name, after) for (what, name), (_, after) in pairwise(begun) if what == "unshard"]
    assert len(following) >= 6
    assert all(name == after for name, after in following), events


# --- set_gradient_divide_factor -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "factor"), [(1, 2.0), (2, 1), (3, 0.5), (3, 1e-3), (2, 1e6)], indirect=["world"]
)
@on_ranks()
def test_the_sum_over_ranks_is_divided_once_by_any_factor(factor: float) -> None:
    """All ranks have the same batch: the sum is the world size times the plain gradient."""
    model = sharded_tower()
    model.set_gradient_divide_factor(factor)
    backward(model)
    assert_close(gradients(model), plain_gradients(0), dist.get_world_size() / factor)


@on_ranks(2)
def test_a_factor_concerns_what_it_was_set_on() -> None:
    model = sharded_tower()
    model.set_gradient_divide_factor(4.0)
    model.set_gradient_divide_factor(16.0, recurse=False)
    model.blocks[1].set_gradient_divide_factor(8.0)
    backward(model)
    want, got = plain_gradients(0), gradients(model)
    for name in want:
        divisor = 16.0 if name in ROOT else 8.0 if name.startswith("blocks.1") else 4.0
        assert_close({name: got[name]}, {name: want[name]}, 2 / divisor)


# --- DistributedDataParallel ----------------------------------------------------------------------


@on_ranks(2)
def test_a_sharded_module_tells_ddp_that_it_needs_no_wrapper() -> None:
    assert_expected_inline(
        refusal(nn.parallel.DistributedDataParallel, sharded_tower()),
        """TypeError: DistributedDataParallel: Tower is sharded, and this library reduces its gradients. Train the model as it is, without a wrapper. To replicate as well, shard it with strategy="hybrid" or on a mesh with a dimension to replicate over; strategy="ddp" replicates alone.""",
    )
