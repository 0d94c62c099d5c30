"""Random programs train as plain copies that average their gradients.

PROGRAM_DRAW="{...}" pytest -m slow -s tests/campaign/test_programs.py
PROGRAM_SEED=5000 PROGRAM_DRAWS=400 pytest -m slow -s tests/campaign/test_programs.py
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scenario import one_thread

from campaign.actor import Actor, world_of
from campaign.campaign import Campaign, Worlds
from campaign.draws import Draw
from campaign.notes import Notes, close, difference
from campaign.program import PROGRAMS, settled


def emulated(program: Draw) -> list[Notes]:
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


def sharded(program: Draw) -> Notes:
    actor = Actor(program, dist.get_rank(), is_sharded=True)
    for _ in actor.run():
        pass
    return actor.notes


def run_program(worlds: Worlds, program: Draw, folder: Path) -> str | None:
    wanted = emulated(program)
    found = worlds[world_of(program)].run(sharded, program, timeout=CAMPAIGN.timeout_s(60))
    for rank, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if (wrong := difference(want, [got], close(atol=1e-9, rtol=1e-7))) is not None:
            return f"of rank {rank}: {wrong}"
    return None


CAMPAIGN = Campaign("PROGRAM", PROGRAMS, settled, run_program)


def test_programs_train_as_plain_copies_do(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=3)


@pytest.mark.slow
def test_many_programs_train_as_plain_copies_do(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=300)
