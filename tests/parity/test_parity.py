"""Training under sharding equals plain training on the global batch, wherever shards lie and whatever is freed.

In float64 to 1e-10: only the order of additions differs. In float32 to its rounding over a few
AdamW steps, which divide by the root of a small number.
"""

from typing import Any

import pytest
import torch
from harness import World
from meshed import Layout, train_on
from models import (
    even_tower,
    float32_batch,
    language_model,
    next_token_loss,
    odd_model,
    random_batch,
    token_batch,
    uneven_batch,
    uneven_tower,
)
from on_ranks import on_ranks
from reference import Recipe, assert_same_record, assert_same_training, plain_run, shard
from scenario import Side
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardwise import CPUOffloadPolicy

LINES = {size: Layout((size,), ("shard",), ("shard",)) for size in (1, 2, 3, 4)}
SQUARE = Layout((2, 2))
REPLICAS, SHARDS = Layout((2, 1)), Layout((1, 2))  # one of the dimensions is trivial


class Convolutions(nn.Module):
    """Weights of three and four dimensions, none of which divides by 2 and 4 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(1, 8, (3, 5), padding=(1, 2))
        self.blocks = nn.ModuleList([nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 4, (2, 4), padding=1)])
        self.line = nn.Conv1d(4, 8, 4, padding=2)
        self.outlet = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x.view(-1, 1, 2, x.shape[1] // 2))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(self.line(x.flatten(2)).mean(-1))


EVEN = Recipe(even_tower, random_batch, steps=2)
UNEVEN = Recipe(uneven_tower, uneven_batch, steps=2)
ODD = Recipe(odd_model, random_batch, steps=2)
TEXT = Recipe(language_model, token_batch, loss=next_token_loss, steps=2)
CONVOLUTIONS = Recipe(Convolutions, random_batch, steps=2)


def second(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def last(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim else None


def before_last(param: nn.Parameter) -> Shard | None:
    return Shard(-2) if param.ndim > 1 else None


def largest(param: nn.Parameter) -> Shard | None:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim])) if param.ndim else None


def smallest(param: nn.Parameter) -> Shard | None:
    return Shard(min(range(param.ndim), key=lambda dim: param.shape[dim])) if param.ndim else None


FREED, KEPT = {"reshard_after_forward": True}, {"reshard_after_forward": False}
CASES: dict[str, tuple[Layout, Recipe, dict[str, Any]]] = {
    "1, text, last dim, freed": (LINES[1], TEXT, {"shard_placement_fn": last, **FREED}),
    "2, text, kept": (LINES[2], TEXT, KEPT),
    "2, even, smallest dim": (LINES[2], EVEN, {"shard_placement_fn": smallest}),
    "2, convolutions, second dim, kept": (LINES[2], CONVOLUTIONS, {"shard_placement_fn": second, **KEPT}),
    "2, text, on the host": (LINES[2], TEXT, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "3, odd, largest dim": (LINES[3], ODD, {"shard_placement_fn": largest}),
    "3, text, last dim but one, freed": (LINES[3], TEXT, {"shard_placement_fn": before_last, **FREED}),
    "3, uneven, pinned on the host": (
        LINES[3],
        UNEVEN,
        {"offload_policy": CPUOffloadPolicy(pin_memory=True)},
    ),
    "4, uneven": (LINES[4], UNEVEN, {}),
    "4, odd, last dim, kept": (LINES[4], ODD, {"shard_placement_fn": last, **KEPT}),
    "4, odd, kept by pairs": (LINES[4], ODD, {"reshard_after_forward": 2}),
    "4, text, kept by all": (LINES[4], TEXT, {"reshard_after_forward": 4}),
    "square, uneven, freed": (SQUARE, UNEVEN, FREED),
    "square, odd, kept": (SQUARE, ODD, KEPT),
    "square, convolutions, second dim": (SQUARE, CONVOLUTIONS, {"shard_placement_fn": second}),
    "shards, uneven": (SHARDS, UNEVEN, {}),
    "replicas, odd": (REPLICAS, ODD, {}),
    "three replicas, even, freed": (Layout((3, 1)), EVEN, FREED),
}


@pytest.mark.parametrize(
    ("world", "layout", "recipe", "options"),
    [pytest.param(case[0].size, *case, id=name) for name, case in CASES.items()],
    indirect=["world"],
)
@on_ranks()
def test_training_equals_plain_training_wherever_shards_lie_and_whatever_is_freed(
    layout: Layout, recipe: Recipe, options: dict[str, Any]
) -> None:
    expected = plain_run(recipe)
    model = shard(recipe.model(), recipe.but(options={"mesh": layout.mesh(), **options}))
    record = train_on(layout, model, recipe)
    Side(is_sharded=True).assert_settled(model)
    assert_same_record(record, expected)


def test_float32_training_agrees_to_rounding(world3: World) -> None:
    recipe = Recipe(even_tower, float32_batch, dtype=torch.float32)
    assert_same_training(world3, recipe, atol=1e-5)
