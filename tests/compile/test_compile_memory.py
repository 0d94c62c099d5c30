"""What graphs of whole models hold while they run, in units of B, a block's full parameters.

Beside shards, which are there before; with activations of two rows, and a root of an eighth of B.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from compile import log_of_step
from harness import World
from models import Tower, random_batch, shard_tower
from reference import mean_of_squares
from test_compile_model import HOWS, compiled, num_graphs
from torch.distributed.device_mesh import DeviceMesh

WIDTH, HIDDEN, DEPTH = 256, 1024, 6
B = 4 * (2 * WIDTH * HIDDEN + HIDDEN + 3 * WIDTH)
ROOT = 4 * (WIDTH * WIDTH + 2 * WIDTH + 1) / B
REST = 0.1  # activations


@dataclass
class Held:
    """In units of B."""

    after_forward: float
    forward: float
    backward: float


@cache  # a mesh opens process groups, which no test can close
def fake_mesh() -> DeviceMesh:
    """Of both ranks, which send nothing: each releases what it has allocated, where the profiler sees it."""
    return DeviceMesh.from_group(dist.new_group([0, 1], backend="fake"), "cpu")


def held(how: str, backend: str, **options: Any) -> Held:
    """In a step of a compiled model, after two others."""
    torch.manual_seed(0)
    model = shard_tower(Tower(WIDTH, HIDDEN, DEPTH), mesh=fake_mesh(), **options)
    run = compiled(model, how, backend)
    forward = partial(mean_of_squares, run, random_batch(0, 2, WIDTH, torch.float32))
    for _ in range(2):
        forward().backward()
        model.zero_grad()
    assert num_graphs() == 1
    log = log_of_step(model, forward)
    peaks = [log.peak(*log.marks[phase])[0] / B for phase in ("forward", "backward")]
    return Held(log.alive_bytes(log.marks["forward"][1]) / B, *peaks)


# What was unsharded and copies of it in place; in backward what was unsharded and gradients, with Inductor beside
# those that are packed.
BLOCKS_ALIVE = {"aot_eager": (2, 2), "inductor": (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "backend", "reshard"), list(product(HOWS, ["aot_eager", "inductor"], [None, True, False]))
)
def test_a_graph_holds_at_most_two_blocks_in_forward_three_in_backward_and_none_between_unless_told_to(
    world2: World, how: str, backend: str, reshard: bool | None
) -> None:
    for found in world2.run(held, how, backend, reshard_after_forward=reshard, timeout=300):
        if reshard is False:
            assert found.after_forward >= DEPTH
            assert max(found.forward, found.backward) < DEPTH + 1 + ROOT + REST
        else:
            forward, backward = BLOCKS_ALIVE[backend]
            assert found.after_forward < (0 if reshard else ROOT) + REST
            assert found.forward < forward + ROOT + REST
            assert found.backward < backward + ROOT + REST
