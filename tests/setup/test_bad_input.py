"""Modules and parameters that cannot be sharded are refused, in words that help, and stay as they were."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from harness import World
from meshed import refusal
from models import Tower, random_batch
from on_ranks import on_ranks
from reference import full
from refusals import (
    A_REMEDY,
    SHARDED,
    Refused,
    assert_refused,
    assert_says,
    assert_says_what_to_do,
    assert_trains,
    refused,
    shard_block_1,
    shard_bottom_up,
    shard_root,
    sharded_tower,
    start_again,
    tower,
)
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from shardwise import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard

# --- what is given to be sharded, and what was sharded before -------------------------------------


def wholly_sharded_tower() -> nn.Module:
    return fully_shard(tower())


NO_MODULE = "TypeError: fully_shard: expected an nn.Module or a list of them, got "
NO_FORWARD = (
    "has no forward, so it is unknown when to unshard its parameters. "
    "Call fully_shard on its children, one by one, or on the module around it."
)
BOTTOM_UP = ("ValueError", "bottom-up", "inner modules first")
AGAIN = {"build": sharded_tower, **SHARDED}

REFUSED: dict[str, Refused] = {
    "a class": refused(
        lambda model: fully_shard(type(model)),
        NO_MODULE + "the class Tower (its instance is needed, not the class).",
    ),
    "parameters": refused(lambda model: fully_shard(model.parameters()), NO_MODULE + "a generator."),
    "an empty list": refused(
        lambda model: fully_shard([]),
        "ValueError: fully_shard: the list of modules is empty; there is nothing to shard.",
    ),
    "a list of blocks": refused(
        lambda model: fully_shard(model.blocks), "ValueError: fully_shard: ModuleList " + NO_FORWARD
    ),
    "a string in a list": refused(
        lambda model: fully_shard([model.blocks[0], "blocks.1"]), "TypeError", "str", "[1]"
    ),
    "a module twice in a list": refused(
        lambda model: fully_shard([model.inlet, model.blocks[0], model.blocks[0]]),
        *("ValueError", "twice", "Block", "[1]", "[2]", A_REMEDY),
    ),
    "a module inside another of the list": refused(  # it says which of the block's layers
        lambda model: fully_shard([model.blocks[0], model.outlet, model.blocks[1].up, model.blocks[1]]),
        *("ValueError", "Linear", "inside Block", "leave the inner one out", "up"),
    ),
    "the root twice": refused(
        shard_root, "ValueError: fully_shard: this Tower is already sharded", "once", **AGAIN
    ),
    "a block twice": refused(shard_block_1, "ValueError", "already sharded", "blocks.1", **AGAIN),
    "a block after the root": refused(
        *(shard_block_1, *BOTTOM_UP, "Tower, which", "blocks.1"), build=wholly_sharded_tower, **SHARDED
    ),
    "a layer after its block": refused(
        lambda model: fully_shard(model.blocks[1].up), *BOTTOM_UP, "blocks.1, which", "blocks.1.up", **AGAIN
    ),
}


# --- what parameters lie in -----------------------------------------------------------------------


def tower_over_one_memory() -> nn.Module:
    model = tower()
    model.blocks[1].up.weight = nn.Parameter(model.blocks[0].up.weight.data)
    return model


def tie(model: nn.Module) -> nn.Module:
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


REFUSED |= {
    "two parameters over the same memory": refused(
        shard_root,
        "ValueError: blocks.0.up.weight and blocks.1.up.weight are two parameters over the same memory. Sharded "
        "they would be trained apart. Assign one parameter to both places to tie them, or clone one.",
        **{
            "build": tower_over_one_memory,
            "then": lambda model: fully_shard(tie(model)),
            "plain": lambda: tie(tower()),
        },
    ),
}


@on_ranks(1)
def test_a_module_that_torch_jit_compiled_is_refused() -> None:
    model = tower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        model.blocks[1].up = torch.jit.script(model.blocks[1].up)
    before = list(model.parameters())
    told = refusal(fully_shard, model)
    assert_says(told, "NotImplementedError: Tower: blocks.1.up.weight", "torch.jit", "compiled from")
    assert list(map(id, model.parameters())) == list(map(id, before))


# --- torch's own fully_shard and replicate --------------------------------------------------------


def sharded_by_torch(name: str) -> nn.Module:
    model = tower()
    peer.fully_shard(model.get_submodule(name))
    return model


ROOT_OF_TORCHS = {"build": partial(sharded_by_torch, ""), "then": start_again}
BLOCK_OF_TORCHS = {"build": partial(sharded_by_torch, "blocks.1"), "then": start_again}
REFUSED |= {
    "what torch has sharded": refused(
        *(shard_root, "ValueError", "torch's fully_shard", "Tower", "one of them only"), **ROOT_OF_TORCHS
    ),
    "what torch has replicated": refused(
        *(shard_root, "ValueError", "torch's replicate", "Tower", "one of them only"),
        **{"build": lambda: replicate(tower()), "then": start_again},
    ),
    "a block inside what torch has sharded": refused(
        shard_block_1, "Block", "torch's fully_shard", **ROOT_OF_TORCHS
    ),
    "what is around what torch has sharded": refused(
        shard_root, "Tower: blocks.1", "torch's fully_shard", **BLOCK_OF_TORCHS
    ),
    "what is sharded here, by torch's replicate": refused(
        replicate, "replicate has already been applied", **AGAIN
    ),
}


@on_ranks(2)
def test_torchs_apis_around_it_leave_alone_what_is_sharded_here() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    apis = {"fully_shard": lambda module: peer.fully_shard(module, mesh=mesh), "replicate": replicate}
    batch = torch.arange(16, dtype=torch.float64).view(4, 4) / 16
    found = {}
    for name, apply in apis.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)).double()
        plain = copy.deepcopy(model)
        fully_shard(model[0], mesh=mesh)
        apply(model)
        plain(batch).sum().backward()
        (2 * model(batch[2 * rank :][:2]).sum()).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found[name] = all(torch.allclose(full(ours.grad), want.grad) for ours, want in pairs)
    assert found == {"fully_shard": True, "replicate": True}


# --- parameters -----------------------------------------------------------------------------------


def a_tensor_subclass() -> Tensor:
    return nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))


def a_sparse_one() -> Tensor:
    return nn.Parameter(torch.eye(4).to_sparse())


def a_dtensor() -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))


def tower_with(make: Callable[[], Tensor]) -> nn.Module:
    model = tower()
    model.blocks[1].up.register_parameter("special", make())
    return model


def shard_without_the_special_one(model: nn.Module) -> None:
    model.blocks[1].up.register_parameter("special", None)
    del model.blocks[1].up._parameters["special"]
    shard_bottom_up(model)


@on_ranks(1)
def test_a_tensor_subclass_is_refused_for_what_it_is() -> None:
    """The class might have got the methods it lacks until then."""
    model = tower_with(a_tensor_subclass)
    shard_bottom_up(model)
    with pytest.raises(NotImplementedError) as caught:
        model(random_batch(0, 2))
    text = f"NotImplementedError: {caught.value}"
    assert_says(text, "NotImplementedError", "blocks.1.up.special holds a TwoTensor")
    assert "subclass of nn.Parameter" not in text
    assert_says_what_to_do(text)


SPARSE = {"build": partial(tower_with, a_sparse_one), "then": shard_without_the_special_one}
OF_NO_MESH = {"build": partial(tower_with, a_dtensor), "then": shard_without_the_special_one}
# Nothing says how its ranks and those of fully_shard's mesh, none of which has a name, are related.
IS_A_DTENSOR = ("ValueError", "is a DTensor on the mesh", "mesh_dim_names", A_REMEDY)
REFUSED |= {
    "a sparse parameter": refused(
        *(shard_root, "NotImplementedError", "Tower", "blocks.1.up.special", "torch.sparse_coo", "dense"),
        A_REMEDY,
        **SPARSE,
    ),
    "a DTensor on a mesh that cannot be joined": refused(
        shard_root, "Tower", "blocks.1.up.special", *IS_A_DTENSOR, **OF_NO_MESH
    ),
}


class LazyTower(Tower):
    def __init__(self) -> None:
        super().__init__(depth=1)
        self.inlet = nn.LazyLinear(8)


def lazy_tower() -> nn.Module:
    return LazyTower().double()


def initialise(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    model(random_batch(0, 1))
    return model


REFUSED |= {
    "a lazy module": refused(
        shard_root,
        "ValueError: LazyTower: inlet.weight is not initialised: the module is lazy and does not know its shape "
        "yet. Run one forward before fully_shard.",
        build=lazy_tower,
        then=lambda model: shard_bottom_up(initialise(model)),
        plain=lambda: initialise(lazy_tower()),
    ),
}


def tied_tower() -> nn.Module:
    model = tower()
    model.blocks[1].norm.bias = model.inlet.bias
    return model


def tied_tower_tied_after_sharding() -> nn.Module:
    model = tied_tower()
    fully_shard(model.blocks[1])
    model.inlet.bias = model.blocks[1].norm.bias
    return model


def shard_inlet_and_root(model: nn.Module) -> None:
    fully_shard(model.inlet)
    fully_shard(model)


@pytest.mark.parametrize("then", [shard_root, shard_inlet_and_root])
@pytest.mark.parametrize("world", [1, 2], indirect=True)
def test_a_tie_may_be_made_with_a_parameter_that_is_sharded_already(world: World, then: Any) -> None:
    assert_trains(world, then, build=tied_tower_tied_after_sharding, plain=tied_tower)


class Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.layer(x))


def two_holders_of_one_layer() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(Holder(layer), Holder(layer)).double()


def two_holders_each_sharded() -> nn.Module:
    model = two_holders_of_one_layer()
    for holder in model:
        fully_shard(holder)
    return model


SHARED = {"build": two_holders_each_sharded, "then": shard_root, "plain": two_holders_of_one_layer}


def shard_root_while_the_first_is_unsharded(model: nn.Module) -> None:
    model[0].unshard()
    try:
        fully_shard(model)
    finally:
        model[0].reshard()


def two_holders_on_two_meshes() -> nn.Module:
    model = two_holders_of_one_layer()
    plane = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "alone"))
    fully_shard(model[0], mesh=plane["alone"])
    return model


REFUSED |= {
    "a layer in two sharded modules without one around both": refused(
        lambda model: model[1](random_batch(0, 4)),
        "RuntimeError: layer.weight is tied to layer.weight, which was sharded in another fully_shard call, and "
        "no sharded module contains both, to own the parameter. Call fully_shard on the module around both, after "
        "these two, or shard both in one call, as a list.",
        **SHARED,
    ),
    "a tie with a parameter of an unsharded group": refused(
        shard_root_while_the_first_is_unsharded,
        *("RuntimeError", "0.layer.weight and 1.layer.weight are tied", "before the first forward"),
        **SHARED,
    ),
    "a tie across meshes": refused(
        shard_root,
        *("ValueError", "0.layer.weight", "1.layer.weight", "are tied", "mesh", "or untie them"),
        **{"build": two_holders_on_two_meshes, "then": start_again},
    ),
}


# --- parameters without values --------------------------------------------------------------------


def meta_tower() -> nn.Module:
    with torch.device("meta"):
        model = tower()
    shard_bottom_up(model)
    return model


def partly_meta_tower() -> nn.Module:
    model = tower()
    with torch.device("meta"):
        model.blocks[1].up = nn.Linear(8, 16).double()
    shard_bottom_up(model)
    return model


def give_values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.to_empty(device="cpu").parameters():
            param.fill_(0.125)
    return model


NO_VALUES = {"then": give_values, "plain": lambda: give_values(tower())}
META = {"build": meta_tower, **NO_VALUES}
WITHOUT_VALUES = ("RuntimeError", "meta", "blocks.0.norm.weight", "materialize")
REFUSED |= {
    "a forward without values": refused(
        lambda model: model(random_batch(0, 4)),
        "RuntimeError: Cannot run forward: 16 parameters are still on the meta device: inlet.weight, inlet.bias, "
        "outlet.weight, outlet.bias, blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.up.weight, "
        "blocks.0.up.bias and 8 more. Nothing has given them values. Call shardwise.materialize(model), or load "
        "a checkpoint, first.",
        **META,
    ),
    "unshard without values": refused(lambda model: model.unshard(), *WITHOUT_VALUES, **META),
    "a forward where some have no values": refused(  # and only those are named
        lambda model: model(random_batch(0, 4)),
        "2 parameters are still on the meta device: blocks.1.up.weight, blocks.1.up.bias. Nothing",
        build=partly_meta_tower,
        **NO_VALUES,
    ),
}


# --- buffers --------------------------------------------------------------------------------------


class Immovable(Tensor):
    """As a buffer for which the device has no memory left."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            raise MemoryError("no memory left")
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks(1)
def test_buffers_that_cannot_be_cast_leave_the_model_as_it_was() -> None:
    model = tower()
    model.blocks[0].register_buffer("first", torch.ones(2, dtype=torch.float64))
    model.blocks[1].register_buffer("second", torch.ones(2, dtype=torch.float64).as_subclass(Immovable))
    before = [*map(type, model.modules()), *map(id, (*model.parameters(), *model.buffers()))]
    with pytest.raises(MemoryError):
        fully_shard(model, mp_policy=MixedPrecisionPolicy(buffer_dtype=torch.bfloat16))
    assert before == [*map(type, model.modules()), *map(id, (*model.parameters(), *model.buffers()))]


# --- all of them ----------------------------------------------------------------------------------

ON_TWO_RANKS = {
    "a DTensor on a mesh that cannot be joined",
    "a forward without values",
    "a layer in two sharded modules without one around both",
    "a tie across meshes",
    "a tie with a parameter of an unsharded group",
}


@pytest.mark.parametrize(
    ("world", "case"), [(2 if case in ON_TWO_RANKS else 1, case) for case in REFUSED], indirect=["world"]
)
def test_it_is_refused_in_words_that_help(world: World, case: str) -> None:
    text = assert_refused(world, __name__, case)
    if "torch has sharded" in case:
        assert "tensor parallelism" not in text


@on_ranks(2)
def test_a_parameter_that_is_sharded_over_a_data_parallel_dimension_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Shard(0)]))
    dims = DataParallelMeshDims(shard="data")
    told = refusal(fully_shard, model, mesh=mesh, dp_mesh_dims=dims)
    assert_says(
        told, "ValueError: Linear: weight is a DTensor", "'data', which dp_mesh_dims names", "Replicate()"
    )


@on_ranks(1)
def test_a_parameter_that_has_a_gradient_is_refused_until_it_has_none() -> None:
    model = tower()
    model(random_batch(0, 1)).sum().backward()
    assert_says(refusal(fully_shard, model), "ValueError: Tower: inlet.weight has a gradient already")
    model.zero_grad()
    fully_shard(model)
