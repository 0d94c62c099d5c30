"""All ranks stop at the same step, whichever of them was told to, and whenever."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from on_ranks import on_ranks

from shardwise.ranks import StopSignal

STEPS = 12
Plan = dict[tuple[int, int], signal.Signals]  # (rank, step) -> what arrives in it


def steps_done(plan: Plan, options: dict[str, Any]) -> tuple[int, float, bool]:
    """How many steps a loop does, the sum that its collectives give, and whether handlers are as before."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    total, done = torch.zeros(1), 0
    with StopSignal(**options) as stop:
        for step in range(STEPS):
            if (rank, step) in plan:
                os.kill(os.getpid(), plan[rank, step])
            term = torch.ones(1)
            if dist.is_initialized():
                dist.all_reduce(term)  # a rank that left alone would be waited for here
            total += term
            done += 1
            if stop.requested():
                break
        assert stop.requested() == (done < STEPS)
    return done, total.item(), before == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
CASES: list[tuple[Plan, dict[str, Any], int]] = [
    ({}, {}, STEPS),
    ({(1, 3): TERM}, {}, 5),  # heard in the fourth step, known to all at the end of the fifth
    ({(0, 3): TERM, (1, 4): TERM, (1, 5): TERM}, {}, 5),
    ({(0, 5): TERM, (1, 2): TERM}, {}, 4),
    ({(0, 3): TERM, (1, 3): TERM}, {}, 5),
    ({(1, 0): TERM}, {"every": 3}, 6),
    ({(0, 2): USR1}, {"signals": (TERM, USR1)}, 4),
]


def test_all_ranks_stop_at_the_same_step(world2: World) -> None:
    for plan, options, want in CASES:
        assert world2.run(steps_done, plan, options) == [(want, 2.0 * want, True)] * 2, (plan, options)


def test_one_process_stops_at_once() -> None:
    assert steps_done({(0, 3): TERM}, {}) == (4, 4.0, True)


@on_ranks(2)
def test_an_error_inside_passes_at_once_and_the_next_one_works() -> None:
    before = signal.getsignal(TERM)

    def fail() -> None:
        with StopSignal() as stop:
            for _ in range(1 + dist.get_rank()):  # one rank is further than the other
                stop.requested()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with StopSignal() as stop:
        assert not any(stop.requested() for _ in range(4))
    assert signal.getsignal(TERM) is before


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="every is 0; pass a number of calls from 1 on"):
        StopSignal(every=0)
    with pytest.raises(RuntimeError, match="outside of `with StopSignal"):
        StopSignal().requested()
    told: list[str] = []

    def enter() -> None:
        try:
            StopSignal().__enter__()
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "in the main thread only" in told[0]
