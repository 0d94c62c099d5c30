"""The tracker of bench/memory.py, on allocations whose peaks are known."""

import pytest
import torch
from memory import Allocation, Log, largest, read_log
from torch.profiler import ProfilerActivity, profile, record_function

MB = 1 << 20


def floats(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes // 4)


def test_the_peak_between_two_marks_counts_what_was_alive_before() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        kept = floats(4 * MB)
        with record_function("mark one"):
            first = floats(2 * MB)
            del first
            second = floats(1 * MB)
        with record_function("mark two"):
            third = floats(8 * MB)
        del second, third
        with record_function("mark three"):
            pass
    log = read_log(seen, "cpu")
    assert [log.peak(*log.marks[name])[0] / MB for name in ("one", "two", "three")] == [6, 13, 4]
    assert log.set_resident([kept[: MB // 4]], at=log.marks["three"][0]) == MB
    assert [log.peak(*log.marks[name])[0] / MB for name in ("one", "two", "three")] == [5, 12, 3]


def test_a_tensor_of_unrecorded_memory_is_refused() -> None:
    with pytest.raises(RuntimeError, match="lies in no memory that was recorded"):
        Log([Allocation(1000, 16, 0, ())]).set_resident([torch.zeros(4)], at=0)


def test_an_address_that_is_used_anew_has_been_released() -> None:
    class Device:
        type = "cpu"

    class Fields:
        def __init__(self, ptr: int, size: int) -> None:
            self.ptr, self.alloc_size, self.device = ptr, size, Device

    class Event:
        name, parent, children = "[memory]", None, ()

        def __init__(self, time: int, ptr: int, size: int) -> None:
            from torch._C._profiler import _EventType

            self.tag, self.start_time_ns = _EventType.Allocation, time
            self.extra_fields = Fields(ptr, size)

    class Results:
        def experimental_event_tree(self) -> list[Event]:
            # Another thread released the first: nobody saw it. The release of 9 was of older memory.
            return [Event(1, 7, 100), Event(2, 7, 60), Event(3, 9, -40), Event(4, 7, -60)]

    class Profiler:
        kineto_results = Results()

    class Seen:
        profiler = Profiler()

    log = read_log(Seen(), "cpu")  # type: ignore[arg-type]
    assert [(a.num_bytes, a.begin, a.end) for a in log.allocations] == [(100, 1, 2), (60, 2, 4)]
    assert log.peak(0, 10) == (100, 1)


def test_what_an_operator_of_the_transport_allocates_counts_apart() -> None:
    log = Log([Allocation(0, 8, 1, ("aten::clone", "c10d::send")), Allocation(9, 4, 2, ("aten::empty",))])
    assert log.peak(0, 9) == (4, 2)
    assert log.transport_bytes(0, 9) == 8


def test_of_the_ranks_the_one_that_holds_most_counts() -> None:
    ranks = [[{"backward_units": 3, "rank": 0}], [{"backward_units": 4, "rank": 1}]]
    assert largest(ranks) == [{"backward_units": 4, "rank": 1}]
