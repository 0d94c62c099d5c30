"""The streams of one group while a trace records: they do the same work, and tell the timeline of it.

A group submits all that it communicates to its ``CommStreams``. A trace gives it these in their place, over
the same streams, and takes them away again: nothing else has to know of traces.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardwise.comm.streams import CommStream, CommStreams, CommWork, Finish, StartWork
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

    def submit(self, start: StartWork, users: Sequence[Any] = ()) -> CommWork:
        """As of ``inner``; the work tells when it is waited for."""
        work = self._transfers.begin(self._row, self._group)
        submitted = self.inner.submit(partial(self._transfers.start, work, start), users)
        self._transfers.submitted(work)
        wait = partial(self._transfers.wait, work, submitted.wait)
        return CommWork(wait, submitted.synchronize, submitted.end)

    def issue(self, call: Callable[..., Finish], *args: Any) -> Finish:
        """As of ``inner``; tells when, and how many bytes."""
        return self._transfers.issue(call, args)

    def copy_in(self, copy: Callable[[], _V]) -> _V:
        """As of ``inner``; tells when."""
        return self.inner.copy_in(partial(self._transfers.copy, self._group, copy))

    def wait_for(self, other: Any, work: CommWork) -> None:
        """As of ``inner``."""
        self.inner.wait_for(other.inner, work)


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
