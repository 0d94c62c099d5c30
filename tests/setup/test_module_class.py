"""What a sharded module still is: its class, a container, an nn.Module."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
import torch
from comparing import assert_equal
from dynamo import quiet_dynamo
from harness import World
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
    facts = {
        "returned": fully_shard(plain) is plain,
        "name": (type(one).__name__, one._get_name()),
        "doc": type(one).__doc__ == Tower.__doc__,
        "is both": isinstance(one, Tower) and isinstance(one, FSDPModule),
        "one class for all instances": type(one) is type(other) is type(plain),
        "blocks share a class": len({type(block) for block in one.blocks}) == 1,
        "original is untouched": before is Tower and not issubclass(Tower, FSDPModule),
        "container is untouched": type(one.blocks) is nn.ModuleList,
        "layer is untouched": type(one.inlet) is nn.Linear,
        "new instances are plain": type(type(one)(depth=1)) is Tower,
        "a class of one's own": type(fully_shard(nn.Linear(2, 2))).__name__,
        "found by name": look_up(one, "Tower") is type(one) and look_up(one, "Block") is type(one.blocks[0]),
        "pickled": pickle.loads(pickle.dumps(type(one.blocks[0]))) is type(one.blocks[0]),
        "prints": str(one),
    }
    prints = str(plain_tower()).replace("Tower(", "FSDPTower(").replace(" Block(", " FSDPBlock(")
    assert "(0-2): 3 x FSDPBlock(" in prints
    assert facts == {
        **dict.fromkeys(facts, True),
        "name": ("Tower", "Tower"),
        "a class of one's own": "Linear",
        "prints": prints,
    }


@pytest.mark.parametrize("as_tuple", [False, True])
@on_ranks(1)
def test_what_is_given_is_returned(as_tuple: bool) -> None:
    model = plain_tower()
    blocks: Any = tuple(model.blocks) if as_tuple else list(model.blocks)
    assert [
        fully_shard(blocks) is blocks,
        all(block is mine for block, mine in zip(blocks, model.blocks, strict=True)),
        all(isinstance(block, FSDPModule) for block in blocks),
        fully_shard(model) is model,
    ] == [True] * 4


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


def gradients_of_each(is_sharded: bool) -> dict[str, dict[str, Tensor | None]]:
    found = {}
    for name, make in MODELS.items():
        model = built(make, seed=0)
        if is_sharded:
            cls = type(getattr(model, "blocks", [model])[0])
            shard_tower(model) if hasattr(model, "blocks") else fully_shard(model)
            first = getattr(model, "blocks", [model])[0]
            assert isinstance(first, cls)
            assert isinstance(first, FSDPModule)
            assert type(first).__name__ == cls.__name__
        backward(model.train())
        found[name] = gradients(model)
    return found


def test_modules_of_any_class_and_make_train_as_plain_ones(world2: World) -> None:
    expected = gradients_of_each(is_sharded=False)
    for got in world2.run(gradients_of_each, is_sharded=True):
        assert_equal(got, expected, atol=1e-10)


@on_ranks(1)
def test_attributes_and_overridden_methods_stay() -> None:
    slotted, itself = SlottedFirst(8, 16), SlottedItself(8, 16)
    calls, own = CallsSuper(8, 16), OwnNew(8, 16)
    for block in (slotted, itself, calls, own):
        fully_shard(block)
    calls.eval()
    assert [slotted.left, slotted.right, itself.extra, calls.was_told, calls.extra_repr(), own.born] == [
        2.0,
        "kept",
        "kept",
        False,
        "extra of ''",
        True,
    ]


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
    facts = {
        "class": type(model).__name__,
        "len": len(model),
        "index": [type(model[i]).__name__ for i in (0, 1, -1)],
        "iteration": [layer is model[i] for i, layer in enumerate(model)],
        "slice": (type(part) is nn.Sequential, len(part), part[1] is model[2]),
        "slice of all": torch.equal(model[:](x), model(x)),
        "slice runs": torch.equal(part(x), torch.tanh(model[2](torch.tanh(x)))),
        "contains": model[2] in model,
    }
    model.append(nn.Softplus())
    facts["appended"] = len(model), torch.equal(model(x), nn.functional.softplus(model[:-1](x)))
    model.insert(1, nn.Identity())
    model.pop(-1)
    facts["inserted and popped"] = len(model), torch.equal(model(x), sharded_sequence()(x))
    assert facts == {
        "class": "Sequential",
        "len": 5,
        "index": ["Linear", "Tanh", "Linear"],
        "iteration": [True] * 5,
        "slice": (True, 3, True),
        "slice of all": True,
        "slice runs": True,
        "contains": True,
        "appended": (6, True),
        "inserted and popped": (6, True),
    }


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
    same = [name for name, buffer in model.named_buffers() if before[name] is buffer]
    backward(model)
    facts = {
        "same objects": same,
        "plain tensors": all(type(buffer) is Tensor for buffer in model.buffers()),
        "values": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }
    assert facts["same objects"] == [name for name, _ in plain.named_buffers()]
    assert facts["plain tensors"]
    for name, buffer in plain.named_buffers():
        assert torch.equal(facts["values"][name], buffer), name


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


def output_after_apply(is_sharded: bool) -> tuple[Tensor, bool]:
    model = sharded_tower() if is_sharded else plain_tower()
    if is_sharded:
        model(random_batch(1, 2))  # what was unsharded before must not be what is used afterwards
    returned = model.apply(set_to_eighths)
    return model(random_batch(0, 4)).detach(), returned is model


def test_apply_reaches_the_shards_and_forward_sees_it(world2: World) -> None:
    expected, _ = output_after_apply(is_sharded=False)
    for output, returns_itself in world2.run(output_after_apply, is_sharded=True):
        assert returns_itself
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
