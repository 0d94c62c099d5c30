"""What ranks were waiting for when a collective failed: the usual cause is that they disagreed.

When a wait fails, most often because the process group's timeout has passed, each rank leaves a note in
the store of the job, reads those of the others, and says in its error who waited for what. Nothing is
sent before that. Back ends that end the process themselves on a timeout (NCCL's watchdog) leave no time
for it.
"""

import time

from shardwise.runtime import compat
from shardwise.runtime.mesh import Axis

PATIENCE_S = 3.0
"""How long to wait for the notes of the other ranks; they have the same timeout."""


def explain_failure(error: RuntimeError, event: str, name: str, axes: list[Axis]) -> RuntimeError:
    """The error to raise instead of ``error``, which came while waiting for ``event`` of ``name``."""
    notes = _exchange(f"the {event} of '{name}'", axes[0]) if axes else {}
    if len(set(notes.values())) < 2 and None not in notes.values():
        return error
    told = "; ".join(
        f"rank {rank} waited for {note}" if note else f"rank {rank} was not waiting at all"
        for rank, note in sorted(notes.items())
    )
    first = str(error).splitlines()[0]
    return RuntimeError(
        f"{name}: its {event} failed ({first}), because the ranks disagree on what to communicate: {told}. "
        "Collectives must be issued in the same order everywhere. Usual cause: control flow around these "
        "modules that differs by rank. If some ranks leave a module out, call set_may_be_unused() on it; if "
        "they use different parameters of one, set_reduce_scatter_unused_params(True)."
    )


def _exchange(note: str, axis: Axis) -> dict[int, str | None]:
    """The notes of all ranks of ``axis``; None for one that has left none."""
    if axis.pg is None:
        return {}
    store, ranks = compat.job_store(), compat.ranks_of(axis.pg)
    prefix = f"shardwise/waits/{axis.pg.group_name}"
    store.set(f"{prefix}/{ranks[axis.rank]}", note)
    notes: dict[int, str | None] = dict.fromkeys(ranks)
    deadline = time.monotonic() + PATIENCE_S
    while None in notes.values() and time.monotonic() < deadline:
        for rank in ranks:
            key = f"{prefix}/{rank}"
            if notes[rank] is None and store.check([key]):
                notes[rank] = store.get(key).decode()
        time.sleep(0.05)
    return notes
