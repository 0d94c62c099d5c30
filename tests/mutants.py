"""Break the library in one place at a time, and see which test notices.

    python tests/mutants.py                       all of tests/mutants.txt: hours
    python tests/mutants.py --turn                a fortieth, by the hour of the last commit: minutes
    python tests/mutants.py --only engine groups  those of packages, or of files: engine/unsharded_groups.py
    python tests/mutants.py --numbers 3 17        these, as numbered in the output
    python tests/mutants.py --untried             those without a recorded outcome; --left: that nothing found;
                                                  --found: that a test found
    python tests/mutants.py --record              write outcomes into the list, as they come

Each is applied in a copy of the tree, where tests run until one fails: first the one that found it last time, then those
of its package (`TESTS`), then whole programs (`LAST`). A test that does not end counts as one that fails. Survivors are
printed at the end with the command that repeats them; exits with 1 if there are any.

A mutant that survives lacks a test, or breaks nothing: write the one, or replace the other.

What takes time is importing torch, so that this process does it once and forks: a mutant costs seconds. It never imports
shardwise itself.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from slow import turn

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".txt")
SOURCE = Path("src", "shardwise")
TURNS = 40
HANG_S = 90.0  # of one test; ranks of a world have less
RANKS_HANG_S = 40.0

# By package of `src/shardwise`, the quickest and the most likely to find something first.
TESTS = {
    "layout": ["layout", "planning", "strategies/test_explain.py", "checkpoint/test_checkpoint.py"],
    "ranks": ["ranks", "checkpoint/test_stopping.py"],
    "comm": [
        "comm",
        "races/test_races.py",
        "software_gpu/test_recipes_on_gpus.py",
        "strategies/test_comm_hooks.py",
        "state",
    ],
    "params": ["params", "engine", "setup", "strategies/test_comm_hooks.py"],
    "buckets": ["params", "engine", "optim", "comm", "races/test_races.py"],
    "groups": ["engine", "params", "setup", "races/test_races.py", "ranks"],
    "engine": ["engine", "ranks", "parity/test_composition.py", "races/test_races.py", "params", "setup"],
    "features": [
        "engine/test_inference.py",
        "engine/test_generation.py",
        "interop/test_pipelines.py",
        "engine",
    ],
    "compile": ["compile"],
    "fsdp_module.py": [
        "engine",
        "setup",
        "parity/test_peer_surface.py",
        "comm",
        "strategies/test_comm_hooks.py",
    ],
    "setup": ["setup", "params", "parity/test_placement.py", "parity/test_tensor_parallel.py"],
    "fully_shard.py": ["setup", "params", "parity/test_placement.py"],
    "policies.py": ["setup", "engine/test_precision.py", "strategies"],
    "strategies": ["strategies", "planning"],
    "dry_run": ["planning", "strategies"],
    "planning": ["planning", "commands/test_estimate_command.py"],
    "init": ["state/test_materialize.py", "state/test_partly_loaded.py", "state", "setup"],
    "optim": ["optim"],
    "state": ["state", "checkpoint"],
    "checkpoint": ["checkpoint", "commands/test_commands.py", "examples/test_kill_and_resume.py"],
    "observe.py": ["observe", "engine/test_memory.py", "comm/test_traffic.py"],
    "tracing": ["tracing"],
    "doctor.py": ["commands/test_doctor.py"],
    "interop": ["interop"],
    "torch_compat": ["torch_compat", "layout", "params", "optim", "engine"],
    "commands": ["commands"],
}
LAST = ["parity"]


@dataclass(frozen=True)
class Mutant:
    """One break: ``new`` stands for ``old`` in a file of the library; ``outcome`` is what was seen last time."""

    number: int
    file: str
    nearest: list[str]  # tests of the file
    old: str
    new: str
    outcome: str
    line: int  # of the list, after which the outcome stands

    def __str__(self) -> str:
        return f"{self.number} {self.file}: {_one_line(self.old)} -> {_one_line(self.new)}"

    @property
    def package(self) -> str:
        return self.file.split("/")[0]

    @property
    def is_left(self) -> bool:
        """Whether it was tried, and nothing found it."""
        return bool(self.outcome) and "::" not in self.outcome

    def applied(self, text: str) -> str:
        """The broken file; ``old`` must stand in it once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self}: occurs {text.count(self.old)} times in the file")
        return text.replace(self.old, self.new)

    def tests(self, tree: Path) -> Iterator[list[str]]:
        """What to run, one after the other: each is collected only where those before have found nothing."""
        known, _, name = self.outcome.split(",")[0].partition("::")
        if name and (tree / known).is_file() and f"def {name}(" in (tree / known).read_text():
            yield [f"{known}::{name}"]
        for names in (self.nearest, TESTS[self.package], LAST):
            yield [f"tests/{name}" for name in names]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def read_mutants(text: str) -> list[Mutant]:
    """The list: `== file: nearest tests`, then `- old`, `+ new` and `> outcome`; the first two may have more lines."""
    mutants: list[Mutant] = []
    parts: dict[str, list[str]] = {}
    file, nearest = "", ""

    def end(line: int) -> None:
        if parts:
            old, new, outcome = ("\n".join(parts.get(mark, [])) for mark in "-+>")
            at = line - len(parts.get(">", []))
            mutants.append(Mutant(len(mutants) + 1, file, nearest.split(), old, new, outcome, at))
            parts.clear()

    for number, line in enumerate(text.splitlines()):
        mark, content = line[:1], line[2:]
        if mark not in ("-", "+", ">") or (mark == "-" and "+" in parts):
            end(number)
        if line.startswith("== "):
            file, _, nearest = line[3:].partition(": ")
        elif mark in ("-", "+", ">"):
            parts.setdefault(mark, []).append(content)
    end(len(text.splitlines()))
    return mutants


def record(tried: Mutant, outcome: str) -> None:
    """Write an outcome into the list, as that is now: others may have edited it."""
    text = LIST.read_text()
    lines = text.splitlines()
    for mutant in read_mutants(text):
        if (mutant.file, mutant.old, mutant.new) == (tried.file, tried.old, tried.new):
            lines[mutant.line : mutant.line + bool(mutant.outcome)] = [f"> {outcome}"]
    LIST.write_text("\n".join(lines) + "\n")


class _Progress:
    """A plugin of pytest's: says which test runs, for the one who waits for it to end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._path.write_text(nodeid)


def _fork_server(path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
    """As multiprocessing starts the server of ranks, but with torch imported already."""
    code = os.fsdecode(arguments[-1])
    if "forkserver" not in code:
        return _START(path, arguments, fds)
    child = os.fork()
    if not child:
        for fd in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, *fds}:
            with contextlib.suppress(OSError):  # the one of the listing itself
                os.close(fd)
        try:
            exec(code, {})
        finally:
            os._exit(0)
    return child


_START = multiprocessing.util.spawnv_passfds


def _pytest(tree: Path, arguments: list[str], progress: Path) -> None:
    """In a child process: run tests of ``tree``, and exit with pytest's status."""
    os.setsid()
    os.chdir(tree)
    with open(progress.with_suffix(".out"), "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.path[:] = [str(tree / "tests"), str(tree / "src"), *sys.path[1:]]
    os.environ["PYTHONPATH"] = str(tree / "src")
    sys.modules["__main__"] = types.ModuleType("__main__")  # ranks would import this file again
    sys.modules.pop("slow", None)
    multiprocessing.util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    import harness
    import pytest

    harness.World.run.__kwdefaults__["timeout"] = RANKS_HANG_S
    forkserver.ensure_running()
    os._exit(pytest.main(arguments, plugins=[_Progress(progress)]))


@dataclass(frozen=True)
class Verdict:
    """What came of tests: the first that failed or hung, if any did; and what pytest printed."""

    finder: str
    output: str
    hangs: bool = False
    is_out_of_time: bool = False


def run_tests(tree: Path, tests: list[str], *, limit_s: float) -> Verdict:
    """Run them in a child process until one fails or hangs, or time is up."""
    progress = tree / "progress"
    progress.write_text("")
    started, child = time.monotonic(), os.fork()
    if not child:
        try:
            _pytest(tree, ["-x", "-q", "-p", "no:cacheprovider", *tests], progress)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(3)
    hangs = is_out_of_time = False
    while not (hangs or is_out_of_time or os.waitpid(child, os.WNOHANG)[0]):
        time.sleep(0.05)
        hangs = time.time() - progress.stat().st_mtime > HANG_S
        is_out_of_time = time.monotonic() - started > limit_s
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with what it has left behind
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    output = progress.with_suffix(".out").read_text(errors="replace")
    if hangs:
        return Verdict(progress.read_text(), output, hangs=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.MULTILINE)
    ranks_hang = bool(re.search(r"on a world of \d+: ranks? [\d, ]+ gave no answer", output))
    return Verdict(failed[0] if failed else "", output, ranks_hang, is_out_of_time)


class Copy:
    """A copy of the tree, in which one file at a time is broken."""

    def __init__(self, folder: str) -> None:
        self.tree = Path(folder, "tree")
        left_out = shutil.ignore_patterns(
            ".git", "__pycache__", ".*_cache", ".hypothesis", ".venv", "*.egg-info"
        )
        shutil.copytree(ROOT, self.tree, ignore=left_out)

    def try_out(self, mutant: Mutant, limit_s: float) -> Verdict:
        """Break the file, run tests until one notices, and mend it."""
        path = self.tree / SOURCE / mutant.file
        text, deadline = path.read_text(), time.monotonic() + limit_s
        self._write(path, mutant.applied(text))
        try:
            for tests in mutant.tests(self.tree):
                verdict = run_tests(self.tree, tests, limit_s=deadline - time.monotonic())
                if verdict.finder or verdict.is_out_of_time:
                    break
        finally:
            self._write(path, text)
        return verdict

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        # Compiled files are told apart by the second, and by the length of the source: both may be the same.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()


def outcome_of(verdict: Verdict, seconds: float) -> str:
    """As it is recorded."""
    if verdict.finder:
        test = verdict.finder.split("[")[0]  # without its case
        return f"{test}, {'hangs' if verdict.hangs else f'{seconds:.0f} s'}"
    return f"not found in {seconds:.0f} s" if verdict.is_out_of_time else "survived"


def choose(mutants: list[Mutant], arguments: argparse.Namespace) -> list[Mutant]:
    """Those that the command line asks for."""
    if arguments.numbers:
        mutants = [mutant for mutant in mutants if mutant.number in arguments.numbers]
    if arguments.only:
        mutants = [mutant for mutant in mutants if {mutant.file, mutant.package} & set(arguments.only)]
    if arguments.untried:
        mutants = [mutant for mutant in mutants if not mutant.outcome]
    if arguments.left:
        mutants = [mutant for mutant in mutants if mutant.is_left]
    if arguments.found:
        mutants = [mutant for mutant in mutants if "::" in mutant.outcome]
    if arguments.turn:
        mutants = mutants[turn(TURNS) - 1 :: TURNS]
    if arguments.sample:
        mutants = mutants[:: max(1, len(mutants) // arguments.sample)]
    return mutants


def fails_unbroken(copy: Copy, outcomes: Iterable[str]) -> str:
    """The first of the tests that found something, and that fails without a mutant as well."""
    tests = sorted({outcome.split(",")[0] for outcome in outcomes if "::" in outcome})
    return run_tests(copy.tree, tests, limit_s=1800).finder if tests else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PACKAGE", help="packages, or files in them")
    parser.add_argument("--numbers", type=int, nargs="+", metavar="N")
    parser.add_argument("--untried", action="store_true", help="without a recorded outcome")
    parser.add_argument("--left", action="store_true", help="tried, and not found")
    parser.add_argument("--found", action="store_true", help="tried, and found")
    parser.add_argument("--turn", action="store_true", help=f"one of {TURNS} turns")
    parser.add_argument("--sample", type=int, metavar="N", help="about N, from everywhere in the list")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each (default: 300)")
    parser.add_argument("--record", action="store_true", help="write the outcomes into the list")
    parser.add_argument("--json", type=Path, help="write the outcomes into a file")
    arguments = parser.parse_args()
    chosen = choose(read_mutants(LIST.read_text()), arguments)
    preload()
    outcomes: dict[str, str] = {}
    left: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(folder)
        for mutant in chosen:
            started = time.monotonic()
            verdict = copy.try_out(mutant, arguments.limit)
            outcome = outcomes[str(mutant)] = outcome_of(verdict, time.monotonic() - started)
            print(f"{mutant}\n    {outcome}", flush=True)
            if not verdict.finder:
                left.append(mutant)
                if not verdict.is_out_of_time and "passed" not in verdict.output:
                    print(verdict.output[-3000:])  # tests did not even run
            if arguments.record:
                record(mutant, outcome)
        fails = fails_unbroken(copy, outcomes.values())
    if arguments.json:
        arguments.json.write_text(json.dumps(outcomes, indent=2))
    print(f"\n{len(outcomes) - len(left)} of {len(outcomes)} found")
    if fails:
        print(f"{fails} fails without a mutant as well: what it found does not count")
    for mutant in left:
        print(f"NOT FOUND {mutant}")
    if left:
        print(f"python tests/mutants.py --numbers {' '.join(str(mutant.number) for mutant in left)}")
    return int(bool(left or fails))


def preload() -> None:
    """What every child needs, once: anything but the library itself."""
    for name in (
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.tensor.parallel",
        "pytest",
    ):
        importlib.import_module(name)
    assert "shardwise" not in sys.modules


if __name__ == "__main__":
    sys.exit(main())
