"""How many frames of the library stand between a hook of torch's and the collective that it issues."""

import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import shardwise
from shardwise import fully_shard
from shardwise.dry_run.fake_world import fake_world

SOURCE = Path(shardwise.__file__).parent


def frames_above() -> list[tuple[str, str]]:
    """The frames of the library that run now, outermost first, but for those of the stand-in collectives."""
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


def shown(path: list[tuple[str, str]]) -> str:
    lines = [f"{file:28} {name}" for file, name in path]
    return "\n".join([*lines, f"{len(path)} frames in {len({file for file, _ in path})} files"])


def test_from_the_hook_of_a_module_to_the_all_gather(paths: dict[str, list[tuple[str, str]]]) -> None:
    assert_expected_inline(
        shown(paths["before_forward"]),
        """\
engine/forward.py            before_forward
engine/forward.py            ForwardPass.enter
groups/unsharded.py          Unsharded.unshard
groups/unsharded.py          Unsharded._start
comm/streams.py              CommStream.submit
comm/all_gather.py           AllGather.start
comm/communicators.py        BackendCollectives.all_gather
7 frames in 5 files""",
    )


def test_from_the_hook_of_a_node_to_the_all_gather(paths: dict[str, list[tuple[str, str]]]) -> None:
    assert_expected_inline(
        shown(paths["_before_backward"]),
        """\
engine/forward.py            _before_backward
engine/backward.py           BackwardPass.enter
engine/backward.py           BackwardPass._unshard
groups/unsharded.py          Unsharded.unshard_ahead
groups/unsharded.py          Unsharded._start
comm/streams.py              CommStream.submit
comm/all_gather.py           AllGather.start
comm/communicators.py        BackendCollectives.all_gather
8 frames in 6 files""",
    )


def test_from_the_hook_of_a_gradient_to_the_reduce_scatter(paths: dict[str, list[tuple[str, str]]]) -> None:
    assert_expected_inline(
        shown(paths["_arrived"]),
        """\
groups/gradients.py          _arrived
engine/backward.py           gradients_complete
engine/reduction_queue.py    ReductionQueue.reduce
groups/gradients.py          Gradients.reduce
comm/reduction.py            Reduction.send
comm/streams.py              CommStream.submit
comm/reduce_scatter.py       ReduceScatter.start
comm/communicators.py        BackendCollectives.reduce_scatter
8 frames in 7 files""",
    )
