"""Meshes, policies, flags and classes that do not fit are refused, in words that help.

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
from torch.distributed.tensor import Shard

from shardwise import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# --- arguments and classes ------------------------------------------------------------------------


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


def mesh_of(device: str, *shape: int) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def wrong(make: Callable[[], Any], argument: str, *words: Any) -> Refused:
    """A block is sharded with an argument that `make` makes, on the rank."""
    return refused(lambda model: fully_shard(model.blocks[0], **{argument: make()}), *words)


def no_mesh(make: Callable[[], Any], what: str) -> Refused:
    remedy = "Make one with torch.distributed.init_device_mesh(device_type, (world_size,))."
    return wrong(make, "mesh", f"TypeError: fully_shard: mesh is a {what}, not a DeviceMesh. {remedy}")


def no_type(value: Any, argument: str, text: str = "") -> Refused:
    return wrong(lambda: value, argument, f"TypeError: fully_shard: {argument} {text}")


def last_in_a_list(cls: type[nn.Module], *words: str) -> Refused:
    build = partial(with_outlet, cls)
    return refused(
        lambda model: fully_shard([model.inlet, model.blocks[0], model.outlet]),
        *("TypeError: fully_shard: ", cls.__name__, *words),
        build=build,
        plain=build,
    )


AROUND_IT = "shard the module around it instead"
REFUSED = {
    "a string as mesh": no_mesh(lambda: "cpu", "str"),
    "a number as mesh": no_mesh(lambda: 2, "int"),
    "a process group as mesh": no_mesh(lambda: dist.group.WORLD, "ProcessGroup"),
    "a list of ranks as mesh": no_mesh(lambda: [0], "list"),
    "a mesh of a device that the group does not serve": wrong(
        *(lambda: mesh_of("meta", 1), "mesh"),
        *("ValueError", "'meta'", "process group", "cpu", "init_process_group"),
    ),
    "mp_policy is a dtype": no_type(torch.bfloat16, "mp_policy", "is a dtype, not a MixedPrecisionPolicy."),
    "mp_policy is a class": no_type(MixedPrecisionPolicy, "mp_policy"),
    "offload_policy is a bool": no_type(True, "offload_policy", "is True, a bool, not an OffloadPolicy."),
    "offload_policy is a class": no_type(OffloadPolicy, "offload_policy"),
    "comm_policy is an int": no_type(1, "comm_policy"),
    "comm_policy is a class": no_type(CommPolicy, "comm_policy"),
    "reshard_after_forward is a str": no_type(
        "yes", "reshard_after_forward", "is 'yes', a str; pass True, False, None or a number of ranks."
    ),
    "ignored_params is an int": no_type(3, "ignored_params"),
    "ignored_params is a parameter": no_type(nn.Parameter(torch.ones(2)), "ignored_params"),
    "a class that lets no attribute be set, last in a list": last_in_a_list(Sealed, AROUND_IT),
    "a class that cannot be extended, last in a list": last_in_a_list(Final, AROUND_IT),
    "a class that uses one of our names, last in a list": last_in_a_list(
        HasItsOwnReshard,
        "has an attribute 'reshard' of its own, a name that sharded modules need: the method of FSDPModule would "
        "take its place. Rename it in the class.",
    ),
}
if not torch.cuda.is_available():  # where the mesh would be a good one
    REFUSED["a mesh of a device that is not here"] = wrong(
        lambda: mesh_of("cuda", 1), "mesh", "fully_shard", "mesh", "cuda", A_REMEDY
    )


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name_and_nobody_in_a_list_is_changed(world1: World, case: str) -> None:
    assert_refused(world1, __name__, case)


HARMLESS: dict[str, Callable[[], dict[str, Any]]] = {
    "our policies": lambda: {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()},
    "torch's policies": lambda: {
        "mp_policy": peer.MixedPrecisionPolicy(),
        "offload_policy": peer.OffloadPolicy(),
    },
    "no casting": lambda: {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)},
    "the dtypes it has": lambda: {"mp_policy": MixedPrecisionPolicy(*[torch.float64] * 3)},
    "the dtypes it has, torch's": lambda: {"mp_policy": peer.MixedPrecisionPolicy(*[torch.float64] * 3)},
    "nothing": lambda: dict.fromkeys(
        ("mp_policy", "offload_policy", "comm_policy", "ignored_params", "shard_placement_fn", "mesh")
    ),
    "no parameters": lambda: {"ignored_params": frozenset()},
    "no answer": lambda: {"reshard_after_forward": None},
    "reshard_after_forward=1": lambda: {"reshard_after_forward": 1},
    "another dimension": lambda: {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
    "the host": lambda: {"offload_policy": CPUOffloadPolicy()},
    "the host, torch's": lambda: {"offload_policy": peer.CPUOffloadPolicy()},
    "the host, torch's, not pinned": lambda: {"offload_policy": peer.CPUOffloadPolicy(pin_memory=False)},
    "a row of a plane": lambda: {"mesh": mesh_of("cpu", 1, dist.get_world_size())["shard"]},
}


def shard_harmlessly(model: nn.Module, what: str) -> None:
    shard_tower(model, **HARMLESS[what]())


@pytest.mark.parametrize(
    ("world", "what"), [(2 if "row" in what else 1, what) for what in HARMLESS], indirect=["world"]
)
def test_what_changes_no_number_is_allowed_and_changes_none(world: World, what: str) -> None:
    assert_trains(world, partial(shard_harmlessly, what=what))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("prefetch", -1, ValueError),
        ("packing_limit_bytes", -(2**40), ValueError),
        ("part_bytes", -1, ValueError),
        ("prefetch", "1", TypeError),
        ("prefetch", None, TypeError),
        ("packing_limit_bytes", "1", TypeError),
        ("packing_limit_bytes", 1.5, TypeError),
    ],
)
def test_a_comm_policy_refuses_negative_values_and_wrong_types(
    field: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"CommPolicy: {field} is {value!r}" + "; .*0" * (error is ValueError)):
        CommPolicy(**{field: value})


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
