"""A run whose processes are killed ends as if nothing had happened.

torchrun starts examples/train_gpt.py by way of killed_gpt.py, whose ranks kill themselves where the test
says, and starts over. What must hold in the end is that losses are those of the run that nothing has broken:
the same bits on as many processes, and the same up to rounding on another number.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from example_files import example_file
from expecttest import assert_expected_inline

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("killed_gpt.py")
STEPS, EVERY = 12, 4  # EVERY: steps from one checkpoint to the next
SIZES = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--batch=4", "--device=cpu"]
TIME_TO_HANG = 120  # seconds of one attempt; it takes 4 where nothing else runs

Kill = tuple[int, str, int]  # rank, moment, step: see killed_gpt.py
Losses = dict[str, list[float]]  # train_loss, val_loss


@dataclasses.dataclass
class Run:
    return_code: int
    output: str
    losses: Losses | None  # None: it did not come to its end
    starts: list[int]  # how many steps were done when each attempt began
    kills: list[Kill]  # those that did not happen


def run(
    folder: Path,
    processes: int,
    kills: list[Kill],
    *,
    max_restarts: int | None = None,
    saves: bool = True,
    dropout: bool = True,
    options: tuple[str, ...] = (),
    term: tuple[int, str, int, str] | None = None,
) -> Run:
    """Train in `folder`, and go on from what is there. A restart for each kill unless told otherwise."""
    folder.mkdir(exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"kills": kills, "starts": [], "dropout": dropout, "term": term}))
    restarts = len(kills) if max_restarts is None else max_restarts
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    command += [str(SCRIPT), str(plan), *SIZES, f"--steps={STEPS}", "--eval-every=5", f"--out={folder}"]
    if saves:
        command += ["--resume", f"--checkpoint-dir={folder / 'saved'}", f"--checkpoint-every={EVERY}"]
    return_code, output = wait_for([*command, *options], folder, TIME_TO_HANG * (restarts + 1))
    losses = None
    if return_code == 0 and (folder / "metrics.json").exists():
        metrics = json.loads((folder / "metrics.json").read_text())
        losses = {name: metrics[name] for name in ("train_loss", "val_loss")}
    after = json.loads(plan.read_text())
    return Run(return_code, output, losses, after["starts"], [tuple(kill) for kill in after["kills"]])


def wait_for(command: list[str], folder: Path, seconds: float) -> tuple[int, str]:
    """Run it to its end; a hang fails, and nothing that it has started outlives it."""
    # Not pipes: they end with the last process that holds them, which may be the one that hangs.
    paths = [folder / "stdout", folder / "stderr"]
    with paths[0].open("w") as stdout, paths[1].open("w") as stderr:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        try:
            process.wait(timeout=seconds)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            left = kill_processes_of(folder)
            process.wait()
    output = "".join(f"--- {path.name} ---\n{path.read_text()}\n" for path in paths)
    assert not hung, f"still running after {seconds} s: {left}\n{output}"
    assert not left, f"outlived torchrun: {left}\n{output}"
    return process.returncode, output


def kill_processes_of(folder: Path) -> list[list[str]]:
    """End what has `folder` on its command line: torchrun and its workers, each in a session of its own."""
    killed = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if process.pid != os.getpid() and any(part.startswith(f"{folder}{os.sep}") for part in command):
            os.kill(process.pid, signal.SIGKILL)
            killed.append(command)
    return killed


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of two processes that nobody kills and that save nothing."""
    folder = tmp_path_factory.mktemp("unbroken")
    losses = losses_of(run(folder, 2, [], saves=False))
    assert not (folder / "saved").exists()
    return losses


def losses_of(ended: Run) -> Losses:
    assert ended.return_code == 0, ended.output
    assert ended.kills == [], ended.output
    assert ended.losses is not None
    assert len(set(ended.losses["train_loss"])) == STEPS, "each step has a loss of its own"
    return ended.losses


def random_kills(seed: int, count: int) -> list[Kill]:
    """The first before there is a checkpoint; each reached by the attempt after the one before."""
    draw = random.Random(seed)
    steps = [draw.randint(1, EVERY), *sorted(draw.sample(range(EVERY + 1, STEPS + 1), count - 1))]
    return [(draw.randrange(2), draw.choice(["began", "backward", "stepped"]), step) for step in steps]


def assert_goes_on(ended: Run, kills: list[Kill]) -> None:
    """Each attempt begins at the last checkpoint, or at the one before if the last was still being saved."""
    first, *later = ended.starts
    assert first == 0
    for start, (_, _, step) in zip(later, kills, strict=True):
        last = (step - 1) // EVERY * EVERY
        assert start in {last, max(0, last - EVERY)}, (ended.starts, kills)


@pytest.mark.slow
def test_killed_while_saving(tmp_path: Path, unbroken: Losses) -> None:
    # What is killed in the midst of saving which checkpoint, and where the next attempt begins.
    starts: dict[Kill, int] = {
        (0, "writing", 4): 0,
        (1, "writing", 4): 0,
        (0, "publishing", 4): 0,
        (1, "writing", 8): 4,
        (0, "publishing", 8): 4,
        (0, "writing", 12): 8,
    }
    ended = run(tmp_path, 2, list(starts))
    assert losses_of(ended) == unbroken
    assert ended.starts == [0, *starts.values()], ended.output
    # What was half written is gone, and so are checkpoints that are too old.
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == ["step-00000008", "step-00000012"]


@pytest.mark.slow
def test_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Two processes, then one, then two again, each killed at a checkpoint except the last."""
    whole = losses_of(run(tmp_path / "unbroken", 1, [], saves=False, dropout=False))
    folder = tmp_path / "moved"
    starts = []
    for processes, kills in [(2, [(0, "published", 4)]), (1, [(0, "published", 8)]), (2, [])]:
        ended = run(folder, processes, kills, max_restarts=0, dropout=False)
        assert (ended.return_code != 0) == bool(kills), ended.output
        starts += ended.starts
    assert starts == [0, 4, 8]
    # float32 has 6e-8; means over two processes are rounded otherwise than over one, and Adam divides by them.
    for name, losses in losses_of(ended).items():
        assert losses == pytest.approx(whole[name], rel=1e-5, abs=0.0), name


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "code"), [("rank", 0), ("torchrun", 1)])
def test_told_to_stop(tmp_path: Path, unbroken: Losses, whom: str, code: int) -> None:
    """By a scheduler that needs the place: one rank hears of it, or torchrun, which tells all of its."""
    stopped = run(tmp_path, 2, [], term=(1, "backward", 6, whom))
    assert (stopped.return_code != 0) == bool(code), stopped.output
    assert stopped.losses is None
    # Told in step 6; the ranks' flags are read in the step after they were sent.
    assert {each.name for each in (tmp_path / "saved").iterdir()} == {"step-00000004", "step-00000007"}
    assert f"told to stop at step 7 of {STEPS}: saved; --resume goes on" in stopped.output
    ended = run(tmp_path, 2, [])
    assert losses_of(ended) == unbroken
    assert ended.starts == [7]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "seed"), [("ddp", 1), ("zero1", 2), ("zero3", 4)])
def test_killed_again_and_again(tmp_path: Path, strategy: str, seed: int) -> None:
    options = (f"--strategy={strategy}",)
    whole = losses_of(run(tmp_path / "unbroken", 2, [], saves=False, options=options))
    kills = random_kills(seed, count=6)
    ended = run(tmp_path / "killed", 2, kills, options=options)
    assert losses_of(ended) == whole
    assert_goes_on(ended, kills)


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def train_gpt() -> Iterator[ModuleType]:
    with example_file("train_gpt") as module:
        yield module


REFUSED = {
    "--resume": "--resume needs --checkpoint-dir: the folder to go on from, and to save to",
    "--checkpoint-dir D --checkpoint-every 0": "--checkpoint-every must be above 0",
    "--accumulate 3": "--batch 16 does not divide into 3 equal parts",
    "--peak-tflops -1": "--peak-tflops must be above 0",
    "--workers -1": "--workers must be 0 or above",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items())
def test_a_command_line_is_refused(
    train_gpt: ModuleType, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        train_gpt.parse_settings(train_gpt.command_line(), arguments.split())
    assert message in capsys.readouterr().err


def settings_in(folder: Path, **changed: object) -> argparse.Namespace:
    settings = {"heads": 2, "context": 16, "batch": 4, "steps": 12, "lr": 0.003, "seed": 0, "resume": False}
    return argparse.Namespace(checkpoint_dir=folder, **settings | changed)


def test_a_new_run_is_refused_where_another_has_saved(train_gpt: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / ".metadata").touch()
    with pytest.raises(FileExistsError, match=r"step-00000004 is there already\. Give --resume to go on"):
        train_gpt.resume(None, None, None, settings_in(tmp_path))


def test_a_run_with_other_settings_is_refused(train_gpt: ModuleType) -> None:
    before = settings_in(Path("runs/saved"))
    saved = {name: getattr(before, name) for name in train_gpt.COURSE}
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        train_gpt.check_unchanged(settings_in(Path("runs/saved"), lr=0.1, steps=24), saved)
    assert_expected_inline(
        str(refused.value),
        """runs/saved holds a run with --steps 12 --lr 0.003, and this one has --steps 24 --lr 0.1. It cannot go on from there and be either of them: ask for what it began with, or give another --checkpoint-dir.""",
    )
