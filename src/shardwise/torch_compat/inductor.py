"""Inductor's schedule.

Its steps have no public interface, but its configuration asks for passes over them
(``reorder_for_compute_comm_overlap_passes``), and torch's own passes use these attributes. Seen on 2.13.
"""

from collections.abc import Iterable
from typing import Any


def made_by(step: Any) -> Iterable[str]:
    """Names of the buffers that a step writes."""
    return step.get_buffer_names()  # type: ignore[no-any-return]


def needed_by(step: Any) -> tuple[list[str], list[str]]:
    """Names of the buffers that a step reads, and of those whose steps it only has to follow.

    Each in an order that is the same on all ranks.
    """
    needed: dict[bool, set[str]] = {False: set(), True: set()}
    for dep in step.unmet_dependencies:
        needed[getattr(dep, "is_fake", False)].add(dep.name)
    return sorted(needed[False]), sorted(needed[True] - needed[False])


def collective_of(step: Any) -> str | None:
    """Which functional collective a step begins ("all_gather_into_tensor"), or "wait_tensor"."""
    from torch._inductor.utils import is_collective, is_wait

    if is_wait(step.node):
        return "wait_tensor"
    if not is_collective(step.node):
        return None
    name = str(step.node.op_overload).split(".")[1]
    return name.removesuffix("_out").removesuffix("_")  # all_reduce_ sums in place
