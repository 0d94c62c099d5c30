"""CommStreams, and the reduction that runs on two of them.

What device streams order is checked against a recording stand-in for torch's streams. That nothing waits too little is
shown by tests/races and tests/software_gpu, and by tests/device where there is a GPU.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from simulated_device import Device, Event, Stream, install

from shardwise.comm import buffers
from shardwise.comm.buffers import buffer_for, typed_range
from shardwise.comm.communicators import SingleRank
from shardwise.comm.reduction import GradientPart, ReduceScatter, Reduction, SecondStage
from shardwise.comm.streams import CommStreams, CommWork, DeviceStream, HostStream, is_of_device
from shardwise.layout.slots import Layout, Slot, plan_layout

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch)


@pytest.fixture
def log(device: Device) -> list[str]:
    return device.log


def work(log: list[str]) -> Any:
    def start() -> Any:
        log.append("start")
        return lambda: log.append("finish")

    return start


def test_a_device_stream_queues_all_work_at_once_and_the_computation_waits_for_an_event(
    log: list[str],
) -> None:
    stream = DeviceStream(torch.device("cuda"))
    stream.wait_for_compute()
    ticket = stream.submit(work(log))
    log.append("-- computing goes on")
    ticket.wait()
    ticket.wait()
    with stream.allocation_scope():
        log.append("free")
    assert_expected_inline(
        "\n".join(log),
        """\
stream waits for all of computing
stream is current
start
finish
stream records
stream is left
-- computing goes on
computing waits for the event of stream
stream is current
free
stream is left""",
    )


@pytest.mark.parametrize("waits", ["wait", "synchronize"])
def test_a_host_stream_finishes_when_the_result_is_needed(waits: str) -> None:
    log: list[str] = []
    ticket = HostStream().submit(work(log))
    log.append("computing goes on")
    getattr(ticket, waits)()
    ticket.wait()
    assert log == ["start", "computing goes on", "finish"]


def test_work_that_fails_to_finish_is_not_finished_again() -> None:
    attempts = []

    def fail() -> None:
        attempts.append(1)
        raise OSError("wire cut")

    ticket = CommWork(fail)
    with pytest.raises(OSError, match="wire cut"):
        ticket.wait()
    ticket.wait()
    assert len(attempts) == 1


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("thing", "kind", "where", "is_of_it"),
    [
        (torch.Event("cpu"), "Event", CPU, True),
        (torch.cpu.Stream(), "Stream", CPU, True),
        (torch.Stream("cpu"), "Stream", CPU, True),
        (threading.Event(), "Event", CPU, False),
        (torch.Event("cpu"), "Stream", CPU, False),
        (torch.Event("cpu"), "Event", GPU, False),
        (torch.Stream("cpu"), "Stream", GPU, False),
        (None, "Event", GPU, False),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__module__,
)
def test_streams_and_events_of_a_device_are_told_from_others(
    thing: Any, kind: str, where: torch.device, is_of_it: bool
) -> None:
    assert is_of_device(thing, kind, where) is is_of_it


def test_streams_and_events_of_the_device_are_of_its_own_module(device: Device) -> None:
    assert is_of_device(Event(), "Event", GPU)
    assert not is_of_device(Stream("side", device), "Event", GPU)


def named_streams() -> CommStreams:
    """Three streams of a device, whose streams say in the log which they are."""
    streams = CommStreams(torch.device("cuda"))
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        getattr(streams, name)._stream.name = name
    return streams


def test_a_host_stream_gives_a_kept_buffer_to_one_user_at_a_time() -> None:
    stream = HostStream()
    small, large = stream.acquire(16, CPU), stream.acquire(64, CPU)
    stream.release(large)
    stream.release(small)
    assert stream.acquire(16, CPU) is small
    assert stream.acquire(16, CPU) is not small
    assert stream.acquire(64, CPU) is large


@pytest.mark.parametrize(("num_bytes", "is_kept"), [(1 << 20, True), (2 << 20, False)])
def test_a_host_stream_keeps_small_buffers(num_bytes: int, is_kept: bool) -> None:
    stream = HostStream()
    scratch = stream.acquire(num_bytes, CPU)
    stream.release(scratch)
    assert (stream.acquire(num_bytes, CPU) is scratch) == is_kept


@pytest.mark.parametrize(("smallest", "is_kept"), [(2 << 20, True), (16, False)])
def test_a_host_stream_keeps_few_sizes_of_small_buffers(smallest: int, is_kept: bool) -> None:
    """Sizes that are not kept do not count."""
    stream = HostStream()
    kept = stream.acquire(8, CPU)
    stream.release(kept)
    for number in range(40):
        stream.release(stream.acquire(smallest + number, CPU))
    stream.release(stream.acquire(12, CPU))
    assert (stream.acquire(8, CPU) is kept) == is_kept


# --- reductions -----------------------------------------------------------------------------------


class LoggedReduce:
    """Sums over the shards, as the log tells it."""

    reduce_memory_factor = 1.0
    is_alone = False
    device = CPU

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log, self.name = log, name
        self.layout = WIDE

    def start(
        self, stream: Any, part: GradientPart, gradients: Sequence[Any], sums: Any, divisor: float
    ) -> Any:
        output = sums()
        self.log.append(f"sum over shards{self.name} starts")
        tell(self.log, f"sums{self.name}", output)
        output.view(torch.float64).fill_(len(gradients) / divisor)
        return lambda: self.log.append(f"sum over shards{self.name} ends")

    def make_sums(self) -> torch.Tensor:
        self.log.append(f"sums{self.name} are allocated")
        return buffer_for(self.layout, self.device)


def layout_of(dtype: torch.dtype, numel: int = 4) -> Layout:
    return plan_layout([Slot((numel,), dtype, dtype.itemsize, "all alike", 2)], 1, [False])


ELSEWHERE = torch.device("meta")  # a device other than the computing one, without bytes to compare
WHOLE = GradientPart((0,), (), 32)
WIDE, NARROW = layout_of(torch.float64), layout_of(torch.float32)


def tell(log: list[str], what: str, thing: Any) -> None:
    weakref.finalize(thing, log.append, f"{what} are freed").atexit = False


@pytest.fixture
def replicas(log: list[str]) -> SecondStage:
    def sum_up(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        log.append("sum over replicas starts")
        for tensor in tensors:
            tensor.mul_(2)
        return lambda: log.append("sum over replicas ends")

    return SecondStage(
        NARROW, CPU, summed=frozenset({0}), all_reduce=sum_up, hook=lambda _: log.append("hook")
    )


def reduction_of(log: list[str], streams: CommStreams, stage: SecondStage, name: str = "") -> Reduction:
    """In flight, with nobody else holding its gradients."""
    gradients = [torch.ones(4, dtype=torch.float64)]
    tell(log, f"gradients{name}", gradients[0])
    reduce: Any = LoggedReduce(log, name)
    made = Reduction(reduce, 2.0, streams, is_filled=True)
    made.send(WHOLE, gradients)
    made.close(stage)
    return made


def test_on_a_device_both_stages_are_queued_at_once_and_nothing_is_freed_before_the_computation_waits(
    log: list[str], replicas: SecondStage
) -> None:
    made = reduction_of(log, named_streams(), replicas)
    log.append("-- computing goes on")
    made.finish()
    assert_expected_inline(
        "\n".join(log),
        """\
reduce_scatter waits for all of computing
reduce_scatter is current
sums are allocated
sum over shards starts
sum over shards ends
reduce_scatter records
reduce_scatter is left
all_reduce waits for the event of reduce_scatter
all_reduce is current
sum over replicas starts
sum over replicas ends
hook
all_reduce records
all_reduce is left
-- computing goes on
computing waits for the event of all_reduce
gradients are freed
sums are freed""",
    )
    assert torch.equal(typed_range(made.output, 0, 16, torch.float32), torch.ones(4))


def test_gradients_are_freed_once_they_are_summed_over_the_shards_and_the_host_waits_at_the_end_only(
    log: list[str], replicas: SecondStage
) -> None:
    """Not once the sums have gone over the replicas, and into host memory."""
    made = reduction_of(log, named_streams(), replace(replicas, device=ELSEWHERE))
    assert made.arrives_on_host
    log[:] = ["-- computing goes on"]
    made.release_parts()
    log.append("-- the next group is reduced")
    made.release()
    log.append("-- the result is needed")
    made.finish()
    assert made.output.device == ELSEWHERE
    assert_expected_inline(
        "\n".join(log),
        """\
-- computing goes on
computing waits for the event of reduce_scatter
gradients are freed
-- the next group is reduced
computing waits for the event of all_reduce
sums are freed
-- the result is needed
the host waits for the event of all_reduce""",
    )


def test_without_a_second_stage_the_third_stream_stays_idle(log: list[str]) -> None:
    made = reduction_of(log, named_streams(), SecondStage(WIDE, CPU))
    output = made.output
    made.finish()
    assert made.output is output
    assert log[-2:] == ["computing waits for the event of reduce_scatter", "gradients are freed"]
    assert "all_reduce" not in "".join(log)


def test_on_the_host_one_group_goes_over_the_replicas_while_the_next_goes_over_the_shards(
    log: list[str], replicas: SecondStage
) -> None:
    streams = CommStreams(CPU)
    first = reduction_of(log, streams, replicas, name=" 1")
    second = reduction_of(log, streams, replicas, name=" 2")
    first.advance()
    first.advance()
    log.append("-- computing goes on")
    first.finish()
    second.finish()
    assert_expected_inline(
        "\n".join(log),
        """\
sums 1 are allocated
sum over shards 1 starts
sums 2 are allocated
sum over shards 2 starts
sum over shards 1 ends
gradients 1 are freed
sum over replicas starts
-- computing goes on
sum over replicas ends
hook
sums 1 are freed
sum over shards 2 ends
gradients 2 are freed
sum over replicas starts
sum over replicas ends
hook
sums 2 are freed""",
    )


def test_earlier_sums_join_before_the_replicas_and_the_hook_sees_what_comes_out(
    log: list[str], replicas: SecondStage
) -> None:
    seen: list[float] = []
    earlier = torch.full((4,), 3.0, dtype=torch.float64).view(torch.uint8)

    def hook(part: torch.Tensor) -> None:
        seen.append(part[0].item())
        part.add_(1)

    made = reduction_of(log, CommStreams(CPU), replace(replicas, earlier=earlier, hook=hook))
    made.finish()
    assert seen == [2 * (0.5 + 3)]
    assert torch.equal(typed_range(made.output, 0, 16, torch.float32), torch.full((4,), 8.0))


@pytest.mark.parametrize("has_gradient", [True, False])
def test_what_no_gradient_fills_is_zero(has_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, and parameters without a gradient: sums over replicas and norms run over them as well."""
    monkeypatch.setattr(buffers.torch, "empty", lambda *size, **how: torch.full(size, 0xFF, **how))
    padded = layout_of(torch.float64, numel=3)
    gradients = [torch.ones(3, dtype=torch.float64)] if has_gradient else [None]
    reduce = ReduceScatter(SingleRank(), padded, CPU)
    made = Reduction(reduce, 1.0, CommStreams(CPU), is_filled=has_gradient)
    for part in reduce.parts:
        made.send(part, gradients)
    made.close(SecondStage(padded, CPU))
    made.finish()
    value = 1.0 if has_gradient else 0.0
    assert made.output.view(torch.float64).tolist() == [value] * 3 + [0.0]
