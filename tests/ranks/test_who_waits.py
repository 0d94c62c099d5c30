"""Ranks wait for one that does not come: what each of them prints, on gloo and where waits only block.

A rank that is waited for goes on once it has printed the report itself, so that no test waits for a timeout.
"""

import gc
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blocking_backend import blocking_group
from expecttest import assert_expected_inline
from harness import World
from models import shard_tower
from on_ranks import on_ranks
from test_failures import bad_batch, step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import clip_grad_norm_, load_checkpoint, save_checkpoint
from shardwise.ranks import set_wait_limit
from shardwise.ranks.failures import monitor_of_job

LATE = 1  # the rank that is waited for
PATIENCE_S = 40.0


class Report(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.then: Callable[[], None] = lambda: None
        self._came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.name} {record.levelname}: {record.getMessage()}")
        self.then()
        self._came.set()

    def wait(self) -> None:
        assert self._came.wait(PATIENCE_S)


@contextmanager
def reporting() -> Iterator[Report]:
    report = Report()
    set_wait_limit(1.0)
    logger = logging.getLogger("shardwise")
    logger.addHandler(report)
    try:
        yield report
    finally:
        logger.removeHandler(report)
        set_wait_limit(30.0)


class Blocks(nn.Module):
    """Runs its blocks in the order in which it is told to; calls ``pauses`` behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = [0, 1, 2]
        self.pauses: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
            self.pauses()
        return x


def trained(backend: str, steps: int = 2) -> tuple[Blocks, Any]:
    torch.manual_seed(0)
    model = Blocks()
    pg = blocking_group() if backend == "only blocks" else dist.new_group()
    mesh = DeviceMesh.from_group(pg, "cpu")
    shard_tower(model, mesh=mesh)
    for _ in range(steps):
        step(model)
    return model, pg


def texts_while_one_is_late(act: Callable[[], Any]) -> list[str]:
    """What is logged while all ranks but one are in ``act``, which the late one calls after the report."""
    with reporting() as report:
        if dist.get_rank() == LATE:
            report.wait()
        act()
        report.wait()
    return report.texts


def told(texts: list[str], before: int) -> str:
    """With the steps of this test alone, and without times and lines."""
    text = re.sub(r"for \d+ s|py:\d+", lambda found: re.sub(r"\d+", "N", found[0]), "\n".join(texts))
    return re.sub(r"step (\d+)", lambda found: f"step {int(found[1]) - before}", text)


@pytest.mark.parametrize("backend", ["gloo", "only blocks"])
@on_ranks(3)
def test_a_rank_that_has_left_the_loop_is_named_on_all_ranks(backend: str) -> None:
    before = monitor_of_job().steps
    model, _ = trained(backend)
    assert_expected_inline(
        told(texts_while_one_is_late(lambda: step(model)), before),
        """shardwise.ranks.watch WARNING: No progress for N s: ranks 0, 2 waiting for the all-gather of 'blocks.0' (step 3, forward); rank 1 in no step since step 2, at test_who_waits.py:N in wait""",
    )


@on_ranks(2)
def test_a_model_of_the_same_names_hides_nothing() -> None:
    other, _ = trained("only blocks", steps=4)
    if dist.get_rank() != LATE:
        del other
        gc.collect()
    before = monitor_of_job().steps
    model, _ = trained("only blocks")
    with reporting() as report:
        if dist.get_rank() == LATE:
            model.pauses = report.wait
        step(model)
        report.wait()
    assert_expected_inline(
        told(report.texts, before),
        """shardwise.ranks.watch WARNING: No progress for N s: rank 0 waiting for the all-gather of 'blocks.2' (step 3, forward); rank 1 computing (step 3, forward), at test_who_waits.py:N in wait""",
    )


@on_ranks(2)
def test_a_call_that_one_rank_has_not_made(tmp_path: Path) -> None:
    before = monitor_of_job().steps
    model, _ = trained("gloo")
    path = str(tmp_path / "step-1")
    acts = [
        lambda: clip_grad_norm_(model, 1.0),
        lambda: save_checkpoint(path, model),
        lambda: load_checkpoint(path, model),
    ]
    texts = [text for act in acts for text in texts_while_one_is_late(act)]
    assert_expected_inline(
        told(texts, before),
        """\
shardwise.ranks.watch WARNING: No progress for N s: rank 0 in clip_grad_norm_() (after step 2); rank 1 in no step since step 2, at test_who_waits.py:N in wait
shardwise.ranks.watch WARNING: No progress for N s: rank 0 in save_checkpoint() (after step 2); rank 1 in no step since step 2, at test_who_waits.py:N in wait
shardwise.ranks.watch WARNING: No progress for N s: rank 0 in load_checkpoint() (after step 2); rank 1 in no step since step 2, at test_who_waits.py:N in wait""",
    )


# --- waits that nothing can end ---------------------------------------------------------------------


def given_up(act: Callable[[], None], pg: Any, limit_s: float | None) -> tuple[list[str], str]:
    """What is logged while ``act`` waits in vain, and what it raises at the timeout, which then comes."""
    with reporting() as report:
        set_wait_limit(limit_s)
        report.then = pg.give_up
        try:
            act()
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        report.wait()
        dist.barrier()
    return told(report.texts, 0).splitlines(), text


def fails() -> tuple[list[str], str]:
    model, pg = trained("only blocks")
    if dist.get_rank() == LATE:
        model.pauses = bad_batch
        with pytest.raises(ValueError, match="batch 7"):
            step(model)
        dist.barrier()
        return [], ""
    return given_up(lambda: step(model), pg, None)


def other_blocks() -> tuple[list[str], str]:
    model, pg = trained("only blocks")
    if dist.get_rank() == LATE:
        model.order = [0, 2]
    return given_up(lambda: step(model), pg, 1.0)


@pytest.fixture
def fresh(world2: World) -> Iterator[World]:
    """Ranks whose process group nothing has happened to, and that nobody uses afterwards."""
    world2.close()
    yield world2
    world2.close()


def test_an_error_is_told_to_a_rank_whose_wait_nothing_can_end(fresh: World) -> None:
    (logged, raised), _ = fresh.run(fails)
    assert_expected_inline(
        "\n".join([*logged, raised]),
        """\
shardwise.ranks.failures ERROR: blocks.2: its all-gather failed, because rank 1 has failed in the forward of 'Blocks': ValueError: batch 7 has no labels
This rank waited for what rank 1 has not sent any more. The traceback is in the log of rank 1.
The back end does not let this wait end before its timeout.
CommunicationError: blocks.2: its all-gather failed, because rank 1 has failed in the forward of 'Blocks': ValueError: batch 7 has no labels
This rank waited for what rank 1 has not sent any more. The traceback is in the log of rank 1.""",
    )


def test_a_block_that_one_rank_leaves_out_is_named_before_the_timeout(fresh: World) -> None:
    (logged, raised), (second, _) = fresh.run(other_blocks)
    assert_expected_inline(
        "\n".join([*logged, raised]),
        """\
shardwise.ranks.watch WARNING: No progress for N s: rank 0 waiting for the all-gather of 'blocks.0' (step 3, backward); rank 1 in no step since step 3, at test_who_waits.py:N in wait; rank 1 left out the all-gather of 'blocks.1', so that later collectives miss one
CommunicationError: blocks.0: its all-gather failed, because rank 1 has ended; see its log. Its connection was closed, and it has reported no error: it was killed, ran out of memory, crashed, or came to its end before the others. (the test gives up)""",
    )
    assert second
