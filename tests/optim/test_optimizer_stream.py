"""An optimizer that steps on a stream of its own, while the computing stream goes on.

Its event (``set_post_optim_event``) is all that tells when shards have been written and gradients read. The
device is simulated: what counts is which stream waits for it, and from whose memory gradients come.
"""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from harness import World
from meshed import outcome
from models import even_tower, random_batch, shard_tower
from on_ranks import on_ranks
from simulated_device import Event, streams_on_the_host
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import MixedPrecisionPolicy
from shardwise.comm import buffers, reduction


def sharded_tower(shape: tuple[int, ...] | None = None, policy: Any = None) -> Any:
    model: Any = even_tower().double()
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),))
    shard_tower(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def step(model: nn.Module) -> None:
    model(random_batch(0, 4)).sum().backward()
    model.zero_grad()


# --- whose memory gradients are -------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("shape", "computes_in", "expected"),
    [
        ((2,), None, ["reduce"]),
        ((2, 1), None, ["reduce"]),
        ((2,), torch.bfloat16, ["reduce", "replicate"]),  # the sums, and what they are cast to
    ],
)
def test_gradients_lie_in_memory_of_the_streams_that_reduce(
    shape: tuple[int, ...], computes_in: torch.dtype | None, expected: list[str]
) -> None:
    """What ``zero_grad()`` gives back is allocated again only behind the optimizer, which may yet read it."""
    found: set[str] = set()
    with streams_on_the_host() as device, pytest.MonkeyPatch.context() as patch:

        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            found.add(device.current[-1].name)
            return buffers.buffer_for(*args, **kwargs)

        patch.setattr(reduction, "buffer_for", noted)
        model = sharded_tower(shape, MixedPrecisionPolicy(param_dtype=computes_in))
        step(model)
        step(model)
    assert sorted(found) == expected


# --- who waits ------------------------------------------------------------------------------------


def a_forward(model: Any) -> None:
    model(random_batch(0, 4))


def a_forward_after_unshard(model: Any) -> None:
    model.unshard()
    a_forward(model)


def a_forward_of_what_was_kept(model: Any) -> None:
    a_forward(model)


def a_forward_in_inference(model: Any) -> None:
    with shardwise.inference(model):
        a_forward(model)


def full_parameters(model: Any) -> None:
    with shardwise.unsharded(model):
        pass


OTHERS = ["reduce waits for the event of optimizer", "replicate waits for the event of optimizer"]
GATHER, COMPUTING = "gather waits for the event of optimizer", "computing waits for the event of optimizer"


@on_ranks(2)
@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (a_forward, [GATHER, *OTHERS]),
        (a_forward_after_unshard, [GATHER, *OTHERS]),
        (a_forward_in_inference, [GATHER, *OTHERS]),
        (a_forward_of_what_was_kept, [COMPUTING, GATHER, *OTHERS]),  # it compares shards with what was kept
        (full_parameters, [COMPUTING]),  # the rest is the caller's own work on that stream
    ],
)
def test_nobody_touches_the_shards_before_the_optimizer_is_done(
    act: Callable[[Any], None], expected: list[str]
) -> None:
    """Who waits for its event, in order, before the first all-gather, or the first look at shards."""
    with streams_on_the_host() as device:
        model = sharded_tower()
        if act is a_forward_of_what_was_kept:
            model.set_reshard_after_backward(False)
        step(model)
        model.set_post_optim_event(Event("optimizer", device.log))
        device.log.clear()
        act(model)
    first_all_gather = device.log.index("gather is current") if "gather is current" in device.log else None
    assert [line for line in device.log[:first_all_gather] if "optimizer" in line] == expected


# --- whose event ----------------------------------------------------------------------------------


def answers_on_a_device(device: str) -> list[str]:
    """What the root says to things that may be meant as events and streams, and what it waits for after."""
    model = sharded_tower()
    model._shardwise_state.group.device = torch.device(device)
    root = model._shardwise_state.root
    answers = []
    for thing in (None, torch.Event("cpu"), torch.cpu.Event(), threading.Event(), "now"):
        answers.append(outcome(model.set_post_optim_event, thing))
        assert answers[-1] == "accepted" or root.post_optim_event is None
        root.post_optim_event = None
    for thing in (torch.cpu.Stream(), "side"):
        answers.append(outcome(model.set_all_reduce_hook, print, stream=thing))
    return [re.sub(r" is (<.* at 0x.*?>|torch.Event .*?) \(", " is ... (", answer) for answer in answers]


def test_a_device_waits_for_events_of_its_own_only(world1: World) -> None:
    (answers,) = world1.run(answers_on_a_device, "cuda")
    assert_expected_inline(
        "\n".join(answers),
        """\
TypeError: set_post_optim_event: event is None (builtins.NoneType), not one of 'cuda', the device of the mesh: all-gathers would not wait for the optimizer. Pass a torch.cuda.Event.
TypeError: set_post_optim_event: event is ... (torch.Event), not one of 'cuda', the device of the mesh: all-gathers would not wait for the optimizer. Pass a torch.cuda.Event.
TypeError: set_post_optim_event: event is ... (torch.cpu.Event), not one of 'cuda', the device of the mesh: all-gathers would not wait for the optimizer. Pass a torch.cuda.Event.
TypeError: set_post_optim_event: event is ... (threading.Event), not one of 'cuda', the device of the mesh: all-gathers would not wait for the optimizer. Pass a torch.cuda.Event.
TypeError: set_post_optim_event: event is 'now' (builtins.str), not one of 'cuda', the device of the mesh: all-gathers would not wait for the optimizer. Pass a torch.cuda.Event.
TypeError: set_all_reduce_hook: stream is ... (torch.cpu.Stream), not one of 'cuda', the device of the mesh: the hook would not be ordered behind the reduction. Pass a torch.cuda.Stream.
TypeError: set_all_reduce_hook: stream is 'side' (builtins.str), not one of 'cuda', the device of the mesh: the hook would not be ordered behind the reduction. Pass a torch.cuda.Stream.""",
    )


def test_the_host_takes_what_its_streams_record_and_nothing_else(world1: World) -> None:
    (answers,) = world1.run(answers_on_a_device, "cpu")
    accepted = [answer == "accepted" for answer in answers]
    assert accepted == [True, True, True, False, False, True, False]


@on_ranks(2)
def test_streams_and_events_of_the_host_change_nothing() -> None:
    """The lines of a script for any device, with a hook on a stream and an event, and without."""
    results = []
    for uses_streams in (True, False):
        torch.manual_seed(0)
        model = sharded_tower()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        streams = torch.get_device_module("cpu")
        model.set_all_reduce_hook(halve, stream=streams.Stream() if uses_streams else None)
        losses = []
        for number in range(3):
            loss = model(random_batch(number, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
            if uses_streams:
                model.set_post_optim_event(streams.current_stream().record_event())
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    with_them, without = results
    assert with_them == without
    assert len(set(without)) == 3  # it trains


def halve(gradient: torch.Tensor) -> None:
    gradient.mul_(0.5)
