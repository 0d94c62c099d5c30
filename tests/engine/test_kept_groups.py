"""Groups that stay unsharded from one forward to the next: when they are unsharded again, and what that costs.

Each comparison whose answer the host reads makes it wait for all that the device has been given.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from models import built, even_tower, random_batch
from on_ranks import on_ranks
from reference import full, mean_of_squares
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwise
from shardwise import fully_shard
from shardwise.engine.module_state import sharded_module_states
from shardwise.optim import FlatOptimizer
from shardwise.policies import ShardPlacementResult

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero")


@contextmanager
def counted(model: Any) -> Iterator[dict[str, int]]:
    """Inside, what a forward costs: all-gathers, all-reduces, and answers of the device that the host reads."""
    counts = {"all-gathers": 0, "all-reduces": 0, "reads": 0}

    def counting(what: str, call: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return call(*args, **kwargs)

        return count

    def observe(event: str, name: str) -> None:
        counts["all-gathers"] += event == "unshard"

    (root,) = {module_state.root for module_state in sharded_module_states(model)}
    root.observe(observe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting("all-reduces", dist.all_reduce))
        patch.setattr(torch, "equal", counting("reads", torch.equal))
        for name in READS:
            patch.setattr(Tensor, name, counting("reads", getattr(Tensor, name)))
        yield counts
    root.observe(None)


def kept_tower() -> Any:
    torch.manual_seed(0)
    return keep(Side(is_sharded=True), even_tower())


def keep(side: Side, model: Any) -> Any:
    side.shard_tower(model, reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    return model


def unshards_of(model: Any) -> list[str]:
    unsharded: list[str] = []
    (root,) = {module_state.root for module_state in sharded_module_states(model)}
    root.observe(lambda event, name: unsharded.append(name) if event == "unshard" else None)
    return unsharded


def halve(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)


def flat_adamw(model: nn.Module) -> Any:
    return FlatOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


class ByHand:
    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())

    def step(self) -> None:
        for param in self.params:
            param.data.add_(param.grad, alpha=-0.01)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def costs_of_a_step(make_optimizer: Callable[[Any], Any], syncs: list[bool]) -> list[str]:
    """Of each forward in the third step, with a microbatch for each item of ``syncs``."""
    model = kept_tower()
    optimizer = make_optimizer(model)
    costs = []
    for step in range(3):
        for microbatch, sync in enumerate(syncs):
            model.set_requires_gradient_sync(sync)
            inputs = random_batch(4 * step + microbatch, 4, dtype=torch.float32)
            with counted(model) as counts:
                loss = mean_of_squares(model, inputs)
            costs.append(", ".join(f"{number} {what}" for what, number in counts.items()))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return costs[-len(syncs) :]


NEW_WEIGHTS, NOTHING = (f"{number} all-gathers, 0 all-reduces, 0 reads" for number in (4, 0))


def costs_on_all_ranks(world: World, make_optimizer: Callable[[Any], Any], syncs: list[bool]) -> list[str]:
    first, *others = world.run(costs_of_a_step, make_optimizer, syncs)
    assert others == [first] * (world.size - 1)
    return first


@pytest.mark.parametrize("make_optimizer", [sgd, flat_adamw])
def test_an_accumulation_asks_nobody_and_reads_nothing(world2: World, make_optimizer: Any) -> None:
    costs = costs_on_all_ranks(world2, make_optimizer, [False, False, True])
    assert costs == [NEW_WEIGHTS, NOTHING, NOTHING]


def test_after_a_synchronised_microbatch_one_answer_is_read(world2: World) -> None:
    """For the caller has gradients then, and may have changed shards in any way, on any rank."""
    costs = costs_on_all_ranks(world2, sgd, [True, True])
    assert costs == [NEW_WEIGHTS, "0 all-gathers, 1 all-reduces, 1 reads"]


def test_after_a_step_that_nobody_told_of_one_answer_is_read(world2: World) -> None:
    costs = costs_on_all_ranks(world2, ByHand, [False, True])
    assert costs == ["4 all-gathers, 1 all-reduces, 1 reads", NOTHING]


@on_ranks(2)
def test_what_no_optimizer_steps_is_not_unsharded_again() -> None:
    model = kept_tower()
    model.blocks.requires_grad_(False)
    other = nn.Linear(2, 2)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (trained, other.parameters())]
    found = []
    for step in range(4):
        unsharded = unshards_of(model)
        mean_of_squares(model, random_batch(step, 4, dtype=torch.float32)).backward()
        other(torch.ones(2)).sum().backward()
        optimizers[1 if step == 1 else 0].step()
        found.append(unsharded)
    first, second, third, fourth = found
    assert len(first) == 4
    assert (second, third, fourth) == (["Tower"], [], ["Tower"])


# --- the numbers ----------------------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("make_optimizer", [sgd, ByHand, flat_adamw])
def test_accumulation_trains_as_without_sharding(side: Side, make_optimizer: Any) -> None:
    """With a step that changes shards unseen, evaluation between steps, and weights loaded in between."""
    model = keep(side, built(even_tower))
    optimizer = make_optimizer(model)
    for step in range(4):
        optimizer.zero_grad()
        for microbatch in range(3):
            side.sync(model, microbatch == 2)
            mean_of_squares(model, side.inputs(4 * step + microbatch)).backward()
        side.note_gradients(model)
        optimizer.step()
        if step == 1:
            with torch.no_grad():
                side.note_mean("evaluation", mean_of_squares(model, side.inputs(40)))
        if step == 2:  # the unsharded groups are there, and an optimizer has stepped
            halve(model)
    side.note_parameters(model)


def load_between_microbatches(side: Side, model: Any) -> None:
    """All ranks load halves of the weights of ``model``, an even tower, and train on."""
    halves = {name: value.detach() * 0.5 for name, value in built(even_tower).named_parameters()}
    side.sync(model, False)
    mean_of_squares(model, side.inputs(0)).backward()
    if side.is_sharded:
        shardwise.load_full_state_dict(model, halves, src_rank=None)
    else:
        model.load_state_dict(halves)
    side.sync(model, True)
    mean_of_squares(model, side.inputs(1)).backward()
    side.note_gradients(model)


@same_as_plain(2)
def test_weights_may_be_loaded_between_microbatches(side: Side) -> None:
    """All ranks load: what they have kept unsharded is stale on all of them."""
    load_between_microbatches(side, keep(side, built(even_tower)))


@torch.no_grad()
def double_each(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(2)


@torch.no_grad()
def double_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(2)


@same_as_plain(2)
@pytest.mark.parametrize("change", [halve, double_each, double_data])
def test_all_ranks_may_change_weights_between_two_forwards(
    side: Side, change: Callable[[nn.Module], None]
) -> None:
    """The loss of the first forward has no backward."""
    model = built(even_tower)
    side.shard_tower(model, reshard_after_forward=False)
    side.note_mean("before", mean_of_squares(model, side.inputs(0)))
    change(model)
    mean_of_squares(model, side.inputs(1)).backward()
    side.note_gradients(model)


@on_ranks(2)
def test_a_change_on_one_of_the_meshes_of_a_group_counts() -> None:
    torch.manual_seed(0)
    mesh, other = (init_device_mesh("cpu", (2,)) for _ in range(2))

    def place(param: Tensor) -> Any:
        return ShardPlacementResult(Shard(0), other) if param.dim() == 1 else None

    model: Any = fully_shard(
        nn.Linear(4, 4), mesh=mesh, reshard_after_forward=False, shard_placement_fn=place
    )
    inputs = torch.ones(1, 4)
    model(inputs)
    model.bias.data.add_(1)
    assert len(sharded_module_states(model)[0].group.buckets) == 2
    expected = nn.functional.linear(inputs, full(model.weight), full(model.bias))
    torch.testing.assert_close(model(inputs).detach(), expected)


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_counted", "says"), [(True, "blocks.1.up.weight has changed"), (False, "its parameters have changed")]
)
@on_ranks(2)
def test_a_change_between_unsynchronised_microbatches_is_refused(is_counted: bool, says: str) -> None:
    """And not used in part: the forward after that unshards what was changed."""
    model = kept_tower()
    model.set_requires_gradient_sync(False)
    inputs = random_batch(0, 4, dtype=torch.float32)
    model(inputs).sum().backward()
    weight = model.blocks[1].up.weight.detach() if is_counted else model.blocks[1].up.weight.data
    weight.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        model(inputs)
    unsharded = unshards_of(model)
    model(inputs)
    assert f"blocks.1: {says} between microbatches" in str(caught.value)
    assert unsharded == ["blocks.1"]


@on_ranks(2)
def test_weights_that_are_written_with_equal_contents_are_kept() -> None:
    model = kept_tower()
    model.set_requires_gradient_sync(False)
    inputs = random_batch(0, 4, dtype=torch.float32)
    model(inputs).sum().backward()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    unsharded = unshards_of(model)
    model(inputs).sum().backward()
    assert unsharded == []
