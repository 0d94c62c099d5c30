"""Counts of what a sharded model communicates, group by group."""

from collections import Counter
from typing import Any

import pytest
from harness import World
from models import built, even_tower, random_batch
from reference import mean_of_squares
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import fully_shard
from shardwise.observe import CollectiveCounts, count_collectives, memory_snapshot
from shardwise.strategies import register_comm_hook


def counted(replicates: bool) -> tuple[CollectiveCounts, CollectiveCounts, CollectiveCounts]:
    """Of a step, of one inside another's context without synchronisation, and of a block alone."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_r", "dp_s")) if replicates else None
    model = built(even_tower)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    with count_collectives(model) as both:
        with count_collectives(model) as step:
            mean_of_squares(model, random_batch(0, 4)).backward()
        with count_collectives(model.blocks[0]) as block:
            model.set_requires_gradient_sync(False)
            mean_of_squares(model, random_batch(1, 4)).backward()
    before = sum(both.all_gather.values())
    mean_of_squares(model, random_batch(2, 4)).backward()
    assert sum(both.all_gather.values()) == before, "it counts outside"
    return step, both, block


def test_each_block_is_unsharded_twice_and_reduced_once(world2: World) -> None:
    (step, both, block), other = world2.run(counted, False)
    assert (step, both, block) == other
    blocks = sorted(name for name in step.all_gather if name.startswith("blocks."))
    assert len(blocks) > 1
    assert step.all_gather == Counter({**dict.fromkeys(blocks, 2), "Tower": 1})
    assert step.reduce_scatter == Counter([*blocks, "Tower"])
    assert not +step.all_reduce
    assert both.all_gather == step.all_gather + step.all_gather
    assert both.reduce_scatter == step.reduce_scatter, "nothing was to be synchronised"
    assert block.all_gather == Counter({"blocks.0": 2})


def test_replicas_only_reduce(world2: World) -> None:
    for step, *_ in world2.run(counted, True):
        assert not +step.all_gather
        assert not +step.reduce_scatter
        assert set(step.all_reduce.values()) == {1}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("count_collectives", lambda model: count_collectives(model).__enter__()),
        ("memory_snapshot", memory_snapshot),
        ("trace", lambda model: shardwise.trace(model).__enter__()),
        ("explain", shardwise.explain),
        ("register_comm_hook", lambda model: register_comm_hook(model, None, print)),
    ],
)
def test_what_is_not_sharded_is_refused(name: str, call: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: there is no sharded module in this Linear"):
        call(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=f"{name}: model is 3, an int"):
        call(3)
