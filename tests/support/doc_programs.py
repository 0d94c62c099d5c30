"""The programs of the README and of docs/: what stands in blocks of Python and, as sides of changes, in diffs."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Program:
    """A block of code: of which page, which of its blocks, and what it says."""

    page: str
    index: int
    code: str

    def __str__(self) -> str:
        return f"{self.page} {self.index}"

    @property
    def missing(self) -> list[str]:
        """Packages that it imports and that are not installed."""
        imported = re.findall(r"^ *(?:import|from) (\w+)", self.code, flags=re.MULTILINE)
        imported += re.findall(r"torch\.utils\.(tensorboard)", self.code)
        return sorted({name for name in imported if importlib.util.find_spec(name) is None})

    @property
    def needs_gpus(self) -> bool:
        """Whether only devices can run it. The others choose CPUs where there are none."""
        return 'torch.device("cuda"' in self.code

    @property
    def ranks(self) -> int:
        """As many as the block's own command starts; two otherwise."""
        found = re.search(r"torchrun --nproc-per-node (\d)", self.code)
        return int(found[1]) if found else 2


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a language, whatever admonition or list they stand in."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def programs() -> list[Program]:
    """All blocks of Python."""
    return [
        Program(str(page.relative_to(ROOT)), index, code)
        for page in PAGES
        for index, code in enumerate(blocks(page, "python"))
    ]


def sides(diff: str) -> tuple[str, str]:
    """What a program was before a change, and what it is after it."""
    lines = diff.splitlines()
    before, after = ([line[2:] for line in lines if line[:1] in (sign, " ", "")] for sign in "-+")
    return "\n".join(before) + "\n", "\n".join(after) + "\n"


def migrations() -> dict[str, tuple[str, str]]:
    """By page: the two sides of the only diff of each page about migration that has one."""
    found = {page.stem: blocks(page, "diff") for page in PAGES if page.parent.name == "migrate"}
    return {name: sides(diffs[0]) for name, diffs in found.items() if diffs}
