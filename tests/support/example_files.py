"""Import files of examples/, which import their neighbours by bare names."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def example_file(name: str, world: int = 1) -> Iterator[ModuleType]:
    """An example as on a rank that torchrun has started; modules of other folders with such names are set aside."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    others = {other: sys.modules.pop(other) for other in names & sys.modules.keys()}
    try:
        with (
            mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
            mock.patch.dict(os.environ, {"WORLD_SIZE": str(world)}),
        ):
            yield importlib.import_module(name)
    finally:
        for own in names & sys.modules.keys():
            del sys.modules[own]
        sys.modules.update(others)
