"""A test whose body runs on every rank, each of which asserts what it finds.

    @on_ranks(1, 2)                          # in worlds of one rank and of two
    @pytest.mark.parametrize("width", [32, 512])
    def test_it(width):
        model = fully_shard(...)
        assert ...

    @pytest.mark.parametrize("way", WAYS, ids=str)
    @on_ranks()                              # in a world of `way.ranks`; without a way, a mark gives `world`
    def test_it(way):
        ...

Bodies travel by name, as scenarios do (scenario.py), and their parameters by pickle.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

Body = Callable[..., None]


def on_ranks(*worlds: int, timeout: float = 60.0) -> Callable[[Body], Body]:
    """Make a body a test, which runs on every rank of each of `worlds`; its parameters are those of the test."""

    def decorate(body: Body) -> Body:
        has_way = not worlds and "way" in inspect.signature(body).parameters
        fixture = "request" if has_way else f"world{worlds[0]}" if len(worlds) == 1 else "world"

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            world = arguments.pop(fixture)
            if has_way:
                world = world.getfixturevalue(f"world{arguments['way'].ranks}")
            world.run(run_body, test, arguments, timeout=timeout)

        asked = [fixture, *inspect.signature(body).parameters]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        if len(worlds) > 1:
            pytest.mark.parametrize("world", worlds, indirect=True)(test)
        return test

    return decorate


def run_body(test: Body, arguments: dict[str, Any]) -> None:
    inspect.unwrap(test)(**arguments)
