"""The examples train what one process trains, with several dimensions of parallelism, and compiled.

The reference is the example's own model, neither sharded nor spread, in a world of one process. In
float64, so that an expert is never chosen otherwise because sums were rounded otherwise.
"""

import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from dynamo import forget_graphs
from harness import World
from torch._dynamo.utils import counters

from shardwise.tracing.files.chrome import read_json

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = ["--device=cpu", "--layers=2", "--width=16", "--heads=4", "--context=16", "--batch=8", "--steps=3"]

Curve = tuple[list[float], list[float]]  # training and validation losses


@contextlib.contextmanager
def example(name: str) -> Iterator[ModuleType]:
    """Import an example, which imports its neighbours by bare names; others of these names are set aside."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    others = {other: sys.modules.pop(other) for other in names & sys.modules.keys()}
    world = str(dist.get_world_size())  # as torchrun tells the command line
    try:
        with (
            mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
            mock.patch.dict(os.environ, {"WORLD_SIZE": world}),
        ):
            yield importlib.import_module(name)
    finally:
        for own in names & sys.modules.keys():
            del sys.modules[own]
        sys.modules.update(others)


def train(name: str, arguments: list[str], parallel: bool) -> Curve:
    """What an example's ``main`` does, on a text of random bytes: the real one takes seconds to read."""
    with example(name) as module:
        settings = module.parse_settings([*SIZES, *arguments])
        model = module.build_model(settings).double()
        if parallel:
            model = module.parallelize(model, settings) or model
        generator = torch.Generator().manual_seed(0)
        texts = torch.randint(256, (2, 4000), generator=generator, dtype=torch.uint8)
        corpus = module.Corpus(*texts, num_files=0)
        history = module.train(model, corpus, settings, report=lambda line: None)
        return history.train_loss, history.val_loss


RUNS = [
    pytest.param(2, "train_moe", ["--ep", "2"], id="moe-2-experts-whole"),
    pytest.param(4, "train_moe", ["--ep", "2"], id="moe-4-experts-sharded"),
    pytest.param(2, "train_moe", ["--ep", "1"], id="moe-2-one-mesh", marks=pytest.mark.slow),
    pytest.param(2, "train_2d", ["--tp", "2"], id="2d-2-tensor-parallel-alone", marks=pytest.mark.slow),
    pytest.param(4, "train_2d", ["--tp", "2", "--accumulate", "2"], id="2d-4-accumulating"),
    pytest.param(
        4, "train_2d", ["--tp", "2", "--replicate", "2"], id="2d-4-replicated", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("world", "name", "arguments"), RUNS, indirect=["world"])
def test_an_example_trains_what_one_process_trains(
    world1: World, world: World, name: str, arguments: list[str]
) -> None:
    ((training, validation),) = world1.run(train, name, [], parallel=False)
    assert training[0] != training[-1]
    for got in world.run(train, name, arguments, parallel=True):
        assert got[0] == pytest.approx(training, rel=0, abs=1e-10)
        assert got[1] == pytest.approx(validation, rel=0, abs=1e-10)


PIPELINES = [
    pytest.param(4, ["--pipe=2", "--tp=2"], id="3d-4-pipeline-and-tensor-parallel"),
    pytest.param(4, ["--pipe=2", "--tp=1", "--schedule=1F1B"], id="3d-4-sharded", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "arguments"), PIPELINES, indirect=["world"])
def test_the_pipeline_trains_what_one_process_trains(
    world1: World, world: World, arguments: list[str]
) -> None:
    ((training, validation),) = world1.run(train, "train_2d", ["--layers=4"], parallel=False)
    for got in world.run(train, "train_3d", ["--layers=4", "--microbatches=2", *arguments], parallel=True):
        assert got[0] == pytest.approx(training, rel=0, abs=1e-10)
        assert got[1] == pytest.approx(validation, rel=0, abs=1e-10)


@pytest.mark.slow
def test_the_pipeline_runs_on_eight_processes_from_its_command_line() -> None:
    """Two pipeline places, two shards and two tensor parallel ranks print what one process prints."""
    sizes = [*SIZES, "--layers=4", "--microbatches=4"]
    printed = []
    for processes in (1, 8):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(processes), str(EXAMPLES / "train_3d.py"), *sizes]
        run = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert run.returncode == 0, run.stderr
        lines = [line.split() for line in run.stdout.splitlines() if line.startswith("step ")]
        printed.append([(float(line[3]), float(line[6])) for line in lines])
        assert len(lines) == 2
    for one, eight in zip(*printed, strict=True):
        assert eight == pytest.approx(one, abs=1e-5)


GPT = [*SIZES, "--width=64", "--checkpoint-every=2"]


def train_gpt(arguments: list[str]) -> Curve:
    """What train_gpt.py does, on a text of random bytes; with a back end that compiles no C++."""
    compile_of_torch = torch.nn.Module.compile
    with (
        example("train_gpt") as module,
        mock.patch.object(torch.nn.Module, "compile", lambda m: compile_of_torch(m, backend="aot_eager")),
        warnings.catch_warnings(),
    ):
        forget_graphs()
        settings = module.parse_settings([*GPT, *arguments])
        model = module.build_sharded_model(settings, module.import_sharding(settings))
        generator = torch.Generator().manual_seed(0)
        corpus = module.Corpus(*torch.randint(256, (2, 4000), generator=generator, dtype=torch.uint8), 0)
        history = module.train(model, corpus, settings)
        compiled = counters["stats"]["unique_graphs"]
        assert (compiled > 0) == (settings.compile is not None)
        with module.sampling(model, settings):
            assert len(module.generate(model, b"def ", 3, 0)) == 7
        assert counters["stats"]["unique_graphs"] == compiled
        return history.train_loss, history.val_loss


def test_the_gpt_trains_with_muon_on_two_processes_as_on_one(world1: World, world2: World) -> None:
    """To the rounding of the iteration, which is in bfloat16."""
    ((training, validation),) = world1.run(train_gpt, ["--optimizer", "muon"], timeout=300)
    ((adamw, _),) = world1.run(train_gpt, [], timeout=300)
    assert training[-1] != pytest.approx(adamw[-1], rel=1e-4)
    for got in world2.run(train_gpt, ["--optimizer", "muon"], timeout=300):
        assert got[0] == pytest.approx(training, rel=1e-3)
        assert got[1] == pytest.approx(validation, rel=1e-3)


def traced_gpt(arguments: list[str]) -> tuple[Curve, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return train_gpt(arguments), printed.getvalue()


def test_the_gpt_trains_the_same_with_a_step_traced_by_all_ranks(world2: World, tmp_path: Path) -> None:
    plain = world2.run(train_gpt, [])
    (first, printed), (second, nothing) = world2.run(traced_gpt, ["--trace", str(tmp_path / "traces")])
    assert [first, second] == plain
    assert nothing == ""
    head, *table = printed.strip().splitlines()
    assert head.startswith("rank 0 (cpu): ")
    assert table[-1] == f"All ranks: {tmp_path / 'traces' / 'step.html'}"
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        *("rank0.json", "rank1.json", "step.html")
    ]
    assert re.findall(r"<h2>(rank \d)", (tmp_path / "traces" / "step.html").read_text()) == [
        "rank 0",
        "rank 1",
    ]
    for rank in range(2):
        (recording,) = read_json(tmp_path / "traces" / f"rank{rank}.json")
        assert (recording.rank, recording.is_aligned, recording.knew_order) == (rank, True, True)
        assert {group.name: (group.unshards, group.reductions) for group in recording.groups} == {
            "GPT": (1, 1),
            "blocks.0": (2, 1),
            "blocks.1": (1, 1),
        }
        assert [span.name for span in recording.of_row("optimizer")] == ["AdamW"]


@pytest.mark.parametrize("part", ["block", pytest.param("model", marks=pytest.mark.slow)])
def test_the_gpt_trains_the_same_with_parts_compiled(world2: World, part: str) -> None:
    plain = world2.run(train_gpt, [])
    for got, want in zip(world2.run(train_gpt, ["--compile", part], timeout=300), plain, strict=True):
        for mine, other in zip(got, want, strict=True):
            assert mine == pytest.approx(other, rel=0, abs=1e-5)


@pytest.mark.parametrize(
    ("saved", "resumed"), [("block", "model"), pytest.param("model", "block", marks=pytest.mark.slow)]
)
def test_a_compiled_gpt_goes_on_with_other_parts_compiled(
    world2: World, tmp_path: Path, saved: str, resumed: str
) -> None:
    plain = world2.run(train_gpt, [])
    keeps = ["--checkpoint-dir", str(tmp_path)]
    world2.run(train_gpt, [*keeps, "--compile", saved], timeout=300)
    shutil.rmtree(tmp_path / "step-00000003")  # as if killed in the third step
    for got, want in zip(
        world2.run(train_gpt, [*keeps, "--resume", "--compile", resumed], timeout=300), plain, strict=True
    ):
        assert got[0] == pytest.approx(want[0], rel=0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [("block", "model"), ("model", "block")])
def test_a_compiled_gpt_runs_from_its_command_line(tmp_path: Path, saved: str, resumed: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = [*GPT, f"--checkpoint-dir={tmp_path / 'saved'}", f"--out={tmp_path}"]
    command = [*torchrun, str(EXAMPLES / "train_gpt.py"), *sizes]
    for arguments in (["--compile", saved], ["--compile", resumed, "--resume"]):
        run = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500)
        assert run.returncode == 0, run.stderr
        assert ("resumed at step 2" in run.stdout) == ("--resume" in arguments)
        assert "validation loss" in run.stdout
        if "--resume" not in arguments:
            shutil.rmtree(tmp_path / "saved" / "step-00000003")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_2d", "train_moe"])
@pytest.mark.parametrize("processes", [1, 4])
def test_an_example_runs_from_its_command_line(name: str, processes: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(processes), str(EXAMPLES / f"{name}.py"), *SIZES]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "step    3   loss " in run.stdout
