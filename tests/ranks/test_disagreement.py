"""Ranks that disagree on what to communicate: the error says who waited for what.

A process group with a timeout of two seconds plays the one of half an hour.
"""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from harness import World
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import fully_shard


class Forks(nn.Module):
    """Another block on every rank: what a vision tower is to a rank without pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.blocks[way](x)


def forked(way_of_rank: list[int]) -> str:
    pg: Any = dist.new_group(timeout=datetime.timedelta(seconds=2))
    mesh = DeviceMesh.from_group(pg, "cpu")
    model = Forks()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        model(torch.ones(2, 4), way_of_rank[dist.get_rank()]).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_f20_without_the_opt_in_the_error_names_ranks_and_blocks(world2: World) -> None:
    for text in world2.run(forked, [0, 1]):
        assert (
            "rank 0 waited for the all-gather of 'blocks.0'; rank 1 waited for the all-gather of 'blocks.1'"
            in text
        )
        assert "set_may_be_unused()" in text


def test_ranks_that_agree_train(world2: World) -> None:
    assert_expected_inline(str(world2.run(forked, [1, 1])), """['no error', 'no error']""")


def uneven_microbatches(steps_of_rank: list[int]) -> str:
    pg: Any = dist.new_group(timeout=datetime.timedelta(seconds=2))
    mesh = DeviceMesh.from_group(pg, "cpu")
    model = Forks()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        for _ in range(steps_of_rank[dist.get_rank()]):
            model(torch.ones(2, 4), 0).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_f21_a_rank_with_more_microbatches_is_told_who_has_stopped(world2: World) -> None:
    more, done = world2.run(uneven_microbatches, [2, 1])
    assert "rank 0 waited for the all-gather of 'blocks.0'; rank 1 was not waiting at all" in more
    assert done == "no error"
