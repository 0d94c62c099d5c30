"""What a sharded module still is: its class, a container, an nn.Module."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
import torch
from comparing import assert_equal
from dynamo import quiet_dynamo
from models import Block, Tower, built, random_batch, shard_tower
from on_ranks import on_ranks
from torch import Tensor, nn
from towers import backward, gradients, plain_tower, sharded_tower

from shardwise import FSDPModule, fully_shard, unsharded

# --- the class ------------------------------------------------------------------------------------


def look_up(module: nn.Module, name: str) -> type | None:
    """The class of this name in a tree of modules, as frameworks look for those to wrap."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)


@on_ranks(1)
def test_the_class_is_mixed_once_and_is_both() -> None:
    """It prints as before except for the names of classes, is found by its name and travels by pickle."""
    plain, one, other = plain_tower(), sharded_tower(), sharded_tower()
    before = type(plain)
    fully_shard(plain)
    kind, block = type(one), type(one.blocks[0])
    assert (kind.__name__, one._get_name(), kind.__doc__) == ("Tower", "Tower", Tower.__doc__)
    assert issubclass(kind, Tower)
    assert issubclass(kind, FSDPModule)
    assert kind is type(other) is type(plain)
    assert {type(each) for each in one.blocks} == {block}
    assert before is Tower
    assert not issubclass(Tower, FSDPModule)
    assert (type(one.blocks), type(one.inlet)) == (nn.ModuleList, nn.Linear)  # which are not sharded
    assert type(kind(depth=1)) is Tower
    assert type(fully_shard(nn.Linear(2, 2))).__name__ == "Linear"
    assert (look_up(one, "Tower"), look_up(one, "Block")) == (kind, block)
    assert pickle.loads(pickle.dumps(block)) is block
    prints = str(plain_tower()).replace("Tower(", "FSDPTower(").replace(" Block(", " FSDPBlock(")
    assert "(0-2): 3 x FSDPBlock(" in prints
    assert str(one) == prints


@pytest.mark.parametrize("kind", [tuple, list])
@on_ranks(1)
def test_what_is_given_is_returned(kind: Callable[[Any], Any]) -> None:
    model = plain_tower()
    blocks = kind(model.blocks)
    assert fully_shard(blocks) is blocks
    assert blocks == kind(model.blocks)
    assert all(isinstance(block, FSDPModule) for block in blocks)
    assert fully_shard(model) is model


T = TypeVar("T")


class GenericFirst(Generic[T], Block):
    pass


class GenericOfInt(GenericFirst[int]):
    pass


class Slots:
    __slots__ = ("left", "right")


class SlottedFirst(Slots, Block):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.left, self.right = 2.0, "kept"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.left


class SlottedItself(Block):
    __slots__ = ("extra",)

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.extra = "kept"


class CallsSuper(Block):
    """Every method that we mix in code around is overridden and calls its parent's."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 + super().forward(x)

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)

    def train(self, mode: bool = True) -> "CallsSuper":
        self.was_told = mode
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"extra of {super().extra_repr()!r}"


class OwnNew(Block):
    def __new__(cls, *args: Any) -> "OwnNew":
        self = super().__new__(cls)
        self.__dict__["born"] = True
        return self


class Guarded(Block):
    def __getattr__(self, name: str) -> Any:
        if name == "alias":
            return self.up
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.alias(x).sum()


class Registry(Block):
    """Counts the classes made of it, as plug-in systems do."""

    made: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registry.made.append(cls.__name__)


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(2))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(8)), "shift": torch.randn(8)})

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(x + step)
        for value in self.named.values():
            x = x * value
        return x + self.steps[1] - self.named["shift"]


def tower_of(cls: type[nn.Module]) -> Tower:
    model = Tower()
    model.blocks = nn.ModuleList(cls(8, 16) for _ in range(2))
    return model


def tower_of_compiled_blocks() -> Tower:
    """What ``torch.compile(block)`` returns has its forward on the instance, not in its class."""
    quiet_dynamo()
    model = Tower()
    model.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in model.blocks)
    return model


def tower_of_parametrized_layers() -> Tower:
    """Their weight is a property of a class that torch makes for each of them."""
    model = Tower()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
        nn.utils.parametrizations.orthogonal(block.down)
    return model


def with_forward_on_the_instance() -> nn.Module:
    model = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 1)})
    model.forward = lambda x: model["down"](torch.tanh(model["up"](x)))
    return model


CLASSES = [GenericOfInt, SlottedFirst, SlottedItself, CallsSuper, OwnNew, Guarded, Registry]
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"blocks: {cls.__name__}": partial(tower_of, cls) for cls in CLASSES},
    "compiled blocks": tower_of_compiled_blocks,
    "parametrized layers": tower_of_parametrized_layers,
    "forward on the instance": with_forward_on_the_instance,
    "lists and dicts of parameters": Collected,
}


@on_ranks(2)
def test_modules_of_any_class_and_make_train_as_plain_ones() -> None:
    for name, make in MODELS.items():
        plain, model = built(make, seed=0), built(make, seed=0)
        cls = type(getattr(model, "blocks", [model])[0])
        shard_tower(model) if hasattr(model, "blocks") else fully_shard(model)
        first = getattr(model, "blocks", [model])[0]
        assert isinstance(first, cls)
        assert isinstance(first, FSDPModule)
        assert type(first).__name__ == cls.__name__
        for each in (plain, model):
            backward(each.train())
        assert_equal(gradients(model), gradients(plain), name, atol=1e-10)


@on_ranks(1)
def test_attributes_and_overridden_methods_stay() -> None:
    slotted, itself = SlottedFirst(8, 16), SlottedItself(8, 16)
    calls, own = CallsSuper(8, 16), OwnNew(8, 16)
    for block in (slotted, itself, calls, own):
        fully_shard(block)
    calls.eval()
    assert (slotted.left, slotted.right, itself.extra) == (2.0, "kept", "kept")
    assert (calls.was_told, calls.extra_repr(), own.born) == (False, "extra of ''", True)


# --- containers -----------------------------------------------------------------------------------


def plain_sequence() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def sharded_sequence() -> nn.Sequential:
    model = plain_sequence()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


@on_ranks(2)
def test_a_sharded_sequential_is_still_a_sequential() -> None:
    model, x = sharded_sequence(), random_batch(0, 4)
    part = model[1:4]
    assert (type(model).__name__, len(model)) == ("Sequential", 5)
    assert [type(model[i]) for i in (1, 3)] == [nn.Tanh] * 2
    assert all(layer is model[i] for i, layer in enumerate(model))
    assert model[-1] is model[4]
    assert (type(part), len(part)) == (nn.Sequential, 3)
    assert part[1] is model[2]
    assert model[2] in model
    before = model(x)
    assert torch.equal(model[:](x), before)
    assert torch.equal(part(x), torch.tanh(model[2](torch.tanh(x))))
    model.append(nn.Softplus())
    assert torch.equal(model(x), nn.functional.softplus(before))
    model.insert(1, nn.Identity())
    model.pop(-1)
    assert len(model) == 6
    assert torch.equal(model(x), before)


# --- what nn.Module offers ------------------------------------------------------------------------


class WithBuffers(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.normalise = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.normalise(x)) + self.table.sum()


def plain_with_buffers() -> WithBuffers:
    return built(WithBuffers, seed=0)


@on_ranks(2)
def test_buffers_are_left_alone() -> None:
    plain = plain_with_buffers()
    backward(plain)
    model = plain_with_buffers()
    before = dict(model.named_buffers())
    shard_tower(model)
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
    backward(model)
    assert all(type(buffer) is Tensor for buffer in model.buffers())
    assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))


def names_and_shapes(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()],
        "buffers": [(name, tuple(b.shape)) for name, b in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "children": [name for name, _ in model.named_children()],
        "state": [(name, tuple(t.shape), t.dtype) for name, t in model.state_dict().items()],
        "numel": sum(p.numel() for p in model.parameters()),
    }


@on_ranks(2)
def test_names_order_and_shapes_are_those_of_the_plain_model_at_any_moment() -> None:
    plain = plain_with_buffers()
    plain.blocks[0].norm.bias.requires_grad_(False)
    model = shard_tower(plain_with_buffers())
    model.blocks[0].norm.bias.requires_grad_(False)
    names = [names_and_shapes(model)]
    handle = model.blocks[1].register_forward_hook(lambda *_: names.append(names_and_shapes(model)))
    model.unshard()
    model.blocks[0].unshard()
    names.append(names_and_shapes(model))
    backward(model)
    handle.remove()
    with unsharded(model):
        names.append(names_and_shapes(model))
    assert [*names, names_and_shapes(model)] == [names_and_shapes(plain)] * 5


@on_ranks(2)
def test_the_state_dict_holds_the_sharded_parameters() -> None:
    model = sharded_tower()
    model.unshard()
    state = model.state_dict(keep_vars=True)
    assert all(state[name] is param for name, param in model.named_parameters())


def set_to_eighths(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.fill_(0.125)
            module.bias.zero_()


@on_ranks(2)
def test_apply_reaches_the_shards_and_forward_sees_it() -> None:
    plain, model = plain_tower(), sharded_tower()
    model(random_batch(1, 2))  # what was unsharded before must not be what is used afterwards
    outputs = []
    for each in (plain, model):
        assert each.apply(set_to_eighths) is each
        outputs.append(each(random_batch(0, 4)))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-12)
