"""Graphs that a backward has made (`create_graph=True`) find their weights, whatever runs in between.

And of passes inside of a backward: nothing is freed that something around them has yet to use.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from events import events_of
from failure_models import Chain, block
from meshed import refusal
from models import WIDTH, built, even_tower, shard_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from refusals import assert_says
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint

from shardwise import CommPolicy


def slope(model: nn.Module, inputs: Tensor) -> Tensor:
    inputs = inputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).pow(2).sum(), inputs, create_graph=True)
    return gradient


def penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    return (slope(model, inputs).norm(dim=1) - 1).pow(2).mean()


class Soft(nn.Module):
    """Its last nodes use weights of the root as well; one block runs twice, one is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        tower = even_tower()
        self.inlet, self.blocks, self.outlet = tower.inlet, tower.blocks, tower.outlet

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = self.blocks[1](self.blocks[2](self.blocks[1](x)))
        return self.outlet(torch.tanh(x))


# --- what comes between ---------------------------------------------------------------------------


def a_loss(side: Side, model: nn.Module) -> None:
    mean_of_squares(model, side.inputs(1)).backward()


def an_evaluation(side: Side, model: nn.Module) -> None:
    with torch.no_grad():
        side.note_rows("evaluation", model(side.inputs(2)))


def a_forward(side: Side, model: nn.Module) -> None:
    side.note_rows("forward", model(side.inputs(3)))


def another_penalty(side: Side, model: nn.Module) -> None:
    penalty(model, side.inputs(4)).backward()


def a_graph_that_is_dropped(side: Side, model: nn.Module) -> None:
    side.note_rows("dropped", slope(model, side.inputs(4)))


BETWEEN: list[Callable[[Side, nn.Module], None]] = [
    *(a_loss, an_evaluation, a_forward, another_penalty, a_graph_that_is_dropped)
]


@same_as_plain(2)
@pytest.mark.parametrize(("make", "reshard"), [(even_tower, None), (Soft, True), (even_tower, False)])
def test_any_pass_may_come_between_a_graph_and_its_backward(
    side: Side, make: Callable[[], nn.Module], reshard: bool | None
) -> None:
    model = built(make)
    side.shard_tower(model, reshard_after_forward=reshard)
    optimizer = adamw(model)
    for between in BETWEEN:
        optimizer.zero_grad()
        first, second = (penalty(model, side.inputs(step)) for step in (0, 5))
        between(side, model)
        first.backward()
        second.backward(retain_graph=True)
        side.assert_settled(model)
        second.backward()
        side.note_gradients(model)
        side.assert_settled(model)
        optimizer.step()
    side.note_parameters(model)


# --- derivatives of higher order ------------------------------------------------------------------


def loss_with_penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    return mean_of_squares(model, inputs) + 10 * penalty(model, inputs)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("loss", "depth", "reshard"),
    [(loss_with_penalty, 0, None), (loss_with_penalty, 3, True), (penalty, 3, None)],
)
def test_a_gradient_penalty_trains_as_without_sharding(
    side: Side, loss: Any, depth: int, reshard: bool | None
) -> None:
    """Beside another loss, or as all of it."""
    model = side.shard_tower(built(Chain, *[block] * depth), reshard_after_forward=reshard)
    side.steps(model, adamw(model), range(2), loss)


@on_ranks(2)
def test_batched_gradients_that_create_a_graph_are_refused() -> None:
    """Tensors that stand for several hide the nodes that have made them."""
    model, point = shard_tower(built(even_tower)), torch.ones(2, 8).double()
    derive = partial(jacobian, lambda x: model(x).sum(0), point, vectorize=True)
    refused = refusal(partial(derive, create_graph=True))
    assert_says(
        refused, "NotImplementedError: ", "vectorize=True", "Use vectorize=False, or torch.func.jacrev"
    )
    torch.testing.assert_close(derive(), jacobian(lambda x: model(x).sum(0), point), rtol=0, atol=1e-12)


@same_as_plain(2)
def test_derivatives_of_higher_order(side: Side) -> None:
    model = side.shard_tower(built(Soft), comm_policy=CommPolicy(backward_prefetch="after"))
    point = torch.arange(8.0).double().div(8)[None]
    second = torch.autograd.functional.hessian(lambda x: model(x).pow(2).sum(), point, create_graph=True)
    side.note("hessian", second)
    side.assert_settled(model)
    mean_of_squares(model, side.inputs(0)).backward()
    inputs = side.inputs(1).requires_grad_()
    derived = model(inputs).pow(2).sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(derived, inputs, create_graph=True)
        side.note_rows("slope", gradient)
        derived = gradient.pow(2).sum()
    (derived / len(inputs)).backward()
    side.note_gradients(model)
    second.pow(2).sum().backward()
    side.note_gradients(model)
    side.assert_settled(model)


# --- force models ---------------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize("reshard", [None, False])
def test_forces_leave_nothing_unsharded(side: Side, reshard: bool | None) -> None:
    model = side.shard_tower(built(Soft), reshard_after_forward=reshard)
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        positions = side.inputs(step).requires_grad_()
        energy = model(positions)
        (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=step != 1)
        side.assert_settled(model)
        loss = forces.pow(2).mean() if step != 1 else mean_of_squares(model, positions)
        loss.backward()
        side.note_rows("forces", forces)
        side.note_gradients(model)
        side.assert_settled(model)
        optimizer.step()


# --- weights that have changed since --------------------------------------------------------------


@on_ranks(2)
def test_a_graph_from_before_a_step_raises_as_without_sharding() -> None:
    side = Side(is_sharded=True)
    model = side.shard_tower(built(even_tower))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    punished = penalty(model, side.inputs(0))
    mean_of_squares(model, side.inputs(1)).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    text = refusal(punished.backward)
    optimizer.zero_grad()
    mean_of_squares(model, side.inputs(1)).backward()
    assert all(param.grad is not None for param in model.parameters())
    assert "modified by an inplace operation" in text
    assert "2147483647" not in text


# --- what it costs --------------------------------------------------------------------------------


@on_ranks(2)
def test_the_backward_of_a_graph_unshards_each_group_once_and_ahead() -> None:
    side = Side(is_sharded=True)
    model = side.shard_tower(built(even_tower))
    penalty(model, side.inputs(0)).backward()
    punished = penalty(model, side.inputs(0))
    events = events_of(model)
    punished.backward()
    names = ["Tower", "blocks.0", "blocks.1", "blocks.2"]
    assert [event for event in events if event.startswith("unshard")] == [f"unshard {n}" for n in names]
    assert {event for event in events if event.startswith("free")} == {f"free {n}" for n in names}


# --- backwards and forwards inside of a backward --------------------------------------------------


class DifferentiatesItself(nn.Module):
    """An energy model inside a block: its forward calls ``torch.autograd.grad``, then computes on."""

    def __init__(self, creates_graph: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.creates_graph = creates_graph

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.second(torch.tanh(self.first(z))).pow(2).sum()
            (force,) = torch.autograd.grad(energy, z, create_graph=self.creates_graph)
        return x + torch.tanh(self.first(x)) + 0.1 * (force if self.creates_graph else force.detach())


class Checkpoints(Chain):
    """Recomputes its blocks by two checkpoints, one in the other; ``kinds``: which of them are reentrant."""

    def __init__(self, kinds: tuple[bool, bool], creates_graph: bool) -> None:
        super().__init__(*[lambda: DifferentiatesItself(creates_graph)] * 2)
        self.kinds = kinds

    def between(self, block: nn.Module, x: Tensor) -> Any:
        outer, inner = self.kinds

        def part(x: Tensor) -> Tensor:
            return torch.tanh(checkpoint(block, x, use_reentrant=inner))  # type: ignore[arg-type]

        return checkpoint(part, x, use_reentrant=outer)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("outer", "creates_graph", "reshard"),
    [(True, True, None), (True, False, True), (False, True, True), (False, True, None)],
)
def test_checkpoints_nest_around_a_block_that_differentiates_itself(
    side: Side, outer: bool, creates_graph: bool, reshard: bool | None
) -> None:
    model = built(Checkpoints, (outer, False), creates_graph)
    side.shard_tower(model, reshard_after_forward=reshard)
    side.steps(model, adamw(model), range(2))


class Checkpointed(Chain):
    def __init__(self) -> None:
        super().__init__(block, block, block)

    def between(self, block: nn.Module, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=True) if torch.is_grad_enabled() else block(x)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("make", "reshard"), [(Checkpointed, None), (Checkpointed, False), (even_tower, None)]
)
def test_a_backward_hook_may_evaluate_the_model(side: Side, make: Any, reshard: bool | None) -> None:
    """Also one that is recomputed."""
    model = side.shard_tower(built(make), reshard_after_forward=reshard)
    seen: list[Tensor] = []

    def evaluate(*_: Any) -> None:
        with torch.no_grad():
            seen.append(mean_of_squares(model, side.inputs(7)))

    model.blocks[1].down.register_full_backward_hook(evaluate)
    side.steps(model, adamw(model), range(2), lambda model, x: mean_of_squares(model, x.requires_grad_()))
    assert len(seen) == 2
    side.note_mean("seen", torch.stack(seen))
