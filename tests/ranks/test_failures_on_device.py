"""Failures on a device, where only a stream waits: two monitors in one process, and checks made by hand."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from shardwise.ranks import failures
from shardwise.ranks.activity import Wait
from shardwise.ranks.failures import PATIENCE_LOOKS, CommunicationError, FailureMonitor

AXIS: Any = SimpleNamespace(pg="the process group")


class Queue:
    last_event = SimpleNamespace(query=lambda: False)


@dataclass
class Pair:
    """The monitors of two ranks, and how often communicators are aborted."""

    first: FailureMonitor
    second: FailureMonitor
    aborted: list[str]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    store, aborted = dist.HashStore(), []
    monkeypatch.setattr(failures.c10d, "end_waits", lambda pgs, aborts: aborted.append("aborted"))
    monkeypatch.setattr(Wait, "ranks", [0, 1])
    return Pair(FailureMonitor(store, 0), FailureMonitor(store, 1), aborted)


def queue(monitor: FailureMonitor, count: int = 1) -> Wait:
    wait = Wait("all-gather", "blocks.0", lambda: [AXIS], stream=Queue())
    for _ in range(count):
        monitor.issue(wait)
    return wait


def look(monitor: FailureMonitor, times: int = PATIENCE_LOOKS + 2) -> None:
    for _ in range(times):
        monitor.look()


def test_the_device_is_freed_and_the_error_is_raised_at_the_next_call(pair: Pair) -> None:
    first, second = pair.first, pair.second
    waits = queue(first, 2), queue(second)
    second.report(ValueError("batch 7 has no labels"), "the forward of 'GPT'")
    look(first, PATIENCE_LOOKS + 1)
    assert pair.aborted == []  # the failed rank may be about to continue
    look(first, 1)
    assert pair.aborted == ["aborted"]
    with pytest.raises(CommunicationError) as caught:
        first.begin()
    assert_expected_inline(
        str(caught.value),
        """\
Communication on the device failed, because rank 1 has failed in the forward of 'GPT': ValueError: batch 7 has no labels
This rank waited for what rank 1 has not sent any more. The traceback is in the log of rank 1.""",
    )
    first.begin()  # once
    later = queue(first)
    look(first)
    assert pair.aborted == ["aborted"]
    del waits, later


def test_a_rank_that_continues_in_time_ends_nothing(pair: Pair) -> None:
    first, second = pair.first, pair.second
    waits = queue(first, 2), queue(second)
    second.report(ValueError("batch 7 has no labels"), "the forward of 'GPT'")
    look(first, PATIENCE_LOOKS + 1)
    second.begin()
    look(first)
    first.begin()
    assert pair.aborted == []
    del waits


def test_a_rank_that_takes_no_part_ends_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wait, "ranks", [0, 2])
    waits = queue(pair.first)
    pair.second.report(ValueError("batch 7 has no labels"), "its program")
    look(pair.first)
    assert pair.aborted == []
    del waits


def test_a_rank_that_has_issued_all_that_is_waited_for_ends_nothing(pair: Pair) -> None:
    first, second = pair.first, pair.second
    waits = queue(first, 2), queue(second, 2)
    second.report(ValueError("batch 7 has no labels"), "its program")
    look(first)
    assert pair.aborted == []
    del waits


def test_a_model_that_is_gone_waits_for_nothing(pair: Pair) -> None:
    first, second = pair.first, pair.second
    waits = queue(first, 2), queue(second)
    second.report(ValueError("batch 7 has no labels"), "its program")
    del waits
    look(first)
    assert pair.aborted == []


def test_attributes_are_few_enough_for_python_to_find_them_fast(pair: Pair) -> None:
    assert len(vars(pair.first)) < 30  # dictionaries of more do not share their keys
