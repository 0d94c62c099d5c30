"""Failures: the first error of any rank reaches every rank that waits for it, long before a timeout.

A rank on which an exception leaves a forward, a backward or a public call posts a note on the board of the
job. Waiting ranks do nothing extra. A thread in each process checks four times a second whether the same wait
still lasts, and reads notes only then. If a rank has failed before it issued the collective that this rank
waits for, the thread closes the connections of that wait, which raises at once:

    rank 1   issues 41, raises, posts a note (41)
    rank 0   issues 41, issues 42, waits for 42 ... reads the note: 42 will never come from rank 1

A rank may catch an exception and continue: it then marks its note as over, and others wait a while for that.
All ranks may raise alike and continue, some sooner: a rank that has itself failed after the same number of
collectives ignores such a note.

On a device, collectives are queued, and the host does not wait. There the thread reads notes whenever nothing
has been issued for half a second, and aborts all of NCCL's communicators, so that the device does not hang;
the error is raised at the next forward, backward or public call. Failures that NCCL detects (a network
failure, a timeout) reach a thread of torch, which ends the process. With TORCH_NCCL_ASYNC_ERROR_HANDLING=2 it
aborts the communicators instead: the next collective then raises here, and is explained like any other.
"""

import atexit
import inspect
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist

from shardwise.layout.mesh import Axis
from shardwise.ranks.activity import RankActivity, RankStatus, Wait
from shardwise.ranks.board import Board
from shardwise.ranks.model_ranks import axes_of_given
from shardwise.ranks.watch import VARIABLE, StallReporter, Statuses, deadlock, disagreement_text, ended_text
from shardwise.torch_compat import c10d, interpreter

INTERVAL_S = 0.25  # between two checks whether a wait still lasts
STUCK_LOOKS = 8  # checks of one wait before ranks post what they wait for
PATIENCE_LOOKS = 3  # in which the failed rank must not have continued; with the checks before, 1.5 s
SEARCH_LOOKS = 4  # how often to look for the exception of a backward
ABORT_PATIENCE_S = 5.0  # before the caller knows, who may destroy process groups: see wait_for_aborts
# How long to wait for the posts of others after a failed wait:
TIMEOUT_PATIENCE_S = 3.0  # a timeout hits them too
CLOSED_PATIENCE_S = 1.0  # all waiting ranks notice a closed connection at once
PEER_PATIENCE_S = 0.3  # if the peer of the connection is known: it posts before it ends, if at all

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class CommunicationError(RuntimeError):
    """A collective has failed. The text names the rank that failed and what it raised, the rank that ended,
    or how the ranks disagree; this rank is not the cause."""


@dataclass(frozen=True)
class FailureNote:
    """A failure of one rank, the ``ordinal``-th after it had ``issued`` this many collectives."""

    rank: int
    where: str
    error: str
    issued: int = 0
    ordinal: int = 1
    is_over: bool = False  # the rank has continued
    between: Sequence[int] = ()  # no rank has raised: these ranks wait for each other
    key: int = 0

    def text(self, subject: str) -> str:
        """The message of a rank that it stopped."""
        if self.between:
            return f"{subject}, because {self.error}"
        return (
            f"{subject}, because rank {self.rank} has failed in {self.where}: {self.error}\n"
            f"This rank waited for what rank {self.rank} has not sent any more. "
            f"The traceback is in the log of rank {self.rank}."
        )


class FailureMonitor(RankActivity):
    """Reports this rank's failures and reads those of others.

    It has fewer than 30 attributes: with more, Python 3.11 finds each more slowly.
    """

    def __init__(self, store: Any, rank: int, world: int = 1) -> None:
        super().__init__(has_others=store is not None)
        self.rank = rank
        self.failure: FailureNote | None = None  # of another rank, which this one cannot survive
        self._aborts: c10d.Aborts = {}  # for this failure
        self.watch: StallReporter | None = None
        self._board = Board(store)
        self._lock = threading.RLock()  # a finalizer may report inside it
        self._own: FailureNote | None = None  # posted, and not over
        self._failed_at = (-1, 0)  # collectives issued, and how many failures there
        # For the exception of a backward: where, exceptions by thread before, looks since.
        self._search: tuple[str, dict[int, Any], int] | None = None
        self._suspects: Counter[int] = Counter()  # in how many checks of this wait failures were not over
        self._unraised: FailureNote | None = None  # a failure that has not been raised on the host yet
        self._heeded: set[int] = set()  # failures that were raised here
        self._oldest = 1  # failure that may not be over
        self._stuck: Statuses | None = None  # what ranks have posted, once this one has
        self._ended_looks = 0  # since the connections of a wait were closed, while it still lasts
        if not self.has_others:
            return
        self.watch = StallReporter(self._board, rank, world, self, INTERVAL_S)
        for note in self.active_failures():  # of an earlier process group in this store
            if note.rank == rank:
                self._post(replace(note, is_over=True))

    # --- failures of this rank ----------------------------------------------------------------------

    def begin(self) -> None:
        """This rank continues: its exception was caught. Raise CommunicationError if another rank has failed,
        and the work that this rank has queued since is lost."""
        if self._own is None and self.failure is None and self._search is None:
            self.issuing = None  # the caller may have caught its exception
            return
        with self._lock:
            unraised, self._unraised = self._unraised, None
            self.failure = self.issuing = self._search = None
            self._queued.clear()
            self._end_own()
        if unraised is not None:
            c10d.wait_for_aborts(ABORT_PATIENCE_S)
            raise CommunicationError(unraised.text("Communication on the device failed"))

    def report(self, error: BaseException, where: str) -> None:
        """Report an exception that leaves ``where`` on this rank. Never raises."""
        if not isinstance(error, CommunicationError):
            kind = type(error).__name__
            self._report(where, f"{kind}: {error}"[:2000] if str(error) else kind)

    def report_backward(self, where: str) -> None:
        """Report a failed backward, once its exception is found: it has not reached the caller yet."""
        with self._lock:
            if self._search is None and self._fails():
                self._search = where, interpreter.handled_exceptions(), 0

    def _fails(self) -> bool:
        """Count a failure of this rank; False if the others know one already, or have caused it."""
        if not self.has_others or self.failure is not None or self._own is not None:
            return False
        before, times = self._failed_at
        self._failed_at = self.issued, times + 1 if before == self.issued else 1
        return True

    def _report(self, where: str, error: str) -> None:
        with self._lock:
            search, self._search = self._search, None
            if search is not None or self._fails():
                self._own = FailureNote(self.rank, search[0] if search else where, error, *self._failed_at)
                with suppress(dist.DistError):  # the store has ended: no rank can read it
                    self._own = self._post(self._own)

    def _find_exception(self) -> None:
        """Report a backward with its exception, which some thread is handling."""
        with self._lock:
            if self._search is None:
                return
            (where, before, looks), now = self._search, interpreter.handled_exceptions()
            new = [error for key, error in now.items() if error is not None and error is not before.get(key)]
            if new and isinstance(new[0], CommunicationError):
                self._search = None
            elif new:
                self.report(new[0], where)
            elif looks == SEARCH_LOOKS:
                self._report(where, "an exception; see its log")
            else:
                self._search = where, before, looks + 1

    def _end_own(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            with suppress(dist.DistError):
                self._post(replace(own, is_over=True))

    def _post(self, note: FailureNote) -> FailureNote:
        note = replace(note, key=note.key or self._board.count("failures"))
        self._board.post(f"failures/{note.key}", note)
        return note

    @contextmanager
    def call(self, caller: str, axes: Callable[[], Sequence[Axis]]) -> Iterator[None]:
        """Around a public call that communicates along ``axes``."""
        if not self.has_others or self.waiting is not None:  # waiting: inside another call
            yield
            return
        self.begin()
        self.calls[caller] += 1
        wait = self.waiting = Wait("call", caller, axes, self.issued + 1, self.calls[caller])
        try:
            yield
        except Exception as error:
            if not c10d.is_communication_error(error):
                self.report(error, caller)
            self.raise_explained(error, wait)
        finally:
            self.waiting = None

    @contextmanager
    def collective(self, wait: Wait) -> Iterator[None]:
        """Around an exchange in a forward or backward that sends no parameters or gradients of a group."""
        if not self.has_others:
            yield
            return
        self.note_wait(wait)
        wait.number = self.issued + 1
        wait.count += 1
        around, self.waiting = self.waiting, wait
        try:
            yield
            self.issued += 1
        except RuntimeError as error:
            self.raise_explained(error, wait)
        finally:
            self.waiting = around

    # --- failures of other ranks --------------------------------------------------------------------

    def active_failures(self) -> list[FailureNote]:
        """Failures of ranks that have not continued since, the oldest first."""
        newest = self._board.count("failures", 0)
        notes = {key: self._board.read(f"failures/{key}") for key in range(self._oldest, newest + 1)}
        # None: about to be posted.
        active = {key: note for key, note in notes.items() if note is None or not note["is_over"]}
        self._oldest = min(active, default=newest + 1)
        return [FailureNote(**note) for note in active.values() if note is not None]

    def raise_explained(self, error: Exception, wait: Wait) -> NoReturn:
        """Raise ``explained`` if ``error`` is one of communication; else ``error`` itself."""
        if not c10d.is_communication_error(error):
            raise error
        raise self.explained(error, wait) from error

    def explained(self, error: Exception, wait: Wait) -> Exception:
        """The exception to raise instead of ``error``, which ended ``wait``."""
        if not self.has_others:
            return error
        with self._lock:  # the thread may be about to take a failure that it has posted
            try:
                cause = self.failure or self._cause_of(error, wait)
            except dist.DistError as lost:
                cause = (
                    f", and the store of the job does not answer ({str(lost).splitlines()[0]}): the process "
                    "that holds it has ended, which is rank 0 unless torchrun started the job. See its log."
                )
            if isinstance(cause, FailureNote):
                self._take(cause)
                cause = cause.text("")
        c10d.wait_for_aborts(ABORT_PATIENCE_S)
        return CommunicationError(wait.subject + cause)

    def _cause_of(self, error: Exception, wait: Wait) -> FailureNote | str:
        """The failure behind ``error``, if a rank has posted one, otherwise the end of this rank's message.

        Each rank posts what it waited for. If a connection was closed, a rank has ended: the one that posts
        nothing. If the timeout of the process group has passed, ranks usually disagree.
        """
        own = RankStatus(self.step, self.phase, wait.event, wait.name)
        groups = {axis.pg.group_name: c10d.ranks_of(axis.pg) for axis in wait.axes() if axis.pg is not None}
        for group in groups:
            self._board.post(f"failed/{group}/{self.rank}", own)
        is_timeout, peer = c10d.is_timeout(error), getattr(error, "peer", None)
        started = time.monotonic()
        waits: dict[int, RankStatus | None] = {}
        while True:
            patience_s = TIMEOUT_PATIENCE_S if is_timeout else CLOSED_PATIENCE_S
            if peer in waits and waits[peer] is None and not is_timeout:
                patience_s = PEER_PATIENCE_S
            is_late = time.monotonic() - started >= patience_s
            for note in self.active_failures():
                if self._heeds(note):
                    return note
            for group, ranks in groups.items():
                waits |= self._board.statuses(f"failed/{group}", ranks)
            if is_late or None not in waits.values():
                break
            time.sleep(0.02)
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        silent = sorted(rank for rank, wait in waits.items() if wait is None)
        if silent and not is_timeout:
            return ended_text(own, self._board.statuses("ended", silent), peer, first_line)
        if len({wait and (wait.event, wait.name) for wait in waits.values()}) > 1:
            return f" ({first_line}), because {disagreement_text(waits)}"
        return f": {error}"

    def _take(self, note: FailureNote) -> None:
        self.failure, self._aborts = note, {}
        self._heeded.add(note.key)

    def _heeds(self, note: FailureNote) -> bool:
        """Whether to act on a note: another rank has failed, and this one has not failed alike."""
        issued, times = self._failed_at
        is_alike = note.issued == issued and note.ordinal <= times
        return note.rank != self.rank and note.key not in self._heeded and not is_alike

    # --- the thread -----------------------------------------------------------------------------------

    def look(self) -> None:
        """One check of the thread."""
        if self._search is not None:
            self._find_exception()
        waiting = self.count_look()
        try:
            if self.watch is not None:
                self.watch.look()
        except dist.DistError:
            raise
        except Exception:  # failures are still reported
            self.watch = None
            _log.exception("Long waits are not reported any more")
        if waiting is None or self.quiet_looks == 0:
            self._suspects.clear()
            self._ended_looks = 0
            if self._stuck is not None:
                self._stuck = None
                self._board.post(f"stuck/{self.rank}", None)
            return
        if self.quiet_looks > 1 and self.failure is None:
            with self._lock:
                self._look_at_failures(waiting)
                is_time = self.quiet_looks >= STUCK_LOOKS and self.quiet_looks % 2 == 0
                if self.failure is None and is_time and waiting is self.waiting:
                    self._look_for_deadlock(waiting)
        with self._lock:  # aborts begin before this rank raises, which waits for them
            if self.failure is not None and waiting is self.last_wait:
                self._end_waits(self.failure, waiting)

    def _end_waits(self, failure: FailureNote, waiting: Wait) -> None:
        """Make what this rank waits for raise; with the lock."""
        if waiting is not self.on_host:
            self._unraised = failure
        pgs = [axis.pg for axis in waiting.axes() if axis.pg is not None]
        c10d.end_waits(pgs, self._aborts)
        self._ended_looks += 1
        if self._ended_looks == PATIENCE_LOOKS:
            # Nothing can end the waits of some back ends, so log why this one is in vain.
            text = failure.text(waiting.subject)
            _log.error("%s\nThe back end does not let this wait end before its timeout.", text)

    def _look_at_failures(self, waiting: Wait) -> None:
        """Fail if a rank failed before it issued the awaited collective, and has not continued since."""
        ranks = waiting.ranks
        number = self.issued + 1 if waiting is self.issuing else waiting.number
        for note in self.active_failures():
            if self.rank in note.between and note.key not in self._heeded:
                return self._take(note)
            if note.rank in ranks and self._heeds(note) and note.issued < number:
                self._suspects[note.key] += 1
                if self._suspects[note.key] >= PATIENCE_LOOKS:
                    self._take(note)
                return

    def _look_for_deadlock(self, waiting: Wait) -> None:
        """Post what this rank waits for; the first rank checks whether ranks wait for each other."""
        if self._stuck is None:
            status = self.status()
            if status.event == "call" or status.issued.get(status.kind) is None:
                return  # a call, or an ambiguous name
            # Only the last: ranks that left out earlier collectives may still wait for each other.
            self._board.post(f"stuck/{self.rank}", replace(status, due={status.kind: status.count}))
            self._stuck = {}
        ranks = waiting.ranks
        if ranks[:1] == [self.rank]:
            before, self._stuck = self._stuck, self._board.statuses("stuck", ranks)
            if self._stuck == before and (text := deadlock(self._stuck)) is not None:
                self._take(self._post(FailureNote(self.rank, "", text, between=ranks)))

    def at_exit(self) -> None:
        """At the end of the process: post that it ends, and the exception that ended it."""
        # Only if the store outlives its ranks: a store that is gone answers slowly, and writes to stderr.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            with suppress(dist.DistError):
                self._board.post(f"ended/{self.rank}", RankStatus(self.step, has_ended=True))
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self.report(error, "its program")


NO_OTHERS = FailureMonitor(None, 0)
"""The monitor of a job without other ranks, or without a store."""

_MONITORS: weakref.WeakKeyDictionary[dist.ProcessGroup, FailureMonitor] = weakref.WeakKeyDictionary()


def monitor_of_job() -> FailureMonitor:
    """The monitor of this rank, one for each default process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return NO_OTHERS
    pg = dist.group.WORLD
    assert pg is not None
    found = _MONITORS.get(pg)
    if found is None:
        found = _MONITORS[pg] = NO_OTHERS if pg.size() == 1 or c10d.is_fake(pg) else _started(pg)
    return found


def _started(pg: dist.ProcessGroup) -> FailureMonitor:
    """A new monitor, with its thread, which runs as long as the monitor lives."""
    monitor = FailureMonitor(c10d.job_store_client(), pg.rank(), pg.size())
    has_ended = threading.Event()
    own = weakref.ref(monitor, lambda _: has_ended.set())

    def look() -> None:
        while not has_ended.wait(INTERVAL_S) and (looking := own()) is not None:
            try:
                looking.look()
            except dist.DistError:  # the store has ended, and the process will
                pass
            except Exception:
                _log.exception("Could not look for failures of other ranks")
            del looking

    def at_exit() -> None:
        has_ended.set()  # a thread inside torch while the interpreter shuts down would crash the process
        thread.join(timeout=2.0)
        c10d.wait_for_aborts(ABORT_PATIENCE_S)
        if (ending := own()) is not None:
            ending.at_exit()

    thread = threading.Thread(target=look, name="shardwise monitor", daemon=True)
    thread.start()
    atexit.register(at_exit)
    return monitor


def set_wait_limit(seconds: float | None) -> None:
    """Choose how long a rank waits for others before all ranks report where they are.

    If a rank waits longer in a collective of a sharded model, or in a call that communicates, every rank logs
    one warning of ``shardwise.ranks.watch``: which ranks wait for what, and where the others are. The job
    keeps running. Ranks that compute or read data for long are mentioned only if another rank waits for them.

    Args:
        seconds: by default the environment variable ``SHARDWISE_WAIT_LIMIT`` (0: never), or 30 if it is not
            set. None: no reports. Pass the same on all ranks: a rank without reports does not report where it
            is.

    Raises:
        ValueError: it is not above 0.
        RuntimeError: there is no process group yet.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"set_wait_limit: seconds is {seconds!r}; pass a time above 0, or None.")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "set_wait_limit: there is no process group, whose ranks could wait for each other. Call it after "
            f"init_process_group, or set the environment variable {VARIABLE}."
        )
    if (reporter := monitor_of_job().watch) is not None:
        reporter.limit_s = seconds


def monitored(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function that communicates between the ranks of its first argument, or between all
    ranks if that is neither a module nor parameters. Other ranks can see that this one is in it, and what it
    raises."""
    name_of_first = next(iter(inspect.signature(function).parameters))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        monitor = monitor_of_job()
        if monitor is NO_OTHERS:
            return function(*args, **kwargs)
        first = args[0] if args else kwargs.get(name_of_first)
        with monitor.call(function.__name__, lambda: axes_of_given(first)):
            return function(*args, **kwargs)

    return call
