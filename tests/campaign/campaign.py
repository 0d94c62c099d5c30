"""A campaign: draws of one strategy, run one after another.

    CAMPAIGN = Campaign("STATE", DRAWS, settled, run_draw)

    STATE_DRAW="{...}" pytest -m slow -s tests/campaign/test_state_campaign.py           one draw, or a list of them
    STATE_SEED=5000 STATE_DRAWS=400 pytest -m slow -s tests/campaign/test_state_campaign.py

    STATE_SHRINK=1 pytest -m slow tests/campaign/test_state_campaign.py     make the draw that fails small: minutes

STATE_TIMEOUT_S limits, in seconds, one run of a draw.
"""

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import hypothesis
from harness import World
from hypothesis import HealthCheck, Phase

from campaign.draws import Draw, Draws

Worlds = dict[int, World]


@dataclass(frozen=True)
class Campaign:
    """What is drawn, and how a draw is run.

    ``settled`` gives the nearest draw that plain PyTorch can run and that the documentation allows. ``run`` says
    what is wrong with a draw, None if nothing is, and raises what a rank or plain PyTorch raises; it gets a folder
    of its own.
    """

    name: str  # of its variables in the environment
    draws: Draws
    settled: Callable[[Draw], Draw]
    run: Callable[[Worlds, Draw, Path], str | None]

    def check_draw(self, worlds: Worlds, folder: Path, draw: Draw) -> None:
        failure = self.run(worlds, self.settled(draw), folder)
        assert failure is None, failure

    def check_many(self, worlds: Worlds, folder: Path, num_draws: int) -> None:
        folders = (folder / str(number) for number in count())
        if given := os.environ.get(f"{self.name}_DRAW"):
            found = ast.literal_eval(given)
            for draw in found if isinstance(found, list) else [found]:
                self.check_draw(worlds, next(folders), draw)
            return

        phases = (Phase.generate, Phase.shrink) if self._asked("SHRINK", 0) else (Phase.generate,)

        @hypothesis.seed(self._asked("SEED", 100))
        @hypothesis.settings(
            max_examples=self._asked("DRAWS", num_draws),
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(self.draws)
        def check(draw: Draw) -> None:
            self.check_draw(worlds, next(folders), draw)

        check()

    def timeout_s(self, usually: int = 90) -> int:
        return self._asked("TIMEOUT_S", usually)

    def _asked(self, what: str, otherwise: int) -> int:
        return int(os.environ.get(f"{self.name}_{what}", otherwise))
