"""What is in memory during a step, in units of B, the largest group's full parameters."""

import gc
from typing import Any

import pytest
import torch
from events import observe
from on_ranks import on_ranks
from torch import Tensor, nn

from shardwise import CommPolicy, fully_shard
from shardwise.observe import memory_snapshot

WIDTH, DEPTH = 512, 6
B = 2 * WIDTH * WIDTH * 4  # a block's full parameters, in bytes; small ones keep their memory


class Pair(nn.Module):
    """Two matrices: every byte of a group is a direct parameter's or nearly so."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stack(policy: CommPolicy | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair() for _ in range(DEPTH)))
    for block in model:
        fully_shard(block, comm_policy=policy, **options)
    return fully_shard(model, comm_policy=policy, **options)


def unsharded_bytes(model: nn.Module) -> int:
    snapshot = memory_snapshot(model)
    return snapshot.unsharded_bytes + snapshot.kept_storage_bytes


@pytest.mark.parametrize(
    ("choices", "forward", "backward", "gradients"),
    [
        ({}, 2, 2, 2),
        ({"part_bytes": 0}, 2, 2, 1),
        ({"prefetch": 3, "max_prefetched": 2}, 3, 3, 2),
        ({"backward_prefetch": "after"}, 2, 1, 2),
    ],
    ids=["small groups", "in parts", "ahead", "after"],
)
@on_ranks(2)
def test_two_groups_of_parameters_are_the_most_and_as_many_of_gradients_or_one(
    choices: dict[str, Any], forward: int, backward: int, gradients: int
) -> None:
    """Unless the caller lets more be unsharded ahead, or fewer."""
    model = stack(CommPolicy(**choices))
    x = torch.randn(2, WIDTH)
    model(x).sum().backward()
    peaks = {"forward": 0.0, "backward": 0.0, "gradients": 0.0}
    phase = "forward"

    def look(_event: str, _name: str) -> None:
        peaks[phase] = max(peaks[phase], unsharded_bytes(model) / B)
        peaks["gradients"] = max(peaks["gradients"], memory_snapshot(model).full_gradient_bytes / B)

    observe(model, look)
    loss = model(x).sum()
    phase = "backward"
    loss.backward()
    peaks["after"] = (unsharded_bytes(model) + memory_snapshot(model).full_gradient_bytes) / B
    assert peaks == {"forward": forward, "backward": backward, "gradients": gradients, "after": 0}


@pytest.mark.parametrize("after_a_step", [False, True])
@on_ranks(2)
def test_a_model_that_is_dropped_leaves_nothing_behind(after_a_step: bool) -> None:
    model = stack()
    if after_a_step:
        model(torch.randn(2, WIDTH)).sum().backward()
    del model
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is nn.Parameter and each.shape == (WIDTH, WIDTH)]
    assert sum(each.untyped_storage().nbytes() for each in left) == 0
