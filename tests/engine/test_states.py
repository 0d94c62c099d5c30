"""The state machines of a group: what is allowed, shown as a person reads it, and no dead ends."""

from collections.abc import Mapping
from enum import Enum
from operator import attrgetter
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from on_ranks import on_ranks
from torch import nn

from shardwise import fully_shard
from shardwise.groups.states import GRADIENT_STATES, UNSHARD_STATES, GradientState, UnshardState


def printed(table: Mapping[tuple[Any, str], Any]) -> str:
    return "\n".join(f"{s.value} --{event}--> {t.value}" for (s, event), t in table.items())


def test_the_states_of_parameters() -> None:
    assert_expected_inline(
        printed(UNSHARD_STATES),
        """\
sharded --unshard--> unsharding
unsharding --wait--> unsharded
unsharded --reshard--> sharded
unsharded --keep_part--> partly unsharded
partly unsharded --unshard--> unsharding
partly unsharded --reshard--> sharded
sharded --summon--> summoned
summoned --end_summon--> sharded""",
    )


def test_the_states_of_gradients() -> None:
    assert_expected_inline(
        printed(GRADIENT_STATES),
        """\
empty --accumulate--> pending
deferred --accumulate--> pending
pending --defer--> deferred
pending --reduce--> reducing
deferred --reduce--> reducing
reducing --finish--> empty
reducing --defer--> deferred
empty --join--> reducing
pending --drop--> empty
deferred --drop--> empty
reducing --drop--> empty""",
    )


@pytest.mark.parametrize(
    ("states", "table", "home"),
    [
        (UnshardState, UNSHARD_STATES, UnshardState.SHARDED),
        (GradientState, GRADIENT_STATES, GradientState.EMPTY),
    ],
)
def test_from_every_state_there_is_a_way_home_and_back(
    states: type[Enum], table: Mapping[tuple[Any, str], Any], home: Any
) -> None:
    def reachable(start: Any) -> set[Any]:
        found = {start}
        while more := {t for (s, _), t in table.items() if s in found} - found:
            found |= more
        return found

    assert reachable(home) == set(states)
    assert all(home in reachable(state) for state in states)


SHARDED = "while sharded; from here only unshard() or summon() is possible."
EMPTY = "while empty; from here only accumulate() or join() is possible."


@pytest.mark.parametrize(
    ("step", "possible"),
    [
        ("unsharded.wait", SHARDED),
        ("unsharded.reshard", SHARDED),
        ("gradients.reduce", EMPTY),
        ("gradients.finish", EMPTY),
        ("gradients.defer", EMPTY),
    ],
)
@on_ranks(1)
def test_a_step_out_of_turn_names_the_group_and_what_is_possible(step: str, possible: str) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    group = model._shardwise_state.group
    with pytest.raises(RuntimeError) as refused:
        attrgetter(step)(group)()
    message = str(refused.value)
    call = step.split(".")[1]
    assert message == f"Sequential: cannot {call}() {possible} Did a hook call into the group out of turn?"


@on_ranks(2)
def test_autograds_own_check_sees_through_the_sharding() -> None:
    """Of a graph over full parameters that nobody unshards again."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    fully_shard(model[0])
    fully_shard(model)
    x = torch.ones(1, 2, dtype=torch.double, requires_grad=True)
    model(x)
    model[0].unshard()
    loss = (x @ model[0].weight).sum()
    model[0].reshard()
    with pytest.raises(RuntimeError) as refused:
        loss.backward()
    model(x).sum().backward()  # and the model still trains
    assert str(refused.value).startswith(
        "one of the variables needed for gradient computation has been modified by an inplace operation"
    )
