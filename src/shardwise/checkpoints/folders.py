"""Where checkpoints lie on disk, so that at every moment a complete one is found.

Paths only: what is in the files is not known here. A folder is complete when it has a `.metadata`, which is
the last file that is written, and the first that is removed. A save of `step-20` over an older one:

    .step-20.partial     written here, and synced; a crash leaves it behind, and the next save removes it
    step-20          ->  .step-20.previous       moved aside
    .step-20.partial ->  step-20                 in place
    .step-20.previous    removed; after a crash between the two moves, it is what is found
"""

import os
import re
import shutil
from pathlib import Path

METADATA = ".metadata"


def absolute(path: str | os.PathLike[str]) -> Path:
    """`path` as one that has a name: 'run/..' has none of its own."""
    return Path(os.path.abspath(path))


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it is moved to `path`."""
    return path.with_name(f".{path.name}.partial")


def previous_of(path: Path) -> Path:
    """Where the checkpoint that was at `path` waits until the new one is there."""
    return path.with_name(f".{path.name}.previous")


def is_complete(path: Path) -> bool:
    """Whether the folder `path` is a checkpoint that was written to its end."""
    return (path / METADATA).is_file() and not path.name.endswith(".partial")


def found(path: Path) -> Path | None:
    """The complete checkpoint at `path`, also if a crash has left it aside; None: there is none."""
    return next((each for each in (path, previous_of(path)) if is_complete(each)), None)


def why_not_a_checkpoint(path: Path) -> str:
    """What is wrong with a `path` at which nothing was found."""
    partial = partial_of(path)
    if path.name.endswith(".partial"):
        return "it is what a save that did not end has left behind; load the checkpoint before it"
    if partial.exists():
        return f"only {partial} is there, which a save that did not end has left behind"
    if not path.exists():
        return "it does not exist"
    if not path.is_dir():
        return "it is a file; a checkpoint is a folder"
    inside = [each.name for each in sorted(path.iterdir()) if is_complete(each)]
    if inside:
        return (
            f"it is a folder of checkpoints; load one of them, or latest_checkpoint: {', '.join(inside[:8])}"
        )
    return f"the folder has no file {METADATA}"


def prepare(path: Path) -> Path:
    """An empty folder to write into, before it is moved to `path`.

    Raises:
        FileExistsError: at `path` is something else than a checkpoint, which is not ours to replace.
    """
    if path.exists() and not is_complete(path) and not _is_remains(path):
        raise FileExistsError(
            f"{path} exists and is not a checkpoint, so it is not replaced by one. Choose another path."
        )
    partial = partial_of(path)
    remove(partial)
    partial.mkdir(parents=True)
    return partial


def publish(path: Path) -> None:
    """Move what was written beside `path` to it, and aside what was there before, until `forget_previous`."""
    partial, previous = partial_of(path), previous_of(path)
    sync(partial)
    if is_complete(path):
        remove(previous)
        path.rename(previous)
        sync(path.parent)
    else:
        remove(path)  # empty, or remains: `prepare` has seen to it
    try:
        partial.rename(path)
    except OSError:
        if is_complete(previous):
            previous.rename(path)
        raise
    sync(path.parent)


def forget_previous(path: Path) -> None:
    """Remove the checkpoint that the one at `path` has replaced."""
    remove(previous_of(path))


def _is_remains(path: Path) -> bool:
    """Whether the folder `path` holds nothing but files of a checkpoint whose removal did not end."""
    return path.is_dir() and all(
        re.fullmatch(r"__\d+_\d+\.distcp|\.digests", each.name) for each in path.iterdir()
    )


def remove(path: Path) -> None:
    """Remove a folder, which is no checkpoint any more from the first moment."""
    if path.is_dir() and not path.is_symlink():
        (path / METADATA).unlink(missing_ok=True)
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()


def discard(path: Path) -> None:
    """Remove what a failed save has written, as far as that is possible."""
    shutil.rmtree(partial_of(path), ignore_errors=True)


def sync(path: Path) -> None:
    """Have what is in the file `path`, or the names in a folder, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def numbered(name: str) -> tuple[str, int] | None:
    """'step-90' -> ('step-', 90); None for a name that does not end in a number."""
    match = re.fullmatch(r"(.*?)(\d+)", name)
    return (match[1], int(match[2])) if match else None


def newest(directory: Path) -> Path | None:
    """The complete checkpoint in `directory` of the highest number."""
    if not directory.is_dir():
        return None
    complete: dict[str, Path] = {}
    for each in directory.iterdir():
        name = each.name
        if name.startswith(".") and name.endswith(".previous"):
            name = name[1 : -len(".previous")]
        elif name.startswith("."):
            continue
        if (place := found(each.with_name(name))) is not None and numbered(name):
            complete[name] = place
    # Names of one number are told apart by their text, so that all ranks choose the same one.
    latest = max(complete, key=lambda name: (_number(name), name), default=None)
    return None if latest is None else complete[latest]


def remove_older(path: Path, keep: int) -> None:
    """Remove complete checkpoints named like `path` with lower numbers, but for the newest `keep` with it."""
    own = numbered(path.name)
    if own is None:
        raise ValueError(f"{path.name}: keep needs names that end in a number, such as step-100")
    older = []
    for each in path.parent.iterdir():
        other = numbered(each.name)
        if other and other[0] == own[0] and other[1] < own[1] and each.is_dir() and is_complete(each):
            older.append((other[1], each))
    for _, each in sorted(older, reverse=True)[keep - 1 :]:
        if not each.is_symlink():
            remove(each)


def free_bytes(path: Path) -> int:
    """Free bytes of the file system of `path`, or of its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _number(name: str) -> int:
    split = numbered(name)
    assert split is not None
    return split[1]
