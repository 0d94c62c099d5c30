"""What one training step does, in which order: unshards ahead, frees behind, one reduction a group."""

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from events import events_of
from expecttest import assert_expected_inline
from failure_models import CheckpointedTower, Failure
from models import Tower, built, random_batch, shard_tower
from on_ranks import on_ranks
from torch import Tensor, nn
from towers import backward


def log_of_a_step(model: nn.Module, step: int = 1) -> str:
    events = events_of(model)
    backward(model, step)
    return "\n".join(events)


@on_ranks(2)
def test_the_first_step_records_and_unshards_each_group_as_it_comes() -> None:
    log = log_of_a_step(shard_tower(built(Tower, seed=0)))
    forward = log[: log.index("backward")]
    assert_expected_inline(
        forward,
        """\
unshard Tower
forward Tower
unshard blocks.0
forward blocks.0
free blocks.0
unshard blocks.1
forward blocks.1
free blocks.1
unshard blocks.2
forward blocks.2
""",
    )


@on_ranks(2)
def test_from_the_second_step_on_the_next_group_is_unsharded_during_the_computation() -> None:
    model = shard_tower(built(Tower, seed=0))
    backward(model)
    assert_expected_inline(
        log_of_a_step(model),
        """\
unshard Tower
unshard blocks.0
forward Tower
unshard blocks.1
forward blocks.0
free blocks.0
unshard blocks.2
forward blocks.1
free blocks.1
forward blocks.2
backward Tower
unshard blocks.1
backward blocks.2
reduce blocks.2
free blocks.2
unshard blocks.0
backward blocks.1
reduce blocks.1
reduced blocks.2
free blocks.1
backward blocks.0
reduce blocks.0
reduced blocks.1
reduce Tower
reduced blocks.0
reduced Tower
free Tower
free blocks.0""",
    )


class Switching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return x


@on_ranks(2)
def test_a_new_order_stops_prefetch_and_is_what_the_next_forward_follows() -> None:
    torch.manual_seed(0)
    model = Switching()
    shard_tower(model)
    events = events_of(model)
    for order in ([0, 1, 2], [0, 1, 2], [2, 0, 1], [2, 0, 1]):
        if order == [0, 1, 2]:
            events.clear()
        events.append(f"-- {order}")
        model.order = order
        with torch.no_grad():
            model(torch.ones(2, 4))
    assert_expected_inline(
        "\n".join(events),
        """\
-- [0, 1, 2]
unshard Switching
unshard blocks.0
forward Switching
unshard blocks.1
forward blocks.0
free blocks.0
unshard blocks.2
forward blocks.1
free blocks.1
forward blocks.2
free blocks.2
free Switching
-- [2, 0, 1]
unshard Switching
unshard blocks.0
forward Switching
unshard blocks.2
forward blocks.2
free blocks.2
forward blocks.0
free blocks.0
unshard blocks.1
forward blocks.1
free blocks.1
free Switching
-- [2, 0, 1]
unshard Switching
unshard blocks.2
forward Switching
unshard blocks.0
forward blocks.2
free blocks.2
unshard blocks.1
forward blocks.0
free blocks.0
forward blocks.1
free blocks.1
free Switching""",
    )


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_a_recomputed_block_is_unsharded_once_in_backward(reentrant: bool) -> None:
    model = shard_tower(built(CheckpointedTower, "around", reentrant, depth=2, seed=0))
    backward(model)
    events = log_of_a_step(model).splitlines()
    after = events[events.index("backward CheckpointedTower") :]
    assert [event for event in after if event.startswith("unshard")] == ["unshard blocks.0"]
    reductions = [event for event in after if event.startswith("reduce ")]
    assert reductions == ["reduce blocks.1", "reduce blocks.0", "reduce CheckpointedTower"]


class Again(Tower):
    """Runs the first block once more, after the second."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return self.outlet(third(first(second(first(self.inlet(x))))))


def with_unused(module: nn.Module) -> None:
    module.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))


def reductions_in(model: Any, step: int = 1) -> str:
    """Backwards and reductions of a step."""
    events = log_of_a_step(model, step).splitlines()
    return "\n".join(event for event in events if event.split()[0] in ("backward", "reduce"))


@on_ranks(2)
def test_a_block_with_unused_parameters_is_reduced_after_the_first_of_its_calls() -> None:
    model = built(Again, seed=0)
    with_unused(model.blocks[0])
    assert_expected_inline(
        reductions_in(shard_tower(model)),
        """\
backward Again
backward blocks.2
reduce blocks.2
backward blocks.0
backward blocks.1
reduce blocks.1
backward blocks.0
reduce Again
reduce blocks.0""",
    )


class Catches(Tower):
    """Goes on without a block that fails."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            with suppress(Failure):
                x = block(x)
        return self.outlet(x)


def fail(module: nn.Module, args: Any) -> None:
    raise Failure


@on_ranks(2)
def test_a_block_that_has_failed_is_freed_even_if_it_would_be_kept_for_backward() -> None:
    model = shard_tower(built(Catches, seed=0), reshard_after_forward=False)
    model.blocks[1].register_forward_pre_hook(fail)
    events = events_of(model)
    model(random_batch(0, 4))
    assert [event for event in events if event.startswith("free")] == ["free blocks.1"]


class InTurn(nn.Module):
    """Uses its layers in turn, one a call."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block, copy.deepcopy(block)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[self.calls % 2](x)


@on_ranks(2)
def test_a_block_that_has_gradients_of_its_last_call_is_not_reduced_before_those_of_the_first() -> None:
    model = built(Again, seed=0)
    model.blocks[0] = InTurn(model.blocks[0])
    assert_expected_inline(
        reductions_in(shard_tower(model)),
        """\
backward Again
backward blocks.2
reduce blocks.2
backward blocks.0
backward blocks.1
reduce blocks.1
backward blocks.0
reduce blocks.0
reduce Again""",
    )


@on_ranks(2)
def test_a_group_with_unused_parameters_is_reduced_once_it_is_over() -> None:
    """In every step: before backward enters the next group, and not at the end of it."""
    model = built(Tower, seed=0)
    for block in model.blocks:
        with_unused(block)
    shard_tower(model)
    for step in range(1, 4):
        assert_expected_inline(
            reductions_in(model, step),
            """\
backward Tower
backward blocks.2
reduce blocks.2
backward blocks.1
reduce blocks.1
backward blocks.0
reduce Tower
reduce blocks.0""",
        )
