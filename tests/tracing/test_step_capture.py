"""``SHARDWISE_TRACE``: one step of a program that does not ask for it."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import World
from models import SquareTower, built, random_batch, shard_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from torch import nn

from shardwise import fully_shard, no_sync, trace
from shardwise.engine.module_state import module_state_of
from shardwise.tracing.files import read_json
from shardwise.tracing.trace import step_to_trace

WIDTH = 16
GROUPS = {"SquareTower", "blocks.0", "blocks.1"}


def model_to_train() -> Any:
    return shard_tower(built(SquareTower, WIDTH, 2, seed=0))


def variable_is(text: str) -> Any:
    return mock.patch.dict(os.environ, SHARDWISE_TRACE=text)


@pytest.mark.parametrize(("text", "step"), [("", None), ("step", 5), ("2", 2), (" 31 ", 31)])
def test_the_variable_names_a_step(text: str, step: int | None) -> None:
    with variable_is(text):
        assert step_to_trace() == step


@pytest.mark.parametrize("text", ["1", "0", "-3", "2.5", "yes", "steps"])
def test_what_names_no_step_is_refused(text: str) -> None:
    message = f"SHARDWISE_TRACE is '{text}'; set it to the number of the step"
    with variable_is(text), pytest.raises(ValueError, match=message):
        step_to_trace()


def train(folder: Path, variable: str, num_steps: int = 4) -> tuple[list[int], str, list[str]]:
    """How many features the root has before each step and at the end, what was printed, which files there are.

    Each step has two microbatches and two optimizers.
    """
    printed = io.StringIO()
    with variable_is(variable), contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        model = model_to_train()
        optimizers = [
            torch.optim.AdamW(model.outlet.parameters()),
            torch.optim.SGD(model.blocks.parameters(), lr=0.1),
        ]
        root, counts = module_state_of(model).root, []
        for _ in range(num_steps):
            counts.append(len(root.features))
            with no_sync(model):
                mean_of_squares(model, random_batch(0, 4, WIDTH)).backward()
            mean_of_squares(model, random_batch(1, 4, WIDTH)).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        counts.append(len(root.features))
        torch.distributed.barrier()
        return counts, printed.getvalue(), sorted(map(str, Path().rglob("*.*")))


def test_one_step_is_traced_on_all_ranks_and_then_nothing_is_left(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(train, tmp_path, "3")
    # The capture itself; from the end of step 2 to that of step 3 the trace as well.
    assert first[0] == second[0] == [1, 1, 2, 0, 0]
    files = [f"shardwise-trace/SquareTower-step3-rank{end}" for end in ("0.html", "0.json", "1.json")]
    assert first[2] == second[2] == files
    assert first[1].count("SHARDWISE_TRACE: see shardwise-trace/SquareTower-step3-rank0.html") == 1
    assert "group " in first[1], "the table"
    assert second[1] == ""
    for rank in (0, 1):
        (found,) = read_json(tmp_path / files[rank + 1])
        assert found.rank == rank
        assert {group.name for group in found.groups} == GROUPS
        # One step, which begins when the first optimizer has stepped, and ends when it steps again.
        assert [span.name for span in found.of_row("optimizer")] == ["SGD", "AdamW"]
        forwards = [
            span
            for span in found.of_row("all-gather")
            if (span.name, span.phase) == ("SquareTower", "forward")
        ]
        assert len(forwards) == 2, "of microbatches"
        assert found.knew_order
        assert found.is_aligned


def test_without_the_variable_nothing_is_attached(world1: World, tmp_path: Path) -> None:
    ((counts, printed, files),) = world1.run(train, tmp_path, "")
    assert (counts, printed, files) == ([0, 0, 0, 0, 0], "", [])


def test_a_folder_that_cannot_be_written_ends_no_training(world1: World, tmp_path: Path) -> None:
    (tmp_path / "shardwise-trace").write_text("a file")
    ((counts, printed, files),) = world1.run(train, tmp_path, "2")
    assert (counts, printed, files) == ([1, 2, 0, 0, 0], "", [])


@on_ranks(1)
def test_fully_shard_refuses_it_before_it_changes_the_model() -> None:
    model = nn.Linear(4, 4)
    with (
        variable_is("first"),
        pytest.raises(ValueError, match="SHARDWISE_TRACE is 'first'") as caught,
    ):
        fully_shard(model)
    assert "or to 'step' for step 5" in str(caught.value)
    assert type(model) is nn.Linear


def traced_by_the_program(folder: Path) -> tuple[int, list[str]]:
    with variable_is("3"), contextlib.chdir(folder):
        model = model_to_train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trace(model):
            for step in range(3):
                mean_of_squares(model, random_batch(step, 4, WIDTH)).backward()
                optimizer.step()
        return len(module_state_of(model).root.features), sorted(map(str, Path().rglob("*.*")))


def test_a_step_that_the_program_traces_itself_is_left_to_it(world2: World, tmp_path: Path) -> None:
    assert world2.run(traced_by_the_program, tmp_path) == [(0, [])] * 2
