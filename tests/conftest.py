"""Fixtures that every test may use: worlds of 1 to 4 ranks, shared by the whole session."""

from collections import Counter
from collections.abc import Iterator

import pytest
from harness import World


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.thin(n)`: of a parametrised test every n-th case always runs, the others are marked slow.

    With n prime to the numbers of values, every value still has its turn.
    """
    counts: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("thin")) is not None:
            name = item.nodeid.partition("[")[0]
            if counts[name] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[name] += 1


def _shared_world(size: int) -> Iterator[World]:
    world = World(size)  # its ranks start with its first run
    yield world
    world.close()


@pytest.fixture(scope="session")
def world1() -> Iterator[World]:
    yield from _shared_world(1)


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    yield from _shared_world(2)


@pytest.fixture(scope="session")
def world3() -> Iterator[World]:
    yield from _shared_world(3)


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    yield from _shared_world(4)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """The world of the size given by `@pytest.mark.parametrize("world", [1, 2], indirect=True)`."""
    return request.getfixturevalue(f"world{request.param}")
