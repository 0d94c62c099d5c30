"""Random programs train as plain copies that average their gradients.

    CAMPAIGN_SEED=5000 CAMPAIGN_PROGRAMS=400 pytest -m slow -s tests/campaign
    CAMPAIGN_PROGRAM="{...}" pytest -m slow tests/campaign

A program that is given need not be complete. CAMPAIGN_SHRINK_S limits the shrinking of each that fails.
"""

import ast
import os

import pytest
from harness import World

from campaign.compare import Worlds, failure_of, shrunk
from campaign.program import completed, drawn, shown


@pytest.fixture
def worlds(world1: World, world2: World, world3: World, world4: World) -> Worlds:
    return {1: world1, 2: world2, 3: world3, 4: world4}


@pytest.mark.parametrize("seed", range(6))
def test_a_program_trains_as_plain_copies_do(worlds: Worlds, seed: int) -> None:
    program = drawn(seed)
    failure = failure_of(worlds, program)
    assert failure is None, f"{failure}\n\n{shown(program)}"


@pytest.mark.slow
def test_many_programs_train_as_plain_copies_do(worlds: Worlds) -> None:
    start, count = (int(os.environ.get(f"CAMPAIGN_{k}", d)) for k, d in [("SEED", 100), ("PROGRAMS", 300)])
    seconds = float(os.environ.get("CAMPAIGN_SHRINK_S", 60))
    programs = {seed: drawn(seed) for seed in range(start, start + count)}
    if given := os.environ.get("CAMPAIGN_PROGRAM"):
        programs = {-1: completed(ast.literal_eval(given))}
    failures = []
    for seed, program in programs.items():
        if failure_of(worlds, program) is not None:
            small, failure = shrunk(worlds, program, seconds)
            failures.append(f"seed {seed}: {failure}\n\nCAMPAIGN_PROGRAM:\n{shown(small)}")
            print(failures[-1], flush=True)
    assert not failures, f"{len(failures)} of {len(programs)} programs\n\n" + "\n\n".join(failures)
