"""Writes that survive a power failure."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have what is in the file `path`, or the names in a folder, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
