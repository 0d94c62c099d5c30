"""Forwards that leave out some layers, as stochastic depth does: what is unsharded ahead goes on behind them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparing import alike
from events import counts, events_of
from expecttest import assert_expected_inline
from harness import World
from torch import Tensor, nn

from shardwise import CommPolicy, fully_shard
from shardwise.engine.prefetch import Order


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.order = "012345"

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = x + self.layers[int(index)](x).tanh()
        return x


def followed(planned: str, used: str) -> str:
    """For each group used: itself, what was skipped before it, and which two come next."""
    groups: dict[str, Any] = {name: SimpleNamespace(name=name) for name in planned + used}
    order, told = Order(), []
    order.planned = [groups[name] for name in planned]
    order.rewind()
    for name in used:
        skipped = "".join(group.name for group in order.enter(groups[name]))
        told.append(f"{name}({skipped}){''.join(group.name for group in order.upcoming(2))}")
    return " ".join(told)


def test_an_order_goes_on_behind_what_is_left_out() -> None:
    assert followed("abcde", "abcde") == "a()bc b()cd c()de d()e e()"
    assert followed("abcde", "ade") == "a()bc d(bc)e e()"
    assert followed("abcde", "ccde") == "c(ab)de c()de d()e e()"
    assert followed("abac", "aac") == "a()ba a()ba c(ba)"


def test_an_order_that_goes_back_is_not_followed() -> None:
    assert followed("abcde", "acbde") == "a()bc c(b)de b() d() e()"
    assert followed("abcde", "axbcd") == "a()bc x() b() c() d()"


def events_of_a_forward(order: str, prefetch: int) -> list[str]:
    model = Deep()
    for module in (*model.layers, model):
        fully_shard(module, comm_policy=CommPolicy(prefetch=prefetch))
    x = torch.randn(2, 8)
    with torch.no_grad():
        model(x)
        events = events_of(model)
        model.order = order
        model(x)
    return [event.replace("layers.", "") for event in events if "layers" in event]


def test_the_next_layer_is_unsharded_ahead_behind_those_that_are_left_out(world2: World) -> None:
    assert_expected_inline(
        "\n".join(alike(world2.run(events_of_a_forward, "0345", 1))),
        """\
unshard 0
unshard 1
forward 0
free 0
free 1
unshard 3
unshard 4
forward 3
free 3
unshard 5
forward 4
free 4
forward 5
free 5""",
    )


@pytest.mark.parametrize(
    ("order", "late"), [("012345", 1), ("0345", 2), ("02345", 2), ("0135", 3), ("543210", 5)]
)
def test_only_a_layer_behind_a_gap_is_unsharded_late(world2: World, order: str, late: int) -> None:
    events = world2.run(events_of_a_forward, order, 1)[0]
    starts = [events.index(f"forward {name}") for name in order]
    rows = zip(order, [0, *starts], starts, strict=False)
    assert sum(f"unshard {name}" in events[before:start] for name, before, start in rows) == late


def test_behind_a_step_back_nothing_is_unsharded_ahead(world2: World) -> None:
    """Nor a second time, where it would be for nobody; the layer in front is, as it was thought to be left out."""
    events = world2.run(events_of_a_forward, "102345", 1)[0]
    assert counts(events, "unshard") == {"0": 2, "1": 1, "2": 1, "3": 1, "4": 1, "5": 1}


def most_unsharded(order: str, prefetch: int) -> int:
    held, most = set(), 0
    for event, name in map(str.split, events_of_a_forward(order, prefetch)):
        if event == "unshard":
            held.add(name)
        elif event == "free":
            held.discard(name)
        most = max(most, len(held))
    return most


@pytest.mark.parametrize("prefetch", [1, 2])
def test_no_more_are_in_memory_than_were_asked_for(world2: World, prefetch: int) -> None:
    for order in ("0345", "025", "05", "135"):
        assert max(world2.run(most_unsharded, order, prefetch)) <= prefetch + 1
