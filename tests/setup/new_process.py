"""A process where no process group was ever made, for tests of a model before or without a real one."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_a_new_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` returns there. The world's server forks it with torch loaded."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result(timeout=60)
