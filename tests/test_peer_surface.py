"""Trying this library is a change of one import line.

Signatures are compared with those of ``torch.distributed.fsdp``, whatever version is installed; then
one and the same training script runs with either import.
"""

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from harness import World
from models import Tower, random_batch
from reference import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise

OURS, PEERS = "shardwise", "torch.distributed.fsdp"

# --- names and signatures -------------------------------------------------------------------------

# What a script for torch's fully_shard may pass.
ARGUMENTS = [
    "module",
    "mesh",
    "reshard_after_forward",
    "shard_placement_fn",
    "mp_policy",
    "offload_policy",
    "ignored_params",
]

METHODS = [
    "unshard",
    "reshard",
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_is_last_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_gradient_divide_factor",
]


def comparable(value: Any) -> Any:
    """A default in a form that is equal across the two libraries: policies by their fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, dataclasses.asdict(value)
    return value


def parameter(function: Any, name: str) -> tuple[Any, Any]:
    found = inspect.signature(function).parameters[name]
    return found.kind, comparable(found.default)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_fully_shard_takes_the_same_argument(name: str) -> None:
    assert parameter(shardwise.fully_shard, name) == parameter(peer.fully_shard, name)


def test_fully_shard_takes_its_arguments_in_the_same_order() -> None:
    ours = [name for name in inspect.signature(shardwise.fully_shard).parameters if name in ARGUMENTS]
    theirs = [name for name in inspect.signature(peer.fully_shard).parameters if name in ARGUMENTS]
    assert ours == theirs == ARGUMENTS


def test_what_we_take_beyond_is_optional_and_by_name() -> None:
    parameters = inspect.signature(shardwise.fully_shard).parameters
    for name in parameters.keys() - set(ARGUMENTS):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is not inspect.Parameter.empty


@pytest.mark.parametrize("name", METHODS)
def test_a_sharded_module_has_the_same_method(name: str) -> None:
    """Every call that the peer's signature allows binds to ours, to the same parameters."""
    ours = inspect.signature(getattr(shardwise.FSDPModule, name)).parameters
    theirs = inspect.signature(getattr(peer.FSDPModule, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for each, their in theirs.items():
        assert ours[each].kind == their.kind, each
        assert ours[each].default == their.default, each
    for each in list(ours)[len(theirs) :]:
        assert ours[each].default is not inspect.Parameter.empty


def test_a_forward_method_is_registered_by_the_same_call() -> None:
    ours = inspect.signature(shardwise.register_fsdp_forward_method).parameters
    theirs = inspect.signature(peer.register_fsdp_forward_method).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"])
def test_a_policy_has_the_same_fields(name: str) -> None:
    ours, theirs = getattr(shardwise, name), getattr(peer, name)
    assert [(f.name, f.default) for f in dataclasses.fields(ours)] == [
        (f.name, f.default) for f in dataclasses.fields(theirs)
    ]


def test_our_public_names_are_the_peers_and_one_more() -> None:
    assert set(shardwise.__all__) - set(dir(peer)) == {"CommPolicy"}


# --- the same script ------------------------------------------------------------------------------


def train_plainly(library: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of AdamW, as one finds them in a tutorial."""
    fsdp = importlib.import_module(library)
    torch.manual_seed(0)
    model = Tower().double()
    for block in model.blocks:
        fsdp.fully_shard(block)
    fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(rank_batch(step)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses, parameters_of(model)


def train_with_every_option(library: str) -> tuple[list[float], dict[str, Tensor]]:
    """Every argument and method that both libraries have, where it changes no number."""
    fsdp = importlib.import_module(library)
    torch.manual_seed(0)
    model = Tower().double()
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


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param) for name, param in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("script", [train_plainly, train_with_every_option])
def test_the_same_script_computes_the_same_with_either_import(world2: World, script: Any) -> None:
    for ours, theirs in zip(world2.run(script, OURS), world2.run(script, PEERS), strict=True):
        (losses, parameters), (peer_losses, peer_parameters) = ours, theirs
        assert losses[0] != losses[-1]  # it trains at all
        torch.testing.assert_close(losses, peer_losses, rtol=0, atol=1e-12)
        assert parameters.keys() == peer_parameters.keys()
        for name, value in peer_parameters.items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-12)


def rows_of_every_rank(library: str) -> list[tuple[str, Any, Any, tuple[int, ...]]]:
    fsdp = importlib.import_module(library)
    torch.manual_seed(0)
    model = fsdp.fully_shard(Tower(width=7, hidden=13).double())
    return [
        (name, param.placements, tuple(param.shape), tuple(param.to_local().shape))
        for name, param in model.named_parameters()
    ]


def test_every_rank_holds_the_same_rows_with_either_import(world3: World) -> None:
    assert world3.run(rows_of_every_rank, OURS) == world3.run(rows_of_every_rank, PEERS)


def checkpoint_crosses_over(saver: str, loader: str) -> bool:
    """A sharded state dict of one library is loaded into a model of the other."""
    states = []
    for seed, library in ((0, saver), (1, loader)):
        torch.manual_seed(seed)
        model = importlib.import_module(library).fully_shard(Tower().double())
        states.append(model.state_dict())
    model.load_state_dict(states[0])
    return all(torch.equal(full(model.state_dict()[name]), full(value)) for name, value in states[0].items())


@pytest.mark.parametrize(("saver", "loader"), [(OURS, PEERS), (PEERS, OURS)], ids=["to-peer", "from-peer"])
def test_a_sharded_state_dict_crosses_over(world2: World, saver: str, loader: str) -> None:
    assert world2.run(checkpoint_crosses_over, saver, loader) == [True, True]
