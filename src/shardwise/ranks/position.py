"""Where this rank is in its training: what it has issued, what it waits for, in which pass it is.

The training thread writes it down, for the price of a counter a collective. A thread of the relay
(failures.py) reads it, and finds out from outside whether the rank waits:

    on the host      ``waiting`` is set while the host waits, ``issuing`` while a back end takes a collective
    on a device      only a stream waits. The event at the end of the oldest collective that is not over says
                     what for; asking an event whether it has come waits for nothing
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwise.layout.mesh import Axis

_MOST_QUEUED = 1024
"""So many collectives are remembered on a device: as far as the host can be ahead of it."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Wait:
    """One kind of wait of this rank: for an event of a name, again and again.

    ``number`` is that of the collective that is waited for, among all that this rank has issued; ``count``
    counts those of this kind. ``ordinal`` tells models apart that use the same names: 2 is the second
    wait for such an event of such a name. A public call may compute as well as wait. ``reason``: why this
    rank waits, where others may have no reason to. ``stream``: that of a device, which waits while the host
    goes on; its ``last_event`` is at the end of what was queued last. ``monitor``: where what this rank does
    is written down.
    """

    event: str
    name: str
    axes: Callable[[], Sequence[Axis]]
    number: int = 0
    count: int = 0
    ordinal: int = 1
    reason: str = ""
    stream: Any = None
    monitor: Any = None

    @property
    def kind(self) -> str:
        """The same on all ranks."""
        kind = f"{self.event} {self.name}"
        return kind if self.ordinal == 1 else f"{kind} ({self.ordinal})"


@dataclass(frozen=True)
class Awaited:
    """What a rank waits for: the ``count``-th of the kind of ``wait``."""

    wait: Wait
    count: int
    is_on_device: bool


class Position:
    """Where one rank is.

    ``issued``: how many collectives of parameter groups this rank has begun; what other calls communicate is
    not counted, since ranks may make such calls alone where they have nobody to communicate with.
    ``waiting``: what it waits for. ``issuing``: what it hands to the back end, which may block as well.
    ``steps``: how many backwards have begun. ``phase``: "forward", "backward", or "" outside of both.
    """

    def __init__(self, *, has_others: bool) -> None:
        self.issued = 0
        self.waiting: Wait | None = None
        self.issuing: Wait | None = None
        self.waits: weakref.WeakSet[Wait] = weakref.WeakSet()  # what may be waited for
        self._known: Counter[tuple[str, str, frozenset[int]]] = Counter()  # waits, by event, name and ranks
        self.calls: Counter[str] = Counter()  # public calls that communicate, by name
        self.steps = 0
        self.phase = ""
        # On a device: a wait, which of its kind, and the event at its end. The wait would keep its model
        # alive.
        self._queued: deque[tuple[weakref.ref[Wait], int, Any]] = deque(
            maxlen=_MOST_QUEUED if has_others else 0
        )

    # --- the training thread writes -----------------------------------------------------------------

    def expect(self, wait: Wait, ranks: Iterable[int]) -> None:
        """``wait`` may come from now on. ``ranks`` take part in it, and all say so in the same order."""
        if wait in self.waits:
            return
        # Counted for good: a model that is not used any more may live on some of the ranks.
        key = wait.event, wait.name, frozenset(ranks)
        self._known[key] += 1
        wait.ordinal = self._known[key]
        self.waits.add(wait)

    def issue(self, wait: Wait) -> None:
        """Count a collective that ``wait`` will wait for."""
        self.issued = wait.number = self.issued + 1
        wait.count += 1
        self.issuing = None
        if wait.stream is not None:
            self._queued.append((weakref.ref(wait), wait.count, wait.stream.last_event))

    @contextmanager
    def exchange(self, wait: Wait, ranks: Iterable[int]) -> Iterator[None]:
        """Around an exchange of ``ranks`` that is no collective of a back end; counts as one when it is
        over."""
        self.expect(wait, ranks)
        wait.number = self.issued + 1
        wait.count += 1
        around, self.waiting = self.waiting, wait
        try:
            yield
            self.issued += 1
        finally:
            self.waiting = around

    def enter_forward(self) -> None:
        """A forward of a sharded model begins."""
        self.phase = "forward"

    def enter_backward(self) -> None:
        """A backward begins, and with it the next step."""
        self.steps += 1
        self.phase = "backward"

    def leave(self, phase: str = "") -> None:
        """A pass is over, or has failed; it ran inside of ``phase``."""
        self.phase = phase

    # --- the relay's thread reads -------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the running step, from 1; outside of forward and backward, of the last one."""
        return self.steps + (self.phase == "forward")

    @property
    def mark(self) -> tuple[Any, ...]:
        """Changes whenever the training thread issues something, or comes somewhere else."""
        waiting = self.waiting
        number = 0 if waiting is None else waiting.number
        return self.issued, self.steps, self.phase, id(waiting), number, id(self.issuing)

    @property
    def on_host(self) -> Wait | None:
        """What the host waits for, in a wait or because the back end blocks when it is given a collective."""
        return self.waiting or self.issuing

    def last_on_device(self) -> Wait | None:
        """What was queued last on a device: that may be over already."""
        return self._queued[-1][0]() if self._queued else None

    def awaited(self) -> Awaited | None:
        """What this rank waits for; None if it computes, or does something else."""
        if (waiting := self.waiting) is not None:
            return Awaited(waiting, waiting.count, is_on_device=False)
        if (issuing := self.issuing) is not None:
            return Awaited(issuing, issuing.count + 1, is_on_device=False)
        self._forget_what_is_over()
        if not self._queued:
            return None
        own, count, _ = self._queued[0]
        wait = own()
        return None if wait is None else Awaited(wait, count, is_on_device=True)

    def _forget_what_is_over(self) -> None:
        """Oldest first: a collective never depends on one that was issued after it."""
        try:
            while self._queued and self._queued[0][2].query():
                self._queued.popleft()
        except RuntimeError:  # the device has failed, and says so where it is used
            self._queued.clear()

    def issued_until(self, awaited: Awaited, is_shared: Callable[[Wait], bool]) -> dict[str, int]:
        """How many collectives of each kind this rank had issued with what it waits for, in their order.

        Of kinds that ``is_shared``: by the ranks that take part in it. Left out are those that this rank has
        issued ahead.
        """
        own = awaited.wait
        # If a device is more than a step behind the host, it is not known what came before.
        if own in self.waits and own.count == awaited.count:
            before = [wait for wait in self.waits if 0 < wait.number < own.number and is_shared(wait)]
        else:
            before = []
        due = {wait.kind: wait.count for wait in sorted(before, key=lambda wait: wait.number)}
        return due | {own.kind: awaited.count}

    def issued_by_kind(self) -> dict[str, int | None]:
        """How many collectives of each kind this rank has issued, public calls included; None where groups
        of the same name are sharded over different ranks."""
        issued: dict[str, int | None] = {f"call {name}": count for name, count in self.calls.items()}
        for wait in list(self.waits):
            issued[wait.kind] = None if wait.kind in issued else wait.count
        return issued
