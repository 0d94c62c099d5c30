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


@pytest.mark.parametrize(
    ("world", "recipe", "reshard"),
    [
        pytest.param(1, TEXT, True, id="1, text, freed"),
        pytest.param(2, EVEN, None, id="2, even"),
        pytest.param(2, TEXT, False, id="2, text, kept"),
        pytest.param(3, ODD, None, id="3, odd"),
        pytest.param(3, TEXT, True, id="3, text, freed"),
        pytest.param(4, UNEVEN, None, id="4, uneven"),
    ],
    indirect=["world"],
)
def test_sharded_training_equals_plain_training_whatever_is_freed(
    world: World, recipe: Recipe, reshard: bool | None
) -> None:
    assert_same_training(world, recipe.but(options={"reshard_after_forward": reshard}))


def test_float32_training_agrees_to_rounding(world3: World) -> None:
    recipe = Recipe(even_tower, float32_batch, dtype=torch.float32)
    assert_same_training(world3, recipe, atol=1e-5)
