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
from on_ranks import on_ranks
from refusals import Refused, assert_refused, assert_says, assert_trains, refusal, refused, tower
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardwise
from shardwise import CPUOffloadPolicy, FSDPModule, fully_shard


def refused_with(make: Callable[[], dict[str, Any]], *words: str, **how: Any) -> Refused:
    """A block is sharded with the arguments that `make` makes, on the rank: a constructor may refuse as well."""
    return refused(lambda model: fully_shard(model.blocks[0], **make()), *words, **how)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None, device: str = "cpu") -> Any:
    return init_device_mesh(device, shape, mesh_dim_names=names)


# --- meshes ---------------------------------------------------------------------------------------

NAMES = ("replicate", "shard", "tp")


def cube(names: tuple[str, ...] | None = NAMES) -> Any:
    return mesh_of((1, 2, 1), names)


MESHES = {
    "ranks out of order": refused_with(
        lambda: {"mesh": DeviceMesh("cpu", [1, 0])},
        *("[1, 0]", "ascending order", "on the wrong ranks"),
    ),
    "a cube": refused_with(lambda: {"mesh": cube()}, "mesh", "3", "dp_mesh_dims"),
    "a cube without names": refused_with(lambda: {"mesh": cube(None)}, "mesh", "3", "dp_mesh_dims"),
    "a plane of meta devices": refused_with(
        lambda: {"mesh": mesh_of((1, 2), ("replicate", "shard"), device="meta")},
        *("meta", "process group", "cpu"),
    ),
}

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
DIMS = {
    **{
        f"dims {which} of {names}": refused_with(
            lambda names=names, which=which: {
                "mesh": cube(names),
                "dp_mesh_dims": shardwise.DataParallelMeshDims(**which),
            },
            *words,
        )
        for names, which, words in WRONG_DIMS
    },
    **{
        f"dims {value!r}": refused_with(
            lambda value=value: {"mesh": cube(), "dp_mesh_dims": value},
            *("dp_mesh_dims", type(value).__name__, "DataParallelMeshDims"),
        )
        for value in ("shard", ("shard",), {"shard": "shard"}, 1)
    },
    "dims without a mesh": refused_with(
        lambda: {"dp_mesh_dims": shardwise.DataParallelMeshDims(shard="shard")}, "dp_mesh_dims", "mesh"
    ),
}

# --- parameters that are DTensors on another mesh -------------------------------------------------


def tower_on(make_mesh: Callable[[], Any]) -> nn.Module:
    """`blocks.0.up.weight` is a DTensor, its rows over the mesh."""
    model = tower()
    up = model.blocks[0].up
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), make_mesh(), [Shard(0)]))
    return model


def start_again_plain(model: nn.Module) -> None:
    weight = model.blocks[0].up.weight.detach().full_tensor()
    model.blocks[0].up.weight = nn.Parameter(weight)
    shard_tower(model)


OTHER_ROOTS = {
    f"a parameter on {lies}, a call with {given}": refused_with(
        make, *("up.weight", "mesh", "tp"), build=partial(tower_on, make_mesh), then=start_again_plain
    )
    for lies, make_mesh in (
        ("a line of its own", lambda: mesh_of((2,), ("tp",))),
        ("another plane", lambda: mesh_of((1, 2), ("dp", "tp"))["tp"]),
    )
    for given, make in (
        ("a plane of data", lambda: {"mesh": mesh_of((2, 1), ("dp", "other"))["dp"]}),
        ("no mesh", dict),
        (
            "a plane that calls it data",
            lambda: {
                "mesh": mesh_of((1, 2), ("dp", "tp")),
                "dp_mesh_dims": shardwise.DataParallelMeshDims(shard="tp"),
            },
        ),
    )
}

# --- placements -----------------------------------------------------------------------------------


def placing(value: Any, ndim: int = 2) -> dict[str, Any]:
    """`shard_placement_fn` returns `value` for parameters of `ndim` dimensions, and None for others."""
    return {"shard_placement_fn": lambda param: value if param.ndim == ndim else None}


class Result:
    """As ShardPlacementResult, with what is given."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def fails_for_the_second(param: nn.Parameter) -> Shard:
    if param.ndim == 1:
        raise LookupError("no placement known")
    return Shard(1)


NO_PLACEMENTS = [*(Shard(5), Shard(-3), Shard(2), Replicate(), Partial(), "0", 0, True, Shard, (Shard(0),))]
NO_RESULTS: list[dict[str, Any]] = [
    {"placement": Shard(0)},
    {"placement": Shard(0), "mesh_info": "cpu"},
    {"placement": Shard(0), "mesh_info": 3},
    {"placement": Replicate(), "mesh_info": None},
    {"placement": Shard(7), "mesh_info": None},
]
PLACEMENTS = {
    **{
        f"placement {value}": refused_with(
            partial(placing, value), "shard_placement_fn", "up.weight", "Shard"
        )
        for value in NO_PLACEMENTS
    },
    "placement Shard(1) of a vector": refused_with(
        partial(placing, Shard(1), ndim=1), "shard_placement_fn", "norm.weight", "Shard"
    ),
    **{
        f"result {fields}": refused_with(
            partial(placing, Result(**fields)), "shard_placement_fn", "up.weight"
        )
        for fields in NO_RESULTS
    },
    "a parameter on meta devices": refused_with(
        lambda: placing(shardwise.policies.ShardPlacementResult(Shard(0), mesh_of((2,), device="meta"))),
        *("meta", "process group"),
    ),
    **{
        f"placements by {value!r}": refused_with(
            partial(dict, shard_placement_fn=value), "shard_placement_fn", type(value).__name__
        )
        for value in (Shard(0), "Shard(0)", 0, {"up.weight": Shard(1)})
    },
}

# --- resharding to a smaller world ----------------------------------------------------------------

# 1 and 2 of two ranks are False and True.
SIZES_OF_TWO = {
    f"{size} of 2": refused_with(
        partial(dict, reshard_after_forward=size), "reshard_after_forward", str(size), "2"
    )
    for size in (0, -1, -2, 3, 4)
}
SIZES_OF_FOUR = {
    **{
        f"{size} of 4": refused_with(
            partial(dict, reshard_after_forward=size), "reshard_after_forward", str(size), "4"
        )
        for size in (0, -1, -2, 3, 5, 8)
    },
    **{
        f"{size} of 2 x 2": refused_with(
            lambda size=size: {"mesh": mesh_of((2, 2), NAMES[:2]), "reshard_after_forward": size},
            *("reshard_after_forward", str(size), "2"),
        )
        for size in (3, 4)
    },
    **{
        f"{size!r} ranks": refused_with(
            partial(dict, reshard_after_forward=size), "TypeError", "reshard_after_forward"
        )
        for size in (2.0, "2", [2], torch.tensor(2))
    },
}


def shard_by_halves(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2)
    fully_shard(model)


def test_a_size_that_divides_the_ranks_is_fine(world4: World) -> None:
    assert_trains(world4, shard_by_halves)


# --- policies and ignored parameters --------------------------------------------------------------


class HasNothing:
    """No policy at all."""


FLOAT_8 = torch.float8_e4m3fn
NO_DTYPES: dict[str, list[Any]] = {
    "param_dtype": [torch.int32, torch.bool, torch.complex64, FLOAT_8, "bfloat16", float],
    "reduce_dtype": [torch.int32, torch.float8_e5m2, "float32"],
    "output_dtype": [torch.int64, 32],
}
NO_VALUES: dict[str, list[Any]] = {  # of fields that torch's policy lacks, or leaves unchecked
    "accumulate_dtype": [torch.int32, FLOAT_8, "float32"],
    "buffer_dtype": [torch.int64, "float32"],
    "keep_low_precision_grads": ["yes", 1],
    "full_precision": [3, "norm", (nn.LayerNorm, "Linear"), int],
    "cast_forward_inputs": ["no", None],
}
NO_POLICIES: dict[str, dict[str, Any]] = {
    "an object": {"mp_policy": HasNothing()},
    "a dict": {"mp_policy": {"param_dtype": torch.bfloat16}},
    "an offload policy": {"mp_policy": CPUOffloadPolicy()},
    "FSDP1's offload": {"offload_policy": peer.CPUOffload(offload_params=True)},
    "an object as offload": {"offload_policy": HasNothing()},
    "a precision policy": {"offload_policy": peer.MixedPrecisionPolicy()},
}
NO_PARAMETERS = {
    "names": {"up.weight"},
    "none": [None],
    "numbers": {1, 2},
    "a name": "up.weight",
    "a module": nn.Linear(2, 2),
}


def policy(fields: dict[str, Any], library: Any = shardwise) -> dict[str, Any]:
    return {"mp_policy": library.MixedPrecisionPolicy(**fields)}


POLICIES = {
    **{
        f"{whose} {name}={value}": refused_with(
            partial(policy, {name: value}, library), name, str(getattr(value, "__name__", value))
        )
        for name, values in NO_DTYPES.items()
        for value in values
        for whose, library in (("our", shardwise), ("torch's", peer))
    },
    **{
        f"our {name}={value}": refused_with(partial(policy, {name: value}), name)
        for name, values in NO_VALUES.items()
        for value in values
    },
    **{
        f"{what} as {name}": refused_with(partial(dict, given), "TypeError", name, type(value).__name__)
        for what, given in NO_POLICIES.items()
        for name, value in given.items()
    },
    **{
        f"pin_memory={value!r}": refused_with(
            lambda value=value: {"offload_policy": CPUOffloadPolicy(pin_memory=value)}, "pin_memory"
        )
        for value in ("yes", 1, None)
    },
    **{
        f"ignoring {what}": refused_with(partial(dict, ignored_params=value), "ignored_params")
        for what, value in NO_PARAMETERS.items()
    },
}

BY_RANKS = {1: POLICIES, 2: MESHES | DIMS | OTHER_ROOTS | PLACEMENTS | SIZES_OF_TWO, 4: SIZES_OF_FOUR}
REFUSED = {case: line for lines in BY_RANKS.values() for case, line in lines.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world", "case"),
    [(ranks, case) for ranks, lines in BY_RANKS.items() for case in lines],
    indirect=["world"],
)
def test_it_is_refused_by_name(world: World, case: str) -> None:
    text = assert_refused(world, __name__, case)
    assert text.startswith(("TypeError: ", "ValueError: ")), text


def test_an_error_of_the_placement_function_reaches_the_caller(world2: World) -> None:
    act = partial(fully_shard_block, shard_placement_fn=fails_for_the_second)
    assert_says(refusal(world2, act), "LookupError", "no placement known")


def fully_shard_block(model: nn.Module, **arguments: Any) -> None:
    fully_shard(model.blocks[0], **arguments)


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


@pytest.mark.parametrize("case", [f"placement {Shard(5)}", "our param_dtype=torch.int32", "3 of 2"])
@on_ranks(2)
def test_a_refused_model_is_no_sharded_model(case: str) -> None:
    model = Tower(depth=1)
    with pytest.raises((TypeError, ValueError)):
        REFUSED[case].act(model)
    assert [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)] == []
