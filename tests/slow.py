"""Run the slow tests in parts, each in a process of its own, and sum up.

    python tests/slow.py                    all, in ten parts
    python tests/slow.py --only 3 7         these of them
    python tests/slow.py --turn             the one whose turn it is: by the hour of the last commit
    python tests/slow.py --parts 40 -- -x   in smaller parts; what follows -- goes to pytest

A part that fails does not keep the others from running; each is printed with the command that repeats it. Exits
with 1 where one failed.
"""

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def turn(num_parts: int) -> int:
    """The same for everybody who has the same commit; after ``num_parts`` hours it is another one's turn."""
    asked = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    seconds = int(asked.stdout) if asked.returncode == 0 and asked.stdout.strip() else int(time.time())
    return seconds // 3600 % num_parts + 1


def run_part(part: str, options: list[str]) -> tuple[int, str]:
    """Exit status and pytest's own summary; everything is printed as it comes."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--durations=10",
        "--slow-part",
        part,
        *options,
    ]
    print(f"\n--- slow tests, part {part}: {' '.join(['python', *command[1:]])}", flush=True)
    summary = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with ignored_interrupts():
            for line in process.stdout:
                print(line, end="", flush=True)
                if re.search(r"\d+ (passed|failed|error|skipped)", line):
                    summary = line.strip(" =\n")
    return process.returncode, summary


@contextlib.contextmanager
def ignored_interrupts() -> Iterator[None]:
    """SIGINT goes to pytest as well, which ends then and says what failed so far: that is what one wants to read."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", type=int, default=10, help="how many there are")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", type=int, nargs="+", metavar="K")
    which.add_argument("--turn", action="store_true")
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    arguments = parser.parse_args()
    numbers = arguments.only or range(1, arguments.parts + 1)
    if arguments.turn:
        numbers = [turn(arguments.parts)]
    parts = [f"{number}/{arguments.parts}" for number in numbers]
    results = {part: run_part(part, arguments.options) for part in parts}
    print("\n--- slow tests")
    for part, (status, summary) in results.items():
        print(f"part {part}: {summary or f'exit status {status}'}")
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
