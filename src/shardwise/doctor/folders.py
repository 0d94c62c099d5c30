"""Whether a folder for checkpoints is the same on all ranks, and does what saving asks of it."""

import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardwise.doctor.job import Finding, Job, ok, wrong
from shardwise.layout.fqns import listed_ranks, ranks_by_value

T = TypeVar("T")

_SHARE_OF_TIMEOUT = 6
"""So much of the timeout (10 s of it by default) a shared file system may take to show a new file."""


def check_folder(job: Job, folder: Path) -> list[Finding]:
    """Write, flush and rename a file on each rank, and look for those of all others.

    Rank 0 makes the folder if it is not there, as a save does, and removes it afterwards.
    """
    subject = f"folder {folder}"
    missing: list[Path] = []

    def make() -> tuple[str, str]:
        if job.rank:
            return "", ""
        missing.extend(each for each in (folder, *folder.parents) if not each.exists())
        return _why_not(lambda: folder.mkdir(parents=True, exist_ok=True)), uuid.uuid4().hex

    why_not, name = job.gather(subject, make)[0]
    if why_not:
        return [wrong(subject, f"rank 0 cannot make it, as a save would: {why_not}.")]
    names = [f".shardwise-doctor-{name}-{rank}" for rank in range(job.world)]
    own, patience_s = folder / names[job.rank], job.timeout_s / _SHARE_OF_TIMEOUT

    def write() -> str:
        is_missing = _what_stays(lambda: not folder.is_dir(), patience_s)
        return _NOT_THERE if is_missing else _why_not(partial(_write, own))

    def look() -> tuple[list[int], int]:
        if errors[job.rank]:
            return [], 0
        written = [rank for rank, error in enumerate(errors) if not error]
        unseen = _what_stays(partial(_unseen, folder, names, written), patience_s)
        return unseen, shutil.disk_usage(folder).free

    try:
        errors = job.gather(subject, write)
        facts = job.gather(subject, look)
    finally:
        for path in (own, _partial(own)):
            with suppress(OSError):
                path.unlink()
    job.gather(subject, lambda: None)  # all have removed their files
    for each in missing:
        with suppress(OSError):
            each.rmdir()
    failed = ranks_by_value((rank, error) for rank, error in enumerate(errors) if error).items()
    found = [wrong(subject, f"{listed_ranks(ranks)} cannot save there: {why}.") for why, ranks in failed]
    for rank, (unseen, _) in enumerate(facts):
        if unseen:
            text = f"rank {rank} does not see what {listed_ranks(unseen)} wrote: it is not shared"
            found.append(wrong(subject, f"{text}. Mount one file system there on all machines."))
    free_gb = min(free for _, free in facts) / 1e9
    return found or [ok(subject, f"shared by all ranks; write, fsync and rename work; {free_gb:.0f} GB free")]


_NOT_THERE = "it is not there, as it is on rank 0. Mount one file system there on all machines"


def _why_not(act: Callable[[], None]) -> str:
    """The text of what fails in ``act``."""
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _what_stays(look: Callable[[], T], within_s: float) -> T:
    """What ``look`` returns in the end: other machines may show a change of the folder later."""
    deadline = time.monotonic() + within_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _unseen(folder: Path, names: Sequence[str], written: Sequence[int]) -> list[int]:
    """The ranks whose files are not there. Opening a folder makes NFS ask the server again, as asking for a
    file may not."""
    there = set(os.listdir(folder))
    return [rank for rank in written if names[rank] not in there]


def _write(path: Path) -> None:
    """Write as a checkpoint is written."""
    with open(_partial(path), "wb") as file:
        file.write(b"shardwise")
        file.flush()
        os.fsync(file.fileno())
    _partial(path).rename(path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
