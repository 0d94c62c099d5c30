"""``python -m shardwise COMMAND``: what can be done from a shell, alone or under torchrun."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from shardwise import __version__
from shardwise.commands import COMMANDS, UsageError


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that ``words`` name, by default those of the command line; returns its exit status."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(prog="python -m shardwise", description=__doc__)
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
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
    try:
        return int(run(arguments))
    except UsageError as error:
        print(f"python -m shardwise {chosen}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
