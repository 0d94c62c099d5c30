"""Parts that a few ranks keep between microbatches: which all-gathers are of all ranks, and which of a few."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import built, even_tower, random_batch
from on_ranks import on_ranks
from reference import mean_of_squares
from scenario import Side

import shardwise
from shardwise.comm.all_gather import AllGather
from shardwise.engine.module_state import sharded_module_states
from shardwise.groups.states import SHARDED

GROUPS = 4


def tower(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Counter[int]]:
    """Of which pairs of ranks keep parts; and a counter of all-gathers by the number of ranks."""
    counts: Counter[int] = Counter()
    start = AllGather.start

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self._world] += 1
        return start(self, *args, **kwargs)

    monkeypatch.setattr(AllGather, "start", counting)
    return Side(is_sharded=True).shard_tower(built(even_tower), reshard_after_forward=2), counts


def microbatch(model: Any, number: int, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    mean_of_squares(model, random_batch(number, 4)).backward()


@on_ranks(4)
def test_a_step_gathers_over_all_ranks_once() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        model, counts = tower(monkeypatch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        for step in range(3):
            counts.clear()
            for number in range(3):
                microbatch(model, 3 * step + number, is_last=number == 2)
            # In each forward and backward, but for the first forward over all.
            assert counts == {4: GROUPS, 2: 5 * GROUPS}
            groups = [module_state.group for module_state in sharded_module_states(model)]
            assert {group.unsharded.state for group in groups} == {SHARDED}
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_evaluation_ends_it_and_reading_weights_does_not() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        model, counts = tower(monkeypatch)
        again, kept = {4: GROUPS, 2: GROUPS}, {2: 2 * GROUPS}
        acts: list[tuple[Callable[[], Any], dict[int, int]]] = [
            (lambda: torch.no_grad()(model)(random_batch(0, 4)), again),
            (lambda: shardwise.full_state_dict(model), kept),
        ]
        for act, expected in acts:
            microbatch(model, 0, is_last=False)
            act()
            counts.clear()
            microbatch(model, 1, is_last=False)
            assert counts == expected
            model.zero_grad()
            microbatch(model, 2, is_last=True)


@pytest.mark.parametrize("is_counted", [True, False])
@on_ranks(4)
def test_a_change_between_a_forward_and_its_backward_is_refused_in_the_next_forward(is_counted: bool) -> None:
    model = Side(is_sharded=True).shard_tower(built(even_tower), reshard_after_forward=2)
    model.set_requires_gradient_sync(False)
    loss = mean_of_squares(model, random_batch(0, 4))
    weight = model.blocks[1].up.weight.detach() if is_counted else model.blocks[1].up.weight.data
    weight.mul_(2)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"blocks.1: .* between microbatches"):
        model(random_batch(0, 4))
