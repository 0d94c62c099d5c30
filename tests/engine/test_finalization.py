"""Backwards that the caller ends: `set_manual_backward_finalization` and `finalize_backward`.

What is reduced when is read from the model's own events.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from events import events_of
from expecttest import assert_expected_inline
from meshed import refusal
from models import built, even_tower, random_batch
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from towers import assert_close, gradients

from shardwise import fully_shard


def tower(side: Side, shape: tuple[int, ...] | None = None) -> Any:
    model = built(even_tower, seed=0)
    options = {"mesh": init_device_mesh("cpu", shape)} if side.is_sharded and shape else {}
    side.shard_tower(model, **options)
    if side.is_sharded:
        model.set_manual_backward_finalization(True)
    return model


def finalize(side: Side, model: Any, async_op: bool) -> None:
    if side.is_sharded:
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is None) is not async_op
        if handle is not None:
            handle.wait()
            handle.wait()  # once is enough, twice does no harm


@same_as_plain(2)
@pytest.mark.parametrize(
    ("shape", "syncs", "async_op"),
    [
        ((2,), [True], True),
        ((2, 1), [False, False], False),
        ((2,), [False, False], True),
        ((2, 1), [True, True, False], True),
    ],
    ids=str,
)
def test_gradients_are_complete_when_the_caller_has_ended_the_backward(
    side: Side, shape: tuple[int, ...], syncs: list[bool], async_op: bool
) -> None:
    """Two steps of several microbatches, each ended by one call; some backwards synchronise, some do not."""
    model = tower(side, shape)
    optimizer = adamw(model)
    for step in range(2):
        for number, does_sync in enumerate(syncs):
            side.sync(model, does_sync)
            mean_of_squares(model, side.inputs(10 * step + number)).backward()
        side.sync(model, True)
        finalize(side, model, async_op)
        side.note_gradients(model)
        side.assert_settled(model)
        optimizer.step()
        optimizer.zero_grad()
    side.note_parameters(model)


# --- what ranks reduce at a moment that they have in common ---------------------------------------


class Choosing(nn.Module):
    """Two layers of which a rank may leave out the second, with a scale that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) * self.scale if uses_second else x


def rank_batch(number: int, rank: int) -> Tensor:
    return random_batch(10 * number + rank, 4)


@pytest.mark.parametrize("syncs", [False, True])
@on_ranks(2)
def test_ranks_that_use_different_modules_reduce_once(syncs: bool) -> None:
    uses = [[True, False], [False, False]]  # of the second layer, by rank and microbatch
    plain = built(Choosing, seed=0)
    for rank, microbatches in enumerate(uses):
        for number, uses_second in enumerate(microbatches):
            plain(rank_batch(number, rank), uses_second).pow(2).sum().div(2).backward()
    model = built(Choosing, seed=0)
    ignored = {model.scale}
    for layer in (model.first, model.second):
        fully_shard(layer)
    with pytest.warns(UserWarning, match="ignored_params contains trainable"):
        fully_shard(model, ignored_params=ignored)
    model.second.set_may_be_unused()
    model.set_reduce_ignored_params(True)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(syncs)
    for number, uses_second in enumerate(uses[dist.get_rank()]):
        model(rank_batch(number, dist.get_rank()), uses_second).pow(2).sum().backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    assert_close(gradients(model), gradients(plain))


# --- when -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_reductions_are_under_way_until_the_caller_waits() -> None:
    model = tower(Side(is_sharded=True))
    model.set_requires_gradient_sync(False)
    for number in range(2):
        model(random_batch(number, 4)).sum().backward()
    model.set_requires_gradient_sync(True)
    events = events_of(model)
    handle = model.finalize_backward(async_op=True)
    events.append("-- the caller goes on")
    handle.wait()
    events.append("-- the caller has waited")
    assert_expected_inline(
        "\n".join(events),
        """\
reduce Tower
reduce blocks.0
reduced Tower
reduce blocks.1
reduced blocks.0
reduce blocks.2
reduced blocks.1
-- the caller goes on
reduced blocks.2
-- the caller has waited""",
    )


# --- misuse ---------------------------------------------------------------------------------------


def trained(model: Any) -> None:
    model(random_batch(0, 4)).sum().backward()


def without_the_mode(model: Any) -> None:
    model.set_manual_backward_finalization(False)
    trained(model)
    model.finalize_backward()


def mode_left_before_the_end(model: Any) -> None:
    trained(model)
    model.set_manual_backward_finalization(False)


def before_waiting(act: Callable[[Any, Tensor], Any]) -> Callable[[Any], None]:
    """While gradients are still being reduced; ``act`` is also given a loss from before."""

    def misuse(model: Any) -> None:
        loss = model(random_batch(0, 4)).sum()
        trained(model)
        handle = model.finalize_backward(async_op=True)
        try:
            act(model, loss)
        finally:
            handle.wait()

    return misuse


def inside_a_backward(model: Any) -> None:
    loss = model(random_batch(0, 4)).sum()
    loss.register_hook(lambda _: model.finalize_backward())
    loss.backward()


MISUSES: dict[str, Callable[[Any], Any]] = {
    "on_a_block": lambda model: model.blocks[0].finalize_backward(),
    "set_on_a_block": lambda model: model.blocks[0].set_manual_backward_finalization(True),
    "without_the_mode": without_the_mode,
    "mode_left_before_the_end": mode_left_before_the_end,
    "forward_before_waiting": before_waiting(lambda model, _: trained(model)),
    "backward_before_waiting": before_waiting(lambda _, loss: loss.backward()),
    "twice_before_waiting": before_waiting(lambda model, _: model.finalize_backward()),
    "inside_a_backward": inside_a_backward,
    "waiting_after_a_reset": before_waiting(lambda model, _: model.reset_iter_state()),
    "no_bool": lambda model: model.set_manual_backward_finalization(1),
}


@on_ranks(2)
def test_misuse_is_refused_and_leaves_the_model_usable() -> None:
    answers = []
    for name, misuse in MISUSES.items():
        model = tower(Side(is_sharded=True))
        answers.append(f"{name}: {refusal(misuse, model)}")
        model.reset_iter_state()
        model.zero_grad()
        trained(model)  # it goes on
        model.set_manual_backward_finalization(True)
        model.finalize_backward()
        assert all(param.grad is not None for param in model.parameters())
    assert_expected_inline(
        "\n".join(answers),
        """\
on_a_block: RuntimeError: finalize_backward: blocks.0 is not the root, but inside a sharded module that drives it. Call it on the outermost sharded module.
set_on_a_block: RuntimeError: set_manual_backward_finalization: blocks.0 is not the root, but inside a sharded module that drives it. Call it on the outermost sharded module.
without_the_mode: RuntimeError: finalize_backward: Tower ends its backwards by itself, and their gradients are complete. Call set_manual_backward_finalization(True) before forward, or leave this call out.
mode_left_before_the_end: RuntimeError: set_manual_backward_finalization: Tower has run a backward that was not finalized. Call finalize_backward(), or reset_iter_state() to drop its gradients, before changing who ends a backward.
forward_before_waiting: RuntimeError: Tower: a forward while gradients are still being reduced: finalize_backward(async_op=True) returned a handle whose wait() was not called. Call it first.
backward_before_waiting: RuntimeError: Tower: a backward while gradients are still being reduced: finalize_backward(async_op=True) returned a handle whose wait() was not called. Call it first.
twice_before_waiting: RuntimeError: Tower: finalize_backward() while gradients are still being reduced: finalize_backward(async_op=True) returned a handle whose wait() was not called. Call it first.
inside_a_backward: RuntimeError: finalize_backward: Tower is part of a model whose backward is running, and that needs its parameters and gradients as they are. Call it afterwards.
waiting_after_a_reset: RuntimeError: GradientReductionHandle.wait: reset_iter_state() was called after finalize_backward() and has dropped the gradients that this handle stands for. Run the iteration again.
no_bool: TypeError: set_manual_backward_finalization: enabled is 1, an int; pass True or False.""",
    )


@same_as_plain(2)
def test_before_the_first_forward_there_is_nothing_to_end(side: Side) -> None:
    """It does nothing there, whoever ends backwards; what follows trains."""
    model = tower(side)
    if side.is_sharded:
        model.set_manual_backward_finalization(False)
        finalize(side, model, async_op=False)
        model.finalize_backward(async_op=True)
        model.set_manual_backward_finalization(True)
    mean_of_squares(model, side.inputs(0)).backward()
    finalize(side, model, async_op=False)
    side.note_gradients(model)


@same_as_plain(2)
@pytest.mark.parametrize("what", ["a copy", "a module around"])
def test_a_copy_and_a_module_around_are_ended_by_hand_as_well(side: Side, what: str) -> None:
    """Of a model that ends its backwards by hand, and is copied or becomes part of another one."""
    if what == "a copy":
        model = copy.deepcopy(tower(side))
    else:
        model = side.shard(nn.Sequential(tower(side)))
    side.sync(model, False)
    mean_of_squares(model, side.inputs(0)).backward()
    side.sync(model, True)
    finalize(side, model, async_op=False)
    side.note_gradients(model)
