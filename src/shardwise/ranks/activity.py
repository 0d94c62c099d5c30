"""What this rank does in training: what it has issued, what it waits for, which pass it is in.

The host waits while ``waiting`` is set, or ``issuing`` if a back end takes a collective. On a device only a
stream waits: the end event of the oldest unfinished collective shows what for; to query it does not block.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch.distributed as dist

from shardwise.layout.mesh import Axis
from shardwise.torch_compat import c10d

_MOST_QUEUED = 1024  # collectives on a device: no host is further ahead of it


@dataclass(eq=False, slots=True, weakref_slot=True)
class Wait:
    """A recurring wait of this rank: for a named event, or in a public call."""

    event: str
    name: str
    axes: Callable[[], Sequence[Axis]]
    number: int = 0  # of the awaited collective, among all that this rank has issued
    count: int = 0  # of those of this kind
    ordinal: int = 1  # distinguishes models that use the same names
    reason: str = ""  # why this rank waits, where others may have no reason to
    stream: Any = None  # on a device it waits instead of the host; has the ``last_event``
    monitor: Any = None  # records this rank's activity

    @property
    def kind(self) -> str:
        """The same on all ranks."""
        kind = f"{self.event} {self.name}"
        return kind if self.ordinal == 1 else f"{kind} ({self.ordinal})"

    @property
    def subject(self) -> str:
        """The beginning of a message that it failed."""
        if self.event == "call":
            return f"{self.name} failed"
        return f"{self.name}: its {self.event} failed" if self.name else f"The {self.event} failed"

    @property
    def ranks(self) -> list[int]:
        """The ranks that take part in it."""
        groups = [c10d.ranks_of(axis.pg) for axis in self.axes() if axis.pg is not None]
        return sorted({rank for group in groups for rank in group})


@dataclass(frozen=True)
class RankStatus:
    """What one rank reports about itself to others."""

    step: int = 0  # the running one, or the last
    phase: str = ""  # "forward", "backward"; outside both ""
    event: str = ""  # of its wait, if any, as in `Wait`
    name: str = ""
    kind: str = ""
    reason: str = ""
    count: int = 0
    ranks: Sequence[int] = ()  # that take part in it
    issued: Mapping[str, int | None] = field(default_factory=dict)  # collectives by kind; None: unknown
    due: Mapping[str, int] = field(default_factory=dict)  # how many all of ``ranks`` must have issued
    is_on_device: bool = False
    quiet_s: float = 0.0
    code: str = ""  # where the main thread is, outside torch and this library
    is_late: bool = False  # it has waited for too long
    has_ended: bool = False

    @property
    def moment(self) -> str:
        """A pass of the running step, or after the last step."""
        return f"step {self.step}, {self.phase}" if self.phase else f"after step {self.step}"


class RankActivity:
    """What one rank does. The training thread writes it, at the cost of a counter per collective."""

    def __init__(self, *, has_others: bool) -> None:
        self.has_others = has_others
        # Collectives of parameter groups. Those of other calls are not counted: a rank that has no peers
        # may make such calls alone.
        self.issued = 0
        self.waiting: Wait | None = None  # the wait of the host
        self.issuing: Wait | None = None  # the collective being given to the back end, which may block too
        self.waits: weakref.WeakSet[Wait] = weakref.WeakSet()  # all possible waits
        self.calls: Counter[str] = Counter()  # public calls that communicate, by name
        self._numbers = count(1)  # of models
        self.steps = 0  # backwards that have begun
        self.phase = ""  # "forward", "backward"; outside both ""
        self.quiet_looks = 0  # looks of the monitor since the last change
        self._known: Counter[tuple[str, str, frozenset[int]]] = Counter()  # waits, by event, name and ranks
        self._seen: object = None  # at the last look
        # On a device: the wait (weakly, or it would keep its model alive), its count, the event at its end.
        most = _MOST_QUEUED if has_others else 0
        self._queued: deque[tuple[weakref.ref[Wait], int, Any]] = deque(maxlen=most)

    # --- the training thread writes -----------------------------------------------------------------

    def note_wait(self, wait: Wait) -> None:
        """Register ``wait``. All ranks that take part in it register it, in the same order."""
        if not self.has_others or wait in self.waits:
            return
        # Never counted down: a discarded model may still live on some ranks.
        key = wait.event, wait.name, frozenset(wait.ranks)
        self._known[key] += 1
        wait.ordinal = self._known[key]
        self.waits.add(wait)

    def next_number(self) -> int:
        """A number that no other rank gives, and this one not again."""
        return next(self._numbers) * dist.get_world_size() + dist.get_rank()

    def issue(self, wait: Wait) -> None:
        """Count a collective that ``wait`` will wait for."""
        self.issued = wait.number = self.issued + 1
        wait.count += 1
        self.issuing = None
        if wait.stream is not None:
            self._queued.append((weakref.ref(wait), wait.count, wait.stream.last_event))

    # --- the monitor's thread reads -----------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the running step, from 1; outside forward and backward, of the last one."""
        return self.steps + (self.phase == "forward")

    @property
    def on_host(self) -> Wait | None:
        """What the host waits for, in a wait or in a back end that blocks while it takes a collective."""
        return self.waiting or self.issuing

    @property
    def last_wait(self) -> Wait | None:
        """What the host waits for, else what was queued last on a device, which may be over already."""
        return self.on_host or (self._queued[-1][0]() if self._queued else None)

    def count_look(self) -> Wait | None:
        """Count one look of the monitor, and return ``last_wait``. Looks are counted, not seconds: a process
        that was stopped for an hour has not waited an hour."""
        waiting, issuing = self.waiting, self.issuing
        # Kinds: to hold a wait would keep its model alive, and the wait of the next call may get its id.
        doing = waiting and (waiting.kind, waiting.number, waiting.count), issuing and issuing.kind
        seen = doing, self.issued, self.steps, self.phase
        self.quiet_looks = self.quiet_looks + 1 if seen == self._seen else 0
        self._seen = seen
        return self.last_wait

    def awaited(self) -> tuple[Wait, int, bool] | None:
        """This rank's wait, its count, and whether it is on a device; None if it does not wait."""
        if (waiting := self.waiting) is not None:
            return waiting, waiting.count, False
        if (issuing := self.issuing) is not None:
            return issuing, issuing.count + 1, False
        try:  # oldest first: a collective never depends on a later one
            while self._queued and self._queued[0][2].query():
                self._queued.popleft()
        except RuntimeError:  # the device has failed, and raises where it is used
            self._queued.clear()
        if not self._queued:
            return None
        own, count, _ = self._queued[0]
        return None if (wait := own()) is None else (wait, count, True)

    def status(self) -> RankStatus:
        """The current status of this rank, for others to read."""
        issued: dict[str, int | None] = {f"call {name}": count for name, count in self.calls.items()}
        for each in list(self.waits):  # unknown if groups on different ranks share a name
            issued[each.kind] = None if each.kind in issued else each.count
        if (awaited := self.awaited()) is None:
            return RankStatus(self.step, self.phase, issued=issued)
        wait, count, on_device = awaited
        # Collectives issued before it, in order; not those issued ahead.
        is_known = wait in self.waits and wait.count == count  # if not, the device is over a step behind
        before = [each for each in list(self.waits) if is_known and 0 < each.number < wait.number]
        before = sorted((each for each in before if each.ranks == wait.ranks), key=lambda each: each.number)
        due = {each.kind: each.count for each in before} | {wait.kind: count}
        what = wait.event, wait.name, wait.kind, wait.reason
        return RankStatus(self.step, self.phase, *what, count, wait.ranks, issued, due, on_device)
