"""Programs of Inductor.

Their steps have no public interface, but passes over them are what its configuration asks for
(``reorder_for_compute_comm_overlap_passes``), and torch's own rest on these.
"""

from collections.abc import Iterable
from typing import Any

# --- Inductor -------------------------------------------------------------------------------------

# Steps of its programs have no public interface, but passes over them are what its configuration asks for
# (``reorder_for_compute_comm_overlap_passes``), and torch's own rest on these.


def made_by(step: Any) -> Iterable[str]:
    """Names of the buffers that a step of a program of Inductor writes."""
    return step.get_buffer_names()  # type: ignore[no-any-return]


def needed_by(step: Any) -> tuple[list[str], list[str]]:
    """Names of the buffers that must be there before it, and of those whose steps it merely has to follow,
    each in an order that all ranks have."""
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
