"""Every program of docs/ runs as it stands, as a file of its own, and does what is said beside it.

Here in worlds of processes that are there already; the slow ones start each by torchrun, as a reader does.
"""

import contextlib
import io
import itertools
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections import OrderedDict
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from doc_programs import PAGES, ROOT, Program, blocks, migrations, programs, sides
from dynamo import forget_graphs
from expecttest import assert_expected_inline
from harness import World
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardwise import fully_shard, load_checkpoint, load_full_state_dict, save_checkpoint
from shardwise.state import load_full_optimizer_state_dict

PROGRAMS = [each for each in programs() if not each.needs_gpus]  # those: tests/software_gpu
MIGRATIONS = migrations()
BY_RANKS = {ranks: [each for each in PROGRAMS if each.ranks == ranks] for ranks in (2, 4)}
CHECKPOINTS, COMPILE = "docs/guides/checkpoints.md", "docs/guides/compile.md"
PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", flags=re.MULTILINE)
SHOWN = [
    each
    for each in PROGRAMS
    if each.page in (CHECKPOINTS, COMPILE, "docs/guides/memory.md") and PRINTED.search(each.code)
]
BY_PAGE = {f"docs/{page}.md" for page in ("tutorial", "guides/strategies", "guides/look-inside")} | {COMPILE}
RESUMING = [each for each in PROGRAMS if each.page == CHECKPOINTS and each not in SHOWN]


class PrintingWriter:
    """TensorBoard's writer, with the arguments that the guide passes; prints what it is given."""

    def __init__(self, log_dir: str) -> None:
        print("writes to", log_dir)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        print("scalar", tag, step, math.isfinite(value))

    def add_histogram_raw(
        self, tag: str, min: float, max: float, num: int, sum: float, sum_squares: float,
        bucket_limits: list[float], bucket_counts: list[int], global_step: int,
    ) -> None:  # fmt: skip
        fits = len(bucket_limits) == len(bucket_counts) == 64
        print("histogram", tag, global_step, fits and min <= sum / num <= max and sum_squares > 0)

    def close(self) -> None:
        print("closed")


def run(script: str, folder: str) -> tuple[dict[str, Any], str]:
    """Run a file in ``folder``, as a process of torchrun that is there already; its names, and what it prints."""
    printed = io.StringIO()
    before = os.getcwd()
    os.chdir(folder)
    forget_graphs()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT 0.21 reads it
    torch.manual_seed(1 + dist.get_rank())  # a program has to seed by itself what is to be equal
    size = str(dist.get_world_size())
    ours = {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    try:
        with (
            mock.patch.dict(os.environ, ours),
            pytest.MonkeyPatch.context() as patch,  # not patch.dict, which forgets what a program imports
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(dist, "destroy_process_group"),
            # A back end that needs no C++.
            mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")),
            contextlib.redirect_stdout(printed),
        ):
            patch.setitem(sys.modules, "torch.utils.tensorboard", mock.Mock(SummaryWriter=PrintingWriter))
            names = runpy.run_path(script)
    finally:
        os.chdir(before)
    return names, printed.getvalue()


def run_all(scripts: list[str], folder: str) -> dict[str, str]:
    return {script: run(script, folder)[1] for script in scripts}


def written(folder: Path, codes: list[str]) -> list[str]:
    paths = [folder / f"program{index}.py" for index in range(len(codes))]
    for path, code in zip(paths, codes, strict=True):
        path.write_text(code)
    return [str(path) for path in paths]


def skip_without_packages(program: Program) -> None:
    """Pages of docs/interop are about packages that the tests do not all install."""
    if program.missing:
        others = {"peft", "safetensors", "tensorboard", "transformers"}
        assert program.page.startswith("docs/interop/") or {*program.missing} <= others
        pytest.skip(f"{', '.join(program.missing)}: not installed")


def test_every_page_is_read() -> None:
    assert len(PAGES) > 25
    assert {each.page for each in PROGRAMS} >= {"docs/index.md", "docs/tutorial.md", "docs/guides/lora.md"}
    assert [each for each in PROGRAMS if each.ranks not in BY_RANKS] == []
    assert set(MIGRATIONS) == {"ddp", "deepspeed", "fsdp1", "fsdp2"}


@pytest.mark.parametrize(
    "program",
    [each for each in BY_RANKS[2] if each.page not in BY_PAGE and each not in [*SHOWN, *RESUMING]],
    ids=str,
)
def test_a_program_runs(program: Program, world2: World, tmp_path: Path) -> None:
    skip_without_packages(program)
    (script,) = written(tmp_path, [program.code])
    world2.run(run_all, [script], str(tmp_path), timeout=120)


@pytest.mark.parametrize("program", BY_RANKS[4], ids=str)
def test_a_program_of_four_ranks_runs(program: Program, world4: World, tmp_path: Path) -> None:
    (script,) = written(tmp_path, [program.code])
    world4.run(run_all, [script], str(tmp_path), timeout=120)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_runs_under_torchrun(program: Program, tmp_path: Path) -> None:
    skip_without_packages(program)
    (script,) = written(tmp_path, [program.code])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(program.ranks), script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


# --- the README -----------------------------------------------------------------------------------


AROUND_A_CHANGE = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential()
model.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
model.head = nn.Linear(8, 8)
{change}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("index", [0, 1], ids=["FSDP2", "DDP"])
def test_a_change_that_the_readme_shows_trains_as_before(index: int, world2: World, tmp_path: Path) -> None:
    codes = [AROUND_A_CHANGE.format(change=side) for side in sides(blocks(ROOT / "README.md", "diff")[index])]
    assert ("shardwise" in codes[0], "shardwise" in codes[1]) == (False, True)
    before, after = written(tmp_path, codes)
    expected = world2.run(last_loss, before, str(tmp_path))
    assert world2.run(last_loss, after, str(tmp_path)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_quickstart_learns(world2: World, tmp_path: Path) -> None:
    quickstart = str(ROOT / "examples" / "quickstart.py")
    (first, others) = world2.run(run_all, [quickstart], str(tmp_path), timeout=120)
    losses = [float(line.split()[-1]) for line in first[quickstart].splitlines() if line.startswith("step")]
    assert len(losses) == 5
    assert losses[0] > 1.0
    assert losses[-1] < 0.7
    assert others[quickstart] == ""
    assert (tmp_path / "runs" / "step-100" / ".metadata").exists()


# --- what is said beside a program ----------------------------------------------------------------


def printed_by(page: str, world: World, folder: Path) -> list[str]:
    """What all programs of a page print, rank by rank."""
    codes = [each.code for each in PROGRAMS if each.page == f"docs/{page}" and each.ranks == world.size]
    scripts = written(folder, codes)
    return ["".join(texts.values()) for texts in world.run(run_all, scripts, str(folder), timeout=120)]


def test_sharding_does_not_change_the_losses_of_the_tutorial(world2: World, tmp_path: Path) -> None:
    for rank, text in enumerate(printed_by("tutorial.md", world2, tmp_path)):
        replicated, sharded = (line for line in text.splitlines() if line.startswith(f"rank {rank}: "))
        assert replicated == sharded
        assert f"rank {rank} holds 8320 of 16640 numbers" in text


def test_the_table_of_groups_is_what_is_printed(world2: World, tmp_path: Path) -> None:
    (table,) = blocks(ROOT / "docs" / "guides" / "strategies.md", "text")
    assert table in printed_by("guides/strategies.md", world2, tmp_path)[0]


def test_one_looks_inside_on_all_ranks_and_writes_on_one(world2: World, tmp_path: Path) -> None:
    ranks = printed_by("guides/look-inside.md", world2, tmp_path)
    for text in blocks(ROOT / "docs" / "guides" / "look-inside.md", "text"):
        assert set(text.splitlines()) <= {line for printed in ranks for line in printed.splitlines()}
    first, second = ("\n".join(printed.split("on this rank\n")[1].splitlines()) for printed in ranks)
    assert second == ""
    assert_expected_inline(
        first,
        """\
writes to runs/first
scalar loss 0 True
scalar gradient norm/model 0 True
scalar gradient norm/0 0 True
scalar gradient norm/2 0 True
histogram 0.weight 0 True
histogram 0.bias 0 True
histogram 2.weight 0 True
histogram 2.bias 0 True
scalar loss 10 True
scalar gradient norm/model 10 True
scalar gradient norm/0 10 True
scalar gradient norm/2 10 True
histogram 0.weight 10 True
histogram 0.bias 10 True
histogram 2.weight 10 True
histogram 2.bias 10 True
closed""",
    )


@pytest.mark.parametrize("program", SHOWN, ids=str)
def test_a_program_prints_what_its_comments_say(program: Program, world2: World, tmp_path: Path) -> None:
    """On each rank; a line of a loop may be printed again and again."""
    skip_without_packages(program)
    (script,) = written(tmp_path, [program.code])
    for printed in world2.run(run_all, [script], str(tmp_path), timeout=120):
        lines = printed[script].splitlines()
        assert [line for line, _ in itertools.groupby(lines)] == PRINTED.findall(program.code)


def test_checkpoints_are_resumed(world2: World, tmp_path: Path) -> None:
    """From disk, and from the memory of hosts unless it is lost."""
    scripts = written(tmp_path, [each.code for each in RESUMING])
    assert len(scripts) == 2

    def steps() -> list[str]:
        (first, second) = world2.run(run_all, scripts, str(tmp_path), timeout=120)
        assert first == second
        return [text.removeprefix("starting at step ").rstrip() for text in first.values()]

    def saved(folder: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / folder).iterdir())

    assert steps() == ["0", "0"]
    assert (saved("run"), saved("memory")) == (["step-2", "step-4", "step-6"], ["step-4", "step-6"])
    assert saved("disk") == ["step-5"]
    assert steps() == ["6", "6"]
    shutil.rmtree(tmp_path / "memory")
    assert steps() == ["6", "5"]


def is_loaded_by_piece(saves: str, folder: str) -> bool:
    """Whether the piece that calls ``saves`` loads everything that a model and its optimizer had before it.

    All of it is set to zero once the piece has saved it.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), experts=nn.Linear(8, 8)))
    with pytest.warns(UserWarning, match="the ranks will drift apart"):  # that is meant
        fully_shard(model, ignored_params={*model.experts.parameters()})
    with torch.no_grad():
        # Another on each rank, for which a full state has no place.
        model.experts.weight.fill_(1 + (dist.get_rank() if saves == "save_checkpoint" else 0))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    calls: dict[str, Any] = {
        each.__name__: each
        for each in (
            get_state_dict,
            load_checkpoint,
            load_full_optimizer_state_dict,
            load_full_state_dict,
            save_checkpoint,
        )
    }

    def values() -> list[Tensor]:
        states = [state[key] for state in optimizer.state.values() for key in sorted(state)]
        kept = [each.detach() for each in (*model.parameters(), *states)]
        return [each.to_local() if isinstance(each, DTensor) else each for each in kept]

    def save_and_forget(*args: Any, **kwargs: Any) -> Any:
        saved = tree_map_only(Tensor, torch.clone, calls[saves](*args, **kwargs))
        for value in values():
            value.zero_()
        return saved

    names = calls | {saves: save_and_forget, "StateDictOptions": StateDictOptions, "dist": dist}
    (piece,) = (each for each in blocks(ROOT / CHECKPOINTS, "py") if f"{saves}(" in each)
    before = [value.clone() for value in values()]
    exec(piece, names | {"model": model, "optimizer": optimizer, "path": f"{folder}/step-1"})
    return all(torch.equal(old, new) for old, new in zip(before, values(), strict=True))


def test_pieces_load_what_they_have_saved(world2: World, tmp_path: Path) -> None:
    """What each rank trains by itself, and full states of torch's functions."""
    assert len(blocks(ROOT / CHECKPOINTS, "py")) == 2
    for saves in ("save_checkpoint", "get_state_dict"):
        assert world2.run(is_loaded_by_piece, saves, str(tmp_path)) == [True, True]


def graphs_of(script: str, folder: str) -> int:
    run(script, folder)
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_recipes_for_compiling_make_one_graph(world2: World, tmp_path: Path) -> None:
    """The blocks share a graph; the model and its blocks are one."""
    codes = [each.code for each in PROGRAMS if each.page == COMPILE and each not in SHOWN]
    assert len(codes) == 2
    for script in written(tmp_path, codes):
        assert world2.run(graphs_of, script, str(tmp_path), timeout=120) == [1, 1]


# --- migration ------------------------------------------------------------------------------------


def last_loss(script: str, folder: str) -> float:
    return run(script, folder)[0]["loss"].item()


@pytest.mark.parametrize("name", MIGRATIONS)
def test_a_migrated_program_runs(name: str, world2: World, tmp_path: Path) -> None:
    (after,) = written(tmp_path, [MIGRATIONS[name][1]])
    assert all(math.isfinite(loss) for loss in world2.run(last_loss, after, str(tmp_path)))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_it_trains_as_before(name: str, world2: World, tmp_path: Path) -> None:
    before, after = written(tmp_path, list(MIGRATIONS[name]))
    expected = world2.run(last_loss, before, str(tmp_path))
    assert world2.run(last_loss, after, str(tmp_path)) == pytest.approx(expected, rel=1e-5)


def test_the_state_of_a_migrated_ddp_program_is_the_same(world2: World, tmp_path: Path) -> None:
    states = []
    for script in written(tmp_path, list(MIGRATIONS["ddp"])):
        world2.run(last_loss, script, str(tmp_path))
        states.append(torch.load(tmp_path / "model.pt"))
    torch.testing.assert_close(states[1], states[0])
