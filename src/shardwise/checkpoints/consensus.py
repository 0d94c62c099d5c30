"""All ranks act, and either all have succeeded or all raise the same.

Where one rank alone raised, the others would wait for it in their next collective, until the watchdog ends
the job. So each step that may fail is followed by a word from every rank on how it went.
"""

from collections.abc import Callable
from hashlib import sha256
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.states.names import listed

T = TypeVar("T")

# Kinds of errors that other ranks raise under their own name; all others become a RuntimeError with theirs.
PLAIN = (ValueError, TypeError, RuntimeError, FileNotFoundError, FileExistsError, NotADirectoryError, OSError)


class Team:
    """The ranks of `pg`; None: this process alone. Every method is collective."""

    def __init__(self, pg: dist.ProcessGroup | None) -> None:
        self.pg = pg
        self.size = 1 if pg is None else dist.get_world_size(pg)
        self.rank = 0 if pg is None else dist.get_rank(pg)
        self.is_first = self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, on every rank."""
        if self.pg is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.pg)
        return values

    def gather_at_first(self, value: Any) -> list[Any] | None:
        """What every rank has, on the first one only."""
        if self.pg is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, group=self.pg, group_dst=0)
        return values

    def scatter(self, values: list[Any] | None) -> Any:
        """To every rank its own of the first one's `values`."""
        if self.pg is None:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values, group=self.pg, group_src=0)
        return box[0]

    def broadcast(self, value: Any, source: int) -> Any:
        """What the rank `source` of this team has."""
        if self.pg is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.pg, group_src=source)
        return box[0]

    def distinct(self, value: Any, key: Any) -> list[Any]:
        """The different values that ranks have, in the order of ranks; equal keys say equal values.

        In most jobs all ranks have the same, and nothing but digests travels.
        """
        digests = self.gather(sha256(repr(key).encode()).digest())
        if len(set(digests)) == 1:
            return [value]
        firsts = [rank for rank, each in enumerate(digests) if digests.index(each) == rank]
        return [self.broadcast(value, rank) for rank in firsts]

    def together(
        self, act: Callable[[], T], explain: Callable[[Exception], str] = str, says_rank: bool = True
    ) -> T:
        """`act()` of this rank, once it has succeeded on all; what failed on any is raised on all.

        Args:
            act: does not communicate.
            explain: the text of an error of this rank, before it is told to the others.
            says_rank: begin with the rank that failed, where not all did.
        """
        failed: tuple[type[Exception], str] | None = None
        cause: Exception | None = None
        try:
            result = act()
        except Exception as error:
            failed, cause = _plain(error, explain), error
            if self.size == 1:
                raise failed[0](failed[1]) from error
        failures = self.gather(failed)
        if any(failures):
            raise _joint(failures, says_rank) from cause
        return result

    def on_first(self, act: Callable[[], Any], explain: Callable[[Exception], str] = str) -> None:
        """`act()` on the first rank; what it raises is raised on all."""
        self.together(lambda: act() if self.is_first else None, explain, says_rank=False)


def _plain(error: Exception, explain: Callable[[Exception], str]) -> tuple[type[Exception], str]:
    """An error as what every rank can unpickle and raise."""
    kind = next((each for each in PLAIN if type(error) is each), None)
    text = f"{type(error).__name__}: {error}" if kind is None else str(error)
    if explain is not str:
        try:
            text = explain(error)
        except Exception as second:  # on its way to the others an error must not be lost
            text += f" ({type(second).__name__} while explaining it: {second})"
    return kind or (OSError if isinstance(error, OSError) else RuntimeError), text


def _joint(failures: list[tuple[type[Exception], str] | None], says_rank: bool) -> Exception:
    """One error for what several ranks have met: the first one's, and who else failed."""
    ranks = [rank for rank, failed in enumerate(failures) if failed]
    first = failures[ranks[0]]
    assert first is not None
    kind, text = first
    if len(set(failures)) == 1:
        return kind(text)  # all ranks have found the same
    text = f"rank {ranks[0]}: {text}" if says_rank else text
    if len(ranks) == 1:
        return kind(text)
    return kind(f"{text} (ranks {listed(map(str, ranks))} failed)")
