"""Whether a folder for checkpoints is the same on all ranks, and does what saving asks of it."""

import os
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shardwise.doctor.findings import Finding, ok, wrong
from shardwise.doctor.job import Job
from shardwise.layout.fqns import listed_ranks, ranks_by_value

_SHARE_OF_TIMEOUT = 6
"""So much of the timeout (10 s of it by default) a shared file system may take to show a new file."""


def check_folder(job: Job, folder: Path) -> list[Finding]:
    """Write, flush and rename a file on each rank, and look for those of all others.

    Rank 0 makes the folder if it is not there, as a save does, and removes it afterwards.
    """
    subject = f"folder {folder}"
    patience_s = job.timeout_s / _SHARE_OF_TIMEOUT
    made, why_not = _made(folder) if job.rank == 0 else ([], "")
    if why_not := job.share(why_not):
        return [] if job.rank else [wrong(subject, f"rank 0 cannot make it, as a save would: {why_not}.")]
    name = job.share(f".shardwise-doctor-{uuid.uuid4().hex}")
    own = folder / f"{name}-{job.rank}"
    try:
        error = _write(own) if _appears(folder, patience_s) else _NOT_THERE
        errors = job.gather(error)
        written = job.share(errors and [rank for rank, each in enumerate(errors) if not each])
        names = {rank: f"{name}-{rank}" for rank in written}
        unseen = [] if error else _unseen(folder, names, patience_s)
        facts = job.gather({"unseen": unseen, "free": _free_bytes(folder)})
        job.share(None)  # all have looked
    finally:
        for path in (own, _partial(own)):
            with suppress(OSError):
                path.unlink()
    job.gather(None)  # all have removed their files
    for each in made:
        with suppress(OSError):
            each.rmdir()
    if errors is None or facts is None:
        return []
    failed = ranks_by_value((rank, error) for rank, error in enumerate(errors) if error)
    found = [
        wrong(subject, f"{listed_ranks(ranks)} cannot save there: {error}.")
        for error, ranks in failed.items()
    ]
    for rank, each in enumerate(facts):
        if each["unseen"]:
            text = f"rank {rank} does not see what {listed_ranks(each['unseen'])} wrote: it is not shared"
            found.append(wrong(subject, f"{text}. Mount one file system there on all machines."))
    free_gb = min(each["free"] for each in facts) / 1e9
    return found or [ok(subject, f"shared by all ranks; write, fsync and rename work; {free_gb:.0f} GB free")]


_NOT_THERE = "it is not there, as it is on rank 0. Mount one file system there on all machines"


def _made(folder: Path) -> tuple[list[Path], str]:
    """Make the folder and those above it; which ones, deepest first, and the text of what fails."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return missing, error.strerror or str(error)
    return missing, ""


def _appears(folder: Path, within_s: float) -> bool:
    """Whether the folder is there, or comes to be: rank 0 may just have made it."""
    deadline = time.monotonic() + within_s
    while not folder.is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
    return folder.is_dir()


def _write(path: Path) -> str:
    """Write as a checkpoint is written; the text of what fails."""
    try:
        with open(_partial(path), "wb") as file:
            file.write(b"shardwise")
            file.flush()
            os.fsync(file.fileno())
        _partial(path).rename(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _unseen(folder: Path, names: Mapping[int, str], within_s: float) -> list[int]:
    """The ranks whose files do not come to be there. Opening a folder makes NFS ask the server again, as
    asking for a file may not."""
    deadline = time.monotonic() + within_s
    while True:
        there = set(os.listdir(folder))
        unseen = [rank for rank, name in names.items() if name not in there]
        if not unseen or time.monotonic() > deadline:
            return unseen
        time.sleep(0.05)


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
