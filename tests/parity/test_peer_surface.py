"""Trying this library is a change of one import line.

The public surface of ``torch.distributed.fsdp.fully_shard`` is walked as the installed torch has it: whatever
name, method, parameter or field a script may use there must be here, and mean the same argument. Then one
and the same training script runs with either import.
"""

import dataclasses
import importlib.metadata
import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from events import observe
from harness import World
from meshed import parameters_of
from models import Tower, built, random_batch
from on_ranks import on_ranks
from reference import full
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardwise

OURS, PEERS = "shardwise", "torch.distributed.fsdp"

# --- names and signatures -------------------------------------------------------------------------

# What the peer has and we leave out on purpose: "Name" or "Class.method", each with the reason.
LEFT_OUT: dict[str, str] = {}

# What stands beside the peer's names at the top, each with the reason.
BEYOND: dict[str, str] = {
    "CommPolicy": "how parameters travel",
    "GradScaler": "the peer leaves it to torch.amp, which mixtures of meshes mislead",
    "clip_grad_norm_": "a method of FSDP1's",
    "global_norm": "the peer leaves it to torch, whose norm is a DTensor",
    "statistics": "of whole tensors, in one all-reduce",
    "compile_options": "for torch.compile of whole models, whose graphs the peer breaks",
    "explain": "the groups as a table",
    "estimate": "memory and traffic of each strategy, before training",
    "trace": "what a step does over time",
    "merge_traces": "the traces of all ranks in one",
    "full_state_dict": "a state of FSDP1's; the peer leaves it to torch.distributed.checkpoint, as the next four",
    "latest_checkpoint": "the newest complete one",
    "load_checkpoint": "refuses what does not fit before anything changes",
    "resume": "loads that one, if there is one",
    "load_full_state_dict": "from one rank, an iterator or files",
    "save_checkpoint": "written beside, then renamed",
    "inference": "the peer all-gathers in each forward",
    "materialize": "param_init_fn of FSDP1",
    "no_sync": "a method of FSDP1's and DDP's",
    "shard_model": "strategies and wrapping, as FSDP1's constructor",
    "unsharded": "FSDP1's summon_full_params",
}
# What the peer exports in newer versions of torch only.
YOUNGER = {"DataParallelMeshDims", "GradientReductionHandle"}


def public(thing: Any) -> list[str]:
    return sorted(name for name in dir(thing) if not name.startswith("_"))


def peers_names() -> list[str]:
    """What ``torch.distributed.fsdp`` exports of fully_shard's family.

    The older ``FullyShardedDataParallel`` shares the package; its names say that they come from modules
    inside it, those of the new family that they come from the package itself.
    """
    return [name for name in public(peer) if getattr(getattr(peer, name), "__module__", None) == PEERS]


def peers_classes() -> list[str]:
    return [name for name in peers_names() if inspect.isclass(getattr(peer, name))]


def peers_callables() -> list[str]:
    """Functions, methods, and classes whose constructors a script calls, as dotted names."""
    functions = [name for name in peers_names() if inspect.isfunction(getattr(peer, name))]
    values = [name for name in peers_classes() if dataclasses.is_dataclass(getattr(peer, name))]
    methods = [
        f"{name}.{method}"
        for name in peers_classes()
        for method in public(getattr(peer, name))
        if callable(getattr(getattr(peer, name), method))
    ]
    return functions + values + methods


def required(names: list[str]) -> list[str]:
    return [name for name in names if name not in LEFT_OUT]


def found(library: Any, dotted: str) -> Any:
    thing = library
    for part in dotted.split("."):
        assert hasattr(thing, part), f"{library.__name__} has no {dotted}"
        thing = getattr(thing, part)
    return thing


def same_default(ours: Any, theirs: Any) -> bool:
    """Equal across the two libraries: policies by the peer's fields, since ours may have more."""
    if not dataclasses.is_dataclass(theirs) or isinstance(theirs, type):
        return bool(ours is theirs or ours == theirs)
    names = [field.name for field in dataclasses.fields(theirs)]
    return type(ours).__name__ == type(theirs).__name__ and all(
        getattr(ours, name) == getattr(theirs, name) for name in names
    )


def assert_takes_every_call(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Every call that the peer's signature allows binds to ours, to the same parameters.

    What we take beyond is optional and by name, so that the peer may grow without a clash.
    """
    mine, others = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    missing = [name for name in others if name not in mine]
    assert not missing, f"no parameter {', '.join(missing)}"
    assert [name for name in mine if name in others] == list(others), "another order"
    for name, other in others.items():
        assert mine[name].kind is other.kind, name
        assert same_default(mine[name].default, other.default), name
    for name in mine.keys() - others.keys():
        assert mine[name].kind is inspect.Parameter.KEYWORD_ONLY, name
        assert mine[name].default is not inspect.Parameter.empty, name


def test_the_walk_sees_the_peer() -> None:
    """So that no other test here passes because nothing was found."""
    assert {"fully_shard", "register_fsdp_forward_method", "share_comm_ctx"} <= set(peers_callables())
    assert {"MixedPrecisionPolicy", "FSDPModule.unshard", "UnshardHandle.wait"} <= set(peers_callables())
    assert not {"FullyShardedDataParallel", "MixedPrecision", "CPUOffload"} & set(peers_names())


@pytest.mark.parametrize("name", required(peers_names()))
def test_we_export_the_same_name(name: str) -> None:
    assert inspect.isclass(found(shardwise, name)) == inspect.isclass(getattr(peer, name))
    assert name in shardwise.__all__


@pytest.mark.parametrize("name", required(peers_callables()))
def test_it_takes_every_call_that_the_peers_takes(name: str) -> None:
    assert_takes_every_call(found(shardwise, name), found(peer, name))


@pytest.mark.parametrize("name", [n for n in peers_callables() if "." not in n and n in peers_classes()])
def test_a_policy_has_the_same_fields(name: str) -> None:
    """By name and default, to read from and to replace; in the same order where they are positional."""
    ours, theirs = found(shardwise, name), getattr(peer, name)
    if theirs.__dataclass_params__.frozen:  # then it may be a key of a dictionary
        assert ours.__dataclass_params__.frozen
    fields = [(field.name, field.default, field.kw_only) for field in dataclasses.fields(theirs)]
    assert [(f.name, f.default, f.kw_only) for f in dataclasses.fields(ours)][: len(fields)] == fields


def test_classes_derive_from_each_other_as_the_peers_do() -> None:
    """``isinstance(policy, OffloadPolicy)`` answers the same."""
    names = required(peers_classes())
    for name in names:
        bases = [base for base in names if issubclass(getattr(peer, name), getattr(peer, base))]
        assert [b for b in names if issubclass(found(shardwise, name), found(shardwise, b))] == bases


def test_our_names_are_the_peers_and_a_few_more() -> None:
    assert set(shardwise.__all__) - set(peers_names()) - YOUNGER == set(BEYOND)


def test_what_is_left_out_is_there_to_be_left_out() -> None:
    for name in LEFT_OUT:
        found(peer, name)
        with pytest.raises(AssertionError):
            found(shardwise, name)


# --- the same script ------------------------------------------------------------------------------


def train_with_every_option(library: str) -> tuple[list[float], dict[str, Tensor]]:
    """Every argument and method that both libraries have, where it changes no number."""
    fsdp = importlib.import_module(library)
    model = built(Tower, seed=0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {
        "mesh": mesh,
        "shard_placement_fn": None,
        "mp_policy": fsdp.MixedPrecisionPolicy(),
        "offload_policy": fsdp.OffloadPolicy(),
        "ignored_params": set(),
    }
    fsdp.fully_shard([model.inlet, model.outlet], reshard_after_forward=False, **options)
    for block in model.blocks:
        fsdp.fully_shard(block, reshard_after_forward=True, **options)
    fsdp.fully_shard(model, reshard_after_forward=None, **options)
    assert isinstance(model, fsdp.FSDPModule)
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    first.set_reshard_after_forward(False)
    fsdp.register_fsdp_forward_method(model, "forward")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        model.unshard(async_op=True).wait()
        for microbatch in range(2):
            is_last = microbatch == 1
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last, recurse=True)
            loss = model.forward(rank_batch(2 * step + microbatch)).pow(2).mean()
            loss.backward()
            losses.append(mean_over_ranks(loss))
        model.reshard()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, parameters_of(model)


def rank_batch(step: int) -> Tensor:
    world = dist.get_world_size()
    return random_batch(step, 4 * world).chunk(world)[dist.get_rank()]


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def test_the_same_script_computes_the_same_with_either_import(world2: World) -> None:
    runs = [world2.run(train_with_every_option, library) for library in (OURS, PEERS)]
    for ours, theirs in zip(*runs, strict=True):
        (losses, parameters), (peer_losses, peer_parameters) = ours, theirs
        assert losses[0] != losses[-1]  # it trains at all
        torch.testing.assert_close(losses, peer_losses, rtol=0, atol=1e-12)
        assert parameters.keys() == peer_parameters.keys()
        for name, value in peer_parameters.items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("saver", "loader"), [(OURS, PEERS), (PEERS, OURS)], ids=["to-peer", "from-peer"])
@on_ranks(3)
def test_a_sharded_state_dict_crosses_over(saver: str, loader: str) -> None:
    """Every rank has the same rows with either import, also where some have fewer or none."""
    states = []
    for seed, library in ((0, saver), (1, loader)):
        torch.manual_seed(seed)
        model = importlib.import_module(library).fully_shard(Tower(width=7, hidden=13).double())
        states.append(model.state_dict())
    shapes = [{name: value.to_local().shape for name, value in state.items()} for state in states]
    assert shapes[0] == shapes[1]
    model.load_state_dict(states[0])
    assert all(torch.equal(full(model.state_dict()[name]), full(value)) for name, value in states[0].items())


def test_the_version_is_that_of_the_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", shardwise.__version__)
    with suppress(importlib.metadata.PackageNotFoundError):
        assert importlib.metadata.version("shardwise") == shardwise.__version__


@on_ranks(1)
def test_the_root_has_one_name() -> None:
    model = shardwise.fully_shard(Tower())
    names: list[str] = []
    observe(model, lambda event, name: names.append(name))
    x = random_batch(0, 2, dtype=torch.float32)
    model(x).sum().backward()
    with shardwise.inference(model), torch.enable_grad(), pytest.raises(RuntimeError) as refused:
        model(x).sum().backward()
    assert {
        "type": type(model).__name__,
        "print": str(model).partition("(")[0],
        "explain": shardwise.explain(model).splitlines()[2].split()[0],
        "events": ", ".join(dict.fromkeys(names)),
        "error": str(refused.value).partition(":")[0],
    } == {"type": "Tower", "print": "FSDPTower", "explain": "Tower", "events": "Tower", "error": "Tower"}


@pytest.mark.skipif(not hasattr(peer, "DataParallelMeshDims"), reason="the peer has them from 2.12 on")
def test_names_of_mesh_dims_are_given_as_tuples_as_the_peer_does() -> None:
    for fields in ({"shard": "a"}, {"replicate": "r"}, {"shard": ("a", "b"), "replicate": ("r",)}):
        ours, peers = shardwise.DataParallelMeshDims(**fields), peer.DataParallelMeshDims(**fields)
        assert ours.shard_names == peers.shard_names
        assert ours.replicate_names == peers.replicate_names
