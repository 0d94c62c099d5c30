"""What joins a sharded tree after fully_shard: noticed wherever it is put, and named."""

from typing import Any

import pytest
import torch
from comparing import assert_all_same
from expecttest import assert_expected_inline
from harness import World
from meshed import outcome, refusal
from models import Tower, built, shard_tower
from on_ranks import on_ranks
from refusals import wrapped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from towers import backward

from shardwise import fully_shard


class Adapter(nn.Module):
    def __init__(self, base: nn.Module, is_trained: bool = True) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(8, 2, bias=False, dtype=torch.float64).requires_grad_(is_trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.down(x).sum(-1, keepdim=True)


def sharded_tower() -> Any:
    model = built(Tower, seed=0)
    return shard_tower(model)


def beside_all(model: Any) -> None:
    model.blocks[1].adapter = Adapter(nn.Identity())


def in_place_of_a_child(model: Any) -> None:
    model.blocks[1].up = Adapter(model.blocks[1].up)


def in_a_leaf(model: Any) -> None:
    model.blocks[1].up.adapter = nn.Sequential(nn.Tanh(), Adapter(nn.Identity()))


def in_a_container(model: Any) -> None:
    model.blocks.append(Adapter(nn.Identity()))


def where_nothing_stood(model: Any) -> None:
    model.blocks[1].norm.register_parameter("shift", None)
    backward(model)
    model.blocks[1].norm.shift = nn.Parameter(torch.zeros(()))


def frozen_and_then_trained(model: Any) -> None:
    model.blocks[1].adapter = Adapter(nn.Identity(), is_trained=False)
    backward(model)
    model.blocks[1].adapter.requires_grad_(True)


PUT = {
    beside_all: "blocks.1.adapter.down.weight",
    in_place_of_a_child: "blocks.1.up.down.weight",
    in_a_leaf: "blocks.1.up.adapter.1.down.weight",
    in_a_container: "blocks.3.down.weight",
    where_nothing_stood: "blocks.1.norm.shift",
    frozen_and_then_trained: "blocks.1.adapter.down.weight",
}


def refusals(puts: list[Any], has_run: bool) -> list[str]:
    found = []
    for put in puts:
        model = sharded_tower()
        if has_run:
            backward(model)
        put(model)
        found.append(refusal(backward, model))
        assert refusal(backward, model) == found[-1]
    return found


@pytest.mark.parametrize("has_run", [False, True])
def test_a_parameter_added_later_is_refused_by_its_full_name(world2: World, has_run: bool) -> None:
    ranks = world2.run(refusals, list(PUT), has_run)
    assert ranks[0] == ranks[1]
    for text, name in zip(ranks[0], PUT.values(), strict=True):
        assert text.startswith(f"RuntimeError: {name}: this parameter was added after fully_shard"), text
    assert_expected_inline(
        wrapped(ranks[0][0]),
        """\
RuntimeError: blocks.1.adapter.down.weight: this parameter was added
after fully_shard (group 'blocks.1'). No group reduces the gradients,
so they would stay this rank's own and the ranks would drift apart.
Add parameters before fully_shard, call fully_shard on the new module,
or freeze what is not to be trained.""",
    )


def harmless_additions(is_sharded: bool) -> dict[str, Tensor]:
    """What may join: modules without parameters, frozen ones, and an adapter that is sharded itself."""
    model = built(Tower, seed=0)
    if is_sharded:
        model = sharded_tower()
        backward(model)
        model.zero_grad()
    model.blocks[0].up = nn.Sequential(model.blocks[0].up, nn.Dropout(0.0))
    torch.manual_seed(1)
    model.blocks[1].up = Adapter(model.blocks[1].up, is_trained=False)
    model.blocks[2].up = Adapter(model.blocks[2].up)
    if is_sharded:
        fully_shard(model.blocks[2].up.down)
    backward(model)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def test_what_needs_no_group_or_has_its_own_may_join(world2: World) -> None:
    assert_all_same(world2.run(harmless_additions, True), harmless_additions(False))


@pytest.mark.parametrize("keeps_others", [False, True])
@on_ranks(2)
def test_parameters_assigned_after_sharding_on_meta_are_used(keeps_others: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).double()
    fully_shard(model)
    for module in model if not keeps_others else model[1:]:
        for name, param in list(module.named_parameters()):
            value = torch.arange(float(param.numel()), dtype=torch.float64).view(param.shape)
            setattr(module, name, nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements)))
    assert (
        "2 parameters are still on the meta device: 0.weight, 0.bias." if keeps_others else "accepted"
    ) in outcome(lambda: model(torch.ones(2, 3, dtype=torch.float64)).sum().backward())
    assert model[1].bias.full_tensor().tolist() == [0.0, 1.0, 2.0]
