"""Training under sharding equals plain single-process training on the global batch.

In float64 to 1e-10: only the order of additions differs. In float32 to its rounding over a few
AdamW steps, which divide by the root of a small number.
"""

import pytest
import torch
from harness import World
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
from reference import Recipe, assert_same_training

EVEN = Recipe(even_tower, random_batch)
UNEVEN = Recipe(uneven_tower, uneven_batch)
ODD = Recipe(odd_model, random_batch)
TEXT = Recipe(language_model, token_batch, loss=next_token_loss)

any_world = pytest.mark.parametrize("world", [1, 2, 3, 4], indirect=True)


@pytest.mark.thin(72)
@any_world
@pytest.mark.parametrize("recipe", [EVEN, UNEVEN, ODD, TEXT], ids=["even", "uneven", "odd", "text"])
def test_sharded_training_equals_plain_training(world: World, recipe: Recipe) -> None:
    assert_same_training(world, recipe)


@pytest.mark.thin(24)
@any_world
@pytest.mark.parametrize("reshard", [True, False])
def test_the_policy_of_resharding_changes_no_number(world: World, reshard: bool) -> None:
    assert_same_training(world, TEXT.but(options={"reshard_after_forward": reshard}))


@pytest.mark.sample(2)
@any_world
def test_float32_training_agrees_to_rounding(world: World) -> None:
    recipe = Recipe(even_tower, float32_batch, dtype=torch.float32)
    assert_same_training(world, recipe, atol=1e-5)
