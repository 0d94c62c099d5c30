"""Random programs train as plain copies that average their gradients.

PROGRAM_DRAW="{...}" pytest -m slow -s tests/campaign/test_programs.py
PROGRAM_SEED=5000 PROGRAM_DRAWS=400 pytest -m slow -s tests/campaign/test_programs.py
"""

from pathlib import Path

import pytest

from campaign.campaign import Campaign, Worlds
from campaign.compare import failure_of
from campaign.program import PROGRAMS, Program, settled


def run_program(worlds: Worlds, program: Program, folder: Path) -> str | None:
    return failure_of(worlds, program, CAMPAIGN.timeout_s(60))


CAMPAIGN = Campaign("PROGRAM", PROGRAMS, settled, run_program)


def test_programs_train_as_plain_copies_do(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=3)


@pytest.mark.slow
def test_many_programs_train_as_plain_copies_do(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=300)
