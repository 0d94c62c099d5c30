"""Full parameters that keep their memory while they are sharded, so that their addresses stay."""

from functools import partial
from typing import Any

import pytest
import torch
from harness import World
from on_ranks import on_ranks
from scenario import Side, same_as_plain
from test_memory import DEPTH, WIDTH, B, Pair, unsharded_bytes
from torch import Tensor, nn

from shardwise import MixedPrecisionPolicy


def pairs(side: Side, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair() for _ in range(DEPTH)))
    return side.shard(*model, model, **options)


def addresses_over_steps(keep: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Where full weights lie in each forward and backward of three steps, and what is allocated after."""
    model = pairs(Side(is_sharded=True), **options)
    model.set_keep_unsharded_storage(keep)
    seen: dict[str, set[int]] = {}
    between: list[float] = []

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
        between.append(unsharded_bytes(model) / B)
    model.set_keep_unsharded_storage(False)
    return {
        "addresses": max(map(len, seen.values())),
        "weights": len(seen),
        "between steps": between,
        "after": unsharded_bytes(model) / B,
    }


@pytest.mark.parametrize(
    "options",
    [{"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)}, {"reshard_after_forward": False}],
    ids=["float64", "unsharded after forward"],
)
def test_addresses_of_full_parameters_stay(world2: World, options: dict[str, Any]) -> None:
    width = 2.0 if "mp_policy" in options else 1.0
    for found in world2.run(addresses_over_steps, True, options):
        assert found["weights"] == 2 * DEPTH
        assert found["addresses"] == 1
        assert found["between steps"] == [DEPTH * width] * 3
        assert found["after"] == 0  # given back as soon as that is wanted


def test_without_asking_the_memory_is_given_back(world2: World) -> None:
    for found in world2.run(addresses_over_steps, False, {}):
        assert found["between steps"] == [0.0] * 3


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
