"""No bytes of parameters or gradients are copied around collectives where nothing has to be."""

import pytest
import torch
from copies import count_copies
from harness import World
from torch import Tensor, nn

from shardwise import CommPolicy, fully_shard

WIDTH = 256


class Pair(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stack(hidden: int, limit: int | None, is_sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair(hidden) for _ in range(3)))
    if is_sharded:
        policy = None if limit is None else CommPolicy(packing_limit_bytes=limit)
        for block in model:
            fully_shard(block, comm_policy=policy)
        fully_shard(model, comm_policy=policy)
    return model


def copies_of_a_step(hidden: int, limit: int | None) -> dict[str, int]:
    x = torch.randn(4, WIDTH)
    counted = []
    for is_sharded in (True, False):
        model = stack(hidden, limit, is_sharded)
        for _ in range(2):  # the second step is the steady one
            model.zero_grad()
            copies = count_copies(lambda m=model: m(x).sum().backward())
        counted.append(copies)
    beyond = counted[0].beyond(counted[1])
    return {kind: beyond.total(kind) for kind in ("copied", "in transport")}


BLOCK = 2 * WIDTH * WIDTH * 4  # bytes


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)], indirect=True)
def test_even_parameters_above_the_packing_limit_are_never_copied(world: World) -> None:
    for counts in world.run(copies_of_a_step, WIDTH, None):
        # A gather puts this rank's own part in place, as any all-gather does: two a block, and one of the
        # block that backward begins with.
        assert counts == {"copied": 0, "in transport": 5 * BLOCK // world.size}


def test_packing_costs_a_copy_each_way(world2: World) -> None:
    for counts in world2.run(copies_of_a_step, WIDTH, 1 << 30):
        assert counts["copied"] == 8 * BLOCK  # out after five all-gathers, in before three reductions


def test_an_uneven_gradient_is_padded_once(world2: World) -> None:
    for counts in world2.run(copies_of_a_step, WIDTH + 1, 0):
        assert counts["copied"] == 3 * (WIDTH + 1) * WIDTH * 4  # "up" has 257 rows, "down" 256
