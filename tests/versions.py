"""Run the suite on the ends of the range of torch that is supported, each in an environment of its own.

    python tests/versions.py                           2.11 and 2.15, all files of the default suite
    python tests/versions.py 2.14 --files test_compat test_streams
    python tests/versions.py --keep ~/environments     keep the environments, and use them again

Slow: from 2.14 on there are only builds with CUDA libraries, several GB each. What would be downloaded is listed
first, and a question asked; --yes answers it. Each file runs in a process of its own, so that a crash or a hang
(--timeout, in seconds) is one file's. Ends with a table of both versions; exits with 1 where something failed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
ENDS = ("2.11", "2.15")


@dataclass
class Version:
    """An environment with one torch."""

    number: str
    folder: Path
    results: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def wanted(self) -> list[str]:
        """What pip is told; the library itself comes without building anything."""
        return [f"torch=={self.number}.*", "-e", f"{ROOT}[test]"]

    def is_there(self) -> bool:
        asked = subprocess.run(
            [self.python, "-c", "import shardwise, pytest, torch; print(torch.__version__)"],
            capture_output=True,
            text=True,
            check=False,
        )
        return asked.returncode == 0 and asked.stdout.startswith(f"{self.number}.")

    def downloads(self) -> list[str]:
        """Name and version of all that pip would install."""
        venv.create(self.folder, with_pip=True)
        report = self.folder / "report.json"
        self.pip("install", "--quiet", "--dry-run", "--report", str(report), *self.wanted)
        installs = json.loads(report.read_text())["install"]
        return sorted(f"{each['metadata']['name']} {each['metadata']['version']}" for each in installs)

    def pip(self, *arguments: str) -> None:
        subprocess.run([self.python, "-m", "pip", *arguments], check=True)

    def run(self, name: str, timeout: float) -> None:
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path_of(name))]
        try:
            ended = subprocess.run(
                command, cwd=ROOT, timeout=timeout, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            self.note(name, f"not over after {timeout:.0f} s", is_good=False)
            return
        summary = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", ended.stdout)
        is_good = ended.returncode in (0, 5)  # 5: nothing to run
        self.note(name, ", ".join(summary) or f"exit status {ended.returncode}", is_good)
        if not is_good:
            print(ended.stdout[-20000:], ended.stderr[-2000:], flush=True)

    def note(self, name: str, text: str, is_good: bool) -> None:
        self.results[name] = text
        self.has_failed |= not is_good
        print(f"torch {self.number} {name}: {text}", flush=True)


def path_of(name: str) -> Path:
    (path,) = TESTS.rglob(f"{name}.py")
    return path


def prepare(version: Version, answers_yes: bool) -> None:
    if version.is_there():
        return
    print(f"\ntorch {version.number}: pip is asked what it would download ...", flush=True)
    print("  " + ", ".join(version.downloads()))
    print(f"  into {version.folder}. CUDA libraries (nvidia-..., triton) are several GB.")
    if not answers_yes and input("Download these? [y/N] ").strip().lower() != "y":
        sys.exit("Nothing was downloaded.")
    version.pip("install", "--quiet", *version.wanted)


def print_table(versions: list[Version], names: list[str]) -> None:
    print("\n| file | " + " | ".join(f"torch {version.number}" for version in versions) + " |")
    print("|---" * (len(versions) + 1) + "|")
    for name in names:
        print(f"| {name} | " + " | ".join(version.results[name] for version in versions) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("versions", nargs="*", default=list(ENDS), metavar="2.N")
    parser.add_argument("--files", nargs="+", help="without .py; all by default")
    parser.add_argument("--keep", type=Path, help="where the environments are, and stay")
    parser.add_argument("--timeout", type=float, default=1200, help="for one file, in seconds")
    parser.add_argument("--yes", action="store_true", help="download without asking")
    arguments = parser.parse_args()
    names = arguments.files or sorted(path.stem for path in TESTS.rglob("test_*.py"))
    with tempfile.TemporaryDirectory(prefix="torch-versions-") as temporary:
        folder = (arguments.keep or Path(temporary)).expanduser().absolute()
        versions = [Version(number, folder / f"torch-{number}") for number in arguments.versions]
        for version in versions:
            prepare(version, arguments.yes)
        for version in versions:
            for name in names:
                version.run(name, arguments.timeout)
    print_table(versions, names)
    return int(any(version.has_failed for version in versions))


if __name__ == "__main__":
    sys.exit(main())
