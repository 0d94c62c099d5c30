"""no_sync: gradients of backwards inside stay on this rank, whole, until the next backward outside.

What accumulates equals plain accumulation on the global batch in float64 to 1e-10, under every strategy;
that nothing travels is weighed on the wire (strategies.py).
"""

import warnings
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from comparing import assert_all_same, assert_equal
from events import counts, events_of
from failure_models import Failure
from harness import World
from meshed import assert_refused_in_a_pass, gradients_of, parameters_of
from models import built, even_tower, random_batch, uneven_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from scenario import Side, same_as_plain
from strategies import Plan, Wire, part, plainly
from torch import Tensor, nn

import shardwise
from shardwise.observe import memory_snapshot


def quiet(model: nn.Module, is_sharded: bool, is_quiet: bool = True) -> Any:
    return shardwise.no_sync(model) if is_sharded and is_quiet else nullcontext()


# --- the numbers ----------------------------------------------------------------------------------

# What each microbatch does: Q is quiet, S synchronised, q is quiet in its forward only, s in its backward
# only, Z is quiet after all gradients have been cleared.
PATTERNS = ["QQS", "SQqS", "sZS", "QSS"]


class Unlike(nn.Module):
    """Frozen parameters, and blocks of which each microbatch leaves out another."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = uneven_tower()
        self.tower.blocks[0].up.requires_grad_(False)
        self.left_out = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.tower.inlet(x)
        for index, block in enumerate(self.tower.blocks):
            if index != self.left_out:
                x = block(x)
        return self.tower.outlet(x)


def accumulated(plan: Plan | None, pattern: str) -> dict[str, Any]:
    model = built(Unlike)
    if plan is not None:
        plan.shard(model)
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for step in range(2):
        for index, what in enumerate(pattern):
            if what == "Z":
                optimizer.zero_grad()
            model.left_out = index
            with quiet(model, plan is not None, what in "QqZ"):
                loss = mean_of_squares(model, part(plan, 10 * step + index))
                if what in "QZ":
                    loss.backward()
            if what not in "QZ":
                with quiet(model, plan is not None, what == "s"):
                    loss.backward()
        notes |= {f"{name}, step {step}": value for name, value in gradients_of(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return notes | parameters_of(model)


def all_accumulated(plan: Plan | None) -> dict[str, Any]:
    return {
        f"{pattern}: {name}": value
        for pattern in PATTERNS
        for name, value in accumulated(plan, pattern).items()
    }


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (2, Plan("ddp", 2)),
        (4, Plan("zero2", 4)),
        (4, Plan("hybrid_zero2", 4, 2)),
        (4, Plan("zero3_hpz", 4, 2)),
    ],
    indirect=["world"],
    ids=str,
)
def test_microbatches_add_up_as_in_plain_training(world: World, plan: Plan) -> None:
    assert_all_same(world.run(all_accumulated, plan), plainly(all_accumulated))


@same_as_plain(2)
def test_a_module_that_only_contains_sharded_ones_will_do(side: Side) -> None:
    """The context is given a module that is not sharded itself: a dictionary of two models."""
    both = nn.ModuleDict({"first": built(even_tower), "second": built(even_tower)})
    if side.is_sharded:
        for model in both.values():
            shardwise.shard_model(model, strategy="ddp")
    optimizer = adamw(both)
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(3):
            with quiet(both, side.is_sharded, microbatch < 2):
                x = side.inputs(10 * step + microbatch)
                (both["first"](x) * both["second"](x)).mean().backward()
        side.note_gradients(both)
        optimizer.step()
    side.note_parameters(both)


@same_as_plain(2)
def test_a_single_block_may_defer(side: Side) -> None:
    model = side.shard_tower(built(even_tower))
    for microbatch in range(3):
        with quiet(model.blocks[1], side.is_sharded, microbatch < 2):
            mean_of_squares(model, side.inputs(microbatch)).backward()
        if microbatch == 0:
            side.note("of another block", model.blocks[0].up.weight.grad)
    side.note_gradients(model)


@same_as_plain(2)
def test_ignored_parameters_that_are_averaged_wait_too(side: Side) -> None:
    model = built(even_tower)
    if side.is_sharded:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ignored_params contains trainable parameters")
            side.shard_tower(model, ignored_params=set(model.outlet.parameters()))
        model.set_reduce_ignored_params(True)
    for step in range(2):
        for microbatch in range(2):
            with quiet(model, side.is_sharded, microbatch < 1):
                mean_of_squares(model, side.inputs(2 * step + microbatch)).backward()
            if step == microbatch == 0:  # of this rank's rows alone
                own = built(even_tower)
                mean_of_squares(own, side.inputs(0)).backward()
                assert_equal(model.outlet.weight.grad, own.outlet.weight.grad)
        side.note("weight", model.outlet.weight.grad)
        side.note("bias", model.outlet.bias.grad)


# --- what travels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan("ddp", 4), Plan("zero2", 4)], ids=str)
@on_ranks(4)
def test_no_gradient_travels_inside(plan: Plan) -> None:
    """Of the strategies that unshard nothing in backward, so that all bytes are those of gradients."""
    model = plan.shard(built(even_tower))
    mean_of_squares(model, part(plan, 0, 8)).backward()
    sent: dict[str, float] = {}
    for name in ("first", "second", "outside"):
        with quiet(model, True, name != "outside"):
            loss = mean_of_squares(model, part(plan, 1, 8))
            with Wire() as wire:
                loss.backward()
        sent[name] = wire.sums if plan.strategy == "ddp" else wire.bytes
    assert sent["first"] == sent["second"] == 0
    assert sent["outside"] > 0


# How many of the four groups each microbatch unshards and reduces, and whether a block is kept afterwards.
OUTLIVES_FORWARD = [(4, 0, True), (0, 0, True), (0, 4, False), (4, 4, False)]


@pytest.mark.parametrize(
    ("world", "plan", "pattern", "expected"),
    [
        # As FSDP1's SHARD_GRAD_OP: unsharded once for all microbatches of a step, and reduced once.
        (4, Plan("zero2", 4), "QQSS", OUTLIVES_FORWARD),
        (4, Plan("hybrid_zero2", 4, 2), "QQSS", OUTLIVES_FORWARD),
        # The root and the last block once, the others in forward and in backward, inside as ever.
        (2, Plan("zero3", 2), "QQS", [(6, 0, False), (6, 0, False), (6, 4, False)]),
        (2, Plan("zero1", 2), "QSQS", [(4, 0, True), (0, 4, True), (0, 0, True), (0, 4, True)]),
    ],
    indirect=["world"],
    ids=str,
)
@on_ranks()
def test_parameters_that_outlive_forward_outlive_backward_inside(
    plan: Plan, pattern: str, expected: list[tuple[int, int, bool]]
) -> None:
    model = plan.shard(built(even_tower))
    mean_of_squares(model, part(plan, 0, 8)).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    events = events_of(model)
    found = []
    for microbatch, what in enumerate(pattern):
        events.clear()
        with quiet(model, True, what == "Q"):
            mean_of_squares(model, part(plan, microbatch, 8)).backward()
        num_unshards, num_reductions = (sum(counts(events, each).values()) for each in ("unshard", "reduce"))
        is_kept = memory_snapshot(model.blocks[0]).groups[0].state == "unsharded"
        found.append((num_unshards, num_reductions, is_kept))
    assert found == expected


# --- settings -------------------------------------------------------------------------------------


def settings_of(model: nn.Module) -> list[tuple[bool, Any, bool]]:
    """Of the root and of each block: whether gradients are reduced, and what is freed when."""
    found = [each._shardwise_state.group.settings for each in (model, *model.blocks)]
    return [(s.requires_gradient_sync, s.reshard_after_forward, s.reshard_after_backward) for s in found]


@pytest.mark.parametrize("how", ["once", "twice", "raised"])
@on_ranks(2)
def test_each_group_gets_its_own_settings_back(how: str) -> None:
    model = built(even_tower)
    shardwise.shard_model(model, strategy="zero2", overrides={"blocks.1": "zero1", "blocks.2": "zero3"})
    model.blocks[1].set_requires_gradient_sync(False)
    found = [settings_of(model)]
    with suppress(Failure), shardwise.no_sync(model):
        if how == "twice":
            with shardwise.no_sync(model.blocks[0]):
                found.append(settings_of(model))
        mean_of_squares(model, random_batch(0, 2)).backward()
        found.append(settings_of(model))
        if how == "raised":
            raise Failure("inside")
    found.append(settings_of(model))
    before, *inside, after = found
    assert before == after
    assert [syncs for syncs, *_ in before] == [True, True, False, True]
    assert before[1][1:] != before[2][1:] != before[3][1:]
    assert inside
    assert all(not syncs for each in inside for syncs, *_ in each)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("when", "outer"), [("forward", True), ("forward", False), ("backward", True)])
@on_ranks(2)
def test_it_is_refused_inside_a_running_pass(when: str, outer: bool) -> None:
    words = ("no_sync", "Sequential" if outer else "0")
    assert_refused_in_a_pass(shardwise.no_sync, when, *words, of_root=outer)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [(even_tower(), ValueError, "no_sync.*Tower"), ([even_tower()], TypeError, "no_sync.*list")],
)
def test_what_is_no_module_or_has_no_sharded_one_is_refused(model: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words), shardwise.no_sync(model):
        pass
