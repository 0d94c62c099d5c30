"""A test that runs on ranks: what is asserted, is asserted on each rank of a world.

    @on_ranks(2)
    def test_it(tmp_path):
        model = fully_shard(...)
        ...

    @pytest.mark.parametrize("way", WAYS, ids=str)
    @on_ranks()                                     # as many as `way.ranks`
    def test_it(way):
        ...

Its parameters are those of the test, and travel by pickle; the test itself travels by its name.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from harness import World


def on_ranks(size: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(program).parameters)
        fixture = "request" if size is None else f"world{size}"

        @functools.wraps(program)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            found = arguments.pop(fixture)
            world: World = found
            if size is None:
                world = found.getfixturevalue(f"world{arguments['way'].ranks}")
            world.run(run_unwrapped, test, [arguments[name] for name in names])

        asked = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (fixture, *names)]
        test.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        return test

    return decorate


def run_unwrapped(test: Callable[..., None], args: list[Any]) -> None:
    """Runs on every rank."""
    inspect.unwrap(test)(*args)
