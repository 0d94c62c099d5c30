"""Lanes. What a device lane orders is checked against a recording stand-in for torch's streams, since
it can be checked anywhere; that the real ones train right is checked where there is a GPU."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from models import even_tower, random_batch
from reference import Recipe, assert_same_record, plain_run, sharded_run

from shardwise.runtime import streams
from shardwise.runtime.streams import DeviceLane, HostLane, Ticket


class RecordedStream:
    """Writes down what a stream is asked to do."""

    log: list[str]

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __enter__(self) -> None:
        self.log.append(f"{self.name} is current")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"{self.name} is left")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: "RecordedStream") -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    computing = RecordedStream("computing", log)
    monkeypatch.setattr(streams.torch, "Stream", lambda *_, **__: RecordedStream("lane", log))
    monkeypatch.setattr(streams.torch.accelerator, "current_stream", lambda _: computing)
    return log


def work(log: list[str]) -> Any:
    def start() -> Any:
        log.append("start")
        return lambda: log.append("finish")

    return start


def test_a_device_lane_queues_all_work_at_once_and_the_computation_waits_for_an_event(
    log: list[str],
) -> None:
    lane = DeviceLane(torch.device("cuda"))
    lane.follow_compute()
    ticket = lane.submit(work(log))
    log.append("-- computing goes on")
    ticket.wait()
    ticket.wait()
    with lane.memory():
        log.append("free")
    assert_expected_inline(
        "\n".join(log),
        """\
lane waits for all of computing
lane is current
start
finish
lane records
lane is left
-- computing goes on
computing waits for event of lane
lane is current
free
lane is left""",
    )


def test_a_host_lane_finishes_when_the_result_is_needed() -> None:
    log: list[str] = []
    ticket = HostLane().submit(work(log))
    log.append("computing goes on")
    ticket.wait()
    ticket.wait()
    assert log == ["start", "computing goes on", "finish"]


def test_work_that_fails_to_finish_is_not_finished_again() -> None:
    attempts = []

    def fail() -> None:
        attempts.append(1)
        raise OSError("wire cut")

    ticket = Ticket(fail)
    with pytest.raises(OSError, match="wire cut"):
        ticket.wait()
    ticket.wait()
    assert len(attempts) == 1


def sharded_on_the_gpu(recipe: Recipe) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    torch.set_default_device("cuda")
    mesh = init_device_mesh("cuda", (1,))
    return sharded_run(recipe.but(options={**recipe.options, "mesh": mesh}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_equals_plain_training(world1: World) -> None:
    recipe = Recipe(even_tower, random_batch)
    (record,) = world1.run(sharded_on_the_gpu, recipe, timeout=120)
    world1.close()
    assert_same_record(record, plain_run(recipe))
