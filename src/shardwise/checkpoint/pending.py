"""Saves in the background, and their order: each waits for the one before it."""

import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwise.ranks.agreement import RankGroup
from shardwise.ranks.failures import CommunicationError
from shardwise.torch_compat import c10d

_log = logging.getLogger(__name__)


class PendingSave:
    """A save that may still be running in the background; returned by :func:`save_checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done = threading.Event()
        # Not the error itself: its traceback would keep what was saved.
        self._failure: tuple[type[Exception], str] | None = None
        self._was_told = False
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """Whether it has ended, with or without an error. Ranks may see this at different moments."""
        return self._done.is_set()

    def wait(self) -> Path:
        """Block until the checkpoint is in place on all ranks.

        Returns:
            Its path.

        Raises:
            Exception: the error of the save, the same on all ranks, and in each call.
        """
        self._end()
        self._was_told = True
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)
        return self.path

    def run_in_thread(self, act: Callable[[], None]) -> None:
        """Save in a thread. Not a daemon: the interpreter waits for it before it exits."""
        self._thread = threading.Thread(target=self.run, args=(act,), name=f"saving {self.path}")
        self._thread.start()

    def run(self, act: Callable[[], None]) -> None:
        """Save, and keep what that raises."""
        try:
            act()
        except Exception as error:
            self._failure = type(error), str(error)
            if self._thread is not None:
                # Perhaps no one waits for it any more.
                _log.error("%s was not saved: %s: %s", self.path, type(error).__name__, error)
                if c10d.is_communication_error(error):
                    text = f"{self.path} was not saved: an exchange with another rank failed ({error})."
                    self._failure = CommunicationError, f"{text} If that rank has ended, see its log."
        except BaseException as error:
            self._failure = RuntimeError, f"{self.path} was not saved: interrupted by {type(error).__name__}"
            self._was_told = True
            raise
        finally:
            self._done.set()

    def _end(self) -> None:
        self._done.wait()
        if self._thread is not None:
            self._thread.join()  # until it has dropped what it saved
            self._thread = None

    def end_before_next(self) -> None:
        """Wait before the next save; warn of a failure that has not been reported yet."""
        self._end()
        if self._failure is not None and not self._was_told:
            self._was_told = True
            text = f"the save before this one failed: {self._failure[1]}"
            warnings.warn(text, RuntimeWarning, stacklevel=7)  # over `begin` and three decorators


class Saves:
    """The saves of one set of ranks: the last one, and the process group they talk over in the background."""

    def __init__(self) -> None:
        self.last: PendingSave | None = None
        self._pg: dist.ProcessGroup | None = None

    def rank_group_in_background(self, rank_group: RankGroup) -> RankGroup:
        """The same ranks with another process group: two threads must not share one."""
        if rank_group.pg is None:
            return rank_group
        if self._pg is None:
            everyone = range(rank_group.size)
            self._pg = c10d.subgroup(
                rank_group.pg, everyone, torch.device("cpu"), "checkpoint", backend="gloo"
            )
        return RankGroup(self._pg)


# A cache: a set of ranks is known by its default process group, and goes with it.
_saves_by_group: WeakKeyDictionary[dist.ProcessGroup, Saves] = WeakKeyDictionary()
_saves_alone = Saves()


def begin() -> tuple[RankGroup, Saves]:
    """All ranks of the default process group, or this process alone, once their last save has ended."""
    pg = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    saves = _saves_alone if pg is None else _saves_by_group.setdefault(pg, Saves())
    if saves.last is not None:
        saves.last.end_before_next()
    return RankGroup(pg), saves
