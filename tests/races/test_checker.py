"""The checker itself: short programs on the simulated device, with a race and without."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor

from races.clocks import Clocks, Lane
from races.collectives import Launch
from races.device import DEVICE, on_host, unseen
from races.launch_order import first_disagreement
from races.memory import UsedAfterFree
from races.reports import told
from races.simulation import Simulation
from shardwise.comm.streams import DeviceStream


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with Simulation() as simulation:
        yield simulation


@pytest.fixture
def side(simulation: Simulation) -> Any:
    return simulation.stream("side")


def contents(tensor: Tensor) -> Any:
    with unseen():
        return on_host(tensor).tolist()


def report(simulation: Simulation) -> str:
    """What was found, without numbers of lines."""
    return re.sub(r":\d+ in", ": in", told(simulation.findings))


def kinds(simulation: Simulation) -> list[str]:
    return [finding.kind for finding in simulation.findings]


# --- clocks ---------------------------------------------------------------------------------------


def test_a_lane_knows_what_it_has_waited_for_and_what_that_had_waited_for() -> None:
    clocks = Clocks()
    first, second, third = (Lane(name) for name in ("first", "second", "third"))
    early = clocks.advance(first)
    clocks.wait(second, first)
    late = clocks.advance(first)
    event = clocks.snapshot(second)
    clocks.join(third, event)
    known = [[clocks.is_over(first, time, lane) for time in (early, late)] for lane in (first, second, third)]
    assert known == [[True, True], [True, False], [True, False]]


# --- between streams ------------------------------------------------------------------------------


def written_beside(simulation: Simulation, side: Any) -> Tensor:
    values = torch.zeros(4, device=DEVICE)
    side.wait_stream(simulation.device.computing)
    with side:
        values.fill_(1)
    return values


def test_a_read_that_does_not_wait_for_a_write_is_told_with_both_sides(
    simulation: Simulation, side: Any
) -> None:
    written_beside(simulation, side) + 1
    assert_expected_inline(
        report(simulation),
        """\
1 x side writes, computing reads

RACE on 16 bytes of memory that computing allocated
  side writes them (fill_)
      the caller's own computation
  computing reads them (add)
      the caller's own computation
  MISSING: computing does not wait for side between the two. Record an event on side behind the first, and have computing wait for it before the second.""",
    )


def test_a_write_that_does_not_wait_for_a_read_is_a_race(simulation: Simulation, side: Any) -> None:
    values = torch.zeros(4, device=DEVICE)
    side.wait_stream(simulation.device.computing)
    with side:
        values + 1
    values.fill_(1)
    assert kinds(simulation) == ["side reads, computing writes"]


def wait_for_stream(simulation: Simulation, side: Any) -> None:
    simulation.device.computing.wait_stream(side)


def wait_for_event(simulation: Simulation, side: Any) -> None:
    simulation.device.computing.wait_event(side.record_event())


def wait_on_the_host(simulation: Simulation, side: Any) -> None:
    side.synchronize()


def wait_for_all_on_the_host(simulation: Simulation, side: Any) -> None:
    simulation.device.synchronize()


@pytest.mark.parametrize(
    "wait", [wait_for_stream, wait_for_event, wait_on_the_host, wait_for_all_on_the_host]
)
def test_what_is_waited_for_in_any_way_is_no_race(
    simulation: Simulation, side: Any, wait: Callable[..., None]
) -> None:
    values = written_beside(simulation, side)
    wait(simulation, side)
    values + 1
    assert simulation.findings == []
    assert simulation.memory.num_checks > 0


def test_an_event_stands_for_what_was_there_when_it_was_recorded(simulation: Simulation, side: Any) -> None:
    early = side.record_event()
    values = written_beside(simulation, side)
    simulation.device.computing.wait_event(early)
    values + 1
    assert kinds(simulation) == ["side writes, computing reads"]


def test_two_reads_and_accesses_of_other_bytes_need_no_order(simulation: Simulation, side: Any) -> None:
    values = torch.zeros(4, device=DEVICE)
    side.wait_stream(simulation.device.computing)
    with side:
        values[1:] + 1
        values[:1].fill_(1)
    values[2:] + 1
    assert simulation.findings == []


def test_tensors_that_share_memory_by_dlpack_are_one(simulation: Simulation, side: Any) -> None:
    values = torch.zeros(4, device=DEVICE)
    same = torch.from_dlpack(values[2:])
    side.wait_stream(simulation.device.computing)
    with side:
        same.fill_(1)
    values[:2] + 1
    assert simulation.findings == []
    values[3:] + 1
    assert kinds(simulation) == ["side writes, computing reads"]


# --- the allocator --------------------------------------------------------------------------------


def allocated_beside_and_read(simulation: Simulation, side: Any) -> Tensor:
    with side:
        values = torch.zeros(4, device=DEVICE)
    simulation.device.computing.wait_stream(side)
    values + 1
    return values


def test_memory_that_is_given_out_again_while_another_stream_reads_it_is_told(
    simulation: Simulation, side: Any
) -> None:
    allocated_beside_and_read(simulation, side)  # and freed
    with side:
        torch.empty(1, device=DEVICE)
    assert_expected_inline(
        report(simulation),
        """\
1 x side allocates again, computing reads

EARLY REUSE of 16 bytes of memory that side allocated
  computing reads them (add)
      the caller's own computation
  they are freed by
      the caller's own computation
  side may get them again, and write, in
      the caller's own computation
  MISSING: side does not wait for computing before it allocates again. Have it wait before the memory is freed, or keep the memory until it has.""",
    )


def test_memory_may_be_given_out_again_behind_its_last_use_or_to_its_reader(
    simulation: Simulation, side: Any
) -> None:
    kept = allocated_beside_and_read(simulation, side)
    side.wait_stream(simulation.device.computing)
    del kept
    with side:
        torch.empty(1, device=DEVICE)
    allocated_beside_and_read(simulation, side)
    torch.empty(1, device=DEVICE)
    assert simulation.findings == []


def test_an_emptied_storage_is_not_to_be_used(simulation: Simulation) -> None:
    values = torch.zeros(4, device=DEVICE)
    view = values[1:]
    values.untyped_storage().resize_(0)
    same = view[1:]
    assert simulation.findings == []
    with pytest.raises(UsedAfterFree, match="computing reads"):
        same + 1


def test_memory_is_nan_until_it_is_written(simulation: Simulation) -> None:
    made = [torch.empty(2, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16)]
    made.append(made[0].new_empty(1))
    refilled = torch.zeros(2, device=DEVICE)
    refilled.untyped_storage().resize_(0)
    refilled.untyped_storage().resize_(8)
    with unseen():
        assert all(bool(on_host(each).isnan().all()) for each in (*made, refilled))


# --- host and device ------------------------------------------------------------------------------


def pinned(*values: float) -> Tensor:
    made = torch.empty(len(values), pin_memory=True)
    assert made.is_pinned()
    return made.copy_(torch.tensor(values))


def test_the_host_may_not_write_what_is_being_copied(simulation: Simulation) -> None:
    source = pinned(1, 2)
    source.to(DEVICE, non_blocking=True)
    source.fill_(3)
    assert kinds(simulation) == ["computing reads, the host writes"]


def test_the_host_may_not_read_what_is_being_copied_to_it(simulation: Simulation) -> None:
    target = pinned(1, 2)
    target.copy_(torch.zeros(2, device=DEVICE), non_blocking=True)
    target + 1
    assert_expected_inline(
        report(simulation),
        """\
1 x computing writes, the host reads

RACE on 8 bytes of memory that the host allocated
  computing writes them (copy_)
      the caller's own computation
  the host reads them (add)
      the caller's own computation
  MISSING: the host does not wait for computing between the two. Record an event on computing behind the first, and have the host wait for it before the second.""",
    )


@pytest.mark.parametrize("wait", [wait_on_the_host, wait_for_all_on_the_host])
def test_the_host_may_use_what_it_has_waited_for(simulation: Simulation, wait: Callable[..., None]) -> None:
    target = pinned(1, 2)
    target.copy_(torch.zeros(2, device=DEVICE), non_blocking=True)
    wait(simulation, simulation.device.computing)
    assert (target + 1).tolist() == [1, 1]
    assert simulation.findings == []


def test_copies_of_pageable_memory_are_over_when_the_call_returns(simulation: Simulation) -> None:
    source = torch.ones(2)
    copied = source.to(DEVICE, non_blocking=True)
    source.fill_(3)
    assert copied.cpu().tolist() == [1, 1]
    assert simulation.findings == []


def test_tensors_of_host_and_device_do_not_mix(simulation: Simulation) -> None:
    with pytest.raises(RuntimeError, match="of the device and one of the host"):
        torch.zeros(2, device=DEVICE) + torch.zeros(2)
    assert contents(torch.ones(2, device=DEVICE) + torch.tensor(1.0)) == [2, 2]  # a number


def test_whatever_makes_the_host_wait_is_counted(simulation: Simulation, side: Any) -> None:
    values = torch.ones(3, device=DEVICE)
    mask = values > 0
    simulation.blocks.clear()
    values.sum().item()
    values.tolist()
    torch.equal(values, values)
    values.nonzero()
    values[mask]
    if mask.any():
        values.to("cpu")
    torch.ones(3).to(DEVICE)
    side.synchronize()
    side.record_event().synchronize()
    assert_expected_inline(
        "\n".join(f"{count} {what}" for what, count in simulation.host_waits.items()),
        """\
2 _local_scalar_dense
2 copy to the host
1 equal
1 nonzero
1 index
1 copy to the device
1 stream synchronize
1 event synchronize""",
    )


def test_what_the_device_does_alone_makes_nobody_wait(simulation: Simulation, side: Any) -> None:
    values = torch.ones(3, device=DEVICE)
    target = pinned(1, 2, 3)
    simulation.blocks.clear()
    target.copy_(values, non_blocking=True)
    target.to(DEVICE, non_blocking=True)
    torch.where(values > 0, values, 0).cumsum(0)
    side.wait_event(simulation.device.computing.record_event())
    assert simulation.host_waits == {}


@pytest.mark.parametrize(
    "misuse",
    [
        lambda stream: stream.wait_event(torch.Event("cpu")),
        lambda stream: stream.wait_event(None),
        lambda stream: stream.wait_stream(torch.cpu.Stream()),
        lambda stream: stream.record_event().wait(torch.cpu.Stream()),
    ],
)
def test_streams_and_events_take_only_their_own_kind(side: Any, misuse: Callable[[Any], None]) -> None:
    with pytest.raises(TypeError, match="of the device, not"):
        misuse(side)


# --- collectives ----------------------------------------------------------------------------------


def all_gather(output: Tensor, source: Tensor, **options: Any) -> Any:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output, source, **options)


def test_results_arrive_when_they_are_waited_for(simulation: Simulation) -> None:
    output = torch.zeros(16, device=DEVICE)
    work = all_gather(output, torch.ones(2, device=DEVICE), async_op=True)
    assert all(value != value for value in contents(output))
    work.wait()
    output + 1
    assert contents(output) == [1] * 16
    assert simulation.findings == []


def test_results_that_nobody_waited_for_are_a_race(simulation: Simulation) -> None:
    source, output = torch.ones(2, device=DEVICE), torch.zeros(16, device=DEVICE)
    work = all_gather(output, source, async_op=True)
    output + 1
    assert kinds(simulation) == ["an asynchronous all_gather writes, computing reads"]
    work.wait()


def test_what_is_sent_may_not_be_changed_on_the_way(simulation: Simulation) -> None:
    source, output = torch.ones(2, device=DEVICE), torch.zeros(16, device=DEVICE)
    work = all_gather(output, source, async_op=True)
    source.zero_()
    assert kinds(simulation) == ["an asynchronous all_gather reads, computing writes"]
    work.wait()


def launch(communicator: str, kind: str, members: tuple[int, ...] = (0, 1)) -> Launch:
    return Launch(communicator, members, kind, 8, Lane("any"), {}, ())


def test_ranks_that_launch_in_one_order_agree_whatever_they_launch_with_others() -> None:
    both = [launch("a", "all_gather"), launch("b", "reduce_scatter")]
    alone = launch("c", "all_reduce", (1, 2))
    assert first_disagreement({0: both, 1: [both[0], alone, both[1]]}) is None


def test_two_communicators_in_another_order_are_told() -> None:
    both = [launch("a", "all_gather"), launch("b", "reduce_scatter")]
    assert_expected_inline(
        first_disagreement({0: both, 1: both[::-1]}) or "",
        """\
launch 0 of ranks 0 and 1 differs:
  rank 0: all_gather of 8 bytes on 'a'
  rank 1: reduce_scatter of 8 bytes on 'b'""",
    )


def test_a_collective_that_a_rank_leaves_out_is_told() -> None:
    both = [launch("a", "all_gather"), launch("b", "reduce_scatter")]
    assert_expected_inline(
        first_disagreement({0: both, 1: both[:1]}) or "",
        """\
ranks 0 and 1 launch 2 and 1 collectives; the first that one of them lacks:
  rank 0: reduce_scatter of 8 bytes on 'b'""",
    )


# --- the lines of src -----------------------------------------------------------------------------


def test_a_report_names_the_lines_of_the_library(simulation: Simulation) -> None:
    """A buffer that a stream of the library allocates, used by the caller without waiting."""
    stream = DeviceStream(DEVICE)
    scratch = stream.acquire(4, DEVICE)
    stream.submit(lambda: lambda: scratch.bytes.fill_(1))
    scratch.bytes + 1
    assert_expected_inline(
        report(simulation),
        """\
1 x stream writes, computing reads

RACE on 4 bytes of memory that computing allocated
  stream writes them (fill_)
      comm/streams.py: in submit: start()()
  computing reads them (add)
      the caller's own computation
  MISSING: computing does not wait for stream between the two. Record an event on stream behind the first, and have computing wait for it before the second.""",
    )
