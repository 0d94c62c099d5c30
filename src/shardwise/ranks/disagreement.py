"""Why a collective failed: another rank has raised, a rank has ended, or ranks disagree.

When a wait fails, each rank writes to the store of the job what it was waiting for, and looks for the first
failure that any rank has posted (see failures.py). Without one there are two cases. If a connection was
closed, a rank has ended without posting: the one that does not say what it was waiting for. If the timeout of
the process group has passed, ranks most often disagree on what to communicate.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.layout.mesh import Axis
from shardwise.ranks.failure_notes import FailureNote, FailureNotes
from shardwise.torch_compat import c10d

TIMEOUT_PATIENCE_S = 3.0
"""How long to wait for the notes of other ranks after a timeout, which hits them too."""

CLOSED_PATIENCE_S = 1.0
"""The same after a connection was closed, which all waiting ranks notice at once."""

PEER_PATIENCE_S = 0.3
"""The same where the peer of the connection is known: it posts before it ends, if at all."""

_PAUSE_S = 0.02


def explain_failure(
    notes: FailureNotes,
    heeds: Callable[[FailureNote], bool],
    rank: int,
    error: Exception,
    event: str,
    name: str,
    axes: Sequence[Axis],
) -> tuple[FailureNote | None, str]:
    """The failure behind ``error``, if a rank has posted one, and this rank's message."""
    subject = subject_of(event, name)
    groups = {axis.pg.group_name: c10d.ranks_of(axis.pg) for axis in axes if axis.pg is not None}
    for group in groups:
        notes.tell_wait(group, rank, _what(event, name))
    is_timeout, peer = c10d.is_timeout(error), getattr(error, "peer", None)
    started = time.monotonic()
    waits: dict[int, str | None] = {}
    while True:
        passed_s = time.monotonic() - started
        is_late = passed_s >= (TIMEOUT_PATIENCE_S if is_timeout else CLOSED_PATIENCE_S)
        if peer in waits and waits[peer] is None and not is_timeout:
            is_late = is_late or passed_s >= PEER_PATIENCE_S
        for note in notes.active():
            if heeds(note) and (is_late or not note.is_vague):
                return note, relayed_text(subject, note)
        for group, ranks in groups.items():
            waits.update(notes.waits(group, ranks))
        if is_late or None not in waits.values():
            break
        time.sleep(_PAUSE_S)
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    silent = sorted(other for other, wait in waits.items() if wait is None)
    if silent and not is_timeout:
        return None, _ended_text(subject, first_line, silent, peer)
    if len(set(waits.values())) > 1:
        return None, f"{subject} ({first_line}), because {disagreement_text(waits)}"
    return None, f"{subject}: {error}"


def subject_of(event: str, name: str) -> str:
    """The beginning of a message about a wait for ``event`` of ``name``."""
    if event == "call":
        return f"{name} failed"
    return f"{name}: its {event} failed" if name else f"The {event} failed"


def _what(event: str, name: str) -> str:
    if event == "call":
        return name
    return f"the {event} of '{name}'" if name else f"the {event}"


def relayed_text(subject: str, note: FailureNote) -> str:
    """The message of a rank that was stopped by a failure of another."""
    if note.between:
        return f"{subject}, because {note.error}"
    return (
        f"{subject}, because rank {note.rank} has failed in {note.where}: {note.error}\nThis rank waited for "
        f"what rank {note.rank} has not sent any more. The traceback is in the log of rank {note.rank}."
    )


def _ended_text(subject: str, closed: str, silent: Sequence[int], peer: int | None) -> str:
    if peer in silent or len(silent) == 1:
        who = f"rank {peer if peer in silent else silent[0]} has ended; see its log"
    else:
        who = f"one of the ranks {', '.join(map(str, silent))} has ended; see their logs"
    return (
        f"{subject}, because {who}. Its connection was closed, and it has told of no error: it was killed, "
        f"ran out of memory, crashed, or came to its end before the others. ({closed})"
    )


def disagreement_text(waits: Mapping[int, str | None]) -> str:
    """The message that ranks waited for different things, with the usual cause."""
    told = "; ".join(
        f"rank {rank} waited for {wait}" if wait else f"rank {rank} was not waiting at all"
        for rank, wait in sorted(waits.items())
    )
    return (
        f"the ranks disagree on what to communicate: {told}. "
        "Collectives must be issued in the same order everywhere. Usual cause: control flow around these "
        "modules that differs by rank. If some ranks leave a module out, call set_may_be_unused() on it; if "
        "they use different parameters of one, set_reduce_scatter_unused_params(True)."
    )


def deadlock(stuck: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The message if none of these ranks can continue; None if any of them can, or may.

    Each rank waits for the ``count``-th ``event`` of ``name``, and ``issued`` counts its collectives. A rank
    whose collective was issued as often by all other ranks is only slow, and the others may wait for it.
    """
    for own in stuck.values():
        counts = [other["issued"].get(own["kind"], 0) for other in stuck.values()]
        if all(count is None or count >= own["count"] for count in counts):
            return None
    waits = {rank: _what(each["event"], each["name"]) for rank, each in stuck.items()}
    reasons = [f"on rank {rank} {each['reason']}" for rank, each in stuck.items() if each["reason"]]
    if reasons:
        return (
            f"{'; '.join(reasons)}. The other ranks have met no such change: "
            f"{'; '.join(f'rank {rank} waits for {wait}' for rank, wait in waits.items())}. Freeze and "
            "configure the model alike on all ranks."
        )
    return disagreement_text(waits)
