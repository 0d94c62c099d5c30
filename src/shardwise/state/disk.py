"""Writes that survive a power failure."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
