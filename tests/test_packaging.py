"""What a release is made of: everything that a checkout has, and a readme without links that lead nowhere."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
without_relative_links = runpy.run_path(str(ROOT / "setup.py"))["without_relative_links"]


def test_an_index_gets_a_readme_without_relative_links_and_pictures() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = without_relative_links(readme)
    assert re.findall(r"\]\((?!http)", readme)
    assert re.findall(r"\]\((?!http)", shown) == []
    assert re.findall(r"\]\(http[^)]*\)", shown) == re.findall(r"\]\(http[^)]*\)", readme)
    assert re.sub(r"\W", "", "".join(re.findall(r"```.*?```", shown, flags=re.DOTALL))) == re.sub(
        r"\W", "", "".join(re.findall(r"```.*?```", readme, flags=re.DOTALL))
    )


def test_a_link_keeps_its_text() -> None:
    assert without_relative_links(
        "![a picture](a.svg)\n\nsee [the docs](docs/x.md#y), [torch](https://t)"
    ) == ("see the docs, [torch](https://t)")


def test_the_source_distribution_has_everything_that_the_checkout_has() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tops = {path.split("/")[0] for path in listed.splitlines()}
    # src and what setuptools takes by itself.
    always = {"src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", ".gitignore"}
    manifest = (ROOT / "MANIFEST.in").read_text()
    taken = {
        name
        for line in re.findall(r"^(?:graft|include) (.*)$", manifest, re.MULTILINE)
        for name in line.split()
    }
    assert tops - always <= taken
    assert all((ROOT / name).exists() for name in taken)
