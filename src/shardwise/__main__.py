"""``python -m shardwise COMMAND``: commands to run from a shell, alone or under torchrun."""

import argparse
import importlib
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout

from shardwise import __version__
from shardwise.commands import COMMANDS, RankError, UsageError

USAGE = 2
"""The exit status where what was typed cannot work."""

LEAD_S = 10.0
"""So long others wait for rank 0 to tell why no rank can go on: torchrun ends all when the first one ends."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that ``words`` name, by default those of the command line; returns its exit status.

    Where a launcher has started several ranks, all run it and rank 0 prints.
    """
    words = sys.argv[1:] if words is None else words
    prints = os.environ.get("RANK", "0") == "0"
    with nullcontext() if prints else redirect_stdout(io.StringIO()):
        status = _status(words, prints)
    if status == USAGE and not prints:
        time.sleep(LEAD_S)
    return status


def _status(words: Sequence[str], prints: bool) -> int:
    try:
        with nullcontext() if prints else redirect_stderr(io.StringIO()):
            chosen, run, arguments = _parsed(words)
    except SystemExit as end:  # argparse has told why, or has shown the help
        return int(end.code or 0)
    try:
        return int(run(arguments))
    except UsageError as error:
        if prints or isinstance(error, RankError):
            print(f"python -m shardwise {chosen}: {error}", file=sys.stderr)
        return USAGE


def _parsed(words: Sequence[str]) -> tuple[str, Callable[[argparse.Namespace], int], argparse.Namespace]:
    """The command that ``words`` name, what runs it, and its options."""
    parser = argparse.ArgumentParser(prog="python -m shardwise", description=__doc__)
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), "")
    run = None
    for name, purpose in COMMANDS.items():
        own = commands.add_parser(
            name, help=purpose, formatter_class=argparse.RawDescriptionHelpFormatter, description=purpose
        )
        if name == chosen:  # others may need packages that are not installed
            module = importlib.import_module(f"shardwise.commands.{name}")
            own.description = module.__doc__
            module.add_arguments(own)
            run = module.run
    arguments = parser.parse_args(words)
    assert run is not None
    return chosen, run, arguments


if __name__ == "__main__":
    sys.exit(main())
