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
from shardwise.ranks.places import moment
from shardwise.torch_compat import c10d

Told = Mapping[str, Any]
"""A wait as a rank tells it: "event", "name", "step" and "phase"; ``deadlock`` needs more."""

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
    own: Told,
    axes: Sequence[Axis],
) -> tuple[FailureNote | None, str]:
    """The failure behind ``error``, if a rank has posted one, and this rank's message. ``own``: its wait."""
    subject = subject_of(own["event"], own["name"])
    groups = {axis.pg.group_name: c10d.ranks_of(axis.pg) for axis in axes if axis.pg is not None}
    for group in groups:
        notes.tell_wait(group, rank, own)
    is_timeout, peer = c10d.is_timeout(error), getattr(error, "peer", None)
    started = time.monotonic()
    waits: dict[int, Told | None] = {}
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
        if (step := notes.ended_after(who := peer if peer in silent else silent[0])) is not None:
            return None, _left_text(subject, own, who, step)
        return None, _ended_text(subject, first_line, silent, peer)
    if len({each and (each["event"], each["name"]) for each in waits.values()}) > 1:
        return None, f"{subject} ({first_line}), because {disagreement_text(waits)}"
    return None, f"{subject}: {error}"


def subject_of(event: str, name: str) -> str:
    """The beginning of a message about a wait for ``event`` of ``name``."""
    if event == "call":
        return f"{name} failed"
    return f"{name}: its {event} failed" if name else f"The {event} failed"


def _what(wait: Told) -> str:
    event, name = wait["event"], wait["name"]
    if event == "call":
        return f"the others in {name}()"
    return f"the {event} of '{name}'" if name else f"the {event}"


def relayed_text(subject: str, note: FailureNote) -> str:
    """The message of a rank that was stopped by a failure of another."""
    if note.between:
        return f"{subject}, because {note.error}"
    return (
        f"{subject}, because rank {note.rank} has failed in {note.where}: {note.error}\nThis rank waited for "
        f"what rank {note.rank} has not sent any more. The traceback is in the log of rank {note.rank}."
    )


def _left_text(subject: str, own: Told, who: int, step: int) -> str:
    return (
        f"{subject} ({moment(own['step'], own['phase'])}), because rank {who} has come to the end of its "
        f"program, after step {step}. Usual cause: {_DIFFERENT_PLACES}"
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


_DIFFERENT_PLACES = (
    "numbers of microbatches or steps that differ by rank, or a call that all ranks have to make, such as "
    "save_checkpoint, and some do not. Run as many everywhere, and make such calls on all ranks."
)

_DIFFERENT_MODULES = (
    "control flow around these modules that differs by rank. If some ranks leave a module out, call "
    "set_may_be_unused() on it; if they use different parameters of one, "
    "set_reduce_scatter_unused_params(True)."
)


def disagreement_text(waits: Mapping[int, Told | None]) -> str:
    """The message that ranks waited for different things, with the usual cause."""
    told = "; ".join(
        f"rank {rank} waited for {_what(wait)} ({moment(wait['step'], wait['phase'])})"
        if wait
        else f"rank {rank} was in no call of shardwise"
        for rank, wait in sorted(waits.items())
    )
    steps = {wait["step"] if wait and wait["event"] != "call" else None for wait in waits.values()}
    are_in_one_step = len(steps) == 1 and None not in steps
    causes = [_DIFFERENT_MODULES] if are_in_one_step else []
    if not are_in_one_step or len({wait["event"] for wait in waits.values() if wait}) > 1:
        # In one step: a rank reduces, and another does not, because its last microbatch is still to come.
        causes.append(_DIFFERENT_PLACES)
    return (
        f"the ranks disagree on what to communicate: {told}. Collectives must be issued in the same order "
        f"everywhere. Usual cause: {' Or: '.join(causes)}"
    )


def deadlock(stuck: Mapping[int, Told]) -> str | None:
    """The message if none of these ranks can continue; None if any of them can, or may.

    Each rank waits for the ``count``-th ``event`` of ``name``, and ``issued`` counts its collectives. A rank
    whose collective was issued as often by all other ranks is only slow, and the others may wait for it.
    """
    for own in stuck.values():
        counts = [other["issued"].get(own["kind"], 0) for other in stuck.values()]
        if all(count is None or count >= own["count"] for count in counts):
            return None
    reasons = [f"on rank {rank} {each['reason']}" for rank, each in stuck.items() if each["reason"]]
    if reasons:
        waits = "; ".join(f"rank {rank} waits for {_what(each)}" for rank, each in stuck.items())
        return (
            f"{'; '.join(reasons)}. The other ranks have met no such change: {waits}. Freeze and configure "
            "the model alike on all ranks."
        )
    return disagreement_text(stuck)
