"""ReductionQueue: in which order reductions free their memory. Groups are stand-ins that write down what is asked."""

from collections import deque
from types import SimpleNamespace
from typing import Any

from expecttest import assert_expected_inline

from shardwise.engine.reduction_queue import ReductionQueue
from shardwise.groups.states import EMPTY, PENDING, REDUCING


class StandIn:
    part_queue = None

    def __init__(self, name: str, log: list[str], *, to_host: bool) -> None:
        self.name, self.log, self.arrive_on_host, self.state = name, log, to_host, PENDING

    def reduce(self) -> list[Any]:
        self.log.append(f"{self.name} is reduced")
        self.state = REDUCING
        return []

    def advance(self) -> None: ...

    def release_unsharded(self) -> None:
        self.log.append(f"{self.name}: unsharded gradients are freed")

    def release(self) -> None:
        self.log.append(f"{self.name}: sums on the device are freed")

    def finish(self) -> None:
        self.log.append(f"{self.name} is finished")
        self.state = EMPTY


def order_of(num_groups: int, *, replicates: bool, to_host: bool) -> str:
    log: list[str] = []
    queue = ReductionQueue(0.0)
    for number in range(num_groups):
        gradients = StandIn(f"group {number}", log, to_host=to_host)
        settings = SimpleNamespace(max_reductions=1)
        group: Any = SimpleNamespace(gradients=gradients, settings=settings, max_in_flight=1 + replicates)
        queue.reduce(group)
    log.append("-- backward ends")
    queue.finish()
    return "\n".join(log)


def test_of_replicated_groups_only_the_sums_stay_in_flight() -> None:
    assert_expected_inline(
        order_of(3, replicates=True, to_host=False),
        """\
group 0 is reduced
group 1 is reduced
group 0: unsharded gradients are freed
group 2 is reduced
group 0 is finished
group 1: unsharded gradients are freed
-- backward ends
group 1 is finished
group 2 is finished""",
    )


def test_copies_to_the_host_keep_no_unsharded_gradients_and_the_sums_of_two_groups() -> None:
    assert_expected_inline(
        order_of(4, replicates=False, to_host=True),
        """\
group 0 is reduced
group 1 is reduced
group 0: unsharded gradients are freed
group 2 is reduced
group 1: unsharded gradients are freed
group 0: sums on the device are freed
group 3 is reduced
group 2: unsharded gradients are freed
group 1: sums on the device are freed
-- backward ends
group 3: unsharded gradients are freed
group 2: sums on the device are freed
group 0 is finished
group 1 is finished
group 2 is finished
group 3 is finished""",
    )


def test_one_that_is_reduced_anew_in_a_nested_backward_is_not_released() -> None:
    """A nested backward has finished it, and has sent some of its next gradients."""
    log: list[str] = []
    queue = ReductionQueue(0.0)
    groups: list[Any] = []
    for number in range(4):
        gradients = StandIn(f"group {number}", log, to_host=True)
        settings = SimpleNamespace(max_reductions=1)
        groups.append(
            SimpleNamespace(gradients=gradients, reductions=gradients, settings=settings, max_in_flight=1)
        )
        if number == 2:
            groups[0].gradients.state = PENDING
        queue.reduce(groups[number])
    assert "group 0: unsharded gradients are freed" in log
    assert "group 0: sums on the device are freed" not in log
    assert "group 1: sums on the device are freed" in log


class Parts:
    """A reduction with so many parts under way, of a byte each."""

    def __init__(self, num_parts: int) -> None:
        self.held_bytes = deque([1.0] * num_parts)

    def release_part(self) -> None:
        self.held_bytes.popleft()


def test_reductions_whose_parts_were_waited_for_are_passed_over() -> None:
    """Those of a group that goes over the replicas already, behind one that backward has not finished."""
    queue = ReductionQueue(2.0)
    begun = [Parts(1), Parts(1), Parts(3)]
    for each in begun:
        gradients = SimpleNamespace(send_ready=lambda: None, in_flight=lambda each=each: [each])
        if each is begun[-1]:
            begun[1].release_part()
        queue.send_ready(SimpleNamespace(gradients=gradients))  # type: ignore[arg-type]
    assert [len(each.held_bytes) for each in begun] == [0, 0, 2]
