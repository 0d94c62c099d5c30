"""When a long wait is reported, and when not: the reporters of two ranks in one process, and looks made by hand.

Looks are a second apart, and the limit is 30.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from shardwise.ranks.activity import RankActivity, Wait
from shardwise.ranks.board import Board
from shardwise.ranks.watch import StallReporter, limit_of_environment

REPORT_S = 45  # in which a report comes, after the limit


class Event:
    def __init__(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        return self.has_come


class Stream:
    """Of a device: each collective that is queued has an event of its own."""

    @property
    def last_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def __init__(self) -> None:
        self.events: list[Event] = []


class Rank:
    def __init__(self, rank: int, store: dist.Store) -> None:
        self.activity = RankActivity(has_others=True)
        self.stream = Stream()
        self.wait = Wait("all-gather", "blocks.0", list)
        self.activity.note_wait(self.wait)
        self.reporter = StallReporter(Board(store), rank, 2, self.activity, 1.0)

    def queue(self) -> None:
        self.wait.stream = self.stream
        self.activity.issue(self.wait)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.activity.issue(self.wait)
        self.activity.waiting = self.wait
        yield
        self.activity.waiting = None


class Pair:
    def __init__(self, store: dist.Store, log: pytest.LogCaptureFixture) -> None:
        self.first, self.second = Rank(0, store), Rank(1, store)
        self.log = log

    @property
    def both(self) -> tuple[Rank, Rank]:
        return self.first, self.second

    @property
    def messages(self) -> list[str]:
        return self.log.messages

    def pass_seconds(self, seconds: int, *ranks: Rank) -> None:
        """For both ranks, if none are named."""
        for _ in range(seconds):
            for rank in ranks or self.both:
                rank.activity.count_look()
                rank.reporter.look()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Pair:
    monkeypatch.setattr("shardwise.torch_compat.interpreter.where_main_thread_is", lambda: "train.py:8 in f")
    monkeypatch.setattr(Wait, "ranks", [0, 1])
    return Pair(dist.HashStore(), caplog)


def test_both_ranks_report_a_long_wait_once(pair: Pair) -> None:
    first = pair.first
    first.activity.phase = "forward"
    with first.waiting():
        pair.pass_seconds(30)
        assert pair.messages == []
        pair.pass_seconds(4 * REPORT_S)
    assert len(pair.messages) == 2
    assert len(set(pair.messages)) == 1
    assert {(record.name, record.levelno) for record in pair.log.records} == {
        ("shardwise.ranks.watch", logging.WARNING)
    }
    assert_expected_inline(
        pair.messages[0],
        """No progress for 30 s: rank 0 waiting for the all-gather of 'blocks.0' (step 1, forward); rank 1 not training yet, at train.py:8 in f""",
    )


def test_the_next_wait_is_reported_anew(pair: Pair) -> None:
    for _ in range(2):
        with pair.first.waiting():
            pair.pass_seconds(2 * REPORT_S)
    assert len(pair.messages) == 4


def test_two_calls_are_two_waits_though_no_look_falls_between_them(pair: Pair) -> None:
    activity = pair.first.activity
    for count, name in [(1, "save_checkpoint"), (1, "load_checkpoint"), (2, "load_checkpoint")]:
        activity.waiting = None  # frees the object: the next one usually gets its address
        activity.waiting = Wait("call", name, list, 1, count)
        activity.calls[name] += 1
        pair.pass_seconds(2 * REPORT_S)
    assert len(pair.messages) == 6


def test_ranks_that_compute_long_or_are_at_a_prompt_are_not_reported(pair: Pair) -> None:
    first, second = pair.both
    first.activity.phase = "forward"
    for rank in pair.both:
        with rank.waiting():
            pair.pass_seconds(1)
    pair.pass_seconds(10 * REPORT_S)
    first.activity.phase = ""
    first.queue()
    second.queue()
    for rank in pair.both:
        rank.stream.events[-1].has_come = True
    pair.pass_seconds(10 * REPORT_S)
    assert pair.messages == []


def test_a_wait_on_a_device_is_found_from_its_events(pair: Pair) -> None:
    first, second = pair.both
    for rank in pair.both:
        rank.activity.steps += 1
        rank.activity.phase = "backward"
        rank.queue()
        rank.stream.events[-1].has_come = True
    first.queue()
    second.activity.phase = ""
    pair.pass_seconds(2 * REPORT_S)
    assert_expected_inline(
        pair.messages[0],
        """No progress for 30 s: rank 0 waiting for the all-gather of 'blocks.0' on the device (step 1, backward); rank 1 in no step since step 1, at train.py:8 in f""",
    )
    assert len(pair.messages) == 2


def test_what_a_rank_has_issued_ahead_is_not_missed(pair: Pair) -> None:
    first, second = pair.both
    other = Wait("all-gather", "blocks.1", list)
    first.activity.note_wait(other)
    with second.waiting():
        pass
    with first.waiting():
        first.activity.issue(other)
        pair.pass_seconds(REPORT_S)
    assert "left out" not in pair.messages[0]


def test_a_device_that_completes_something_is_not_stuck(pair: Pair) -> None:
    for _ in range(20):
        pair.first.queue()
    for event in pair.first.stream.events:
        pair.pass_seconds(12)  # each takes long, and all together four minutes
        event.has_come = True
    assert pair.messages == []


def test_a_back_end_that_blocks_when_it_is_given_a_collective(pair: Pair) -> None:
    first, second = pair.both
    with second.waiting():
        first.activity.issuing = first.wait  # as where communicators connect, and rank 1 connects another
        pair.pass_seconds(REPORT_S)
    assert "ranks 0, 1 waiting for the all-gather of 'blocks.0'" in pair.messages[0]
    assert "all ranks have issued what is waited for" in pair.messages[0]


def test_a_wait_that_ends_while_places_are_told_is_not_reported(pair: Pair) -> None:
    first = pair.first
    with first.waiting():
        pair.pass_seconds(32, first)
    pair.pass_seconds(REPORT_S)
    assert pair.messages == []


def test_a_rank_that_does_not_answer_is_named(pair: Pair) -> None:
    with pair.first.waiting():
        pair.pass_seconds(2 * REPORT_S, pair.first)
    assert "rank 1 not answering" in pair.messages[0]


def test_a_rank_that_asks_and_ends_leaves_others_able_to_ask(pair: Pair) -> None:
    first, second = pair.both
    with first.waiting():
        pair.pass_seconds(31, first)  # it has asked, and is gone
    with second.waiting():
        pair.pass_seconds(4 * REPORT_S, second)
    assert "rank 1 waiting for the all-gather of 'blocks.0'" in pair.messages[0]


def test_no_limit_is_no_report(pair: Pair) -> None:
    for rank in pair.both:
        rank.reporter.limit_s = None
    with pair.first.waiting():
        pair.pass_seconds(2 * REPORT_S)
    assert pair.messages == []


def test_the_limit_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    for text in ("", "5.5", "0"):
        monkeypatch.setenv("SHARDWISE_WAIT_LIMIT", text)
        read.append(limit_of_environment())
    assert read == [30.0, 5.5, None]
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("SHARDWISE_WAIT_LIMIT", text)
        with pytest.raises(ValueError, match=f"SHARDWISE_WAIT_LIMIT is '{text}'; set it to seconds"):
            limit_of_environment()
