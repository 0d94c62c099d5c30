"""Copies and pickles: of states, of parameters, of models, and what is refused."""

import copy
import io

import pytest
import torch
from arrangements import Way, world_of
from comparing import same
from on_ranks import on_ranks
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import full_state_dict
from shardwise.buckets.bucket import bucket_and_index
from shardwise.comm.full_tensors import full_values

WAYS = [
    Way(1),
    Way(3, build="odd"),
    Way(4, "hybrid", "tied"),
    Way(4, "tp"),
    Way(2, "zero2"),
    Way(2, "columns"),
]


def copied_state(way: Way) -> bool:
    """`copy.deepcopy(model.state_dict())` is the usual way to keep the best weights so far."""
    model = way.model()
    kept = copy.deepcopy(model.state_dict())
    before = full_values(kept, None, True)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert same(full_values(kept, None, True), before)
    model.load_state_dict(kept)
    return same(full_state_dict(model, rank0_only=False), before)


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_state_is_copied_and_loaded_again(way: Way, request: pytest.FixtureRequest) -> None:
    assert all(world_of(way, request).run(copied_state, way))


@on_ranks(2)
def test_a_saved_shard_does_not_bring_its_neighbours_along() -> None:
    model = Way(2, build="even").model()
    state = model.state_dict()
    sizes = []
    one = state["blocks.0.up.weight"]
    for what in (one, state):
        file = io.BytesIO()
        torch.save(what, file)
        sizes.append(file.tell())
    shards = [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]
    total = sum(t.numel() * t.itemsize for t in shards)
    assert sizes[0] - one.to_local().numel() * 8 < 4096  # names, the mesh
    assert sizes[1] - total < 1024 * 25
    assert total > 2048


@on_ranks(2)
def test_a_state_travels_by_pickle() -> None:
    model = Way(2).model()
    before = full_state_dict(model, rank0_only=False)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Way(2).model(seed=1)
    other.load_state_dict(torch.load(file, weights_only=False))
    assert same(full_state_dict(other, rank0_only=False), before)


@on_ranks(2)
def test_a_copied_or_saved_parameter_is_in_no_bucket() -> None:
    param = Way(2).model().blocks[0].up.weight
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    copies = [copy.deepcopy(param), torch.load(file, weights_only=True)]
    assert all(torch.equal(each.to_local(), param.to_local()) for each in copies)
    assert [bucket_and_index(each) is not None for each in (param, *copies)] == [True, False, False]


def copied_model(way: Way) -> bool:
    model = way.model()
    before = full_state_dict(model, rank0_only=False)
    twin = copy.deepcopy(model)
    ema = shardwise.state.EMA(twin, 0.5)
    with torch.no_grad():
        for param in twin.parameters():
            if param.is_floating_point():
                param.add_(1)
    ema.update()
    with ema.swap():
        averaged = full_state_dict(twin, rank0_only=False)
    assert same(full_state_dict(model, rank0_only=False), before)
    want = before["inlet.weight"] + 0.5 if "inlet.weight" in before else before["embed.weight"] + 0.5
    name = "inlet.weight" if "inlet.weight" in before else "embed.weight"
    return torch.allclose(averaged[name], want, rtol=0, atol=1e-12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", [Way(2), Way(4, "hybrid", "tied"), Way(2, "zero2")], ids=str)
def test_a_copy_of_a_model_shares_nothing(way: Way, request: pytest.FixtureRequest) -> None:
    assert all(world_of(way, request).run(copied_model, way))


@on_ranks(2)
def test_a_copy_of_an_unsharded_model_is_sharded_and_the_original_stays_as_it_was() -> None:
    model = Way(2).model()
    model.unshard()
    shown = type(model.inlet.weight)
    twin = copy.deepcopy(model)
    assert not isinstance(model.inlet.weight, DTensor)
    assert type(model.inlet.weight) is shown
    assert isinstance(twin.inlet.weight, DTensor)
    assert "weight" not in vars(twin.inlet)
    model.reshard()
