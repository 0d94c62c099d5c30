"""Where `src/shardwise` orders streams of CUDA: what `tests/races` does on its own device, here to torch's classes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from races.device import Site
from races.reports import calling_functions

from shardwise.comm import streams

Event, Stream = torch.cuda.Event, torch.cuda.Stream


class _Sites:
    """Of one run. A wait of a stream for another one is made of an event: what is inside of it is not asked."""

    def __init__(self, dropped: Site | None) -> None:
        self.asked: set[Site] = set()
        self._dropped = dropped
        self._of_thread = threading.local()
        self._when_entered: dict[int, Any] = {}

    def keeps(self, operation: str) -> bool:
        """Whether it takes place, as all do but that of a mutant."""
        site = Site(operation, calling_functions(2, outside="comm/streams.py"))
        if site.callers:
            self.asked.add(site)
        return site != self._dropped

    @property
    def entered(self) -> list[bool]:
        """For each stream that this thread has entered, whether it became current."""
        if not hasattr(self._of_thread, "entered"):
            self._of_thread.entered = []
        return self._of_thread.entered  # type: ignore[no-any-return]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        wait_event, wait_stream, record_event = Event.wait, Stream.wait_stream, Stream.record_event
        enter, leave = Stream.__enter__, Stream.__exit__
        synchronize = {kind: kind.synchronize for kind in (Event, Stream)}

        def wait(event: Any, stream: Any = None) -> None:
            if getattr(self._of_thread, "inside", False) or self.keeps("wait_event"):
                wait_event(event, stream)

        def wait_all(stream: Any, other: Any) -> None:
            if not self.keeps("wait_stream"):
                return
            self._of_thread.inside = True
            try:
                wait_stream(stream, other)
            finally:
                self._of_thread.inside = False

        def record(stream: Any, event: Any = None) -> Any:
            if getattr(self._of_thread, "inside", False) or self.keeps("record_event"):
                return record_event(stream, event)
            return self._when_entered[stream.cuda_stream]

        def enter_unless_dropped(stream: Any) -> Any:
            self._when_entered[stream.cuda_stream] = record_event(stream)
            self.entered.append(self.keeps("enter"))
            return enter(stream) if self.entered[-1] else stream

        def leave_if_entered(stream: Any, *failure: Any) -> Any:
            return leave(stream, *failure) if self.entered.pop() else None

        def synchronizing(kind: type, name: str) -> Any:
            def block(thing: Any) -> None:
                if self.keeps(f"{name}.synchronize"):
                    synchronize[kind](thing)

            return block

        # Our own streams would record and wait by methods of torch.Stream, in C, which cannot be replaced.
        patch.setattr(streams, "ordering_of", lambda _: (Stream.record_event, Stream.wait_stream))
        patch.setattr(Event, "wait", wait)
        patch.setattr(Stream, "wait_stream", wait_all)
        patch.setattr(Stream, "record_event", record)
        patch.setattr(Stream, "__enter__", enter_unless_dropped, raising=False)
        patch.setattr(Stream, "__exit__", leave_if_entered, raising=False)
        patch.setattr(Event, "synchronize", synchronizing(Event, "event"))
        patch.setattr(Stream, "synchronize", synchronizing(Stream, "stream"))


@contextmanager
def sites(dropped: Site | None = None) -> Iterator[set[Site]]:
    """Inside, one wait does not take place; what was asked for is noted."""
    noted = _Sites(dropped)
    with pytest.MonkeyPatch.context() as patch:
        noted.install(patch)
        yield noted.asked
