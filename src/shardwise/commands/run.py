"""Run a training script that was written for torch's fully_shard, as it is, with this library.

Torch's names are replaced before the script begins, as by shardwise.interop.install().

    python -m shardwise run train.py --epochs 3
    torchrun --nproc-per-node 8 -m shardwise run train.py --epochs 3
    accelerate launch --module shardwise run train.py --epochs 3
    SHARDWISE_INSTALL=0 torchrun --nproc-per-node 8 -m shardwise run train.py    with torch's, to compare

Rank 0 prints what was replaced. The exit status is that of the script.
"""

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.commands import UsageError
from shardwise.interop import install

VARIABLE = "SHARDWISE_INSTALL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``run``: the script, and all that follows it."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the path of a script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(arguments: argparse.Namespace) -> int:
    """Run the script as the main program; what it raises is not caught."""
    if not arguments.module and not Path(arguments.script).is_file():
        raise UsageError(f"there is no script '{arguments.script}' (from {os.getcwd()}).")
    chosen = os.environ.get(VARIABLE, "1")
    if chosen not in ("0", "1"):
        raise UsageError(
            f"{VARIABLE} is '{chosen}'; set it to 1 for this library, or to 0 for torch's fully_shard."
        )
    if chosen == "1":
        with _shown_on_rank_0():
            install()
    sys.argv = [arguments.script, *arguments.arguments]
    if arguments.module:
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments.script).resolve().parent)  # as python itself does
        runpy.run_path(arguments.script, run_name="__main__")
    return 0


@contextmanager
def _shown_on_rank_0() -> Iterator[None]:
    """Show the log: an unchanged script should show which library shards it."""
    log = logging.getLogger("shardwise")
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    level, handler = log.level, logging.StreamHandler()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
