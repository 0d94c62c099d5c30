"""The folders of checkpoints: where a save writes, how it is published, and what crashes leave behind.

A save writes into a hidden folder beside its path, and is moved there when it is complete:

    .step-20.TOKEN.partial     being written; TOKEN names the host and the process
    step-20                    a complete checkpoint: it has a file .metadata
    .step-20.TOKEN.previous    the checkpoint that the new one replaces, until that is in place
    .step-20.TOKEN.removed     being removed
"""

import errno
import os
import re
import shutil
import socket
import stat
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from shardwise.arguments import check_type
from shardwise.layout.fqns import listed
from shardwise.state.model_files import sync


def _hidden(path: Path, token: str, kind: str) -> Path:
    return path.with_name(f".{path.name}.{token}.{kind}")


METADATA = ".metadata"
ABANDONED_S = 24 * 3600  # without a change, on a host whose processes are not seen from here

_TOKEN = r"(?P<host>[0-9a-f]{8})-(?P<pid>[0-9a-f]+)-(?P<began>[0-9a-f]+)-[0-9a-f]{6}"
_HIDDEN = re.compile(rf"\.(?P<name>.+?)(\.(?P<token>{_TOKEN}))?\.(?P<kind>partial|previous|removed)")
_FILES = re.compile(r"__\d+_\d+\.distcp|\.__\d+_\d+\.distcp\.part|\.digests|\.metadata(\.tmp)?")

_NUMBER = r"\d+(?:\.\d+)*"  # in a name
_MOST_OPEN = 128  # files that a load keeps open; in most places a process may have 1024
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY)  # with O_PATH, a folder will do whose names may not be listed

_running: set[str] = set()  # tokens of saves that go on in this process


def absolute(path: str | os.PathLike[str]) -> Path:
    """`path` as one that has a name: 'run/..' has none of its own."""
    return Path(os.path.abspath(path))


def given(caller: str, path: Any) -> Path:
    """The folder that a call is about."""
    wanted = "the folder of a checkpoint, as a str or a Path"
    if path is None and caller == "load_checkpoint":
        wanted += " (latest_checkpoint returns None if it finds none: call resume)"
    check_type(caller, "path", path, wanted, str, os.PathLike)
    return absolute(path)


def check_name(caller: str, path: Path) -> None:
    """Refuse a name that no checkpoint may have: hidden folders are those of saves."""
    if not path.name or path.name.startswith("."):
        raise ValueError(f"{caller}: {path}: a checkpoint needs a name that does not start with a dot.")


@dataclass(frozen=True)
class Save:
    """One save to `path`; all ranks have the same token."""

    path: Path
    token: str

    @property
    def partial(self) -> Path:
        """Where it is written before it is moved to `path`."""
        return _hidden(self.path, self.token, "partial")

    @property
    def previous(self) -> Path:
        """Where the checkpoint that was at `path` waits until the new one is there."""
        return _hidden(self.path, self.token, "previous")


def new_token() -> str:
    """A name that no other save has, and that identifies its process."""
    pid = os.getpid()
    return f"{this_host()}-{pid:x}-{_began(pid) or 0:x}-{uuid4().hex[:6]}"


@contextmanager
def running(token: str) -> Iterator[None]:
    """Inside, this process does not treat files with this name as remains."""
    _running.add(token)
    try:
        yield
    finally:
        _running.discard(token)


def is_complete(path: Path) -> bool:
    """Whether the folder `path` is a checkpoint that was written to its end."""
    hidden = _HIDDEN.fullmatch(path.name)
    return (path / METADATA).is_file() and (hidden is None or hidden["kind"] == "previous")


def found(path: Path) -> Path | None:
    """The complete checkpoint at `path`, also if a crash has left it aside; None: there is none."""
    if is_complete(path):
        return path
    aside = [each for each, kind, name in _remains(path.parent) if (kind, name) == ("previous", path.name)]
    complete = [each for each in aside if is_complete(each)]
    return max(complete, key=lambda each: (each.stat().st_mtime, each.name), default=None)


def refuse_forbidden(path: Path) -> None:
    """Tell what may not be looked at, or read, from what is not there or damaged."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except PermissionError as error:
        user = f"user {os.geteuid()}" if hasattr(os, "geteuid") else "this user"
        raise PermissionError(
            f"{path} may not be read by {user} on {socket.gethostname()}. It may be whole; see who owns it "
            "and the folders above it (ls -ld), and run the job as a user who may read them."
        ) from error
    except OSError:
        return  # it does not exist; another error reports that


def why_not_a_checkpoint(path: Path) -> str:
    """What is wrong with a `path` at which nothing was found."""
    if (hidden := _HIDDEN.fullmatch(path.name)) and hidden["kind"] == "partial":
        return "an unfinished save left it behind; load the checkpoint before it"
    partial = [each for each, kind, name in _remains(path.parent) if (kind, name) == ("partial", path.name)]
    if partial:
        return f"only {partial[0]} is there, which an unfinished save left behind"
    if not path.exists():
        return "it does not exist"
    if not path.is_dir():
        return "it is a file; a checkpoint is a folder"
    inside = sorted(each.name for each in path.iterdir() if is_complete(each))
    if inside:
        return (
            "it is a folder of checkpoints; load one of them, or what latest_checkpoint returns: "
            f"{', '.join(inside[:8])}"
        )
    return f"the folder has no file {METADATA}"


# --- reading --------------------------------------------------------------------------------------


class OpenFolder:
    """The folder of a checkpoint, opened once, so that all that is read of it is of one save.

        a load                            another job, which saves to the same path
        opens step-20
        reads its .metadata
                                          moves it to .step-20.TOKEN.previous, and its own save to step-20
        reads its __0_0.distcp            by path, this would be the file of the new save
                                          removes .step-20.TOKEN.previous
        reads __0_0.distcp again          which is open, and so still there

    A context manager.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = os.open(path, _SEARCH | os.O_DIRECTORY)
        self._kept: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in (*self._kept.values(), self._folder):
            os.close(each)
        self._kept.clear()

    @contextmanager
    def open(self, name: str, buffering: int = -1) -> Iterator[Any]:
        """A file of it, for reading."""
        kept = self._kept.get(name)
        handle = self._handle(name) if kept is None else kept
        try:
            os.lseek(handle, 0, os.SEEK_SET)
            with open(handle, "rb", buffering=buffering, closefd=False) as file:
                yield file
        finally:
            if kept is None:
                os.close(handle)

    def keep_open(self, names: Iterable[str]) -> None:
        """Open files that will be read, so that they can be read when another job has removed them."""
        for name in names:
            if name not in self._kept and len(self._kept) < _MOST_OPEN:
                self._kept[name] = self._handle(name)

    def fetch(self, names: Iterable[str]) -> None:
        """Copy files here that are about to be read, if others have them; collective. See hosts.py."""

    def size(self, name: str) -> int | None:
        """The length of a file in bytes; None: there is no such file."""
        kept = self._kept.get(name)
        try:
            found = os.stat(name, dir_fd=self._folder) if kept is None else os.fstat(kept)
        except FileNotFoundError:
            self._refuse_removed()
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _handle(self, name: str) -> int:
        try:
            return os.open(name, os.O_RDONLY, dir_fd=self._folder)
        except FileNotFoundError:
            self._refuse_removed()
            raise

    def _refuse_removed(self) -> None:
        """Tell a folder that somebody has removed from one that lacks a file: the index goes first."""
        try:
            os.stat(METADATA, dir_fd=self._folder)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} was replaced or removed by another job while it was read. Load it again, or "
                "a checkpoint that no job replaces."
            ) from error


# --- one save -------------------------------------------------------------------------------------


def prepare(save: Save) -> None:
    """An empty folder to write into, before it is moved to `path`."""
    _refuse_others(save.path)
    save.partial.mkdir(parents=True)


def _refuse_others(path: Path) -> None:
    if path.exists() and not is_complete(path) and not is_remains(path):
        raise FileExistsError(
            f"{path} exists and is not a checkpoint, so save_checkpoint does not replace it. Choose another "
            "path."
        )


def publish(save: Save) -> None:
    """Move what was written to its path, and aside what was there before, until `forget_previous`."""
    sync(save.partial)
    try:
        _set_aside(save)
        save.partial.rename(save.path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            if is_complete(save.path):
                forget_previous(save)
            raise FileExistsError(
                f"{save.path}: another job has saved to this path meanwhile, so this save could not be moved "
                "there. The checkpoint there is that of the other job. Give each job its own path."
            ) from error
        if is_complete(save.previous) and not save.path.exists():
            with suppress(OSError):  # another job's save is there meanwhile
                save.previous.rename(save.path)
        raise
    sync(save.path.parent)


def _set_aside(save: Save) -> None:
    _refuse_others(save.path)
    if save.path.is_dir():
        # Remains are moved as well: in a folder that is being removed, another job could put its own.
        remove(save.previous)
        with suppress(FileNotFoundError):  # another job's save has moved it
            save.path.rename(save.previous)
        sync(save.path.parent)
    elif save.path.is_symlink():  # to nowhere
        save.path.unlink(missing_ok=True)


def forget_previous(save: Save) -> None:
    """Remove the checkpoint that the one at `path` has replaced."""
    if save.previous.exists():
        _remove_checkpoint(save.previous, save.path, save.token)


def discard(save: Save) -> None:
    """Remove what a failed save has written on this host."""
    shutil.rmtree(save.partial, ignore_errors=True)


def is_remains(path: Path) -> bool:
    """Whether the folder `path` holds nothing but files of a checkpoint whose removal did not end."""
    with suppress(FileNotFoundError):  # another job removes it as well
        return path.is_dir() and not path.is_symlink() and not is_complete(path) and _has_only_ours(path)
    return False


def _has_only_ours(path: Path) -> bool:
    return all(_FILES.fullmatch(each.name) for each in path.iterdir())


def remove(path: Path) -> None:
    """Remove a folder, which is no checkpoint any more from the first moment."""
    if path.is_dir() and not path.is_symlink():
        (path / METADATA).unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another job removes it as well
            shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()


def _remove_checkpoint(place: Path, path: Path, token: str) -> None:
    """Remove the checkpoint `path`, which is at `place`, under a name that marks an unfinished removal."""
    removed = _hidden(path, token, "removed")
    remove(removed)
    with suppress(FileNotFoundError):  # another job removes it as well
        place.rename(removed)
    remove(removed)


# --- many checkpoints -----------------------------------------------------------------------------


def numbered(name: str) -> tuple[str, list[Decimal]] | None:
    """'step-90' -> ('step-', [90]); None for a name that does not end in a number."""
    match = re.fullmatch(rf"(.*?)({_NUMBER})", name)
    return (match[1], _parts(match[2])) if match else None


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in `directory`; None if it has none, or does not exist.

    The newest checkpoint has the highest number in its name; dates of files do not count. Step-100 is newer
    than step-90. If names have several numbers, they count from the left: epoch-2-step-100 is newer than
    epoch-1-step-900. A number may have decimals (epoch-1.5 is newer than epoch-1.25); with more than one
    point, as in a date, each part is a number. Names without a number are ignored; if there are no others, a
    warning is raised. If a save with ``keep`` is still running, wait for it: it removes older checkpoints.

    Each rank looks by itself. To load the newest checkpoint on all ranks, call :func:`resume` instead: if the
    file system shows a host an old state, that host may find none, where the others wait for it to load.

    Args:
        directory: where the folders `step-10`, `step-20` and so on are.

    Returns:
        A path for :func:`load_checkpoint`. After a crash while a checkpoint was being replaced by one of the
        same name, this is the older one, under its temporary name.

    Raises:
        ValueError: `directory` is itself a checkpoint.
        PermissionError: this process may not read it.

    Example::

        if (path := latest_checkpoint("run")) is not None:
            print("the newest checkpoint is", path.name)
    """
    return newest("latest_checkpoint", absolute(directory))


def newest(caller: str, directory: Path) -> Path | None:
    """As `latest_checkpoint`, with the name of the public function, for messages."""
    refuse_forbidden(directory)
    if is_complete(directory):
        raise ValueError(
            f"{caller}: {directory} is itself a checkpoint, not a folder of checkpoints. Pass it to "
            f"load_checkpoint, or the folder that holds it to {caller}."
        )
    # Names with the same number are ordered by their text, so that all ranks choose the same one.
    complete = complete_in(directory)
    latest = max(filter(numbered, complete), key=newness, default=None)
    if latest is not None:
        return complete[latest]
    if complete:
        warnings.warn(
            f"{caller}: {directory} has complete checkpoints, but their names do not end in a number "
            f"({listed(sorted(complete))}), so it is unknown which is the newest. None was chosen. Save "
            "under names such as step-100, or pass the path of one to load_checkpoint.",
            stacklevel=3,
        )
    return None


def remove_older(save: Save, keep: int) -> None:
    """Remove complete checkpoints named like `path` with lower numbers; keep the newest, `keep` with it."""
    own = numbered(save.path.name)
    assert own is not None

    def is_older(name: str) -> bool:
        other = numbered(name)
        return other is not None and other[0] == own[0] and other[1] < own[1]

    folder = save.path.parent
    older = {name: place for name, place in complete_in(folder).items() if is_older(name)}
    for name, place in sorted(older.items(), key=lambda each: newness(each[0]), reverse=True)[keep - 1 :]:
        if not place.is_symlink():
            _remove_checkpoint(place, folder / name, save.token)


def complete_in(directory: Path) -> dict[str, Path]:
    """The complete checkpoints in `directory`, by name: also those that a crash has left aside."""
    if not directory.is_dir():
        return {}
    names = {each.name for each in directory.iterdir() if not each.name.startswith(".")}
    names |= {name for _, kind, name in _remains(directory) if kind == "previous"}
    return {name: place for name in names if (place := found(directory / name)) is not None}


def free_bytes(path: Path) -> int:
    """Free bytes of the file system of `path`, or of its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def newness(name: str) -> tuple[list[Decimal], str]:
    """All numbers, from the left: 'epoch-2-step-100' is newer than 'epoch-1-step-900'."""
    if hidden := _HIDDEN.fullmatch(name):
        name = hidden["name"]
    return [part for number in re.findall(_NUMBER, name) for part in _parts(number)], name


def _parts(number: str) -> list[Decimal]:
    """'1.25' is less than '1.5'; of more than two parts, as dates have, each counts for itself."""
    return [Decimal(part) for part in (number.split(".") if number.count(".") > 1 else [number])]


# --- what crashes leave behind --------------------------------------------------------------------


def sweep(directory: Path) -> None:
    """Remove what saves and removals that did not end have left in `directory`; or as much as can be."""
    for place, kind, name in _remains(directory):
        with suppress(OSError):
            is_replaced = kind == "previous" and is_complete(directory / name)
            is_checkpoint = kind == "previous" and is_complete(place) and not is_replaced
            if not is_checkpoint and (is_replaced or _is_abandoned(place)) and _has_only_ours(place):
                remove(place)


def _remains(directory: Path) -> list[tuple[Path, str, str]]:
    """The hidden folders of saves in `directory`: path, kind, and the name of the checkpoint."""
    if not directory.is_dir():
        return []
    parsed = [(each, _HIDDEN.fullmatch(each.name)) for each in sorted(directory.iterdir())]
    return [(each, match["kind"], match["name"]) for each, match in parsed if match and each.is_dir()]


def _is_abandoned(place: Path) -> bool:
    """Whether no process writes or removes it any more."""
    match = _HIDDEN.fullmatch(place.name)
    assert match is not None
    if match["token"] is None or match["host"] != this_host():
        changes = [place.stat().st_mtime, *(each.stat().st_mtime for each in place.iterdir())]
        return time.time() - max(changes) > ABANDONED_S
    pid, began = int(match["pid"], 16), int(match["began"], 16)
    if pid == os.getpid() and began == (_began(pid) or 0):
        return match["token"] not in _running
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        pass
    return began != (_began(pid) or 0)


@cache
def this_host() -> str:
    """What has these process numbers: a host, since it was started, and a container on it."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return sha256("\n".join(known).encode()).hexdigest()[:8]


def _began(pid: int) -> int | None:
    """When a process began, in a unit of the system's; None: not known, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
