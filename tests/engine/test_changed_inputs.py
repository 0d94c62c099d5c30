"""A block changes what it was given.

What it puts into a list, a dict or a cache, and what it changes in place, are outputs of that call, also
where it returns something else.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from models import WIDTH, Block, built
from reference import adamw
from scenario import Side, same_as_plain
from torch import Tensor, nn

from shardwise import fully_shard


@dataclass
class Cache:
    """As Hugging Face's key-value caches: every block adds to the same one."""

    keys: list[Tensor] = field(default_factory=list)
    total: Tensor | None = None

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        self.total = key if self.total is None else torch.cat([self.total, key])
        return self.total


class Changes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.block = Block(WIDTH, 13)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor, given: Any) -> Any:
        y = self.block(x)
        if self.how == "dict":
            given["h"] = y
            return given
        if self.how == "list":
            given.append(y)
            return y
        if self.how == "list_alone":
            given.append(y)
            return None
        if self.how == "list_of_others":
            given.append(torch.tanh(self.side(x)))
            return y
        if self.how == "cache":
            return y + given.update(self.side(x)).view(-1, *x.shape).mean(0)
        if self.how == "cache_returned":
            return y + given.update(self.side(x)).view(-1, *x.shape).mean(0), given
        gain = self.side.weight.sum() * 0.01 + 1
        if self.how == "in_place":
            return x.mul_(gain).add_(self.side.bias)
        if self.how == "in_place_alone":
            x.mul_(gain).add_(self.side.bias)
        else:
            x[:, 1:].mul_(gain)
        return None


class Changing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Changes(how) for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x) * 0.5
        given: Any = {} if self.how == "dict" else Cache() if "cache" in self.how else []
        for block in self.blocks:
            returned = block(x, given)
            if self.how == "dict":
                x = returned["h"]
            elif self.how == "cache_returned":
                x, given = returned
            elif returned is not None:
                x = returned
        if self.how == "in_place":
            x = x.clone()
        kept = given.keys if isinstance(given, Cache) else given if isinstance(given, list) else []
        return self.outlet(sum(kept, x))


HOWS = (
    *("dict", "list", "list_alone", "list_of_others", "cache", "cache_returned"),
    *("in_place", "in_place_alone", "part_in_place"),
)


@same_as_plain()
@pytest.mark.parametrize(("world", "reshard"), [(1, None), (2, True)], indirect=["world"])
def test_what_a_block_adds_to_its_input_has_a_gradient(side: Side, reshard: bool | None) -> None:
    for how in HOWS:
        model = side.shard_tower(built(Changing, how), reshard_after_forward=reshard)
        side.steps(model, adamw(model), range(2))


@same_as_plain(2)
def test_a_loss_may_use_nothing_but_what_the_list_has(side: Side) -> None:
    model = side.shard_tower(built(Changing, "list_of_others"), reshard_after_forward=True)
    for step in range(2):
        kept: list[Tensor] = []
        model.blocks[1](side.inputs(step), kept)
        kept[0].pow(2).mean().backward()
        side.note("gradient", model.blocks[1].side.weight.grad)
        side.assert_settled(model)


class AppendsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:
        given.append(self.linear.weight.t())
        return self.linear(x)


def append_weight() -> list[str]:
    model = fully_shard(built(AppendsWeight), reshard_after_forward=True)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    messages = []
    for has_graph in (True, False):
        with torch.set_grad_enabled(has_graph), pytest.raises(TypeError) as refused:
            model(x, [x])
        messages.append(str(refused.value))
    return messages


def test_a_parameter_put_into_the_callers_list_is_refused(world2: World) -> None:
    (with_graph, without), _ = world2.run(append_weight)
    assert with_graph == without
    assert_expected_inline(
        with_graph,
        """AppendsWeight: forward has put one of its own parameters, of shape (8, 8), into a container that it was given. The parameter's memory is freed after forward. Put parameter.clone() there.""",
    )
