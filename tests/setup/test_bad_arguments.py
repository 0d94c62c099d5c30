"""Arguments, meshes, placements, sizes, dtypes and classes that do not fit are refused at the call, by name.

Nothing is left half-sharded after an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from expecttest import assert_expected_inline
from harness import World
from models import Tower, shard_tower
from new_process import in_a_new_process
from on_ranks import on_ranks
from refusals import (
    A_REMEDY,
    Refused,
    assert_refused,
    assert_says,
    assert_trains,
    refuse,
    refused,
    shard_bottom_up,
    shard_root,
    start_again,
    tower,
    wrapped,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardwise
from shardwise import (
    CommPolicy,
    CPUOffloadPolicy,
    fully_shard,
)


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
    "a string": refused_with(
        lambda: {"mesh": "cpu"},
        "TypeError: fully_shard: mesh is a str, not a DeviceMesh. Make one with "
        "torch.distributed.init_device_mesh(device_type, (world_size,)).",
    ),
    "a plane of meta devices": refused_with(
        lambda: {"mesh": mesh_of((1, 2), ("replicate", "shard"), device="meta")},
        *("meta", "process group", "cpu"),
    ),
}

WRONG_DIMS: list[tuple[tuple[str, ...] | None, dict[str, Any], list[str]]] = [
    (NAMES, {"shard": "fsdp"}, ["'fsdp'", "replicate", "shard", "tp"]),
    (NAMES, {"replicate": "dp", "shard": ("shard", "cp")}, ["'dp'", "replicate", "shard", "tp"]),
    (NAMES, {}, ["DataParallelMeshDims", "shard", "replicate"]),
    (NAMES, {"shard": (), "replicate": ()}, ["DataParallelMeshDims", "shard", "replicate"]),
    (NAMES, {"shard": "shard", "replicate": "shard"}, ["'shard'", "replicate"]),
    (NAMES, {"shard": ("shard", "shard")}, ["'shard'"]),
    (None, {"shard": "shard"}, ["mesh", "names"]),
    (NAMES, {"shard": ("shard", 0)}, ["shard", "0"]),
]
if not torch.cuda.is_available():  # where the mesh would be a good one
    MESHES["a mesh of a device that is not here"] = refused_with(
        lambda: {"mesh": mesh_of((2,), device="cuda")}, "fully_shard", "mesh", "cuda", A_REMEDY
    )
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
    "dims as a dict": refused_with(
        lambda: {"mesh": cube(), "dp_mesh_dims": {"shard": "shard"}},
        *("dp_mesh_dims", "dict", "DataParallelMeshDims"),
    ),
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


LINE = partial(tower_on, lambda: mesh_of((2,), ("tp",)))
PLANE = partial(tower_on, lambda: mesh_of((1, 2), ("dp", "tp"))["tp"])
OTHER_ROOTS = {
    f"a parameter on {lies}, a call with {given}": refused_with(
        make, *("up.weight", "mesh", "tp"), build=build, then=start_again_plain
    )
    for lies, build, given, make in (
        ("a line", LINE, "no mesh", dict),
        ("a plane", PLANE, "another plane", lambda: {"mesh": mesh_of((2, 1), ("dp", "other"))["dp"]}),
        (
            *("a plane", PLANE, "one that calls it data"),
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


NO_PLACEMENTS = [*(Shard(2), Shard(-3), Replicate(), Partial(), "0", Shard, (Shard(0),))]
NO_RESULTS: list[dict[str, Any]] = [
    {"placement": Shard(0)},
    {"placement": Shard(0), "mesh_info": "cpu"},
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
    "no function": refused_with(lambda: {"shard_placement_fn": Shard(0)}, "shard_placement_fn", "Shard"),
}

# --- resharding to a smaller world ----------------------------------------------------------------

# 1 and 2 of two ranks are False and True.
SIZES_OF_TWO = {
    f"{size} of 2": refused_with(
        partial(dict, reshard_after_forward=size), "reshard_after_forward", str(size), "2"
    )
    for size in (0, -1, 3)
}
SIZES_OF_FOUR = {
    **{
        f"{size} of 4": refused_with(
            partial(dict, reshard_after_forward=size), "reshard_after_forward", str(size), "4"
        )
        for size in (0, -1, 3, 8)
    },
    "4 of 2 x 2": refused_with(
        lambda: {"mesh": mesh_of((2, 2), NAMES[:2]), "reshard_after_forward": 4},
        *("reshard_after_forward", "4", "2"),
    ),
    **{
        f"{size!r} ranks": refused_with(
            partial(dict, reshard_after_forward=size), "TypeError", "reshard_after_forward"
        )
        for size in (2.0, "2", torch.tensor(2))
    },
}


# --- policies and ignored parameters --------------------------------------------------------------


FLOAT_8 = torch.float8_e4m3fn
NO_VALUES: dict[str, list[Any]] = {
    "param_dtype": [torch.int32, torch.complex64, FLOAT_8, "bfloat16"],
    "reduce_dtype": [torch.float8_e5m2],
    "output_dtype": [torch.int64, 32],
    "accumulate_dtype": [FLOAT_8, "float32"],
    "buffer_dtype": [torch.int64],
    "keep_low_precision_grads": ["yes"],
    "full_precision": [3, "norm", (nn.LayerNorm, "Linear"), int],
    "cast_forward_inputs": ["no", None],
}
NO_POLICIES: dict[str, dict[str, Any]] = {
    "a dtype": {"mp_policy": torch.bfloat16},
    "a class of policies": {"mp_policy": shardwise.MixedPrecisionPolicy},
    "an offload policy": {"mp_policy": CPUOffloadPolicy()},
    "FSDP1's offload": {"offload_policy": peer.CPUOffload(offload_params=True)},
    "a class as offload": {"offload_policy": shardwise.OffloadPolicy},
    "a precision policy": {"offload_policy": peer.MixedPrecisionPolicy()},
    "a number as communication": {"comm_policy": 1},
}
NO_PARAMETERS = {
    "names": {"up.weight"},
    "none": [None],
    "a name": "up.weight",
    "a module": nn.Linear(2, 2),
}


def policy(fields: dict[str, Any], library: Any = shardwise) -> dict[str, Any]:
    return {"mp_policy": library.MixedPrecisionPolicy(**fields)}


POLICIES = {
    "torch's reduce_dtype": refused_with(
        partial(policy, {"reduce_dtype": torch.int32}, peer), "reduce_dtype", "torch.int32"
    ),
    **{
        f"{name}={value}": refused_with(
            partial(policy, {name: value}), name, *([str(value)] if "dtype" in name else [])
        )
        for name, values in NO_VALUES.items()
        for value in values
    },
    **{
        f"{what} as {name}": refused_with(
            partial(dict, given), "TypeError", name, getattr(value, "__name__", type(value).__name__)
        )
        for what, given in NO_POLICIES.items()
        for name, value in given.items()
    },
    "pin_memory": refused_with(lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=1)}, "pin_memory"),
    **{
        f"ignoring {what}": refused_with(partial(dict, ignored_params=value), "ignored_params")
        for what, value in NO_PARAMETERS.items()
    },
}

# --- classes --------------------------------------------------------------------------------------


class Sealed(nn.Linear):
    """Lets no attribute be set once it is built, its class included."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        vars(self)["is_sealed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("is_sealed"):
            raise AttributeError(f"cannot set {name}: sealed")
        super().__setattr__(name, value)


class Final(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 1)

    def __init_subclass__(cls) -> None:
        raise TypeError("no, thank you")


class HasItsOwnReshard(nn.Linear):
    """Uses a name for its own ends that FSDPModule has as well."""

    def __init__(self) -> None:
        super().__init__(8, 1)

    def reshard(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def with_outlet(cls: type[nn.Module]) -> nn.Module:
    model = Tower(depth=2)
    model.outlet = cls()
    return model.double()


def last_in_a_list(cls: type[nn.Module], words: str) -> Refused:
    build = partial(with_outlet, cls)
    return refused(
        lambda model: fully_shard([model.inlet, model.blocks[0], model.outlet]),
        *("TypeError: fully_shard: ", cls.__name__, words),
        build=build,
        plain=build,
    )


AROUND_IT = "shard the module around it instead"
LAST_IN_A_LIST = {
    "a parameter that does not fit, last in a list": refused(
        lambda model: fully_shard(
            [model.inlet, model.blocks[0], model.outlet],
            shard_placement_fn=lambda param: Shard(0 if param.shape[0] > 1 else 4),
        ),
        "Error: ",
        "[2].weight",
    ),
    "a class that lets no attribute be set, last in a list": last_in_a_list(Sealed, AROUND_IT),
    "a class that cannot be extended, last in a list": last_in_a_list(Final, AROUND_IT),
    "a class that uses one of our names, last in a list": last_in_a_list(
        HasItsOwnReshard,
        "has an attribute 'reshard' of its own, a name that sharded modules need: the method of FSDPModule would "
        "take its place. Rename it in the class.",
    ),
}

BY_RANKS = {
    1: POLICIES,
    2: MESHES | DIMS | OTHER_ROOTS | PLACEMENTS | SIZES_OF_TWO,
    4: SIZES_OF_FOUR,
}
REFUSED = {case: line for lines in (LAST_IN_A_LIST, *BY_RANKS.values()) for case, line in lines.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world", "case"),
    [(ranks, case) for ranks, lines in BY_RANKS.items() for case in lines],
    indirect=["world"],
)
def test_it_is_refused_by_name(world: World, case: str) -> None:
    text = assert_refused(world, __name__, case)
    is_of_the_machine = case == "a mesh of a device that is not here"
    assert text.startswith("RuntimeError: " if is_of_the_machine else ("TypeError: ", "ValueError: ")), text


@pytest.mark.parametrize("case", LAST_IN_A_LIST)
def test_nobody_in_a_list_is_changed(world1: World, case: str) -> None:
    assert_refused(world1, __name__, case)


# --- allowed --------------------------------------------------------------------------------------


HARMLESS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch's policies": lambda: {
        "mp_policy": peer.MixedPrecisionPolicy(),
        "offload_policy": peer.OffloadPolicy(),
    },
    "the dtypes it has, torch's": lambda: {"mp_policy": peer.MixedPrecisionPolicy(*[torch.float64] * 3)},
    "nothing": lambda: dict.fromkeys(
        ("mp_policy", "offload_policy", "comm_policy", "ignored_params", "shard_placement_fn", "mesh")
    ),
    "another dimension": lambda: {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
    "the host, torch's, not pinned": lambda: {"offload_policy": peer.CPUOffloadPolicy(pin_memory=False)},
    "a row of a plane": lambda: {"mesh": mesh_of((1, dist.get_world_size()), NAMES[:2])["shard"]},
}


def shard_harmlessly(model: nn.Module, what: str) -> None:
    shard_tower(model, **HARMLESS[what]())


@pytest.mark.parametrize(
    ("world", "what"), [(2 if "row" in what else 1, what) for what in HARMLESS], indirect=["world"]
)
def test_what_changes_no_number_is_allowed_and_changes_none(world: World, what: str) -> None:
    assert_trains(world, partial(shard_harmlessly, what=what))


def test_a_comm_policy_refuses_negative_values_and_wrong_types() -> None:
    with pytest.raises(ValueError, match=r"CommPolicy: prefetch is -1; .*0"):
        CommPolicy(prefetch=-1)
    with pytest.raises(TypeError, match=r"CommPolicy: packing_limit_bytes is 1\.5"):
        CommPolicy(packing_limit_bytes=1.5)  # type: ignore[arg-type]


# --- ranks outside of the mesh ----------------------------------------------------------------------


def shard_on_rank_0(model: nn.Module) -> None:
    fully_shard(model.blocks[0], mesh=DeviceMesh("cpu", [0]))


def test_a_rank_outside_of_the_mesh_is_refused(world2: World) -> None:
    inside, outside = world2.run(refuse, shard_on_rank_0, then=start_again)
    assert inside.text == "accepted"
    assert outside.changes == []
    assert_expected_inline(
        wrapped(outside.text),
        """\
ValueError: fully_shard: rank 1 is not in the mesh [0]. Call
fully_shard only on the ranks of the mesh.""",
    )


# --- without a process group ----------------------------------------------------------------------


def init_and_shard(model: nn.Module) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shard_bottom_up(model)


def shard_over_a_mesh_that_is_gone(model: nn.Module) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
    fully_shard(model.blocks[0], mesh=mesh)


@pytest.mark.processes
def test_without_a_process_group_nothing_is_sharded() -> None:
    told = in_a_new_process(refuse, shard_root, then=init_and_shard)
    assert told.changes == []
    assert told.trains == "as the plain model"
    assert_expected_inline(
        wrapped(told.text),
        """\
RuntimeError: fully_shard: there is no process group, and so no ranks
to shard over. Call torch.distributed.init_process_group() first
(torchrun sets what it reads), or pass mesh=.""",
    )


@pytest.mark.processes
def test_a_mesh_whose_process_group_is_gone_is_refused() -> None:
    told = in_a_new_process(refuse, shard_over_a_mesh_that_is_gone, then=init_and_shard)
    assert told.changes == []
    assert told.trains == "as the plain model"
    assert_says(told.text, "fully_shard", "mesh", "process group")


@on_ranks(1)
def test_a_refusal_leaves_no_attribute_at_all() -> None:
    """Not even an empty one of torch's, which `portrait` would overlook."""
    model = tower()
    before = list(vars(model))
    with pytest.raises(ValueError, match="reshard_after_forward=2"):
        fully_shard(model, reshard_after_forward=2)
    assert list(vars(model)) == before
