"""When groups are unsharded ahead (before a group's backward, after it or not), and how many.

Whatever is chosen, training equals plain training in float64 to 1e-10. The order of events is what a person
would check, so it is written out. What memory it takes is tested in `test_memory.py`.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from events import counts, events_of
from expecttest import assert_expected_inline
from failure_models import Chain, CheckpointedTower, Twice, block
from meshed import refusal
from models import WIDTH, Block, Tower, built, even_tower, shard_tower, uneven_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from refusals import assert_says
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.utils.checkpoint import checkpoint
from towers import backward

from shardwise import CommPolicy, fully_shard
from shardwise.engine.unsharded_groups import Order

Choices = dict[str, Any]

AFTER: Choices = {"prefetch": 1, "backward_prefetch": "after"}
NOT_IN_BACKWARD: Choices = {"prefetch": 1, "backward_prefetch": None, "max_prefetched": 2}
FAR_AHEAD: Choices = {"prefetch": 3, "backward_prefetch": "before", "max_prefetched": 2}
# Each value of each argument beside several of the others.
POLICIES: list[Choices] = [
    {"prefetch": 0, "backward_prefetch": "before"},
    {"prefetch": 1, "backward_prefetch": "before", "max_prefetched": 1},
    NOT_IN_BACKWARD,
    {"prefetch": 2, "backward_prefetch": "after", "max_prefetched": 1},
    FAR_AHEAD,
    {"prefetch": 3, "backward_prefetch": None, "max_prefetched": 1},
]


# --- the order of events --------------------------------------------------------------------------


class Spaced(Tower):
    """Tells when a gradient passes from one block to the one before: ``between 2`` has left block 2."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.events: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for index, each in enumerate(self.blocks):
            x = each(torch.sin(self.announced(x, index)))
        return self.outlet(x)

    def announced(self, x: Tensor, index: int) -> Tensor:
        x = torch.cos(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.events.append(f"between {index}"))
        return x


def events_of_a_step(
    choices: Choices, prepare: Callable[[Any], None] | None = None, **options: Any
) -> list[str]:
    """Of the second step, without the ends of reductions, which the choices do not concern."""
    model = shard_tower(built(Spaced, seed=0), comm_policy=CommPolicy(**choices), **options)
    if prepare is not None:
        prepare(model)
    backward(model)
    model.events = events_of(model)
    backward(model, 1)
    return [event for event in model.events if not event.startswith("reduced")]


def backward_of_a_step(choices: Choices) -> str:
    events = events_of_a_step(choices)
    return "\n".join(events[events.index("backward Spaced") :])


@on_ranks(2)
def test_after_the_next_group_is_unsharded_once_a_group_is_done_and_freed() -> None:
    assert_expected_inline(
        backward_of_a_step({"backward_prefetch": "after"}),
        """\
backward Spaced
backward blocks.2
reduce blocks.2
free blocks.2
unshard blocks.1
between 2
backward blocks.1
reduce blocks.1
free blocks.1
unshard blocks.0
between 1
backward blocks.0
reduce blocks.0
free blocks.0
between 0
reduce Spaced
free Spaced""",
    )


@on_ranks(2)
def test_without_backward_prefetch_a_group_is_unsharded_when_its_backward_begins() -> None:
    assert_expected_inline(
        backward_of_a_step({"backward_prefetch": None}),
        """\
backward Spaced
backward blocks.2
reduce blocks.2
between 2
free blocks.2
unshard blocks.1
backward blocks.1
reduce blocks.1
between 1
free blocks.1
unshard blocks.0
backward blocks.0
reduce blocks.0
between 0
reduce Spaced
free Spaced
free blocks.0""",
    )


@pytest.mark.parametrize("backward_prefetch", ["before", "after", None])
@on_ranks(2)
def test_forward_prefetches_whatever_backward_does(backward_prefetch: str | None) -> None:
    events = events_of_a_step({"backward_prefetch": backward_prefetch})
    assert events[:3] == ["unshard Spaced", "unshard blocks.0", "forward Spaced"]
    assert events[3:5] == ["unshard blocks.1", "forward blocks.0"]


@pytest.mark.parametrize("backward_prefetch", ["before", "after", None])
@on_ranks(2)
def test_a_depth_of_none_unshards_nothing_ahead_in_either_direction(backward_prefetch: str | None) -> None:
    events = events_of_a_step({"prefetch": 0, "backward_prefetch": backward_prefetch})
    for event, following in pairwise(events):
        if event.startswith("unshard "):
            name = event.removeprefix("unshard ")
            assert following in (f"forward {name}", f"backward {name}")


def unsharded_at_once(events: list[str]) -> list[int]:
    """After each event, how many groups but the root's."""
    held: set[str] = set()
    found = []
    for event, name in (each.split(" ", 1) for each in events):
        if event == "unshard" and name != "Spaced":
            held.add(name)
        elif event == "free":
            held.discard(name)
        found.append(len(held))
    return found


@pytest.mark.parametrize(
    ("choices", "forward", "backward"),
    [
        ({"prefetch": 1}, 2, 2),
        ({"prefetch": 2}, 3, 3),
        ({"prefetch": 2, "max_prefetched": 1}, 2, 2),
        ({"prefetch": 2, "backward_prefetch": "after"}, 3, 2),
        ({"prefetch": 3, "backward_prefetch": None, "max_prefetched": 2}, 3, 1),
    ],
)
@on_ranks(2)
def test_as_many_blocks_are_unsharded_at_once_as_was_said(
    choices: Choices, forward: int, backward: int
) -> None:
    events = events_of_a_step(choices)
    at_once, at = unsharded_at_once(events), events.index("backward Spaced")
    assert (max(at_once[:at]), max(at_once[at:])) == (forward, backward)


@pytest.mark.parametrize("backward_prefetch", ["before", "after", None])
@on_ranks(2)
def test_kept_groups_are_not_unsharded_for_backward_and_each_is_freed_once(
    backward_prefetch: str | None,
) -> None:
    log = events_of_a_step({"backward_prefetch": backward_prefetch}, reshard_after_forward=False)
    names = ["Spaced", "blocks.0", "blocks.1", "blocks.2"]
    at = log.index("backward Spaced")
    assert sorted(line for line in log[:at] if line.startswith("unshard")) == [f"unshard {n}" for n in names]
    assert not [line for line in log[:at] if line.startswith("free")]
    assert not [line for line in log[at:] if line.startswith("unshard")]
    assert sorted(line for line in log[at:] if line.startswith("free")) == [f"free {n}" for n in names]


# --- lists of the caller's ------------------------------------------------------------------------


def choose_forward(model: Any) -> None:
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([])
    first.set_modules_to_forward_prefetch([second, third])


def choose_backward(model: Any) -> None:
    first, second, third = model.blocks
    third.set_modules_to_backward_prefetch([second, first])


@pytest.mark.parametrize(
    ("direction", "choose", "ahead"),
    [
        ("forward", choose_forward, ["blocks.0", "blocks.1", "blocks.2"]),
        ("backward", choose_backward, ["blocks.2", "blocks.1", "blocks.0"]),
    ],
)
@on_ranks(2)
def test_a_list_is_unsharded_ahead_in_place_of_the_recorded_order(
    direction: str, choose: Any, ahead: list[str]
) -> None:
    log = events_of_a_step({"prefetch": 0}, choose)
    at = log.index(f"{direction} {ahead[0]}")
    assert log[at - 3 : at] == [f"unshard {name}" for name in ahead]


@on_ranks(2)
def test_a_list_is_unsharded_as_far_as_the_limit_goes() -> None:
    log = events_of_a_step({"prefetch": 0, "max_prefetched": 1}, choose_forward)
    at = log.index("forward blocks.0")
    assert log[at - 2 : at] == ["unshard blocks.0", "unshard blocks.1"]
    assert log.index("unshard blocks.2") > at
    assert max(unsharded_at_once(log)[: log.index("backward Spaced")]) == 2


# --- the same training ----------------------------------------------------------------------------


def train(side: Side, make: Any, choices: Choices) -> None:
    model = side.shard_tower(built(make), comm_policy=CommPolicy(**choices))
    side.steps(model, adamw(model), range(2), width=7 if make is uneven_tower else 8)


@pytest.mark.parametrize("choices", POLICIES, ids=str)
@same_as_plain(2)
def test_every_policy_trains_as_the_plain_model(side: Side, choices: Choices) -> None:
    train(side, uneven_tower, choices)


@same_as_plain(2)
def test_groups_may_have_policies_of_their_own(side: Side) -> None:
    model = built(even_tower)
    for each, choices in zip(model.blocks, (AFTER, NOT_IN_BACKWARD, FAR_AHEAD), strict=True):
        side.shard(each, comm_policy=CommPolicy(**choices))
    side.shard(model)
    side.steps(model, adamw(model), range(2))


def loss_of_running(model: nn.Module, inputs: Tensor) -> Tensor:
    return mean_of_squares(model.run, inputs)  # type: ignore[arg-type]


@same_as_plain(2)
@pytest.mark.parametrize(
    ("where", "reentrant", "choices"),
    [
        ("around", False, AFTER),
        ("inside", True, NOT_IN_BACKWARD),
        ("pairs", True, AFTER),
        ("wrapper", True, FAR_AHEAD),
        ("wrapped", True, NOT_IN_BACKWARD),
        ("whole", False, FAR_AHEAD),
    ],
)
def test_recomputed_blocks_train(side: Side, where: str, reentrant: bool, choices: Choices) -> None:
    model = built(CheckpointedTower, where, reentrant)
    policy = CommPolicy(**choices)
    side.shard(*model.to_shard(), model, comm_policy=policy)
    side.steps(model, adamw(model), range(2), loss_of=loss_of_running)
    for microbatch in range(2):
        side.sync(model, microbatch == 1)
        loss_of_running(model, side.inputs(8 + microbatch)).backward()
    side.note_gradients(model)


class Detached(nn.Module):
    """Its weights are needed after their gradients are complete: their first use adds nothing to these, and
    its backward comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(nn.functional.linear(x, self.linear.weight.detach()))
        return x + torch.tanh(self.linear(first))


def frozen(*names: str) -> nn.Module:
    model = Chain(block, block, block)
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


frozen_first = partial(frozen, "inlet", "blocks.0")
frozen_between = partial(frozen, "blocks.1")
frozen_in_part = partial(frozen, "blocks.0.up", "blocks.1.up", "blocks.2.up")


class Adapted(nn.Module):
    """A frozen base with trainable adapters, whose gradients are complete before the base's backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


lora = partial(Chain, Adapted, Adapted, Adapted)
detached = partial(Chain, Detached, Detached, Detached)


@pytest.mark.parametrize(
    ("make", "choices"),
    [
        (frozen_first, AFTER),
        (frozen_between, NOT_IN_BACKWARD),
        (frozen_in_part, FAR_AHEAD),
        (lora, AFTER),
        (Twice, AFTER),
        (detached, NOT_IN_BACKWARD),
        (detached, FAR_AHEAD),
    ],
)
@same_as_plain(2)
def test_weights_are_there_as_long_as_backward_needs_them(side: Side, make: Any, choices: Choices) -> None:
    """Also after the gradients of their group are complete."""
    train(side, make, choices)


@on_ranks(2)
def test_freeing_them_after_their_gradients_is_an_error_and_no_wrong_number() -> None:
    model = shard_tower(built(detached), comm_policy=CommPolicy(**AFTER))
    backward(model)  # whose backward shows what is recomputed: nothing is freed early yet
    assert_says(refusal(backward, model, 1), "modified by an inplace operation")


@same_as_plain(2)
@pytest.mark.parametrize("choices", [AFTER, FAR_AHEAD], ids=str)
def test_microbatches_train(side: Side, choices: Choices) -> None:
    """Forwards of two microbatches before their backwards, in both orders; some without synchronisation."""
    model = side.shard_tower(built(even_tower), comm_policy=CommPolicy(**choices))
    optimizer = adamw(model)
    for index in range(3):
        optimizer.zero_grad()
        losses = [mean_of_squares(model, side.inputs(4 * index + i)) for i in range(2)]
        for loss in losses if index % 2 else reversed(losses):
            loss.backward()
        side.sync(model, False)
        mean_of_squares(model, side.inputs(4 * index + 2)).backward()
        side.sync(model, True)
        mean_of_squares(model, side.inputs(4 * index + 3)).backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
    side.note_parameters(model)


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *(
            ("backward_prefetch", value, ['"before", "after" or None'])
            for value in ("pre", True, 1, BackwardPrefetch.BACKWARD_POST)
        ),
        *(("max_prefetched", value, []) for value in (-1, 0, 1.5, "2", True)),
    ],
    ids=repr,
)
def test_other_values_are_refused(field: str, value: Any, says: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        CommPolicy(**{field: value})
    assert_says(str(caught.value), f"CommPolicy: {field} is ", repr(value), *says)


# --- "after", where gradients are complete before the weights' last use ---------------------------


class Recomputed(nn.Module):
    """Reentrant checkpoints around blocks of which the first runs twice, with a norm of the root's inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 16) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for each in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = checkpoint(lambda y, each=each: self.norm(each(y)), x, use_reentrant=True)
        return x


@same_as_plain(2)
@pytest.mark.parametrize("quiet", [0, 1])
def test_after_frees_nothing_that_checkpoints_have_yet_to_recompute(side: Side, quiet: int) -> None:
    model = built(Recomputed, seed=4)
    side.shard(*model.blocks, model, comm_policy=CommPolicy(backward_prefetch="after"))
    optimizer = adamw(model)
    for index in range(3):
        for microbatch in range(quiet + 1):
            side.sync(model, microbatch == quiet)
            inputs = side.inputs(10 * index + microbatch).requires_grad_()
            model(inputs).pow(2).mean().backward()
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    side.note_parameters(model)


class PartRecomputed(nn.Module):
    """Uses ``first`` in a checkpointed part; ``mixed``: both layers inside and outside of several."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixed = mixed

    def forward(self, x: Tensor) -> Any:
        if self.mixed:
            x = checkpoint(lambda h: torch.tanh(self.second(self.first(h))), x, use_reentrant=True)
        x = checkpoint(lambda h: torch.tanh(self.first(h)), x, use_reentrant=True)
        return torch.tanh(self.second(self.first(x) if self.mixed else x))


@same_as_plain(2)
def test_a_group_is_not_freed_while_parts_of_it_are_yet_to_be_recomputed(side: Side) -> None:
    for order, mixed in (((0, 1, 1, 2, 0), False), ((0, 1, 2), True), ((0, 0), True)):
        model = built(Chain, *[lambda mixed=mixed: PartRecomputed(mixed)] * 3)
        model.used = order
        side.shard_tower(model, comm_policy=CommPolicy(backward_prefetch="after"))
        side.steps(model, adamw(model), range(2))


def test_a_plan_is_followed_again_from_the_next_use_of_a_group_and_not_from_an_earlier_one() -> None:
    first, again, last = (Mock(name=name) for name in ("first", "again", "last"))
    order = Order()
    order.planned = [again, first, again, last]
    order.rewind()
    order.enter(again)
    order.enter(first)
    order.enter(Mock(name="unplanned"))
    assert order.upcoming(1) == []
    order.resume_at(again)
    assert order.upcoming(2) == [last]


# --- forwards that leave out some layers, as stochastic depth does --------------------------------


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


@on_ranks(2)
def test_the_next_layer_is_unsharded_ahead_behind_those_that_are_left_out() -> None:
    assert_expected_inline(
        "\n".join(events_of_a_forward("0345", 1)),
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
@on_ranks(2)
def test_only_a_layer_behind_a_gap_is_unsharded_late(order: str, late: int) -> None:
    events = events_of_a_forward(order, 1)
    starts = [events.index(f"forward {name}") for name in order]
    rows = zip(order, [0, *starts], starts, strict=False)
    assert sum(f"unshard {name}" in events[before:start] for name, before, start in rows) == late


@on_ranks(2)
def test_behind_a_step_back_nothing_is_unsharded_ahead() -> None:
    """Nor a second time, where it would be for nobody; the layer in front is, as it was thought to be left out."""
    events = events_of_a_forward("102345", 1)
    assert counts(events, "unshard") == {"0": 2, "1": 1, "2": 1, "3": 1, "4": 1, "5": 1}


@pytest.mark.parametrize("prefetch", [1, 2])
@on_ranks(2)
def test_no_more_are_in_memory_than_were_asked_for(prefetch: int) -> None:
    for order in ("0345", "025", "05", "135"):
        assert max(unsharded_at_once(events_of_a_forward(order, prefetch))) <= prefetch + 1
