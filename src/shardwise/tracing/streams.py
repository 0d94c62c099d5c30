"""What a group communicates through while a trace records: it does the same work, and tells the timeline.

A group submits all that it communicates to its ``CommStreams``, and issues collectives by calls of its
communicators. A trace puts these in their place, over the same streams and calls, and takes them away again:
nothing else has to know of traces.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardwise.buckets.bucket import Bucket
from shardwise.comm.communicators import Communicator
from shardwise.comm.streams import CommStream, CommStreams, CommWork, StartWork
from shardwise.ranks.activity import Wait
from shardwise.tracing.records import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

if TYPE_CHECKING:
    from shardwise.tracing.transfers import Transfers

_V = TypeVar("_V")


class TracedStream:
    """``inner``, as one group uses it for the collectives of ``row``."""

    def __init__(self, inner: CommStream, row: str, group: str, transfers: "Transfers") -> None:
        self.inner = inner
        self._row = row
        self._group = group
        self._transfers = transfers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, start: StartWork, users: Sequence[Any] = (), awaited: Wait | None = None) -> CommWork:
        """As of ``inner``; the work tells when it is waited for."""
        work = self._transfers.begin(self._row, self._group)
        submitted = self.inner.submit(partial(self._transfers.start, work, start), users, awaited)
        self._transfers.submitted(work)
        wait = partial(self._transfers.wait, work, submitted.wait)
        return CommWork(wait, submitted.end)

    def copy_in(self, copy: Callable[[], _V]) -> _V:
        """As of ``inner``; tells when."""
        return self.inner.copy_in(partial(self._transfers.copy, self._group, copy))


class TracedStreams(CommStreams):
    """The streams ``inner``, as the group of that name uses them."""

    def __init__(self, inner: CommStreams, group: str, transfers: "Transfers") -> None:
        vars(self).update(vars(inner))
        self.inner = inner

        def traced(stream: CommStream, row: str) -> CommStream:
            return cast(CommStream, TracedStream(stream, row, group, transfers))

        self.all_gather = traced(inner.all_gather, ALL_GATHER)
        self.reduce_scatter = traced(inner.reduce_scatter, REDUCE_SCATTER)
        self.all_reduce = traced(inner.all_reduce, ALL_REDUCE)

    are_labelled = property(lambda self: self.inner.are_labelled)  # type: ignore[assignment]


class TracedCalls:
    """The calls by which the buckets of one group issue collectives: each tells when, and how many bytes."""

    def __init__(self, buckets: Sequence[Bucket], transfers: "Transfers") -> None:
        self._calls = _calls_of(buckets)
        for comm, name in self._calls:
            setattr(comm, name, partial(transfers.issue, getattr(comm, name)))

    def covers(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the buckets still issue by these calls: they may be given other communicators."""
        return self._calls == _calls_of(buckets)

    def remove(self) -> None:
        """Put the calls back."""
        for comm, name in self._calls:
            delattr(comm, name)


def _calls_of(buckets: Sequence[Bucket]) -> list[tuple[Communicator, str]]:
    calls: list[tuple[Communicator | None, str]] = []
    for own in [bucket.communication for bucket in buckets]:
        calls += [(own.all_gather, "all_gather"), (own.post_forward, "all_gather")]
        calls += [(own.reduce_scatter, "reduce_scatter"), (own.over_replicas, "all_reduce")]
    return [(comm, name) for comm, name in calls if comm is not None]
