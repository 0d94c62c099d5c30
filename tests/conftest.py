"""Fixtures that every test may use: worlds of 1 to 4 ranks, shared by the whole session."""

import os
import re
from collections.abc import Iterator

import hypothesis
import pytest
from harness import World
from thinning import Case, part_of, thin_out

# No absolute times: on a loaded machine the first example takes longer than hypothesis allows by itself.
hypothesis.settings.register_profile("shardwise", deadline=None)
hypothesis.settings.load_profile("shardwise")

# `request` asks for whichever world a parameter names.
ASK_FOR_WORLDS = {"world", "world1", "world2", "world3", "world4", "request"}
THINNED = pytest.StashKey[dict[str, tuple[list[Case], list[int]]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Tests are on the host, also on a machine that has GPUs: except with `-m gpu`, processes do not see them."""
    if not re.match(r"gpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part", metavar="K/N", help="run the K-th of N parts of the slow tests, and no others"
    )


def is_unit(item: pytest.Item) -> bool:
    """Runs in this process alone: asks for no world, and is not marked as starting processes of its own."""
    arguments = set(getattr(item, "fixturenames", ()))
    return not arguments & ASK_FOR_WORLDS and item.get_closest_marker("processes") is None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_unit(item):
            item.add_marker("unit")
    config.stash[THINNED] = thin_out(items)
    if (part := config.getoption("--slow-part")) is not None:
        config.option.markexpr = ""
        kept = set(part_of(items, part))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


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
