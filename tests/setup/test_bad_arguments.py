"""Meshes, policies, flags and classes that do not fit are refused, in words that help.

Nothing is left half-sharded after an error.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from expecttest import assert_expected_inline
from harness import World
from models import Tower, shard_tower
from refusals import (
    assert_says,
    assert_says_what_to_do,
    assert_trains,
    refusal,
    refusals,
    refuse,
    shard_bottom_up,
    shard_root,
    start_again,
    tower,
    wrapped,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from shardwise import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# --- the mesh -------------------------------------------------------------------------------------


def with_argument(model: nn.Module, **argument: Any) -> None:
    fully_shard(model.blocks[0], **argument)


def a_string() -> Any:
    return "cpu"


def a_number() -> Any:
    return 2


def a_process_group() -> Any:
    return dist.group.WORLD


def a_list_of_ranks() -> Any:
    return list(range(dist.get_world_size()))


def a_plane() -> Any:
    size = dist.get_world_size()
    return init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))


def a_row_of_a_plane() -> Any:
    return a_plane()["shard"]


def a_mesh_of_meta_devices() -> Any:
    return init_device_mesh("meta", (dist.get_world_size(),))


def a_mesh_of_cuda_devices() -> Any:
    return init_device_mesh("cuda", (dist.get_world_size(),))


def the_mesh_of_rank_0() -> Any:
    return DeviceMesh("cpu", [0])


def with_mesh(model: nn.Module, make: Callable[[], Any]) -> None:
    mesh = make()
    fully_shard(model.blocks[0], mesh=mesh)


def shard_on_mesh(model: nn.Module, make: Callable[[], Any]) -> None:
    mesh = make()
    shard_tower(model, mesh=mesh)


def test_what_is_no_mesh_is_refused(world1: World) -> None:
    makers = [a_string, a_number, a_process_group, a_list_of_ranks]
    text = refusals(world1, *(partial(with_mesh, make=make) for make in makers))
    assert_expected_inline(
        text,
        """\
TypeError: fully_shard: mesh is a str, not a DeviceMesh. Make one with
torch.distributed.init_device_mesh(device_type, (world_size,)).

TypeError: fully_shard: mesh is a int, not a DeviceMesh. Make one with
torch.distributed.init_device_mesh(device_type, (world_size,)).

TypeError: fully_shard: mesh is a ProcessGroup, not a DeviceMesh. Make
one with torch.distributed.init_device_mesh(device_type,
(world_size,)).

TypeError: fully_shard: mesh is a list, not a DeviceMesh. Make one
with torch.distributed.init_device_mesh(device_type, (world_size,)).""",
    )


def test_one_dimension_of_a_mesh_of_two_is_a_mesh(world2: World) -> None:
    assert_trains(world2, partial(shard_on_mesh, make=a_row_of_a_plane))


def test_a_mesh_of_a_device_that_the_group_does_not_serve_is_refused(world1: World) -> None:
    text = refusal(world1, partial(with_mesh, make=a_mesh_of_meta_devices))
    assert_says(text, "ValueError", "'meta'", "process group", "cpu", "init_process_group")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the mesh would be a good one")
def test_a_mesh_of_a_device_that_is_not_here_is_refused(world1: World) -> None:
    text = refusal(world1, partial(with_mesh, make=a_mesh_of_cuda_devices))
    assert_says(text, "fully_shard", "mesh", "cuda")
    assert_says_what_to_do(text)


def test_a_rank_outside_of_the_mesh_is_refused(world2: World) -> None:
    inside, outside = world2.run(refuse, partial(with_mesh, make=the_mesh_of_rank_0), then=start_again)
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


def in_a_new_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run where no process group was ever made. The world's server forks it with torch loaded."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result(timeout=60)


@pytest.mark.processes
def test_without_a_process_group_nothing_is_sharded() -> None:
    told = in_a_new_process(refuse, shard_root, then=init_and_shard)
    assert told.changes == []
    assert told.trains == "as the plain model"
    assert_expected_inline(
        wrapped(told.text),
        """\
RuntimeError: fully_shard: there is no process group, so nobody to
shard with. Call torch.distributed.init_process_group() first
(torchrun sets what it reads), or pass mesh=.""",
    )


@pytest.mark.processes
def test_a_mesh_whose_process_group_is_gone_is_refused() -> None:
    told = in_a_new_process(refuse, shard_over_a_mesh_that_is_gone, then=init_and_shard)
    assert told.changes == []
    assert told.trains == "as the plain model"
    assert_says(told.text, "fully_shard", "mesh", "process group")


# --- the other arguments --------------------------------------------------------------------------


def on_the_last_dimension(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


HARMLESS: dict[str, dict[str, Any]] = {
    "our policies": {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()},
    "no casting": {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)},
    "ignored_params=set()": {"ignored_params": set()},
    "shard_placement_fn=None": {"shard_placement_fn": None},
    "comm_policy=None": {"comm_policy": None},
    "reshard_after_forward=None": {"reshard_after_forward": None},
    "reshard_after_forward=1": {"reshard_after_forward": 1},
    "the dtypes it has": {"mp_policy": MixedPrecisionPolicy(*[torch.float64] * 3)},
    "the dtypes it has, torch's": {"mp_policy": peer.MixedPrecisionPolicy(*[torch.float64] * 3)},
    "another dimension": {"shard_placement_fn": on_the_last_dimension},
    "the host, not pinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_changes_no_number_is_allowed_and_changes_none(world1: World, what: str) -> None:
    assert_trains(world1, partial(shard_tower, **HARMLESS[what]))


WRONG: dict[str, dict[str, Any]] = {
    "mp_policy is a dtype": {"mp_policy": torch.bfloat16},
    "mp_policy is a class": {"mp_policy": MixedPrecisionPolicy},
    "offload_policy is a bool": {"offload_policy": True},
    "offload_policy is a class": {"offload_policy": OffloadPolicy},
    "comm_policy is an int": {"comm_policy": 1},
    "comm_policy is a class": {"comm_policy": CommPolicy},
    "reshard_after_forward is a str": {"reshard_after_forward": "yes"},
    "ignored_params is an int": {"ignored_params": 3},
    "ignored_params is a parameter": {"ignored_params": nn.Parameter(torch.ones(2))},
}


@pytest.mark.parametrize("what", WRONG)
def test_an_argument_of_the_wrong_type_is_refused_by_name(world1: World, what: str) -> None:
    text = refusal(world1, partial(with_argument, **WRONG[what]))
    assert_says(text, "TypeError: fully_shard: ", what.split()[0])


def test_the_words_for_a_wrong_type(world1: World) -> None:
    whats = ["mp_policy is a dtype", "offload_policy is a bool", "reshard_after_forward is a str"]
    text = refusals(world1, *(partial(with_argument, **WRONG[what]) for what in whats))
    assert_expected_inline(
        text,
        """\
TypeError: fully_shard: mp_policy is a dtype, not a
MixedPrecisionPolicy.

TypeError: fully_shard: offload_policy is True, a bool, not an
OffloadPolicy.

TypeError: fully_shard: reshard_after_forward is 'yes', a str; pass
True, False, None or a number of ranks.""",
    )


@pytest.mark.parametrize("value", [-1, -(2**40)])
@pytest.mark.parametrize("field", ["prefetch", "packing_limit_bytes", "part_bytes"])
def test_a_comm_policy_refuses_negative_values(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"CommPolicy: {field} is {value}; .*0"):
        CommPolicy(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefetch", "1"),
        ("prefetch", None),
        ("prefetch", 1.5),
        ("packing_limit_bytes", "1"),
        ("packing_limit_bytes", 1.5),
    ],
)
def test_a_comm_policy_refuses_values_of_the_wrong_type(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"CommPolicy: {field} is {value!r}"):
        CommPolicy(**{field: value})


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
    """Lets nobody extend it."""

    def __init__(self) -> None:
        super().__init__(8, 1)

    def __init_subclass__(cls) -> None:
        raise TypeError("no, thank you")


def with_outlet(cls: type[nn.Module]) -> nn.Module:
    model = Tower(depth=2)
    model.outlet = cls()
    return model.double()


def shard_list_with_outlet(model: nn.Module) -> None:
    fully_shard([model.inlet, model.blocks[0], model.outlet])


@pytest.mark.parametrize("cls", [Sealed, Final])
def test_a_class_that_cannot_be_extended_is_refused_and_nobody_in_the_list_is_changed(
    world1: World, cls: type[nn.Module]
) -> None:
    build = partial(with_outlet, cls)
    text = refusal(world1, shard_list_with_outlet, build=build, plain=build)
    assert_says(text, "TypeError: fully_shard: ", cls.__name__, "shard the module around it instead")


def test_a_refusal_leaves_no_attribute_at_all(world1: World) -> None:
    """Not even an empty one of torch's, which `portrait` would overlook."""
    for before, after in world1.run(attributes_before_and_after_a_refusal):
        assert after == before


def attributes_before_and_after_a_refusal() -> tuple[list[str], list[str]]:
    model = tower()
    before = list(vars(model))
    with pytest.raises(ValueError, match="reshard_after_forward=2"):
        fully_shard(model, reshard_after_forward=2)
    return before, list(vars(model))
