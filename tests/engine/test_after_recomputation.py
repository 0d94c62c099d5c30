"""``backward_prefetch="after"`` frees a group once its gradients are complete: not before parts inside of it
have been recomputed, which nested backwards do (reentrant checkpointing).
"""

from typing import Any

import torch
from failure_models import Chain
from models import WIDTH, built
from reference import adamw
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import CommPolicy


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
