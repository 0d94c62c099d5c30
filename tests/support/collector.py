"""Python's garbage collector, for tests of what is freed without it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside, only what nothing refers to is freed, and no cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
