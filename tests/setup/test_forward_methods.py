"""register_fsdp_forward_method: other methods than forward unshard and free as forward does."""

import copy
from collections.abc import Iterator

import pytest
import torch
from events import counts, events_of
from meshed import refusal
from models import Block, Tower, built, random_batch, shard_tower
from on_ranks import on_ranks
from torch import Tensor, nn
from towers import ROOT, assert_close, backward, gradients, names_of_dtensors

from shardwise import register_fsdp_forward_method


class Encoder(Tower):
    def encode(self, x: Tensor, *, scale: float = 1.0, fail: bool = False) -> dict[str, Tensor]:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        if fail:
            raise LookupError("inside of encode")
        return {"features": self.outlet(x) * scale}


def plain_encoder() -> Encoder:
    return built(Encoder, seed=0)


def encode_and_go_back(model: Encoder) -> None:
    model.encode(random_batch(0, 4), scale=2.0)["features"].pow(2).mean().backward()


def both(times_registered: int = 1) -> tuple[Encoder, Encoder]:
    """A plain one with gradients, and a sharded one with its method registered."""
    plain, model = plain_encoder(), shard_tower(plain_encoder())
    encode_and_go_back(plain)
    for _ in range(times_registered):
        register_fsdp_forward_method(model, "encode")
    return plain, model


@pytest.mark.parametrize(("world", "times_registered"), [(1, 1), (2, 2), (3, 1)], indirect=["world"])
@on_ranks()
def test_a_registered_method_trains_as_forward_does(times_registered: int) -> None:
    plain, model = both(times_registered)
    for _ in range(2):
        model.zero_grad()
        events = events_of(model)
        encode_and_go_back(model)
        assert names_of_dtensors(model) == [name for name, _ in model.named_parameters()]
        assert_close(gradients(model), gradients(plain))
        assert sorted(counts(events, "reduce")) == ["Encoder", "blocks.0", "blocks.1", "blocks.2"]


@on_ranks(2)
def test_a_registered_method_of_a_copy_runs_on_the_copy() -> None:
    plain, model = both()
    twin = copy.deepcopy(model)
    encode_and_go_back(twin)
    assert_close(gradients(twin), gradients(plain))
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_after_an_exception_in_a_registered_method_the_next_call_is_sound() -> None:
    plain, model = both()
    with pytest.raises(LookupError, match="inside of encode"):
        model.encode(random_batch(0, 4), fail=True)
    assert set(ROOT) <= set(names_of_dtensors(model))
    encode_and_go_back(model)
    assert_close(gradients(model), gradients(plain))


class RunsItsBlocksByMethod(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RunByMethod(8, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x, twice = block.run(x)
            x = x + twice
        return self.outlet(x)


class RunByMethod(Block):
    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Uses its weights before, after and inside of its own forward."""
        x = self.norm(x)
        return self.down(self.up(self(x))), 2 * self(x)


@on_ranks(2)
def test_blocks_that_are_run_by_a_registered_method_train() -> None:
    plain, model = built(RunsItsBlocksByMethod, seed=0), built(RunsItsBlocksByMethod, seed=0)
    shard_tower(model)
    for block in model.blocks:
        register_fsdp_forward_method(block, "run")
    events = events_of(model)
    for each in (plain, model):
        backward(each)
    assert_close(gradients(model), gradients(plain))
    assert list(counts(events, "reduce").values()) == [1] * 4


@on_ranks(1)
def test_registering_a_method_changes_this_module_only() -> None:
    model, other, unsharded = shard_tower(plain_encoder()), shard_tower(plain_encoder()), plain_encoder()
    before = dict(vars(unsharded))
    for each in (model, unsharded):
        register_fsdp_forward_method(each, "encode")
    assert model.encode.__name__ == "encode"
    assert "encode" not in vars(other)
    assert vars(unsharded) == before
    result = model.encode(random_batch(0, 4))
    assert type(result) is dict
    assert torch.equal(model(random_batch(0, 4)), result["features"])


class Streaming(Tower):
    """Yields its results one by one, as text generation does."""

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        for row in x.split(1):
            yield self(row)


@on_ranks(1)
def test_a_generator_is_refused_as_its_body_runs_after_the_call_has_returned() -> None:
    assert refusal(register_fsdp_forward_method, shard_tower(Streaming()), "stream") == (
        "NotImplementedError: register_fsdp_forward_method: Streaming.stream is a generator or a coroutine: it "
        "returns before it has run, so its parameters would be freed too early. Register the methods it calls for "
        "each piece, or collect the pieces in a method that returns them."
    )
