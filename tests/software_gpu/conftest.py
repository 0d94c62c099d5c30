"""Builds the software GPUs before the first test on them."""

import pytest

from software_gpu import build


@pytest.fixture(scope="session", autouse=True)
def _software_gpus() -> None:
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    build.built()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each starts processes."""
    for item in items:
        if "software_gpu" in item.path.parts:
            item.add_marker("processes")
