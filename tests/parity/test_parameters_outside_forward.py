"""What a training loop does with parameters itself: how it fails with plain tensors, and what docs/errors.md says instead."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import World
from meshed import refusal
from models import built, even_tower, random_batch
from on_ranks import on_ranks
from reference import mean_of_squares
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise import fully_shard, shard_model, unsharded

MIXED = "got mixed torch.Tensor and DTensor"


def tower(sharded: bool) -> Any:
    model = built(even_tower, seed=3)
    return shard_model(model, wrap={type(model.blocks[0])}) if sharded else model


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def on_all(scalar: Tensor) -> Tensor:
    return scalar.full_tensor() if isinstance(scalar, DTensor) else scalar


# --- each does one thing to a model, as written in the documents --------------------------------------


def penalty(model: nn.Module) -> list[Tensor]:
    loss = mean_of_squares(model, random_batch(0, 4))
    loss = loss + 0.1 * sum(on_all(p.pow(2).sum()) for p in model.parameters())
    loss.backward()
    return [whole(param.grad) for param in model.parameters()]


def copied(model: Any) -> list[Tensor]:
    weight = model.blocks[0].up.weight
    value = torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape)
    with torch.no_grad():
        if isinstance(weight, DTensor):
            weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements))
        else:
            weight.copy_(value)
    return [whole(weight), model(random_batch(0, 4)).detach()]


def copied_while_unsharded(model: Any) -> list[Tensor]:
    is_sharded = isinstance(model.blocks[0].up.weight, DTensor)
    with unsharded(model) if is_sharded else nullcontext(), torch.no_grad():
        weight = model.blocks[0].up.weight
        weight.copy_(torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape))
    return [whole(model.blocks[0].up.weight), model(random_batch(0, 4)).detach()]


def multiplied(model: Any) -> list[Tensor]:
    weight = model.blocks[0].up.weight
    product = on_all(weight) @ torch.ones(weight.shape[1], dtype=weight.dtype)
    product.sum().backward()
    return [product.detach(), whole(weight.grad)]


def averaged(model: nn.Module) -> list[Tensor]:
    average = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mean_of_squares(model, random_batch(0, 4)).backward()
    optimizer.step()
    with torch.no_grad():
        for mean, param in zip(average, model.parameters(), strict=True):
            mean.lerp_(param, 0.1)
    return [*map(whole, average)]


@pytest.mark.parametrize("what", [penalty, copied, copied_while_unsharded, multiplied, averaged])
@on_ranks(2)
def test_what_the_documents_say_does_what_it_does_without_shards(
    what: Callable[[nn.Module], list[Tensor]],
) -> None:
    want = what(tower(sharded=False))
    for one, other in zip(what(tower(sharded=True)), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# --- and how it fails otherwise -----------------------------------------------------------------------


def refusals() -> dict[str, str]:
    model = tower(sharded=True)
    weight = model.blocks[0].up.weight
    plain = torch.ones(weight.shape, dtype=weight.dtype)
    tries: dict[str, Callable[[], Any]] = {
        "penalty": lambda: (
            mean_of_squares(model, random_batch(0, 4)) + sum(p.pow(2).sum() for p in model.parameters())
        ).backward(),
        "copy": lambda: weight.detach().copy_(plain),
        "product": lambda: weight @ plain.T,
        "average": lambda: plain.lerp_(weight.detach(), 0.1),
    }
    found = {}
    for name, act in tries.items():
        found[name] = refusal(act)
    return found


def test_mixing_plain_tensors_with_shards_is_the_error_that_the_documents_name(world2: World) -> None:
    for found in world2.run(refusals):
        assert {name: text for name, text in found.items() if MIXED not in text} == {}
    assert fully_shard.__doc__ is not None
    assert MIXED in fully_shard.__doc__
