"""What a group communicates through while a trace records: it does the same work, and tells the timeline.

A group submits all that it communicates to its ``CommStreams``, and issues collectives by calls of its
communicators. A trace puts these in their place, over the same streams and calls, and takes them away again:
nothing else has to know of traces.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardwise.buckets.bucket import Bucket
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
        self._replaced: list[tuple[Any, str, Any]] = []
        for bucket in buckets:
            own = bucket.communication
            places = [(own.all_gather, "all_gather"), (own.reduce_scatter, "reduce_scatter")]
            if own.post_forward is not None:
                places.append((own.post_forward, "all_gather"))
            if own.over_replicas is not None:
                places.append((own.over_replicas, "all_reduce"))
            for owner, name in places:
                call = getattr(owner, name)
                traced = partial(transfers.issue, call)
                setattr(owner, name, traced)
                self._replaced.append((owner, name, traced))

    def covers(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the buckets still issue by these calls, which end when a group is laid out anew."""
        traced = [getattr(owner, name) for owner, name, _ in self._replaced]
        own = {id(call) for _, _, call in self._replaced}
        return all(id(call) in own for call in traced) and all(
            id(bucket.communication.all_gather.all_gather) in own for bucket in buckets
        )

    def remove(self) -> None:
        """Put the calls back."""
        for owner, name, traced in self._replaced:
            if getattr(owner, name) is traced:
                setattr(owner, name, traced.args[0])
        self._replaced = []
