"""Copies from host memory: on a stream of their own, ahead of the collectives, and all that the host waits for."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import built, even_tower, random_batch
from on_ranks import on_ranks
from reference import adamw
from scenario import Side, same_as_plain
from simulated_device import Device, Event, Stream, install, streams_on_the_host

from shardwise.buckets.bucket import Bucket
from shardwise.comm.streams import CommStreams, CommWork, DeviceStream, HostStream

CUDA = torch.device("cuda")


class Counting(Stream):
    def __init__(self, name: str, device: Device) -> None:
        super().__init__(name, device)
        self.numbers = count(1)

    def record_event(self) -> Event:
        return Event(f"{self.name} {next(self.numbers)}", self.device.log)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = install(monkeypatch)
    monkeypatch.setattr(
        simulated, "Stream", lambda device, priority=0: Counting(next(simulated.names, "stream"), simulated)
    )
    return simulated


class Copied:
    """What a copy has made."""


def gather_of(stream: DeviceStream, number: int, copies: int = 1) -> CommWork:
    log = stream._stream.device.log

    def copy() -> Copied:
        log.append(f"copy {number}")
        made = Copied()
        weakref.finalize(made, log.append, f"copy {number} is freed").atexit = False
        return made

    def start() -> Any:
        for _ in range(copies):
            stream.copy_in(copy)
        log.append(f"gather {number}")
        return lambda: None

    return stream.submit(start)


def lines(log: list[str]) -> str:
    return "\n".join(line for line in log if not line.endswith(("is current", "is left")))


def test_a_copy_from_the_host_does_not_wait_for_the_gather_before_it(device: Device) -> None:
    """But for the one before that, whose copy it takes the place of."""
    device.name_streams("gather", "copies")
    stream = DeviceStream(CUDA)
    for number in (1, 2, 3, 4):
        gather_of(stream, number)
    assert_expected_inline(
        lines(device.log),
        """\
copies waits for all of gather
copy 1
gather waits for the event of copies 1
gather 1
copy 2
gather waits for the event of copies 2
gather 2
copies waits for the event of gather 1
copy 1 is freed
copy 3
gather waits for the event of copies 3
gather 3
copies waits for the event of gather 2
copy 2 is freed
copy 4
gather waits for the event of copies 4
gather 4""",
    )


def test_what_is_copied_for_one_gather_is_kept_together(device: Device) -> None:
    """A group may have several buckets."""
    device.name_streams("gather", "copies")
    stream = DeviceStream(CUDA)
    for number in (1, 2, 3):
        gather_of(stream, number, copies=2)
    freed = [line for line in lines(device.log).splitlines() if "freed" in line or "event of gather" in line]
    assert freed == ["copies waits for the event of gather 1", *["copy 1 is freed"] * 2]


def test_the_host_waits_for_the_last_copy_and_for_nothing_else(device: Device) -> None:
    """Not for the gathers, and so not for the computation that these wait for; and only once."""
    device.name_streams("gather", "copies")
    stream = DeviceStream(CUDA)
    for number in (1, 2):
        gather_of(stream, number)
    device.log.clear()
    stream.wait_until_host_was_read()
    stream.wait_until_host_was_read()
    assert_expected_inline(
        lines(device.log),
        """\
the host waits for the event of copies 2
copies waits for the event of gather 1
copies waits for the event of gather 2
copy 1 is freed
copy 2 is freed""",
    )


def test_copies_wait_for_an_optimizer_that_may_have_written_there(device: Device) -> None:
    device.name_streams("gather", "reduce", "replicate", "copies")
    streams = CommStreams(CUDA)
    streams.wait_for_optimizer()
    gather_of(streams.all_gather, 1)  # type: ignore[arg-type]
    device.log.clear()
    streams.wait_for_optimizer(Event("optimizer", device.log))
    assert device.log[:2] == ["gather waits for the event of optimizer", "copies waits for all of gather"]


def test_without_copies_there_is_no_stream_for_them_and_nobody_waits(device: Device) -> None:
    device.name_streams("gather", "copies")
    stream = DeviceStream(CUDA)
    gather_of(stream, 1, copies=0)
    stream.wait_until_host_was_read()
    stream.wait_for_optimizer()
    assert lines(device.log) == "gather 1\ngather waits for all of computing"


def test_on_the_host_there_is_nothing_to_wait_for() -> None:
    stream = HostStream()
    assert stream.copy_in(lambda: 3) == 3
    stream.wait_until_host_was_read()


# --- with parameters in host memory ---------------------------------------------------------------------


@contextmanager
def offloaded() -> Iterator[Device]:
    """Inside, sharded models of the host are as those of a device whose shards are in host memory."""
    with streams_on_the_host() as simulated, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "is_offloaded", True)
        simulated.name_streams("gather", "reduce", "replicate", "copies")
        yield simulated


@same_as_plain()
@pytest.mark.parametrize(("world", "reshard"), [(1, True), (2, False), (2, True)], indirect=["world"])
def test_shards_that_are_copied_in_train(side: Side, reshard: bool) -> None:
    model = built(even_tower)
    with offloaded() if side.is_sharded else nullcontext():
        side.shard_tower(model, reshard_after_forward=reshard)
        side.steps(model, adamw(model), range(3))


@pytest.mark.parametrize("acts", ["evaluation", "training", "a forward alone"])
@on_ranks(2)
def test_the_host_waits_for_copies_before_the_caller_may_edit_shards(acts: str) -> None:
    torch.manual_seed(0)
    with offloaded() as simulated:
        model = Side(is_sharded=True).shard_tower(even_tower())
        inputs = random_batch(0, 4, dtype=torch.float32)
        model(inputs).sum().backward()
        model.zero_grad()
        simulated.log.clear()
        if acts == "evaluation":
            with torch.no_grad():
                model(inputs)
        else:
            loss = model(inputs).sum()
            simulated.log.append("-- the caller may edit shards")
            if acts == "training":
                loss.backward()
    first = [line for line in simulated.log if line.startswith(("the host", "--", "copies waits"))]
    edit = first.index("-- the caller may edit shards") if acts != "evaluation" else len(first)
    in_forward = [line for line in first[:edit] if line.startswith("the host")]
    assert in_forward == ["the host waits for the event of copies"]
    assert all("event of" in line or "all of gather" in line for line in first if line.startswith("copies"))
    if acts == "training":
        assert [line for line in first[edit + 1 :] if line.startswith("the host")] == in_forward
