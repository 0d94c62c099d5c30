"""What is in memory during a step, in units of B, the largest group's full parameters."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from events import observe
from on_ranks import on_ranks
from scenario import Side, same_as_plain
from torch import Tensor, nn

from shardwise import CommPolicy, MixedPrecisionPolicy, fully_shard
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


# --- full parameters that keep their memory while they are sharded --------------------------------


def pairs(side: Side, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair() for _ in range(DEPTH)))
    return side.shard(*model, model, **options)


@pytest.mark.parametrize(
    ("keeps", "options", "between"),
    [
        (True, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)}, 2 * DEPTH),
        (True, {"reshard_after_forward": False}, DEPTH),
        (False, {}, 0),
    ],
    ids=["float64", "unsharded after forward", "not asked for"],
)
@on_ranks(2)
def test_addresses_of_full_parameters_stay(keeps: bool, options: dict[str, Any], between: int) -> None:
    """In each forward and backward of three steps; and the memory is given back as soon as that is wanted."""
    model = pairs(Side(is_sharded=True), **options)
    model.set_keep_unsharded_storage(keeps)
    seen: dict[str, set[int]] = {}

    def note_now(name: str, weight: Tensor, _: Any = None) -> None:
        seen.setdefault(name, set()).add(weight.data_ptr())

    def note(module: nn.Module, *_: Any) -> None:
        for name, layer in module.named_children():
            name = f"{names[module]}.{name}"
            if name not in seen:  # full parameters stay the same objects
                layer.weight.register_hook(partial(note_now, name, layer.weight))
            note_now(name, layer.weight)

    names = {module: name for name, module in model.named_children()}
    for block in model:
        block.register_forward_hook(note)
    others: list[Tensor] = []  # take the memory that was given back
    for _ in range(3):
        model(torch.randn(2, WIDTH)).sum().backward()
        others += [torch.empty(B // 2, dtype=torch.uint8) for _ in range(3)]
        assert unsharded_bytes(model) / B == between
    assert len(seen) == 2 * DEPTH
    assert not keeps or {len(addresses) for addresses in seen.values()} == {1}
    model.set_keep_unsharded_storage(False)
    assert unsharded_bytes(model) == 0


@on_ranks(2)
def test_it_concerns_the_modules_it_was_called_for() -> None:
    model = pairs(Side(is_sharded=True))
    model[1].set_keep_unsharded_storage(True)
    model.set_keep_unsharded_storage(True, recurse=False)  # it has no parameters of its own
    model(torch.randn(2, WIDTH)).sum().backward()
    assert unsharded_bytes(model) / B == 1.0


@same_as_plain(2, atol=1e-12)
def test_training_is_as_without(side: Side) -> None:
    """Weights are unsharded anew each time, whatever lies in the memory that was kept."""
    model = pairs(side).double()
    if side.is_sharded:
        model.set_keep_unsharded_storage(True)
    # Not Adam, which divides the rounding of gradients that are nearly zero by their size.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        side.step(model, optimizer, step, width=WIDTH)
        with torch.no_grad():
            side.note_rows("evaluated", model(side.inputs(step, WIDTH)))
    side.note_parameters(model)
