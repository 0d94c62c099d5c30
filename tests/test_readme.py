"""What the README promises can be copied from it and run."""

import re
import runpy
from pathlib import Path
from typing import Any

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


def test_the_readmes_checkpoints_are_resumed(tmp_path: Path, world2) -> None:  # type: ignore[no-untyped-def]
    (code,) = [
        c for c in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "save_checkpoint(" in c
    ]
    shorter = code.replace("< 10_000", "< 5").replace("% 500", "% 2")
    script = tmp_path / "script.py"
    script.write_text(shorter)
    assert world2.run(steps_of_running, str(script), str(tmp_path)) == [5, 5]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-2", "step-4"]
    assert world2.run(steps_of_running, str(script), str(tmp_path)) == [1, 1]


def test_the_readmes_recipes_for_compiling_run(tmp_path: Path, world2) -> None:  # type: ignore[no-untyped-def]
    recipes = [c for c in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if ".compile(" in c]
    scripts = [tmp_path / f"recipe_{index}.py" for index in range(len(recipes))]
    for script, recipe in zip(scripts, recipes, strict=True):
        script.write_text(recipe)
    # The blocks share a graph; the model and its blocks are one.
    for script in scripts:
        assert world2.run(graphs_of_running, str(script), timeout=120) == [1, 1]
    assert len(scripts) == 2


def graphs_of_running(script: str) -> int:
    """How many graphs a step is made of, once a recipe has been followed; with a back end that needs no C++."""
    from functools import partialmethod
    from unittest import mock

    import torch
    import torch._dynamo
    from dynamo import forget_graphs
    from models import Tower, random_batch
    from torch import nn
    from torch._dynamo.utils import counters

    from shardwise import shard_model

    forget_graphs()
    with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        model = runpy.run_path(script, {"model": Tower(), "shard_model": shard_model})["model"]
    model(random_batch(0, 4, dtype=torch.float32)).sum().backward()
    return int(counters["stats"]["unique_graphs"])


def steps_of_running(script: str, folder: str) -> int:
    """How many steps the script made, from the checkpoint that it found."""
    import os

    import torch
    from models import Tower, random_batch

    steps = 0

    def train_one_step(model: Any, optimizer: Any) -> None:
        nonlocal steps
        steps += 1
        model(random_batch(0, 4, dtype=torch.float32)).sum().backward()
        optimizer.step()

    before = os.getcwd()
    os.chdir(folder)
    try:
        runpy.run_path(script, {"GPT": Tower, "train_one_step": train_one_step})
    finally:
        os.chdir(before)
    return steps


def names_after_running(script: str) -> bool:
    from shardwise import FSDPModule

    return isinstance(runpy.run_path(script)["model"], FSDPModule)
