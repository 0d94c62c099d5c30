"""Backwards and forwards inside of a backward: nothing is freed that something around them has yet to use.

Scripts run plainly and sharded (scenario.py) in float64.
"""

from typing import Any

import pytest
import torch
from failure_models import Chain, block
from harness import World
from models import WIDTH, built
from reference import adamw, mean_of_squares
from scenario import Side, assert_same, same_as_plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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


def nested_checkpoints(side: Side, cases: Any, options: Any) -> None:
    for kinds, creates_graph in cases:
        model = side.shard_tower(built(Checkpoints, kinds, creates_graph), **options)
        side.steps(model, adamw(model), range(2))


@pytest.mark.parametrize("reshard", [None, True])
def test_checkpoints_nest_around_a_block_that_differentiates_itself(
    world2: World, reshard: bool | None
) -> None:
    inner_keeps = [((outer, False), graph) for outer in (True, False) for graph in (True, False)]
    assert_same(world2, nested_checkpoints, inner_keeps, {"reshard_after_forward": reshard})


class Checkpointed(Chain):
    def __init__(self) -> None:
        super().__init__(block, block, block)

    def between(self, block: nn.Module, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=True) if torch.is_grad_enabled() else block(x)


@same_as_plain(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_backward_hook_may_evaluate_the_model_that_is_recomputed(side: Side, reshard: bool | None) -> None:
    model = side.shard_tower(built(Checkpointed), reshard_after_forward=reshard)
    seen: list[Tensor] = []

    def evaluate(*_: Any) -> None:
        with torch.no_grad():
            seen.append(mean_of_squares(model, side.inputs(7)))

    model.blocks[1].down.register_full_backward_hook(evaluate)
    side.steps(model, adamw(model), range(2), lambda model, x: mean_of_squares(model, x.requires_grad_()))
    assert len(seen) == 2
    side.note_mean("seen", torch.stack(seen))


def forces(side: Side, with_energy: bool, options: Any) -> None:
    """Of the loss on the forces alone, the outlet's bias has no gradient."""
    model = side.shard_tower(built(Chain, block, block), **options)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        x = side.inputs(step).requires_grad_()
        energies = model(x)
        (force,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
        loss = force.pow(2).mean() + (energies.pow(2).mean() if with_energy else 0)
        loss.backward()
        side.note_mean("loss", loss)
        side.note_gradients(model)
        side.assert_settled(model)
        optimizer.step()
    side.note_parameters(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_loss_on_forces_leaves_nothing_unsharded(world2: World, reshard: bool | None) -> None:
    for with_energy in (False, True):
        assert_same(world2, forces, with_energy, {"reshard_after_forward": reshard})
