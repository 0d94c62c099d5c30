"""The examples on software GPUs: they learn what they learn on the host."""

import json
import re
from pathlib import Path

import pytest
from example_files import EXAMPLES

from software_gpu import example_programs
from software_gpu.launch import run_on_gpus

SIZES = ["--layers=4", "--width=16", "--heads=4", "--context=16", "--batch=8", "--steps=3"]
PROGRAMS = {
    "train_gpt": (2, []),
    "train_gpt, recomputing": (2, ["--accumulate=2", "--recompute"]),
    "train_gpt, zero1": (2, ["--strategy=zero1", "--accumulate=2"]),
    "train_2d": (4, ["--tp=2"]),
    "train_3d": (4, ["--pipe=2", "--tp=2", "--microbatches=2"]),
    "train_moe": (4, ["--ep=2"]),
}


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]


@pytest.mark.slow
@pytest.mark.parametrize(("late", "devices"), [(0, 1), (0, 2), (2, 2)])
def test_the_quickstart_learns(late: int, devices: int, tmp_path: Path) -> None:
    """On the host, if there are fewer devices than processes."""
    seen = {"SOFTWARE_GPU_COUNT": str(devices)}
    quickstart = EXAMPLES / "quickstart.py"
    first, other = run_on_gpus(
        2, example_programs.run, quickstart, [], tmp_path, late=late, env=seen, timeout_s=300
    )
    losses = losses_in(first)
    assert len(losses) == 5
    assert losses[0] > 1.0
    assert losses[-1] < 0.7
    assert other == ""
    assert (tmp_path / "runs" / "step-100" / ".metadata").exists()


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_learns_what_it_learns_on_the_host(program: str, tmp_path: Path) -> None:
    """In float32, from the same weights: both draw them on the host, or alike."""
    name = program.split(",")[0]
    world, arguments = PROGRAMS[program]
    curves = []
    for device in ("cuda", "cpu"):
        folder = tmp_path / device
        folder.mkdir()
        options = [*SIZES, *arguments, f"--device={device}", f"--out={folder}"]
        run_on_gpus(
            world, example_programs.run, EXAMPLES / f"{name}.py", options, folder, late=2, timeout_s=400
        )
        metrics = json.loads((folder / "metrics.json").read_text())
        curves.append([*metrics["train_loss"], *metrics["val_loss"]])
    on_device, on_host = curves
    assert on_device[0] != on_device[-1]
    assert on_device == pytest.approx(on_host, rel=1e-4)
