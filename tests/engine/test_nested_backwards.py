"""Backwards and forwards inside of a backward: nothing is freed that something around them has yet to use."""

from typing import Any

import pytest
import torch
from failure_models import Chain, block
from models import WIDTH, built, even_tower
from reference import adamw, mean_of_squares
from scenario import Side, same_as_plain
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
