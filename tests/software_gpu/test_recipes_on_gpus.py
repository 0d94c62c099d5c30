"""Every way to train gives, on software GPUs, the numbers of plain torch in one process."""

import math
from pathlib import Path

import pytest

from software_gpu import recipe_programs, state_programs
from software_gpu.launch import on_the_older_back_end, run_on_gpus
from software_gpu.recipe_programs import RECIPES
from software_gpu.training import join

# The most different ones; all others are slow.
FEW = [
    "zero1",
    "zero2",
    "ddp",
    "hybrid, accumulated without sync",
    "accumulated",
    "offloaded, accumulated, clipped",
    "bfloat16, offloaded",
    "float16, scaled",
    "separate reductions",
    "checkpointed",
    "tied",
    "frozen",
    "few rows",
    "foreach",
    "capturable",
    "flat, fused",
    "Muon",
    "reduced as int8",
]


def check(found: list[dict[str, float]], names: list[str]) -> None:
    for rank, off in enumerate(found):
        assert set(off) <= set(names)
        assert {name: by for name, by in off.items() if not by <= 1} == {}, f"rank {rank}, in tolerances"
    assert found[0], "none has been tried"


def few_and_resume(folder: Path) -> dict[str, float]:
    found = recipe_programs.wrong(FEW)
    state_programs.check_resume(join(), folder)
    return found


def test_the_most_different_recipes_give_the_numbers_of_plain_torch_and_others_resume(tmp_path: Path) -> None:
    check(run_on_gpus(2, few_and_resume, tmp_path, late=2), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 3, 10, 12])
def test_they_do_in_any_order(late: int) -> None:
    check(run_on_gpus(2, recipe_programs.wrong, FEW, late=late, timeout_s=400), FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "late", "backend"),
    [
        *((world, late, "nccl") for world in (2, 4) for late in (0, 2, 11)),
        *(pytest.param(*how, "nccl-legacy", marks=on_the_older_back_end) for how in ((2, 0), (2, 2), (4, 0))),
    ],
)
def test_recipes_give_the_numbers_of_plain_torch(world: int, late: int, backend: str) -> None:
    names = list(RECIPES)
    check(run_on_gpus(world, recipe_programs.wrong, names, backend, late=late, timeout_s=900), names)


def test_a_difference_that_is_not_a_number_is_one() -> None:
    with pytest.raises(AssertionError, match="in tolerances"):
        check([{"zero3": math.nan}], ["zero3"])
