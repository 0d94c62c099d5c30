"""Who waits for whom: while a rank waits for long, all ranks tell where they are, and each prints the report.

The thread of the relay (failures.py) looks four times a second, from outside. A rank that has waited for
longer than the limit opens a round in the store of the job. All ranks ask the store for a new round six times
within the limit, whatever they do.

    rank 0   has waited for 30 s: rounds = 1     ... reads all places, writes report/1    prints
    rank 3   somewhere else       sees rounds = 1, writes place/1/3        sees report/1, prints

    shardwise/places/rounds         how many rounds there have been
    shardwise/places/claim/1        who opens a round counts this up, and only the first does
    shardwise/places/place/1/3      where rank 3 is
    shardwise/places/report/1       the text; empty if the wait was over, or nobody has to be waited for
    shardwise/places/ended/3        where rank 3 was when its process ended

Told are waits in collectives of parameter groups, in comparisons of plans, and in public calls that
communicate, on the host and on devices. Not told: what the caller communicates, as in ``dist.barrier()``, and
what graphs communicate that were compiled as a whole; and ranks that only compute, read data, evaluate or are
at a prompt, for as long as no rank waits for them.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

import torch.distributed as dist

from shardwise.ranks.failure_notes import ENDED
from shardwise.ranks.places import Place, report_of
from shardwise.ranks.position import Position, Wait
from shardwise.torch_compat import interpreter

DEFAULT_LIMIT_S = 30.0
VARIABLE = "SHARDWISE_WAIT_LIMIT"

_LOOKS_IN_LIMIT = 6
"""How often the store is asked for new rounds within the limit."""

_PATIENCE = 2
"""For how many of these intervals the places of all ranks are waited for."""

_KEY = "shardwise/places"
_log = logging.getLogger(__name__)


def limit_of_environment() -> float | None:
    """The limit in seconds that SHARDWISE_WAIT_LIMIT gives, or the default; None: never report.

    Raises:
        ValueError: it is no number from 0 on.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT_LIMIT_S
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = -1.0
    if not limit_s >= 0:
        raise ValueError(f"{VARIABLE} is {text!r}; set it to seconds, or to 0 for no reports.")
    return limit_s or None


class Watch:
    """One rank's end. ``position``: where this rank is; ``ranks_of``: who takes part in a wait;
    ``interval_s``: between two looks."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        position: Position,
        ranks_of: Callable[[Wait], Iterable[int]],
        interval_s: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._position = position
        self._ranks_of = ranks_of
        self._interval_s = interval_s
        self.limit_s: float | None = limit_of_environment()
        self._mark: object = None
        self._quiet = 0  # looks since the training thread did anything
        self._device_quiet = 0  # looks since the device has completed a collective, once that is asked
        self._oldest: tuple[int, int] | None = None  # which collective the device waits for
        self._told_at: int | None = None  # looks: when this wait was reported, or asked about in vain
        self._since_asked = 0
        self._seen = store.add(f"{_KEY}/rounds", 0)  # rounds of an earlier process group in this store
        self._open = 0  # the round whose report is awaited
        self._leads = False
        self._open_for = 0

    def look(self) -> None:
        """One look of the thread. Costs nothing but a comparison unless it is time to ask the store."""
        if self.limit_s is None:
            return
        self._count_quiet()
        if self._open:
            self._follow_round()
            return
        self._since_asked += 1
        if self._since_asked >= self._looks(self.limit_s / _LOOKS_IN_LIMIT):
            self._since_asked = 0
            self._join_round()
        if not self._open and self._is_late() and not self._is_told():
            self._open_round()

    # --- how long -----------------------------------------------------------------------------------

    def _looks(self, seconds: float) -> int:
        # Looks are counted, not seconds: a process that was stopped for an hour has not waited for one.
        return max(1, round(seconds / self._interval_s))

    def _count_quiet(self) -> None:
        mark = self._position.mark
        if mark != self._mark:
            self._mark, self._quiet, self._device_quiet, self._told_at = mark, 0, 0, None
            self._oldest = None
            return
        self._quiet += 1
        assert self.limit_s is not None
        # Events are asked only once nothing was issued for a while: a CUDA graph that another thread captures
        # does not survive such questions.
        if self._quiet < self._looks(self.limit_s / 3):
            return
        awaited = self._position.awaited()
        oldest = None if awaited is None else (id(awaited.wait), awaited.count)
        if oldest != self._oldest:
            self._oldest, self._device_quiet = oldest, 0
        else:
            self._device_quiet += 1

    def _is_late(self) -> bool:
        assert self.limit_s is not None
        limit = self._looks(self.limit_s)
        # On a device, what is waited for was first looked at after a third of the limit.
        return self._oldest is not None and self._quiet >= limit and self._device_quiet >= limit // 2

    def _is_nearly_late(self) -> bool:
        """Late enough to be told once another rank is late."""
        return self._oldest is not None and self._quiet >= self._looks((self.limit_s or 0) / 2)

    def _is_told(self) -> bool:
        return self._told_at is not None and self._quiet < self._told_at

    # --- rounds -------------------------------------------------------------------------------------

    def _open_round(self) -> None:
        """Ask all ranks where they are, unless another rank has just done so."""
        self._ask_again_in(self._looks(self.limit_s or 0))
        if self._store.add(f"{_KEY}/claim/{self._seen + 1}", 1) == 1:
            self._leads = True
            self._store.add(f"{_KEY}/rounds", 1)
        self._join_round()

    def _join_round(self) -> None:
        """Tell where this rank is if a rank has asked."""
        newest = self._store.add(f"{_KEY}/rounds", 0)
        if newest == self._seen:
            return
        self._seen = self._open = newest
        self._open_for = 0
        place = json.dumps(asdict(self.place()))
        self._store.set(f"{_KEY}/place/{newest}/{self._rank}", place)

    def _follow_round(self) -> None:
        """Print the report when it is there; the rank that has asked writes it."""
        self._open_for += 1
        assert self.limit_s is not None
        patience = 2 + _PATIENCE * self._looks(self.limit_s / _LOOKS_IN_LIMIT)
        if self._leads:
            self._write_report(is_last=self._open_for >= patience)
        text = self._value(f"{_KEY}/report/{self._open}")
        if text is not None:
            if text:
                _log.warning(text)
                self._told_at = None if self._oldest is None else 1 << 62  # this wait: once
            self._open = 0
        elif self._open_for >= 2 * patience:  # who has asked is gone
            self._open = 0

    def _write_report(self, *, is_last: bool) -> None:
        ranks = range(self._world)
        told = {rank: self._value(f"{_KEY}/place/{self._open}/{rank}") for rank in ranks}
        for rank in [rank for rank in ranks if told[rank] is None]:
            told[rank] = self._value(f"{ENDED}/{rank}")
        if None in told.values() and not is_last:
            return
        places = {rank: None if each is None else Place(**json.loads(each)) for rank, each in told.items()}
        self._store.set(f"{_KEY}/report/{self._open}", report_of(places) if self._is_late() else "")
        self._leads = False

    def _ask_again_in(self, looks: int) -> None:
        self._told_at = self._quiet + looks

    def _value(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    # --- this rank ----------------------------------------------------------------------------------

    def tell_end(self) -> None:
        """The process ends. Told where the store outlives its ranks: asking one that is gone takes long, and
        writes to stderr."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            ended = Place(step=self._position.step, has_ended=True)
            self._store.set(f"{ENDED}/{self._rank}", json.dumps(asdict(ended)))

    def place(self) -> Place:
        """Where this rank is now."""
        position, awaited = self._position, self._position.awaited()
        place = Place(
            step=position.step,
            phase=position.phase,
            quiet_s=self._quiet * self._interval_s,
            code=interpreter.where_main_thread_is(),
            issued=position.issued_by_kind(),
        )
        if awaited is None:
            return place
        ranks = sorted(self._ranks_of(awaited.wait))
        return replace(
            place,
            event=awaited.wait.event,
            name=awaited.wait.name,
            kind=awaited.wait.kind,
            count=awaited.count,
            ranks=ranks,
            due=position.issued_until(awaited, lambda wait: sorted(self._ranks_of(wait)) == ranks),
            is_late=self._is_nearly_late(),
            is_on_device=awaited.is_on_device,
        )
