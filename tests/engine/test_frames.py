"""How many frames of the library stand between a hook of torch's and the collective that it issues."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise import fully_shard
from shardwise.dry_run.fakes import fake_world

SOURCE = Path(shardwise.__file__).parent


def frames_above() -> list[tuple[str, str]]:
    """The frames of the library that run now, outermost first, except those of the stand-in collectives."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE) and "dry_run" not in path.parts and "shardwise" in path.parts:
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            found.append((path.relative_to(SOURCE).as_posix(), name))
        frame = frame.f_back
    return found[::-1]


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8))


@pytest.fixture(scope="module")
def paths() -> dict[str, list[tuple[str, str]]]:
    """By the hook with which it begins, the longest way to a collective in two steady steps."""
    seen: list[list[tuple[str, str]]] = []
    with fake_world({"dp": 8}, lambda *_: seen.append(frames_above())) as mesh:
        model = nn.Sequential(*(block() for _ in range(4)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        for step in range(4):
            if step == 2:
                seen.clear()
            model(torch.ones(2, 8)).sum().backward()
            model.zero_grad()
    longest: dict[str, list[tuple[str, str]]] = {}
    for path in seen:
        hook = path[0][1]
        longest[hook] = max(longest.get(hook, []), path, key=len)
    return longest


@pytest.mark.parametrize(
    ("hook", "collective", "frames", "files"),
    [
        ("before_forward", "all_gather", 7, 5),
        ("_before_backward", "all_gather", 8, 6),
        ("_arrived", "reduce_scatter", 8, 6),
    ],
    ids=["of a module", "of a node", "of a gradient"],
)
def test_from_a_hook_to_its_collective(
    paths: dict[str, list[tuple[str, str]]], hook: str, collective: str, frames: int, files: int
) -> None:
    path = paths[hook]
    assert path[-1] == ("comm/communicators.py", f"BackendCollectives.{collective}")
    assert (len(path), len({file for file, _ in path})) == (frames, files), path
