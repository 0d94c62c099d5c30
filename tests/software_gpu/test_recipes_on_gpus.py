"""Every way to train gives, on software GPUs, the numbers of plain torch in one process."""

import pytest

from software_gpu import recipe_programs
from software_gpu.launch import has_older_back_end, run_on_gpus
from software_gpu.recipe_programs import RECIPES

# The most different ones; all others are slow.
FEW = [
    "hybrid, accumulated without sync",
    "bfloat16, offloaded",
    "float16, scaled",
    "checkpointed",
    "tied",
    "frozen",
    "few rows",
    "flat, fused",
    "Muon",
    "reduced as int8",
]


def check(found: list[dict[str, float]], names: list[str]) -> None:
    for rank, off in enumerate(found):
        assert set(off) <= set(names)
        assert {name: by for name, by in off.items() if not by <= 1} == {}, f"rank {rank}, in tolerances"
    assert found[0], "none has been tried"


def test_the_most_different_recipes_give_the_numbers_of_plain_torch() -> None:
    check(run_on_gpus(2, recipe_programs.wrong, FEW), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2, 11])
@pytest.mark.parametrize("world", [2, 4])
def test_recipes_give_the_numbers_of_plain_torch(world: int, late: int) -> None:
    names = list(RECIPES)
    check(run_on_gpus(world, recipe_programs.wrong, names, late=late, timeout_s=900), names)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "late"), [(2, 2), (4, 0)])
def test_recipes_give_the_numbers_of_plain_torch_on_the_older_back_end(world: int, late: int) -> None:
    if not has_older_back_end():
        pytest.skip("this torch has one back end for NCCL")
    names = list(RECIPES)
    check(run_on_gpus(world, recipe_programs.wrong, names, "nccl-legacy", late=late, timeout_s=900), names)
