"""Run a program emulated and sharded, say what differs, and make a program that fails small."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from harness import World
from scenario import one_thread
from torch import Tensor

from campaign.actor import Actor, Notes, world_of
from campaign.program import Program, settled, simpler

Worlds = dict[int, World]
TIMEOUT_S = 60.0


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
    """What this rank notes. Runs on every rank."""
    actor = Actor(program, dist.get_rank(), is_sharded=True)
    for _ in actor.run():
        pass
    return actor.notes


def failure_of(worlds: Worlds, program: Program) -> str | None:
    """What is wrong with a program; None if nothing is. Raises what plain PyTorch raises."""
    wanted = emulated(program)
    try:
        found = worlds[world_of(program)].run(sharded, program, timeout=TIMEOUT_S)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for rank, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if (names := [name for name, _ in got]) != [name for name, _ in want]:
            return f"rank {rank} noted {names}"
        for (name, value), (_, other) in zip(want, got, strict=True):
            if (text := _difference(value, other)) is not None:
                return f"{name} on rank {rank}: {text}"
    return None


def _difference(want: object, got: object) -> str | None:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return None if want is got or (type(want) is type(got) and want == got) else f"{got}, expected {want}"
    try:
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-7, equal_nan=False)
    except AssertionError as error:
        return str(error)
    return None


def shrunk(worlds: Worlds, program: Program, seconds: float) -> tuple[Program, str]:
    """A program in which everything that can be simple is, and that fails in the same way."""
    deadline = time.monotonic() + seconds
    failure = failure_of(worlds, program) or "it does not fail again"
    went_on = not failure.startswith("it does not")
    while went_on:
        went_on = False
        for candidate in map(settled, simpler(program)):
            if time.monotonic() > deadline:
                return program, failure
            text = None if candidate == program else _quiet(worlds, candidate)
            if text is not None and _kind(text) == _kind(failure):
                program, failure, went_on = candidate, text, True
                break
    return program, failure


def _quiet(worlds: Worlds, program: Program) -> str | None:
    try:
        return failure_of(worlds, program)
    except Exception:  # plain PyTorch refuses it: no simpler program, but none at all
        return None


def _kind(failure: str) -> str:
    """So that shrinking does not slip from one error to another."""
    if not failure.startswith("WorkerError"):
        return "difference"
    lines = [line for line in failure.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines[-1] if len(lines) > 1 else failure).partition(":")[0].strip()
