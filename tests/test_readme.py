"""What the README promises can be copied from it and run."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"```(?:bash|sh)\n(.*?)```", README, flags=re.DOTALL)


def test_ci_runs_the_readmes_test_command() -> None:
    (command,) = [line for block in COMMANDS for line in block.splitlines() if "&& pytest" in line]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_link_of_the_readme_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("script", sorted(set(re.findall(r"(?:examples|bench)/\w+\.py", README))))
def test_every_script_the_readme_names_exists(script: str) -> None:
    assert (ROOT / script).exists()


def test_the_readmes_first_lines_of_code_run(tmp_path: Path, world2) -> None:  # type: ignore[no-untyped-def]
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "fully_shard(" in c]
    script = tmp_path / "script.py"
    script.write_text(code)
    assert world2.run(names_after_running, str(script)) == [True, True]


def names_after_running(script: str) -> bool:
    from shardwise import FSDPModule

    return isinstance(runpy.run_path(script)["model"], FSDPModule)
