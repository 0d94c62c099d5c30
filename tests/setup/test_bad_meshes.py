"""Meshes, placements, sizes and dtypes that do not fit are refused at the call, by name, and change nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as peer
from harness import World
from models import Tower, shard_tower
from refusals import assert_says, assert_trains, refusal, tower
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardwise
from shardwise import CPUOffloadPolicy, FSDPModule, fully_shard

# Arguments are made on the rank: meshes cannot travel, and what a constructor refuses counts as refused too.
Arguments = Callable[[], dict[str, Any]]

both_kinds = ("TypeError: ", "ValueError: ")


def shard_a_block_with(model: nn.Module, make: Arguments) -> None:
    fully_shard(model.blocks[0], **make())


def refused(world: World, make: Arguments, *words: str, **how: Any) -> str:
    text = refusal(world, partial(shard_a_block_with, make=make), **how)
    assert text.startswith(both_kinds), text
    assert_says(text, *words)
    return text


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None, device: str = "cpu") -> Any:
    return init_device_mesh(device, shape, mesh_dim_names=names)


def dims(**which: Any) -> Any:
    return shardwise.DataParallelMeshDims(**which)


# --- meshes ---------------------------------------------------------------------------------------

NAMES = ("replicate", "shard", "tp")


def three_dimensions() -> dict[str, Any]:
    return {"mesh": mesh_of((1, 2, 1), NAMES)}


def three_dimensions_without_names() -> dict[str, Any]:
    return {"mesh": mesh_of((1, 2, 1))}


def ranks_out_of_order() -> dict[str, Any]:
    return {"mesh": DeviceMesh("cpu", [1, 0])}


def test_a_mesh_lists_its_ranks_in_order(world2: World) -> None:
    refused(world2, ranks_out_of_order, "[1, 0]", "ascending order", "other ranks than the mesh says")


def two_dimensions_of_meta_devices() -> dict[str, Any]:
    return {"mesh": mesh_of((1, 2), ("replicate", "shard"), device="meta")}


@pytest.mark.parametrize("make", [three_dimensions, three_dimensions_without_names])
def test_a_mesh_of_three_dimensions_needs_to_be_told_which_are_which(world2: World, make: Any) -> None:
    refused(world2, make, "mesh", "3", "dp_mesh_dims")


def test_a_plane_of_a_device_that_the_group_does_not_serve_is_refused(world2: World) -> None:
    refused(world2, two_dimensions_of_meta_devices, "meta", "process group", "cpu")


def dims_of(mesh_names: tuple[str, ...] | None, **which: Any) -> dict[str, Any]:
    shape = (1, 2, 1)[: len(mesh_names)] if mesh_names else (1, 2, 1)
    return {"mesh": mesh_of(shape, mesh_names), "dp_mesh_dims": dims(**which)}


WRONG_DIMS: list[tuple[tuple[str, ...] | None, dict[str, Any], list[str]]] = [
    (NAMES, {"shard": "fsdp"}, ["'fsdp'", "replicate", "shard", "tp"]),
    (NAMES, {"replicate": "dp", "shard": "shard"}, ["'dp'", "replicate", "shard", "tp"]),
    (NAMES, {"shard": ("shard", "cp")}, ["'cp'", "tp"]),
    (NAMES, {}, ["DataParallelMeshDims", "shard", "replicate"]),
    (NAMES, {"shard": (), "replicate": ()}, ["DataParallelMeshDims", "shard", "replicate"]),
    (NAMES, {"shard": "shard", "replicate": "shard"}, ["'shard'", "replicate"]),
    (NAMES, {"shard": ("shard", "shard")}, ["'shard'"]),
    (NAMES, {"shard": ("shard", "replicate"), "replicate": "replicate"}, ["'replicate'"]),
    (None, {"shard": "shard"}, ["mesh", "names"]),
    (NAMES, {"shard": 1}, ["shard", "1"]),
    (NAMES, {"shard": ("shard", 0)}, ["shard", "0"]),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("names", "which", "words"), WRONG_DIMS, ids=lambda value: str(value)[:40])
def test_dimensions_that_the_mesh_does_not_have_are_refused(
    world2: World, names: Any, which: dict[str, Any], words: list[str]
) -> None:
    refused(world2, partial(dims_of, names, **which), *words)


@dataclass(frozen=True)
class WrongKind:
    """dp_mesh_dims is something else."""

    value: Any

    def __call__(self) -> dict[str, Any]:
        return {"mesh": mesh_of((1, 2, 1), NAMES), "dp_mesh_dims": self.value}


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", ["shard", ("shard",), {"shard": "shard"}, 1], ids=repr)
def test_dimensions_are_given_as_data_parallel_mesh_dims(world2: World, value: Any) -> None:
    refused(world2, WrongKind(value), "dp_mesh_dims", type(value).__name__, "DataParallelMeshDims")


def dims_without_mesh() -> dict[str, Any]:
    return {"dp_mesh_dims": dims(shard="shard")}


def test_dimensions_need_a_mesh(world2: World) -> None:
    refused(world2, dims_without_mesh, "dp_mesh_dims", "mesh")


# --- parameters that are DTensors on another mesh -------------------------------------------------


def tower_on(make_mesh: Callable[[], Any]) -> nn.Module:
    """`blocks.0.up.weight` is a DTensor, its rows over the mesh."""
    model = tower()
    up = model.blocks[0].up
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), make_mesh(), [Shard(0)]))
    return model


def start_again_plain(model: nn.Module) -> None:
    """The right call on a model without that DTensor."""
    weight = model.blocks[0].up.weight.detach().full_tensor()
    model.blocks[0].up.weight = nn.Parameter(weight)
    shard_tower(model)


def a_line_of_its_own() -> Any:
    return mesh_of((2,), ("tp",))


def another_plane() -> Any:
    return mesh_of((1, 2), ("dp", "tp"))["tp"]


def a_plane_of_data() -> dict[str, Any]:
    return {"mesh": mesh_of((2, 1), ("dp", "other"))["dp"]}


def no_mesh() -> dict[str, Any]:
    return {}


def a_cube_that_calls_it_data() -> dict[str, Any]:
    return {"mesh": mesh_of((1, 2), ("dp", "tp")), "dp_mesh_dims": dims(shard="tp")}


@pytest.mark.thin(5)
@pytest.mark.parametrize("make", [a_plane_of_data, no_mesh, a_cube_that_calls_it_data])
@pytest.mark.parametrize("make_mesh", [a_line_of_its_own, another_plane])
def test_a_parameter_on_a_mesh_with_another_root_is_refused_by_name(
    world2: World, make_mesh: Any, make: Any
) -> None:
    how = {"build": partial(tower_on, make_mesh), "then": start_again_plain}
    refused(world2, make, "up.weight", "mesh", "tp", **how)


# --- placements -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placing:
    """`shard_placement_fn` returns `value` for parameters of `ndim` dimensions, and None for others."""

    value: Any
    ndim: int = 2

    def __call__(self) -> dict[str, Any]:
        return {"shard_placement_fn": self.place}

    def place(self, param: nn.Parameter) -> Any:
        return self.value if param.ndim == self.ndim else None


WRONG_PLACEMENTS = [
    Placing(Shard(5)),
    Placing(Shard(2)),
    Placing(Shard(-3)),
    Placing(Shard(1), ndim=1),
    Placing(Replicate()),
    Placing(Partial()),
    Placing("0"),
    Placing(0),
    Placing(True),
    Placing(Shard),
    Placing((Shard(0),)),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("placing", WRONG_PLACEMENTS, ids=lambda placing: str(placing.value))
def test_a_placement_that_does_not_fit_is_refused_with_the_parameter(world2: World, placing: Placing) -> None:
    name = "norm.weight" if placing.ndim == 1 else "up.weight"
    refused(world2, placing, "shard_placement_fn", name, "Shard")


class Result:
    """As ShardPlacementResult, with what is given."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fields",
    [
        {"placement": Shard(0)},
        {"placement": Shard(0), "mesh_info": "cpu"},
        {"placement": Shard(0), "mesh_info": 3},
        {"placement": Replicate(), "mesh_info": None},
        {"placement": Shard(7), "mesh_info": None},
    ],
    ids=str,
)
def test_a_placement_result_that_does_not_fit_is_refused_with_the_parameter(
    world2: World, fields: dict[str, Any]
) -> None:
    refused(world2, Placing(Result(**fields)), "shard_placement_fn", "up.weight")


def placement_on_meta() -> dict[str, Any]:
    mesh = mesh_of((2,), device="meta")
    return {"shard_placement_fn": lambda param: shardwise.policies.ShardPlacementResult(Shard(0), mesh)}


def test_a_mesh_of_a_parameter_is_checked_like_that_of_the_call(world2: World) -> None:
    refused(world2, placement_on_meta, "meta", "process group")


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", [Shard(0), "Shard(0)", 0, {"up.weight": Shard(1)}], ids=repr)
def test_placements_are_given_by_a_function(world2: World, value: Any) -> None:
    refused(world2, partial(dict, shard_placement_fn=value), "shard_placement_fn", type(value).__name__)


def fails_for_the_second(param: nn.Parameter) -> Shard:
    if param.ndim == 1:
        raise LookupError("no placement known")
    return Shard(1)


def test_an_error_of_the_placement_function_reaches_the_caller(world2: World) -> None:
    act = partial(shard_a_block_with, make=partial(dict, shard_placement_fn=fails_for_the_second))
    assert_says(refusal(world2, act), "LookupError", "no placement known")


# --- resharding to a smaller world ----------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [0, -1, -2, 3, 4])  # 1 and 2 are False and True
def test_no_size_between_1_and_2_ranks_exists(world2: World, size: int) -> None:
    refused(world2, partial(dict, reshard_after_forward=size), "reshard_after_forward", str(size), "2")


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [0, -1, -2, 3, 5, 8])
def test_a_size_that_does_not_divide_the_ranks_is_refused(world4: World, size: int) -> None:
    refused(world4, partial(dict, reshard_after_forward=size), "reshard_after_forward", str(size), "4")


def shard_by_halves(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2)
    fully_shard(model)


def test_a_size_that_divides_them_is_fine(world4: World) -> None:
    assert_trains(world4, shard_by_halves)


def halves_of_a_plane(size: int) -> dict[str, Any]:
    return {"mesh": mesh_of((2, 2), ("replicate", "shard")), "reshard_after_forward": size}


@pytest.mark.parametrize("size", [3, 4])
def test_with_replicas_the_size_divides_the_ranks_that_share_a_model(world4: World, size: int) -> None:
    refused(world4, partial(halves_of_a_plane, size), "reshard_after_forward", str(size), "2")


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [2.0, "2", [2], torch.tensor(2)], ids=repr)
def test_a_size_is_an_int(world4: World, size: Any) -> None:
    text = refused(world4, partial(dict, reshard_after_forward=size), "reshard_after_forward")
    assert text.startswith("TypeError"), text


# --- policies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """A policy of ours or torch's, made on the rank."""

    fields: dict[str, Any]
    is_ours: bool = True

    def __call__(self) -> dict[str, Any]:
        made = shardwise if self.is_ours else peer
        return {"mp_policy": made.MixedPrecisionPolicy(**self.fields)}


DTYPES: list[dict[str, Any]] = [
    {"param_dtype": torch.int32},
    {"param_dtype": torch.int8},
    {"param_dtype": torch.uint8},
    {"param_dtype": torch.bool},
    {"param_dtype": torch.complex64},
    {"param_dtype": torch.float8_e4m3fn},
    {"param_dtype": "bfloat16"},
    {"param_dtype": float},
    {"reduce_dtype": torch.float8_e4m3fn},
    {"reduce_dtype": torch.float8_e5m2},
    {"reduce_dtype": torch.int32},
    {"reduce_dtype": torch.bool},
    {"reduce_dtype": "float32"},
    {"output_dtype": torch.int64},
    {"output_dtype": "float32"},
    {"output_dtype": 32},
]


@pytest.mark.thin(2)
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "torchs"])
@pytest.mark.parametrize("fields", DTYPES, ids=str)
def test_a_dtype_that_cannot_be_used_is_refused_by_name(
    world1: World, fields: dict[str, Any], is_ours: bool
) -> None:
    ((name, dtype),) = fields.items()
    refused(world1, Policy(fields, is_ours), name, str(getattr(dtype, "__name__", dtype)))


OUR_FIELDS: list[dict[str, Any]] = [
    {"accumulate_dtype": torch.int32},
    {"accumulate_dtype": torch.float8_e4m3fn},
    {"accumulate_dtype": "float32"},
    {"buffer_dtype": torch.int64},
    {"buffer_dtype": "float32"},
    {"keep_low_precision_grads": "yes"},
    {"keep_low_precision_grads": 1},
    {"full_precision": 3},
    {"full_precision": "norm"},
    {"full_precision": (nn.LayerNorm, "Linear")},
    {"full_precision": int},
    {"cast_forward_inputs": "no"},
    {"cast_forward_inputs": None},
]


@pytest.mark.parametrize("fields", OUR_FIELDS, ids=str)
def test_a_field_of_the_wrong_kind_is_refused_by_name(world1: World, fields: dict[str, Any]) -> None:
    refused(world1, Policy(fields), next(iter(fields)))


class HasNothing:
    """No policy at all."""


OTHERS: dict[str, dict[str, Any]] = {
    "an object": {"mp_policy": HasNothing()},
    "a string": {"mp_policy": "bf16"},
    "a dict": {"mp_policy": {"param_dtype": torch.bfloat16}},
    "an offload policy": {"mp_policy": CPUOffloadPolicy()},
    "FSDP1's offload": {"offload_policy": peer.CPUOffload(offload_params=True)},
    "an object as offload": {"offload_policy": HasNothing()},
    "a string as offload": {"offload_policy": "cpu"},
    "a precision policy": {"offload_policy": peer.MixedPrecisionPolicy()},
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_policy_is_refused_by_name(world1: World, what: str) -> None:
    ((name, value),) = OTHERS[what].items()
    text = refused(world1, partial(dict, OTHERS[what]), name, type(value).__name__)
    assert text.startswith("TypeError"), text


@pytest.mark.parametrize("value", ["yes", 1, None], ids=repr)
def test_pinning_is_a_bool(world1: World, value: Any) -> None:
    refused(world1, partial(offload_with, value), "pin_memory")


def offload_with(pin_memory: Any) -> dict[str, Any]:
    return {"offload_policy": CPUOffloadPolicy(pin_memory=pin_memory)}


# --- ignored parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [{"up.weight"}, [None], {1, 2}, "up.weight", nn.Linear(2, 2)],
    ids=["names", "none", "numbers", "a name", "a module"],
)
def test_ignored_params_are_parameters(world1: World, value: Any) -> None:
    refused(world1, partial(dict, ignored_params=value), "ignored_params")


# --- nothing is half done -------------------------------------------------------------------------


@dataclass(frozen=True)
class LateRefusal:
    """A list of modules of which only the last has a parameter that does not fit."""

    def __call__(self, model: nn.Module) -> None:
        fully_shard([model.inlet, model.blocks[0], model.outlet], shard_placement_fn=self.place)

    def place(self, param: nn.Parameter) -> Shard:
        return Shard(0) if param.shape[0] > 1 else Shard(4)


def test_a_refusal_of_the_last_module_leaves_the_first_as_it_was(world2: World) -> None:
    assert_says(refusal(world2, LateRefusal()), "Error: ", "[2].weight")


def every_class_after(make: Arguments) -> list[str]:
    model = Tower(depth=1)
    with pytest.raises((TypeError, ValueError)):
        fully_shard(model, **make())
    return [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)]


@pytest.mark.parametrize(
    "make", [Placing(Shard(5)), Policy({"param_dtype": torch.int32}), partial(dict, reshard_after_forward=3)]
)
def test_a_refused_model_is_no_sharded_model(world2: World, make: Any) -> None:
    assert world2.run(every_class_after, make) == [[], []]
