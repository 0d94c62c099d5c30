"""What the pages quote is there: messages, files, links, commands."""

import ast
import builtins
import itertools
import re
import subprocess
from pathlib import Path

import pytest
from doc_programs import PAGES, ROOT, blocks
from torch import nn

import shardwise
from shardwise import FSDPModule, fully_shard, save_checkpoint

DOCS = ROOT / "docs"


def texts_in_the_source() -> list[str]:
    """Every text that stands in the library, with "…" for what is put in."""
    found = []
    for path in Path(shardwise.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_are_those_of_the_library() -> None:
    quoted = re.findall(r"^\| `(.*?)` \|", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)
    texts = texts_in_the_source()
    assert len(quoted) > 20
    assert [message for message in quoted if not any(message in text for text in texts)] == []


def test_the_messages_of_python_are_those_that_it_raises() -> None:
    rows = re.findall(
        r"^\| (\w+Error): `(.*?)` \| `(?:with )?(.*?):?` \|", (DOCS / "errors.md").read_text(), re.MULTILINE
    )
    model = type("Sharded", (FSDPModule, nn.Linear), {})(1, 1)
    names = {"model": model, "save_checkpoint": save_checkpoint, "fully_shard": fully_shard}
    assert len(rows) == 6
    for error, message, call in rows:
        with pytest.raises(getattr(builtins, error), match=re.escape(message)):
            eval(call, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(
        r"\]\((?!https?:)([^)#]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    ):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    for path in re.findall(r"(?:examples|bench|tests)/[\w/]+\.(?:py|sh|md)", page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_tests_that_failures_names_exist() -> None:
    there = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "explain" / "failures.md").read_text()))
    assert len(named) > 60
    assert named - there == set()


def test_shell_blocks_parse() -> None:
    for page in PAGES:
        for block in blocks(page, "bash"):
            done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
            assert done.returncode == 0, (page, done.stderr)


def test_options_that_are_named_exist() -> None:
    """Of our own programs: what follows their names in shell blocks, up to the end of the command."""
    programs = {
        f"examples/{path.name}": "".join(each.read_text() for each in path.parent.glob("*.py"))
        for path in (ROOT / "examples").glob("*.py")
    } | {
        f"-m shardwise {path.stem}": path.read_text()
        for path in (ROOT / "src" / "shardwise" / "commands").glob("*.py")
    }
    seen = 0
    for page in PAGES:
        for line in "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
            for program in programs:
                _, found, arguments = line.partition(program)
                own = arguments.split(" #")[0]
                if program.endswith("run"):  # what follows the name of a script is that script's
                    own = " ".join(itertools.takewhile(lambda word: word.startswith("-"), own.split()))
                for option in re.findall(r"--[a-z][a-z-]*", own if found else ""):
                    assert f'"{option}"' in programs[program], (page, line)
                    seen += 1
    assert seen > 5


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.md", config[config.index("\nnav:") :]))
    there = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
    assert there == listed


def test_ci_runs_the_readmes_commands() -> None:
    commands = re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    two = {
        line for block in commands for line in block.splitlines() if re.search(r"&& (torchrun|pytest)", line)
    }
    assert len(two) == 2
    assert two <= set((ROOT / ".ci" / "run").read_text().splitlines())


def figures(page: Path) -> list[tuple[str, str, str, str]]:
    """Rows of the table against other libraries: a library, its time, ours, and the ratio."""
    return re.findall(
        r"^\| (\w+).* \| (\d+) ms \| (\d+) ms \| ([\d.]+) \|$", page.read_text(), flags=re.MULTILINE
    )


def test_the_home_page_shows_what_the_readme_shows() -> None:
    assert figures(DOCS / "index.md") == figures(ROOT / "README.md")
    assert blocks(DOCS / "index.md", "diff") == blocks(ROOT / "README.md", "diff")


def test_the_readmes_figures_are_those_that_were_recorded() -> None:
    section = (
        (ROOT / "bench" / "README.md").read_text().partition("## Other libraries")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| (\d+) \| ([\d.]+)", section, flags=re.MULTILINE)
    recorded = {(kind, library): (time, ratio) for kind, library, time, ratio in rows}
    shown = figures(ROOT / "README.md")
    assert [library for library, *_ in shown] == ["DeepSpeed", "FSDP2", "FSDP1", "DDP"]
    for library, time, ours, ratio in shown:
        kind = "ddp" if library == "DDP" else "zero3"
        assert recorded[kind, library] == (time, ratio)
        assert recorded[kind, "shardwise"] == (ours, "1")
