"""Run a program emulated and sharded, and say what differs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from scenario import one_thread

from campaign.actor import Actor, world_of
from campaign.campaign import Worlds
from campaign.notes import Notes, close, difference
from campaign.program import Program


def emulated(program: Program) -> list[Notes]:
    """What each rank notes where plain copies of the model average their gradients."""
    actors = [Actor(program, rank, is_sharded=False) for rank in range(world_of(program))]
    running = [actor.run() for actor in actors]
    with one_thread():
        while running:
            has_ended = [next(each, StopIteration) is StopIteration for each in running]
            assert len(set(has_ended)) == 1
            if has_ended[0]:
                break
            _average(actors)
    return [actor.notes for actor in actors]


def _average(actors: Sequence[Actor]) -> None:
    for models in zip(*(actor.models for actor in actors), strict=True):
        for params in zip(*(model.parameters() for model in models), strict=True):
            gradients = [param.grad for param in params if param.grad is not None]
            if gradients:
                mean = torch.stack(gradients).sum(0) / len(actors)
                for param in params:
                    param.grad = torch.empty_like(param).copy_(mean)  # in the parameter's strides


def sharded(program: Program) -> Notes:
    actor = Actor(program, dist.get_rank(), is_sharded=True)
    for _ in actor.run():
        pass
    return actor.notes


def failure_of(worlds: Worlds, program: Program, timeout_s: float) -> str | None:
    """What is wrong with a program; None if nothing is. Raises what a rank or plain PyTorch raises."""
    wanted = emulated(program)
    found = worlds[world_of(program)].run(sharded, program, timeout=timeout_s)
    for rank, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if (wrong := difference(want, [got], close(atol=1e-9, rtol=1e-7))) is not None:
            return f"of rank {rank}: {wrong}"
    return None
