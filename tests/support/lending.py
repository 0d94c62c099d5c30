"""The buffers that streams of the host lend, and whether they come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from shardwise.comm.streams import HostStream, Scratch


@dataclass
class Lent:
    """`out`: those that have not been given back."""

    out: list[Scratch] = field(default_factory=list)
    total: int = 0


@contextmanager
def lent_buffers() -> Iterator[Lent]:
    """What all streams of the host lend inside."""
    lent = Lent()
    acquire, release = HostStream.acquire, HostStream.release

    def lend(self: HostStream, *args: Any) -> Scratch:
        lent.total += 1
        lent.out.append(acquire(self, *args))
        return lent.out[-1]

    def take_back(self: HostStream, scratch: Scratch) -> None:
        lent.out.remove(scratch)
        release(self, scratch)

    with mock.patch.multiple(HostStream, acquire=lend, release=take_back):
        yield lent
