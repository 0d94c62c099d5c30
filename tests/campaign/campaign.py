"""A campaign: draws of one space, run one after another; one that fails is made small before it is told.

    CAMPAIGN = Campaign("STATE", DRAWS, settled, run_draw)

    STATE_DRAW="{...}" pytest -m slow -s tests/campaign/test_state_campaign.py           one draw, or a list of them
    STATE_SEED=5000 STATE_DRAWS=400 pytest -m slow -s tests/campaign/test_state_campaign.py

A draw that is given need not be complete: what it leaves out has the simplest value. STATE_SHRINK_S and
STATE_TIMEOUT_S limit, in seconds, the shrinking of one draw and one run of it.
"""

import ast
import os
import pprint
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from harness import World

from campaign.draws import Draw, Record

Worlds = dict[int, World]


@dataclass(frozen=True)
class Campaign:
    """What is drawn, and how a draw is run.

    ``settled`` gives the nearest draw that plain PyTorch can run and that the documentation allows. ``run`` says
    what is wrong with a draw, None if nothing is, and raises what plain PyTorch raises; it gets a folder of its own.
    """

    name: str  # of its variables in the environment
    draws: Record
    settled: Callable[[Draw], Draw]
    run: Callable[[Worlds, Draw, Path], str | None]

    def drawn(self, seed: int) -> Draw:
        """The draw of a seed."""
        return self.settled(self.draws.draw(random.Random(seed)))

    def completed(self, told: Draw) -> Draw:
        """The draw that ``shown`` tells of."""
        return self.settled(self.draws.completed(told))

    def shown(self, draw: Draw) -> str:
        """The draw without what is simplest anyway."""
        return pprint.pformat(self.draws.told(draw), width=110, sort_dicts=False)

    def check_seed(self, worlds: Worlds, folder: Path, seed: int) -> None:
        """Run the draw of a seed."""
        draw = self.drawn(seed)
        failure = self.run(worlds, draw, folder)
        assert failure is None, f"{failure}\n\n{self.name}_DRAW of seed {seed}:\n{self.shown(draw)}"

    def check_draw(self, worlds: Worlds, folder: Path, told: Draw) -> None:
        """Run a draw as ``shown`` tells it."""
        failure = self.run(worlds, self.completed(told), folder)
        assert failure is None, failure

    def check_many(self, worlds: Worlds, folder: Path, num_draws: int) -> None:
        """Run the draws that the environment asks for, or ``num_draws`` from seed 100 on."""
        start, num_draws = self._asked("SEED", 100), self._asked("DRAWS", num_draws)
        draws = {seed: self.drawn(seed) for seed in range(start, start + num_draws)}
        if given := os.environ.get(f"{self.name}_DRAW"):
            found = ast.literal_eval(given)
            found = found if isinstance(found, list) else [found]
            draws = {-1 - i: self.completed(draw) for i, draw in enumerate(found)}
        failures = []
        for seed, draw in draws.items():
            failure = self.run(worlds, draw, folder / str(seed))
            if failure is not None:
                small, failure = self.shrunk(worlds, folder / f"{seed}-smaller", draw, failure)
                failures.append(f"seed {seed}, {self.name}_DRAW={self.shown(small)}\n{failure}\n")
                print(failures[-1], flush=True)
        assert not failures, f"{len(failures)} of {len(draws)} draws fail\n\n" + "\n".join(failures)

    def shrunk(self, worlds: Worlds, folder: Path, draw: Draw, failure: str) -> tuple[Draw, str]:
        """A draw in which everything that can be simple is, and that fails still, with what is wrong with it."""
        deadline = time.monotonic() + self._asked("SHRINK_S", 60)
        tries = count()
        is_smaller = True
        while is_smaller and time.monotonic() < deadline:
            is_smaller = False
            number = 0
            while number < len(candidates := list(self.draws.simpler(draw))) and time.monotonic() < deadline:
                candidate = self.settled(candidates[number])
                text = None
                if candidate != draw:
                    text = self._run_quietly(worlds, candidate, folder / str(next(tries)))
                if text is not None and kind_of(text) == kind_of(failure):
                    draw, failure, is_smaller = candidate, text, True
                else:  # what was in its place may be gone now: go on from there
                    number += 1
        return draw, failure

    def timeout_s(self, usually: int = 30) -> int:
        """The time that one run on a world may take."""
        return self._asked("TIMEOUT_S", usually)

    def _asked(self, what: str, otherwise: int) -> int:
        return int(os.environ.get(f"{self.name}_{what}", otherwise))

    def _run_quietly(self, worlds: Worlds, draw: Draw, folder: Path) -> str | None:
        try:
            return self.run(worlds, draw, folder)
        except Exception:  # plain PyTorch refuses it: no simpler draw, but none at all
            return None


def kind_of(failure: str) -> str:
    """The error of a failure, so that shrinking does not slip to another one."""
    if "WorkerError" not in failure:
        return "difference"
    lines = [line for line in failure.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines[-1] if len(lines) > 1 else failure).split(":")[0].strip()
