"""Programs of examples/ and of the documentation, each as torchrun would start it, on devices."""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from functools import partialmethod
from pathlib import Path
from unittest import mock

from torch import nn


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run(script: Path, arguments: Sequence[str], folder: Path) -> str:
    """What it prints. Its blocks are compiled by a back end that needs no kernels of Inductor's."""
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")),
        contextlib.redirect_stdout(printed),
        in_folder(folder),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()
