"""The state machines of a group: what is allowed, shown as a person reads it, and no dead ends."""

from collections.abc import Mapping
from enum import Enum
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from harness import World
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


def call_out_of_turn(step: str) -> str:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    group = model._shardwise_state.group
    with pytest.raises(RuntimeError) as refused:
        attrgetter(step)(group)()
    return str(refused.value)


@pytest.mark.parametrize(
    "step",
    [
        "unsharded.wait",
        "unsharded.reshard",
        "gradients.reduce",
        "gradients.finish",
        "gradients.defer",
    ],
)
def test_a_step_out_of_turn_names_the_group_and_what_is_possible(world1: World, step: str) -> None:
    (message,) = world1.run(call_out_of_turn, step)
    expected = {
        "unsharded.wait": "Sequential: cannot wait() while sharded; from here only unshard() or summon() is possible. ",
        "unsharded.reshard": "Sequential: cannot reshard() while sharded; from here only unshard() or summon() is possible. ",
        "gradients.reduce": "Sequential: cannot reduce() while empty; from here only accumulate() or join() is possible. ",
        "gradients.finish": "Sequential: cannot finish() while empty; from here only accumulate() or join() is possible. ",
        "gradients.defer": "Sequential: cannot defer() while empty; from here only accumulate() or join() is possible. ",
    }
    assert message == expected[step] + "Did a hook call into the group out of turn?"


def versions_and_errors() -> list[str]:
    """What autograd's version check says about full parameters that are gone or were changed."""
    messages = []
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    fully_shard(model[0])
    fully_shard(model)
    x = torch.ones(1, 2, dtype=torch.double, requires_grad=True)

    out = model(x)  # weights changed between forward and backward, as plain PyTorch refuses it
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError) as refused:
        out.sum().backward()
    messages.append(str(refused.value).split(": [")[0])

    model[0].unshard()  # a graph over full parameters that nobody unshards again
    loss = (x @ model[0].weight).sum()
    model[0].reshard()
    with pytest.raises(RuntimeError) as refused:
        loss.backward()
    messages.append(str(refused.value).split(": [")[0])

    model[0].unshard()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError) as refused:
        model[0].reshard()
    messages.append(str(refused.value))
    assert dist.get_world_size() == 2
    model(x).sum().backward()  # and the model still trains
    return messages


def test_autograds_own_check_sees_through_the_sharding(world2: World) -> None:
    messages, _ = world2.run(versions_and_errors)
    assert_expected_inline(
        "\n".join(messages),
        """\
0.weight: changed in place between the forward that used it and this backward (group '0'), so that the gradient would be that of other weights. Run backward before the weights are changed, as by an optimizer's step.
one of the variables needed for gradient computation has been modified by an inplace operation
0.weight: changed in place while unsharded (group '0'). Inside forward a module sees an unsharded copy, which is now freed, so the change would be lost. Change the sharded parameter outside of forward, under torch.no_grad().""",
    )
