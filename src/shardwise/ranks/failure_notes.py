"""Notes of failures in the key-value store of the job, which works where collectives do not.

    shardwise/failures         how many failures there have been
    shardwise/failures/3       the third: which rank, what it raised, and whether it has gone on since
    shardwise/waits/PG/1       what rank 1 was waiting for when communication in the process group PG failed
    shardwise/stuck/1          what rank 1 waits for now, and what it has issued, while a wait takes long

Nothing is written while all goes well. Knows no process groups and no models.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

ENDED = "shardwise/places/ended"
"""Where a rank tells that its process ends (watch.py)."""

_FAILURES, _WAITS, _STUCK = "shardwise/failures", "shardwise/waits", "shardwise/stuck"


@dataclass(frozen=True)
class FailureNote:
    """A failure of one rank.

    ``issued``: how many collectives that rank had issued before; ``ordinal``: which failure after that number
    it is. ``is_over``: the rank has continued. ``is_vague``: the exception is not known yet.
    """

    rank: int
    where: str
    error: str
    issued: int
    ordinal: int = 1
    is_over: bool = False
    is_vague: bool = False
    between: tuple[int, ...] = ()  # nobody has raised anything: these ranks wait for each other
    key: int = 0

    def over(self) -> "FailureNote":
        """The same note, of a rank that has continued."""
        return replace(self, is_over=True)

    def completed(self, error: str) -> "FailureNote":
        """The same note, now that the exception is known."""
        return replace(self, error=error, is_vague=False)


class FailureNotes:
    """The notes of a job, as one rank reads and writes them."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._read = 0
        self._active: dict[int, FailureNote] = {}

    def post(self, note: FailureNote) -> FailureNote:
        """Write a new note, or overwrite one that has a ``key``."""
        if note.key == 0:
            note = replace(note, key=self._store.add(_FAILURES, 1))
        self._store.set(f"{_FAILURES}/{note.key}", json.dumps(asdict(note)))
        return note

    def active(self) -> list[FailureNote]:
        """Failures of ranks that have not continued since, the oldest first."""
        while (new := self._get(self._read + 1)) is not None:
            self._read += 1
            self._active[self._read] = new
        for key, note in list(self._active.items()):
            note = self._get(key) or note
            if note.is_over:
                del self._active[key]
            else:
                self._active[key] = note
        return list(self._active.values())

    def _get(self, key: int) -> FailureNote | None:
        found = self._value(f"{_FAILURES}/{key}")
        if found is None:
            return None
        return FailureNote(**found | {"between": tuple(found["between"])})

    # --- waits --------------------------------------------------------------------------------------

    def tell_wait(self, group: str, rank: int, what: Mapping[str, Any]) -> None:
        """Write what ``rank`` was waiting for when its wait in a process group failed."""
        self._store.set(f"{_WAITS}/{group}/{rank}", json.dumps(what))

    def waits(self, group: str, ranks: Iterable[int]) -> dict[int, Mapping[str, Any] | None]:
        """What ranks have written there; None: nothing."""
        return {rank: self._value(f"{_WAITS}/{group}/{rank}") for rank in ranks}

    def ended_after(self, rank: int) -> int | None:
        """After which step the program of ``rank`` came to its end; None: it has not told."""
        place = self._value(f"{ENDED}/{rank}")
        return None if place is None else place["step"]

    def tell_stuck(self, rank: int, what: Mapping[str, Any]) -> None:
        """Write what ``rank`` waits for, and what it has issued."""
        self._store.set(f"{_STUCK}/{rank}", json.dumps(what))

    def no_longer_stuck(self, rank: int) -> None:
        """``rank`` has continued."""
        self._store.set(f"{_STUCK}/{rank}", json.dumps(None))

    def stuck(self, ranks: Iterable[int]) -> dict[int, Mapping[str, Any]] | None:
        """What all of ``ranks`` have written there; None if any has not."""
        found: dict[int, Mapping[str, Any]] = {}
        for rank in ranks:
            if (told := self._value(f"{_STUCK}/{rank}")) is None:
                return None
            found[rank] = told
        return found

    def _value(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
