"""The examples train what one process trains, with several dimensions of parallelism, and compiled.

The reference is the example's own model, neither sharded nor spread, in a world of one process. In
float64, so that an expert is never chosen otherwise because sums were rounded otherwise.
"""

import argparse
import contextlib
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from dynamo import forget_graphs
from example_files import EXAMPLES, example_file
from harness import World
from torch._dynamo.utils import counters

from shardwise.tracing.files import read_json

pytestmark = pytest.mark.processes

SIZES = ["--device=cpu", "--layers=2", "--width=16", "--heads=4", "--context=16", "--batch=8", "--steps=3"]

Curve = tuple[list[float], list[float], list[float]]  # training and validation losses, norms of gradients


def example(name: str) -> contextlib.AbstractContextManager[ModuleType]:
    return example_file(name, dist.get_world_size())


def train(name: str, arguments: list[str], parallel: bool) -> Curve:
    """What an example's ``main`` does, on a text of random bytes: the real one takes seconds to read."""
    with example(name) as module:
        settings = module.parse_settings([*SIZES, *arguments])
        model = module.build_model(settings).double()
        if parallel:
            model = module.parallelize(model, settings) or model
        with silence():
            return curve_of(module.train(model, random_corpus(module), settings))


def random_corpus(module: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return module.Corpus(*torch.randint(256, (2, 4000), generator=generator, dtype=torch.uint8), num_files=0)


def curve_of(history: Any) -> Curve:
    return history.train_loss, history.val_loss, history.grad_norm


def silence() -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stderr(io.StringIO())


def assert_same(got: Curve, expected: Curve, **tolerance: float) -> None:
    for mine, other in zip(got, expected, strict=True):
        assert mine == pytest.approx(other, **tolerance)


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
    (expected,) = world1.run(train, name, [], parallel=False)
    training, _, norms = expected
    assert training[0] != training[-1]
    assert min(norms) > 1.0, "clipping has something to do"
    for got in world.run(train, name, arguments, parallel=True):
        assert_same(got, expected, rel=0, abs=1e-9)


PIPELINES = [
    pytest.param(4, ["--pipe=2", "--tp=2"], id="3d-4-pipeline-and-tensor-parallel"),
    pytest.param(4, ["--pipe=2", "--tp=1", "--schedule=1F1B"], id="3d-4-sharded", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "arguments"), PIPELINES, indirect=["world"])
def test_the_pipeline_trains_what_one_process_trains(
    world1: World, world: World, arguments: list[str]
) -> None:
    (expected,) = world1.run(train, "train_2d", ["--layers=4"], parallel=False)
    for got in world.run(train, "train_3d", ["--layers=4", "--microbatches=2", *arguments], parallel=True):
        assert_same(got, expected, rel=0, abs=1e-9)


@pytest.mark.slow
def test_the_pipeline_runs_on_eight_processes_from_its_command_line(tmp_path: Path) -> None:
    """Two pipeline places, two shards and two tensor parallel ranks learn what one process learns."""
    found = []
    for processes in (1, 8):
        sizes = [*SIZES, "--layers=4", "--microbatches=4", f"--out={tmp_path / str(processes)}"]
        run = torchrun(processes, EXAMPLES / "train_3d.py", sizes)
        assert run.returncode == 0, run.stderr
        found.append(json.loads((tmp_path / str(processes) / "metrics.json").read_text()))
    one, eight = ((each["train_loss"], each["val_loss"], each["grad_norm"]) for each in found)
    assert_same(eight, one, rel=1e-5)


def torchrun(processes: int, script: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


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
        settings = module.parse_settings(module.command_line(), [*GPT, *arguments])
        model = module.build_model(settings)
        with silence():
            history = module.train(model, random_corpus(module), settings)
        compiled = counters["stats"]["unique_graphs"]
        assert (compiled > 0) == (settings.compile is not None)
        with mock.patch.object(module, "SAMPLE_BYTES", 3):
            assert module.sample_of(model, settings).startswith("def ")
        assert counters["stats"]["unique_graphs"] == compiled
        return curve_of(history)


def plain_gpt(arguments: list[str]) -> Curve:
    """The same training in one process and float32, with nothing of shardwise in it."""
    with example("train_gpt") as module:
        settings = module.parse_settings(module.command_line(), [*GPT, *arguments])
        torch.manual_seed(0)
        model = module.GPT(layers=2, width=64, heads=4, context=16)
        optimizer = module.build_optimizer(model, settings.lr)
        corpus, losses, norms = random_corpus(module), [], []
        loader = importlib.import_module("corpus").training_loader
        for step, windows in enumerate(loader(corpus, settings, module.share_of_rank())):
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = module.learning_rate(
                step, settings
            )
            loss = module.mean_loss(model, windows, settings.device)
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        validation, _ = module.validation_loader(corpus, settings, module.share_of_rank(), 32)
        return losses, [module.evaluate(model, validation, settings)], norms


@pytest.mark.parametrize(
    "arguments",
    [["--accumulate=4", "--recompute"], ["--strategy=zero1", "--accumulate=2"]],
    ids=["recomputing", "zero1"],
)
def test_the_gpt_trains_what_one_process_trains(world1: World, world2: World, arguments: list[str]) -> None:
    (expected,) = world1.run(plain_gpt, [])
    assert min(expected[2]) > 1.0, "clipping has something to do"
    for got in world2.run(train_gpt, arguments):
        assert_same(got, expected, rel=1e-5)


@pytest.mark.slow
def test_in_bf16_the_gpt_trains_nearly_the_same(world2: World) -> None:
    expected = world2.run(train_gpt, [])
    for got, exact in zip(world2.run(train_gpt, ["--dtype=bf16"]), expected, strict=True):
        assert got != exact
        assert_same(got, exact, rel=0.02)


def curve_of_bench(arguments: list[str]) -> Curve:
    """What bench/claims/loss_curves.py does with the example's model."""
    with example("train_gpt"):
        module = importlib.import_module("loss_curves")
        try:
            settings = module.parse_settings([*SIZES, "--width=64", *arguments])
            model, optimizer = module.MAKERS[settings.peer](settings)
            with silence():
                return curve_of(module.train(model, optimizer, random_corpus(module), settings))
        finally:
            del sys.modules["loss_curves"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rel"), [("muon", 1e-3), ("soap", 5e-3)])
def test_other_optimizers_train_the_gpt_on_two_processes_as_on_one(
    world1: World, world2: World, name: str, rel: float
) -> None:
    """To the rounding of Muon's iteration, in bfloat16; and of SOAP's eigenvectors of rows that no batch touched."""
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    (expected,) = world1.run(curve_of_bench, ["--optimizer", name], timeout=300)
    (adamw,) = world1.run(curve_of_bench, [], timeout=300)
    assert expected[0][-1] != pytest.approx(adamw[0][-1], rel=1e-4)
    for got in world2.run(curve_of_bench, ["--optimizer", name], timeout=300):
        assert_same(got[:2], expected[:2], rel=rel)


def test_the_peer_trains_the_same_gpt(world2: World) -> None:
    for got, expected in zip(
        world2.run(curve_of_bench, ["--peer", "torch"]), world2.run(curve_of_bench, []), strict=True
    ):
        assert_same(got, expected, rel=1e-5)


@pytest.mark.slow
def test_fewer_bytes_train_the_gpt_nearly_the_same(world2: World) -> None:
    (exact, _), (few, _) = (
        world2.run(curve_of_bench, arguments)
        for arguments in ([], ["--send-gradients", "int8", "--send-weights", "int8"])
    )
    assert few != exact
    assert_same(few[:2], exact[:2], rel=0.01)


def test_flops_of_a_token_are_those_of_the_formula() -> None:
    """6 for each weight of a matrix, and 12 for each layer, feature and position that attention looks at."""
    with example_file("train_gpt") as module:
        sizes = {"layers": 3, "width": 32, "heads": 2, "context": 16}
        settings = argparse.Namespace(**sizes)
        matrices = 3 * 12 * 32 * 32 + 32 * 256
        assert module.flops_per_token(settings) == 6 * matrices + 12 * 3 * 32 * 16


def test_utilization_is_known_where_the_peak_is() -> None:
    with example_file("report") as report:
        history = report.History(unigram=1.0, tokens_per_step=1000, step_seconds=[9.0, 0.5, 0.5])
        settings = argparse.Namespace(peak_tflops=None, device=torch.device("cpu"), dtype="bf16")
        assert report.utilization(history, 1e6, settings) == {}
        settings.peak_tflops = 0.004  # 4e9 operations a second; 2,000 tokens a second take 2e9
        assert report.utilization(history, 1e6, settings) == {"MFU": "50.0%"}
        settings.peak_tflops = None
        for name, tflops in {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756}.items():
            with mock.patch.object(report, "device_name", return_value=name):
                assert report.peak_flops(settings) == tflops * 1e12


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


@pytest.mark.slow
@pytest.mark.parametrize("part", ["block", "model"])
def test_the_gpt_trains_the_same_with_parts_compiled(world2: World, part: str) -> None:
    plain = world2.run(train_gpt, [])
    for got, want in zip(world2.run(train_gpt, ["--compile", part], timeout=300), plain, strict=True):
        assert_same(got, want, rel=0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [("block", "model"), ("model", "block")])
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
@pytest.mark.parametrize(("name", "processes"), [("train_2d", 4), ("train_moe", 1), ("train_moe", 4)])
def test_an_example_runs_from_its_command_line(name: str, processes: int, tmp_path: Path) -> None:
    run = torchrun(processes, EXAMPLES / f"{name}.py", [*SIZES, f"--out={tmp_path}"])
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("device  cpu, as --device cpu says") == 1
    assert "100%" in run.stderr, "the bar"
    assert "validation loss" in run.stdout
    assert len(json.loads((tmp_path / "metrics.json").read_text())["train_loss"]) == 3
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("train_gpt", "--heads=3"),
        ("train_2d", "--steps=many"),
        ("train_3d", "--heads=3"),
        ("train_moe", "--heads=3"),
    ],
)
def test_a_mistake_on_the_command_line_is_said_once(name: str, mistake: str) -> None:
    run = torchrun(2, EXAMPLES / f"{name}.py", [*SIZES, mistake])
    assert run.returncode != 0
    assert run.stderr.count(f"{name}.py: error: ") == 1
    assert run.stderr.count(f"usage: {name}.py") == 1
    assert "exitcode  : 2 " in run.stderr
