"""Copies and pickles: of states, of parameters, of models, and what is refused."""

import copy
import io
from typing import Any

import pytest
import torch
from arrangements import Way
from comparing import same
from models import built, random_batch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import full_state_dict, fully_shard, register_fsdp_forward_method
from shardwise.buckets.bucket import bucket_and_index
from shardwise.comm.full_tensors import full_values


@pytest.mark.parametrize("way", [Way(1), Way(2, "columns"), Way(3, build="odd"), Way(4, "tp")], ids=str)
@on_ranks()
def test_a_state_is_copied_and_loaded_again(way: Way) -> None:
    """`copy.deepcopy(model.state_dict())` is the usual way to keep the best weights so far."""
    model = way.model()
    kept = copy.deepcopy(model.state_dict())
    before = full_values(kept, None, True)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert same(full_values(kept, None, True), before)
    model.load_state_dict(kept)
    assert same(full_state_dict(model, rank0_only=False), before)


@on_ranks(2)
def test_a_saved_state_is_loaded_and_a_shard_does_not_bring_its_neighbours_along() -> None:
    way = Way(2, build="even")
    model = way.model()
    state = model.state_dict()
    one = state["blocks.0.up.weight"]
    files = [io.BytesIO(), io.BytesIO()]
    for what, file in zip((one, state), files, strict=True):
        torch.save(what, file)
    shards = [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]
    total = sum(t.numel() * t.itemsize for t in shards)
    assert total > 2048
    assert files[0].tell() - one.to_local().numel() * 8 < 4096  # names, the mesh
    assert files[1].tell() - total < 1024 * 25
    files[1].seek(0)
    other = way.model(seed=1)
    other.load_state_dict(torch.load(files[1], weights_only=False))
    assert same(*(full_state_dict(each, rank0_only=False) for each in (other, model)))


@on_ranks(2)
def test_a_copied_or_saved_parameter_is_in_no_bucket() -> None:
    param = Way(2).model().blocks[0].up.weight
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    copies = [copy.deepcopy(param), torch.load(file, weights_only=True)]
    assert all(torch.equal(each.to_local(), param.to_local()) for each in copies)
    assert [bucket_and_index(each) is not None for each in (param, *copies)] == [True, False, False]


@pytest.mark.parametrize("way", [Way(2), Way(4, "hybrid", "tied")], ids=str)
@on_ranks()
def test_a_copy_of_a_model_shares_nothing(way: Way) -> None:
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
    name = "embed.weight" if way.build == "tied" else "inlet.weight"
    torch.testing.assert_close(averaged[name], before[name] + 0.5, rtol=0, atol=1e-12)


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


class Encoder(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self(x))


@pytest.mark.parametrize("is_compiled", [False, True])
@on_ranks(2)
def test_a_copy_calls_methods_registered_before_on_its_own_weights(is_compiled: bool) -> None:
    plain = built(Encoder, 4, 4)
    module: Any = fully_shard(torch.compile(plain, backend="eager") if is_compiled else plain)
    register_fsdp_forward_method(module, "encode")
    twin = copy.deepcopy(module)
    x = random_batch(0, 3, 4)
    before = module.encode(x).detach()
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    assert torch.equal(twin.encode(x), before)
    assert not module.encode(x).any()
