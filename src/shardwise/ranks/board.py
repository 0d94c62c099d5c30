"""The board: records that ranks leave for each other in the store of the job, where collectives do not work.

A record is JSON. Failures and waits write nothing while all goes well.

    shardwise/failures        the number of failures so far
    shardwise/failures/3      the third: which rank, what it raised, whether it has continued (failures.py)
    shardwise/failed/PG/1     what rank 1 waited for when communication in the process group PG failed
    shardwise/stuck/1         what rank 1 waits for now, and what it has issued, while a wait takes long
    shardwise/ended/1         where rank 1 was when its process ended
    shardwise/rounds          how often all ranks were asked what they do (watch.py)
    shardwise/rounds/2        counted up to open the second round; the first rank to do so leads it
    shardwise/status/2/1      what rank 1 did then
    shardwise/report/2        the text; empty if the wait was over, or no rank is late
    shardwise/plan/RANKS/...  successive comparisons among these ranks (engine/plan_check.py)
    shardwise/doctor/...      what ranks exchange while a job is examined (doctor.py)
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from shardwise.ranks.activity import RankStatus

_LONGEST_PAUSE_S = 0.2


class Board:
    """One rank's access to the board of a job; ``prefix`` precedes all keys."""

    def __init__(self, store: dist.Store, prefix: str = "shardwise") -> None:
        self._store = store
        self._prefix = prefix

    def post(self, key: str, record: Any) -> None:
        """Write a record over any earlier one; None stands for no record."""
        self._store.set(f"{self._prefix}/{key}", json.dumps(record, default=asdict))

    def read(self, key: str) -> Any:
        """The record at ``key``, if any."""
        key = f"{self._prefix}/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def statuses(self, topic: str, ranks: Iterable[int]) -> dict[int, RankStatus | None]:
        """What ``ranks`` have posted about themselves."""
        found = {rank: self.read(f"{topic}/{rank}") for rank in ranks}
        return {rank: None if each is None else RankStatus(**each) for rank, each in found.items()}

    def count(self, key: str, by: int = 1) -> int:
        """Count up the number at ``key``, from 0, and return it."""
        return self._store.add(f"{self._prefix}/{key}", by)

    def remove(self, key: str) -> None:
        """Remove the record at ``key``, if any."""
        self._store.delete_key(f"{self._prefix}/{key}")

    def wait_for(self, key: str, check: Callable[[], None]) -> Any:
        """The record at ``key``, once it exists. ``check`` is called now and then, and may raise.

        This polls, since the store's own wait blocks other threads, and writes to stderr if it ends without
        a result.
        """
        pause_s = 0.0002
        while not self._store.check([f"{self._prefix}/{key}"]):
            check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self.read(key)

    def take(self, key: str, check: Callable[[], None]) -> Any:
        """Like ``wait_for``, and remove the record."""
        record = self.wait_for(key, check)
        self.remove(key)
        return record
