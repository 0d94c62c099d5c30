"""Ranks launch the collectives of all communicators in one order, also where their data take different routes.

NCCL matches collectives of a communicator by the order of their launches. And where kernels of two communicators
are launched in different orders on two ranks, each may hold what the other waits for. So the order over all of
them is written down, rank by rank, and compared. (gloo, on which this runs, would not mind: it has tags.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from failure_models import Chain
from harness import World
from models import built, random_batch, shard_tower
from simulated_device import streams_on_the_host
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise import CommPolicy
from shardwise.comm.communicators import GlooExchange

IN_PARTS = CommPolicy(packing_limit_bytes=0, part_bytes=0)
PREFETCHES_AFTER = CommPolicy(packing_limit_bytes=0, part_bytes=0, prefetch=2, backward_prefetch="after")


@contextmanager
def launches_noted() -> Iterator[list[str]]:
    """Inside, each launch on any communicator is written down: what, over which ranks, of which bucket."""
    launches: list[str] = []

    def noted(kind: str, call: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            launches.append(f"{kind} {name_of(*args, **kwargs)}")
            return call(*args, **kwargs)

        return note

    def bucket_and_sizes(self: Any, outputs: Any, inputs: Any, *_: Any) -> str:
        numel = [each.numel() for each in inputs]
        return f"on {purpose_of(self._pg)} of {self.channel} with {numel}"

    def group_and_size(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> str:
        return f"on {purpose_of(group)} with {tensor.numel()}"

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("all_gather", "reduce_scatter"):
            patch.setattr(GlooExchange, kind, noted(kind, getattr(GlooExchange, kind), bucket_and_sizes))
        patch.setattr(dist, "all_reduce", noted("all_reduce", dist.all_reduce, group_and_size))
        yield launches


def purpose_of(pg: Any) -> str:
    """Which of the process groups of this rank it is, by a name that all ranks share."""
    name = str(pg.group_name)
    return (
        "reductions"
        if "_reduce_" in name
        else f"{pg.size()} ranks, {dist.get_process_group_ranks(pg)[0] // 2}"
    )


class Route(nn.Module):
    """Four layers, computed in the order of `order`; letters that are left out are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.order = "abcd"
        self.recomputes = False
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            layer = getattr(self, name)
            y = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            x = x + y.tanh()
        return x


Routing = Callable[[Any, int], None]


def orders_within_blocks(model: Any, rank: int) -> None:
    """Gradients of one group arrive in different orders, and so its parts are complete at different times."""
    for block in model.blocks:
        block.order = ("abcd", "dcba", "cadb", "bdac")[rank]


def recomputed_in_different_orders(model: Any, rank: int) -> None:
    orders_within_blocks(model, rank)
    for block in model.blocks:
        block.recomputes = True


def layers_skipped(model: Any, rank: int) -> None:
    """Ranks use different layers of a block, and the setting for that is on."""
    model.set_reduce_scatter_unused_params(True)
    for block in model.blocks:
        block.order = ("ab", "dc", "c", "bda")[rank]


def blocks_skipped(model: Any, rank: int) -> None:
    """As experts are, that no token of a rank has chosen."""
    for number in (1, 2):
        model.blocks[number].set_may_be_unused()
    model.used = ((0, 1, 3), (0, 2, 3), (0, 3), (0, 2, 1, 3))[rank]


def launches_of(
    routing: Routing, shape: tuple[int, ...], policy: CommPolicy, as_on_a_device: bool
) -> tuple[list[str], list[str]]:
    """Those of the first step, and of two later ones, the first without synchronisation."""
    model = built(Chain, *[Route] * 4, seed=0)
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with streams_on_the_host() if as_on_a_device else nullcontext():
        shard_tower(model, mesh=mesh, comm_policy=policy)
        model.set_separate_reduce_scatter_group(True)
        routing(model, dist.get_rank())
        steps = []
        for syncs in ([True], [False, True]):
            with launches_noted() as launches:
                for index, is_last in enumerate(syncs):
                    model.set_requires_gradient_sync(is_last)
                    model(random_batch(index, 4)).sum().backward()
                model.zero_grad()
            steps.append(launches)
    return steps[0], steps[1]


@pytest.mark.parametrize(
    ("world", "shape", "routing", "policy", "as_on_a_device"),
    [
        (2, (2,), orders_within_blocks, IN_PARTS, True),
        (2, (2,), recomputed_in_different_orders, PREFETCHES_AFTER, False),
        (2, (2,), layers_skipped, PREFETCHES_AFTER, True),
        (2, (2,), blocks_skipped, IN_PARTS, False),
        (4, (2, 2), blocks_skipped, PREFETCHES_AFTER, True),
    ],
    indirect=["world"],
)
def test_ranks_with_different_routes_launch_in_one_order(
    world: World, shape: Any, routing: Routing, policy: CommPolicy, as_on_a_device: bool
) -> None:
    first, *others = world.run(launches_of, routing, shape, policy, as_on_a_device)
    for steps in others:
        assert [without_ranks(step) for step in steps] == [without_ranks(step) for step in first]
    reductions = [line for line in first[1] if line.startswith("reduce_scatter on reductions")]
    assert len(reductions) > 7, "the groups are reduced in parts, over a communicator of their own"


def without_ranks(launches: list[str]) -> list[str]:
    """Where ranks of a mesh are of different process groups, these have different first ranks."""
    return [line.split(" ranks, ")[0] + " ranks" + line[line.find(" of ") :] for line in launches]
