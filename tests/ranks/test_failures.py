"""One rank fails: the others raise its error long before the process group's timeout.

Each case has fresh ranks, whose process group has a timeout of a minute: far more than what is allowed here.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import WorkerError, World
from models import shard_tower
from torch import Tensor, nn

from shardwise.ranks import failures
from shardwise.ranks.failures import monitor_of_job

SOON_S = 16 * failures.INTERVAL_S
"""Two seconds are promised on a machine that does nothing else; the timeout is one minute."""

LOOKS_EVERY_S = failures.INTERVAL_S / 5
"""How often ranks look here. What they conclude depends on how often they have looked, not on time."""


class Faulty(nn.Module):
    """Three blocks; ``fails`` is called between the first and the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.fails: Callable[[], None] = lambda: None
        self.fails_in_backward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.fails()
        x = self.blocks[1](x)
        if x.requires_grad:
            x.register_hook(lambda _: self.fails_in_backward())
        return self.blocks[2](x)


def built() -> Faulty:
    torch.manual_seed(0)
    model = Faulty()
    return shard_tower(model)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def bad_batch() -> None:
    raise ValueError("batch 7 has no labels")


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def told(act: Callable[[], Any], failing: int, done: str) -> tuple[str, float]:
    """What ``act`` raises, and after how many seconds; the failing rank stays in its handler until then."""
    started = time.monotonic()
    try:
        act()
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if dist.get_rank() == failing:
            store().wait([f"{done}/{rank}" for rank in range(dist.get_world_size()) if rank != failing])
        else:
            store().set(f"{done}/{dist.get_rank()}", "")
    return text, time.monotonic() - started


def fails_in(where: str) -> tuple[str, float]:
    """A hook of the caller on the outermost module runs when that has an output already."""
    model = built()
    step(model)
    if dist.get_rank() == 1:
        if where == "forward":
            model.fails = bad_batch
        elif where == "backward":
            model.fails_in_backward = bad_batch
        else:
            model.register_forward_hook(lambda *_: bad_batch())
    return told(lambda: step(model), 1, where)


def killed() -> None:
    model = built()
    step(model)
    if dist.get_rank() == 1:
        model.fails = lambda: os.kill(os.getpid(), signal.SIGKILL)
    step(model)


def ended() -> tuple[str, float]:
    """Rank 1 comes to the end of its program by an exception, as the interpreter tells that."""
    model = built()
    step(model)
    if dist.get_rank() != 1:
        return told(lambda: step(model), 1, "ended")
    sys.last_value = ValueError("batch 7 has no labels")
    monitor_of_job().at_exit()
    store().wait(["ended/0", "ended/2"])
    return "", 0.0


def raising_late_and_slow() -> tuple[list[str], int]:
    """All ranks raise alike and go on: rank 1 after rank 0 has been waiting for it for long, twice."""
    model = built()
    step(model)
    own = monitor_of_job()
    texts = []
    waited = threading.Event()

    def tell_when_stuck() -> None:
        while own.quiet_looks < 2 * failures.STUCK_LOOKS and not waited.wait(0.01):
            pass
        store().set("rank 0 has waited", "")

    if dist.get_rank() == 0:
        threading.Thread(target=tell_when_stuck, daemon=True).start()
    model.fails = bad_batch
    try:
        step(model)
    except ValueError as error:
        texts.append(str(error))
        if dist.get_rank() == 1:
            store().wait(["rank 0 has waited"])  # still in the handler
    model.fails = lambda: None
    step(model)
    waited.set()
    return texts, own.active_failures()


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.blocks[way](x)


def forked() -> tuple[str, float]:
    model = Forks()
    shard_tower(model)
    return told(lambda: model(torch.ones(2, 4), dist.get_rank() % 2), -1, "forked")


def looking_often(act: Callable[[], Any]) -> Any:
    failures.INTERVAL_S = LOOKS_EVERY_S  # the thread that looks starts later, and so does nothing else
    return act()


@pytest.fixture
def fresh(world3: World) -> Iterator[Callable[[Callable[[], Any]], list[Any]]]:
    """Runs a function on ranks whose process group nothing has happened to, and that nobody uses afterwards."""
    world3.close()
    yield partial(world3.run, looking_often)
    world3.close()


@pytest.mark.parametrize("where", ["forward", "hook", "backward"])
def test_the_first_error_is_raised_on_all_ranks(fresh: Any, where: str) -> None:
    (first, after), (own, _), (third, _) = fresh(partial(fails_in, where))
    assert own == "ValueError: batch 7 has no labels"
    phase = "backward" if where == "backward" else "forward"
    told_of = f"because rank 1 has failed in the {phase} of 'Faulty': ValueError: batch 7 has no labels"
    assert told_of in first
    assert told_of in third
    assert after < SOON_S


def test_what_ends_a_program_is_told_to_the_others(fresh: Any) -> None:
    for text, after in fresh(ended)[::2]:
        assert "because rank 1 has failed in its program: ValueError: batch 7 has no labels" in text
        assert after < SOON_S


def test_a_rank_that_is_killed_is_named(fresh: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        fresh(killed)
    assert "blocks.2: its all-gather failed, because rank 1 has ended; see its log" in str(caught.value)


def test_a_rank_is_waited_for_that_raises_later_or_is_slow(fresh: Any) -> None:
    for texts, active in fresh(raising_late_and_slow):
        assert texts == ["batch 7 has no labels"]
        assert active == []


def test_ranks_that_wait_for_each_other_are_told_before_the_timeout(fresh: Any) -> None:
    for text, after in fresh(forked):
        assert (
            "ranks 0, 2 waiting for the all-gather of 'blocks.0' (step 1, forward); "
            "rank 1 waiting for the all-gather of 'blocks.1' (step 1, forward)." in text
        )
        assert "microbatches" not in text
        assert "set_may_be_unused()" in text
        assert after < 2 * SOON_S


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from shardwise import fully_shard

port, rank, failing = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 4))
for step in range(3):
    if step == 2 and rank == failing:
        raise ValueError("batch 7 has no labels")
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        (1, "because rank 1 has failed in its program: ValueError: batch 7 has no labels"),
        (0, "rank 0 "),  # it holds the store, which ends with it sooner or later than it is asked
    ],
)
def test_what_ends_a_process_is_told_to_the_others(failing: int, expected: str) -> None:
    port = free_port()
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(port), str(rank), str(failing)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], errors
    assert "ValueError: batch 7 has no labels" in errors[failing]
    assert expected in errors[1 - failing], errors[1 - failing]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
