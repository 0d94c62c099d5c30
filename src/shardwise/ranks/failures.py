"""Failures: the first error of any rank reaches every rank that waits for it, long before a timeout.

A rank on which an exception leaves a forward, a backward or a public call posts a note in the store of the
job. Waiting ranks do nothing extra. A thread in each process checks four times a second whether the same wait
still lasts; only then it reads notes. If a rank has failed before it issued the collective that this rank
waits for, the thread closes the connections of that wait, which raises at once:

    rank 1   issues 41, raises, posts a note (41)
    rank 0   issues 41, issues 42, waits for 42 ... reads the note: 42 will never come from rank 1

On a device, the host does not wait: collectives are queued. There the thread reads notes whenever nothing has
been issued for half a second, and aborts the communicators, so that the device does not hang; the error is
raised at the next forward, backward or public call.

What NCCL itself finds (a network that fails, a timeout) is seen by a thread of torch, not by a call of ours:
it writes to the log and ends the process, on every rank. TORCH_NCCL_ASYNC_ERROR_HANDLING=2 has it abort the
communicators instead, upon which the next collective raises here, and is explained as any other.

A rank may catch an exception and continue: then it marks its note as over, for which others have some
patience. All ranks may raise alike and continue, some sooner than others: a rank that has failed itself after
as many collectives ignores such a note.

If all ranks of a process group have waited for two seconds, the same thread compares who waits for what.
It also reports waits that take long, whatever the reason (watch.py).
"""

import atexit
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from shardwise.layout.mesh import Axis
from shardwise.ranks.disagreement import deadlock, explain_failure, relayed_text, subject_of
from shardwise.ranks.failure_notes import FailureNote, FailureNotes
from shardwise.ranks.model_ranks import axes_of_given
from shardwise.ranks.position import Position, Wait
from shardwise.ranks.watch import VARIABLE, Watch
from shardwise.torch_compat import c10d, interpreter

INTERVAL_S = 0.25
"""How often a process checks whether a wait still lasts."""

STUCK_LOOKS = 8
"""After so many checks of one wait, ranks tell each other what they wait for."""

PATIENCE_LOOKS = 3
"""In how many checks the failed rank must not have continued. All together, it takes a second and a half."""

VAGUE_S = 1.0
"""How long to look for the exception of a backward."""

_FINE_S = 0.01
_log = logging.getLogger(__name__)
_MOST_TEXT = 2000

P = ParamSpec("P")
T = TypeVar("T")


class CommunicationError(RuntimeError):
    """A collective has failed. The text says which rank has failed and what it raised, which rank has ended,
    or how the ranks disagree; this rank has done nothing wrong by itself."""


class Relay(Position):
    """One rank's end of the relay. Made by ``relay_of_job``; ``SILENT`` where there are no other ranks."""

    def __init__(self, store: dist.Store | None, rank: int, world: int = 1) -> None:
        super().__init__(has_others=store is not None)
        self.rank = rank
        self.failure: FailureNote | None = None  # of another rank, which this one cannot survive
        self._notes = None if store is None else FailureNotes(store)
        self._lock = threading.RLock()  # a finalizer may report inside of it
        self._own: FailureNote | None = None  # posted, and not over
        self._failed_at = (-1, 0)  # collectives issued, and how many failures there
        self._seen = (0, 0)  # the wait by its id: holding it would keep its model alive until the next look
        self._looks = 0
        self._suspect = (0, 0)  # a failure, and the checks in which it was not over
        self._unraised: FailureNote | None = None  # a failure that only the device has met
        self._heeded: set[int] = set()  # failures that were raised here
        self._is_stuck = False
        self._stuck_before: Any = None
        self._look_for: tuple[FailureNote, dict[int, Any], int] | None = None
        self._ended_looks = 0  # since a wait was ended that lasts all the same
        self.watch: Watch | None = None
        if store is not None:
            self.watch = Watch(store, rank, world, self, lambda wait: _ranks_along(wait.axes()), INTERVAL_S)
        if self._notes is not None:
            for note in self._notes.active():  # of an earlier process group in this store
                if note.rank == rank:
                    self._notes.post(note.over())

    # --- failures of this rank ----------------------------------------------------------------------

    def note_wait(self, wait: Wait) -> None:
        """``wait`` may come from now on. All ranks that take part in it say so, in the same order."""
        if self._notes is not None:
            self.expect(wait, _ranks_along(wait.axes()))

    def begin(self) -> None:
        """This rank continues: its exception was caught.

        Raises:
            CommunicationError: another rank has failed, and what this rank has queued since is lost.
        """
        if self._own is None and self.failure is None:
            self.issuing = None  # one that failed was caught
            return
        with self._lock:
            unraised, self._unraised = self._unraised, None
            self._look_for = self.failure = self.issuing = None
            self._queued.clear()
            if self._own is not None:
                self._post(self._own.over())
            self._own = None
        if unraised is not None:
            raise CommunicationError(relayed_text("Communication on the device failed", unraised))

    def report(self, error: BaseException, where: str) -> None:
        """Report an exception that leaves ``where`` on this rank. Never raises."""
        if isinstance(error, CommunicationError):
            return
        with self._lock:
            if self._own is None:
                self._post_new(where, _text_of(error))
            elif self._own.is_vague:
                self._own, self._look_for = self._post(self._own.completed(_text_of(error))), None

    def report_backward(self, where: str) -> None:
        """Report a failed backward. Its exception is on its way to the caller, and not available yet."""
        with self._lock:
            if self._own is None:  # else an inner backward has failed before, for the same reason
                self._post_new(where, "an exception; see its log", is_vague=True)
                if self._own is not None:
                    self._look_for = self._own, interpreter.handled_exceptions(), int(VAGUE_S / _FINE_S)

    def _post_new(self, where: str, text: str, is_vague: bool = False) -> None:
        if self._notes is None or self.failure is not None:
            return
        before, times = self._failed_at
        self._failed_at = self.issued, times + 1 if before == self.issued else 1
        self._own = self._post(FailureNote(self.rank, where, text, *self._failed_at, is_vague=is_vague))

    def _post(self, note: FailureNote) -> FailureNote | None:
        assert self._notes is not None
        try:
            return self._notes.post(note)
        except dist.DistError:  # the store has ended: there is nobody to tell
            return None

    @contextmanager
    def call(self, caller: str, axes: Callable[[], Sequence[Axis]]) -> Iterator[None]:
        """Around a public call that communicates along ``axes``."""
        if self._notes is None or self.waiting is not None:  # or inside of another
            yield
            return
        self.begin()
        self.calls[caller] += 1
        self.waiting = Wait("call", caller, axes, self.issued + 1, self.calls[caller])
        try:
            yield
        except Exception as error:
            if c10d.is_communication_error(error):
                raise self.explained(error, "call", caller, axes()) from error
            self.report(error, caller)
            raise
        finally:
            self.waiting = None

    @contextmanager
    def collective(self, wait: Wait) -> Iterator[None]:
        """Around a collective of a forward or backward that is of no group's parameters or gradients."""
        if self._notes is None:
            yield
            return
        try:
            with self.exchange(wait, _ranks_along(wait.axes())):
                yield
        except RuntimeError as error:
            if not c10d.is_communication_error(error):
                raise
            raise self.explained(error, wait.event, wait.name, wait.axes()) from error

    # --- failures of other ranks --------------------------------------------------------------------

    def explained(self, error: Exception, event: str, name: str, axes: Sequence[Axis]) -> Exception:
        """The exception to raise instead of ``error``, which a collective along ``axes`` has raised."""
        if isinstance(error, CommunicationError) or self._notes is None:
            return error
        with self._lock:  # the thread may just be about to take a failure that it has posted
            if self.failure is not None:
                return CommunicationError(relayed_text(subject_of(event, name), self.failure))
            try:
                own = self._told(event, name)
                note, text = explain_failure(self._notes, self._heeds, self.rank, error, own, axes)
            except dist.DistError as lost:
                note, text = None, _without_store(event, name, lost)
        if note is not None:
            self._take(note)
        return CommunicationError(text)

    def _told(self, event: str, name: str) -> dict[str, Any]:
        """What other ranks read of a wait of this one."""
        return {"event": event, "name": name, "step": self.step, "phase": self.phase}

    def _take(self, note: FailureNote) -> None:
        self.failure = note
        self._heeded.add(note.key)

    def _heeds(self, note: FailureNote) -> bool:
        """Whether to act on a note: a failure of another rank that this rank has not had as well."""
        issued, times = self._failed_at
        is_alike = note.issued == issued and note.ordinal <= times
        return note.rank != self.rank and note.key not in self._heeded and not is_alike

    def _look_for_waits(self, watch: Watch) -> None:
        """Reports of waits are a help; failures are relayed without them, too."""
        try:
            watch.look()
        except dist.DistError:  # the store has ended
            raise
        except Exception:
            self.watch = None
            _log.exception("Who waits for whom is not reported any more on this rank")

    def look(self) -> float:
        """One check of the thread. Returns the seconds until the next one."""
        if self._look_for is not None:
            self._find_exception()
            return _FINE_S
        if self.watch is not None:
            self._look_for_waits(self.watch)
        waiting = self._awaited()
        now = (id(waiting), 0 if waiting is None else waiting.number)
        if waiting is None or now != self._seen:
            self._seen, self._looks, self._suspect, self._ended_looks = now, 0, (0, 0), 0
            if self._is_stuck:
                self._leave_stuck()
            return INTERVAL_S
        self._looks += 1
        if self._looks > 1 and self.failure is None:
            with self._lock:
                self._look_at_notes(waiting)
                is_time = self._looks >= STUCK_LOOKS and self._looks % 2 == 0
                if self.failure is None and is_time and waiting is self.waiting:
                    self._look_at_stuck(waiting)
        if self.failure is not None and waiting is self._awaited():
            if waiting is not self.on_host:
                self._unraised = self.failure
            _end(waiting.axes())
            self._tell_if_not_ended(waiting)
        return INTERVAL_S

    def _awaited(self) -> Wait | None:
        """What the host waits for, else what was queued last on a device: that may be over already."""
        return self.on_host or self.last_on_device()

    def _tell_if_not_ended(self, waiting: Wait) -> None:
        """Nothing can end the waits of some back ends: then the log has to say why this one is in vain."""
        self._ended_looks += 1
        if self._ended_looks == PATIENCE_LOOKS and self.failure is not None:
            text = relayed_text(subject_of(waiting.event, waiting.name), self.failure)
            _log.error("%s\nThe back end does not let this wait end before its timeout.", text)

    def _look_at_notes(self, waiting: Wait) -> None:
        """Fail if a rank failed before it issued what this rank waits for, and has not continued since."""
        assert self._notes is not None
        ranks = _ranks_along(waiting.axes())
        number = self.issued + 1 if waiting is self.issuing else waiting.number
        for note in self._notes.active():
            if self.rank in note.between and note.key not in self._heeded:
                self._take(note)
                return
            if note.rank in ranks and self._heeds(note) and note.issued < number:
                suspect, times = self._suspect
                self._suspect = (note.key, times + 1 if suspect == note.key else 1)
                if self._suspect[1] >= PATIENCE_LOOKS and not note.is_vague:
                    self._take(note)
                return

    def _look_at_stuck(self, waiting: Wait) -> None:
        """Post what this rank waits for; the first rank finds out whether ranks wait for each other."""
        assert self._notes is not None
        issued = self.issued_by_kind()
        if waiting not in self.waits or issued[waiting.kind] is None:
            return  # a call, or a name that tells too little
        if not self._is_stuck:
            self._is_stuck = True
            told = self._told(waiting.event, waiting.name)
            told |= {"kind": waiting.kind, "count": waiting.count, "reason": waiting.reason}
            self._notes.tell_stuck(self.rank, told | {"number": waiting.number, "issued": issued})
        ranks = sorted(_ranks_along(waiting.axes()))
        if ranks[:1] != [self.rank]:
            return
        found = self._notes.stuck(ranks)
        text = None if found is None or found != self._stuck_before else deadlock(found)
        self._stuck_before = found
        if text is not None:
            self._take(self._notes.post(FailureNote(self.rank, "", text, 0, between=tuple(ranks))))

    def _leave_stuck(self) -> None:
        assert self._notes is not None
        self._is_stuck, self._stuck_before = False, None
        self._notes.no_longer_stuck(self.rank)

    def _find_exception(self) -> None:
        """Complete the note on a backward with the exception, which some thread handles by now."""
        with self._lock:
            if self._look_for is None:
                return
            note, before, looks = self._look_for
            self._look_for = (note, before, looks - 1) if looks else None
            now = interpreter.handled_exceptions().items()
            new = [error for ident, error in now if error is not None and error is not before.get(ident)]
            if new and isinstance(new[0], CommunicationError):
                self._own = self._post(note.over())
                self._look_for = None
            elif new or not looks:
                text = _text_of(new[0]) if new else note.error
                self._own = self._post(note.completed(text))
                self._look_for = None

    def at_exit(self) -> None:
        """At the end of the process: tell that it ends, and post the exception that ended it."""
        if self.watch is not None:
            with suppress(dist.DistError):
                self.watch.tell_end()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None or isinstance(error, CommunicationError) or self._notes is None:
            return
        with self._lock:
            if self._own is None:
                self._post_new("its program", _text_of(error))
            elif self._own.is_vague:
                self._post(self._own.completed(_text_of(error)))


def _ranks_along(axes: Sequence[Axis]) -> set[int]:
    return {rank for axis in axes if axis.pg is not None for rank in c10d.ranks_of(axis.pg)}


def _text_of(error: BaseException) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}"[:_MOST_TEXT] if str(error) else kind


def _without_store(event: str, name: str, error: Exception) -> str:
    return (
        f"{subject_of(event, name)}, and the store of the job does not "
        f"answer ({str(error).splitlines()[0]}): the process that holds it has ended, which is rank 0 unless "
        "torchrun started the job. See its log."
    )


def _end(axes: Sequence[Axis]) -> None:
    """Make waits for the ranks along ``axes`` raise now."""
    for axis in axes:
        if axis.pg is not None:
            c10d.end_waits(axis.pg)


# --- one for each process group of all ranks ------------------------------------------------------

SILENT = Relay(None, 0)
"""The relay of a job without other ranks, or without a store."""

_RELAYS: weakref.WeakKeyDictionary[dist.ProcessGroup, Relay] = weakref.WeakKeyDictionary()


def relay_of_job() -> Relay:
    """The relay of this rank, one for each default process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return SILENT
    pg = dist.group.WORLD
    assert pg is not None
    found = _RELAYS.get(pg)
    if found is None:
        found = _RELAYS[pg] = _made(pg)
    return found


def _made(pg: dist.ProcessGroup) -> Relay:
    if pg.size() == 1 or c10d.is_fake(pg):
        return SILENT
    relay = Relay(c10d.job_store_client(), pg.rank(), pg.size())
    ended = threading.Event()
    own = weakref.ref(relay, lambda _: ended.set())
    thread = threading.Thread(target=_run_thread, args=(own, ended), name="shardwise relay", daemon=True)
    thread.start()
    atexit.register(_at_exit, own, ended, thread)
    return relay


def _run_thread(own: "weakref.ref[Relay]", ended: threading.Event) -> None:
    pause = INTERVAL_S
    while not ended.wait(pause):
        relay = own()
        if relay is None:
            return
        try:
            pause = relay.look()
        except dist.DistError:  # the store has ended, and the process will
            pause = INTERVAL_S
        del relay


def _at_exit(own: "weakref.ref[Relay]", ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()  # a thread inside torch while the interpreter is taken down would end the process
    thread.join(timeout=2.0)
    if (relay := own()) is not None:
        relay.at_exit()


def set_wait_limit(seconds: float | None) -> None:
    """Choose how long a rank waits for others before all ranks report where they are.

    While a rank waits for longer in a collective of a sharded model, or in a call that communicates, every
    rank logs once who waits for what and where the others are, as a warning of ``shardwise.ranks.watch``.
    Nothing is ended by it. Ranks that compute or read data for long are told of only if another waits for
    them.

    Args:
        seconds: by default 30, or what the environment variable ``SHARDWISE_WAIT_LIMIT`` says (0: never).
            None: no reports. The same on all ranks: one without reports does not say where it is.

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
    watch = relay_of_job().watch
    if watch is not None:
        watch.limit_s = seconds


def relayed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function that communicates between the ranks of its first argument, or between all
    ranks if that is neither a module nor parameters. Other ranks hear that this one is in it, and what it
    raises here."""
    name_of_first = next(iter(inspect.signature(function).parameters))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        relay = relay_of_job()
        if relay is SILENT:
            return function(*args, **kwargs)
        first = args[0] if args else kwargs.get(name_of_first)
        with relay.call(function.__name__, lambda: axes_of_given(first)):
            return function(*args, **kwargs)

    return call
