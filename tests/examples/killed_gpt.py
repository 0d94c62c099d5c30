"""examples/train_gpt.py as torchrun starts it, but its ranks die where a plan says.

    torchrun ... tests/examples/killed_gpt.py PLAN [arguments of train_gpt.py]

PLAN is a JSON file:

    kills    [[rank, moment, step], ...] yet to come. One dies per attempt: the first of the list, which is
             struck off before, so that it happens once, however often torchrun starts over.
    term     [rank, moment, step, whom], or null: when a rank sends SIGTERM to itself ("rank") or to "torchrun".
    starts   how many steps were done already when each attempt began. Filled in here.
    dropout  whether torch's random state, another one on each rank, is to show in the losses.

Step 5 is the one that finds four done. The moments of a step, and of the checkpoint that follows it:

    began       nothing of it is done
    backward    gradients are there, weights have not moved
    stepped     weights have moved, and the loss was taken down nowhere yet
    writing     this rank's file of the checkpoint is written in half
    publishing  all files are written, and not yet moved to where checkpoints are found; rank 0 only
    published   the checkpoint is in place; rank 0 only
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemWriter

from shardwise.checkpoint import folders

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import report
import train_gpt

RANK = int(os.environ.get("RANK", "0"))


class Plan:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = json.loads(path.read_text())
        kills = self.content["kills"]
        self.next_kill = kills[0] if kills else None
        self.start = 0  # of this attempt

    def reached(self, moment: str, step: int, last_words: Callable[[], None] = lambda: None) -> None:
        """Die, if this is where the plan says so, and never return then; or tell whom it says to stop."""
        if (term := self.content["term"]) and term[:3] == [RANK, moment, step]:
            terminate(os.getpid() if term[3] == "rank" else os.getppid())
        if self.next_kill == [RANK, moment, step]:
            last_words()
            self.content["kills"].pop(0)
            self.end_attempt()
            os.kill(os.getpid(), signal.SIGKILL)

    def end_attempt(self) -> None:
        self.content["starts"].append(self.start)
        beside = self.path.with_suffix(".new")
        with beside.open("w") as file:
            json.dump(self.content, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)


def terminate(process: int) -> None:
    """Send SIGTERM to this process, or to torchrun, and return when it has arrived here.

    torchrun may take longer to pass it on than this rank takes for some steps.
    """
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler), "the example handles it"
    arrived, arrival = os.pipe()

    def note(number: int, frame: Any) -> None:
        handler(number, frame)
        os.write(arrival, b"1")

    signal.signal(signal.SIGTERM, note)
    os.kill(process, signal.SIGTERM)
    os.read(arrived, 1)


def watch(plan: Plan) -> None:
    """Have the example, torch and shardwise say where they are."""
    step = 0
    resume, learning_rate, train_step, clip = (
        train_gpt.resume,
        train_gpt.learning_rate,
        train_gpt.train_step,
        train_gpt.clip_grad_norm_,
    )
    write_data, publish = FileSystemWriter.write_data, folders.publish

    def watched_resume(model: Any, optimizer: Any, history: Any, settings: Any) -> None:
        resume(model, optimizer, history, settings)
        plan.start = history.steps_done

    def watched_learning_rate(index: int, *args: Any) -> float:
        nonlocal step
        step = index + 1
        plan.reached("began", step)
        return learning_rate(index, *args)

    def watched_clip(*args: Any, **kwargs: Any) -> Any:
        plan.reached("backward", step)
        return clip(*args, **kwargs)

    def watched_train_step(*args: Any) -> tuple[float, float]:
        loss_and_norm = train_step(*args)
        plan.reached("stepped", step)
        return loss_and_norm

    def watched_write_data(self: FileSystemWriter, *args: Any) -> Any:
        written = write_data(self, *args)
        written.wait()
        plan.reached("writing", step_of(Path(self.path)), lambda: halve_files(Path(self.path)))
        return written

    def watched_publish(save: folders.Save) -> None:
        plan.reached("publishing", step_of(save.path))
        publish(save)
        plan.reached("published", step_of(save.path))

    train_gpt.resume = watched_resume
    train_gpt.learning_rate = watched_learning_rate
    train_gpt.train_step = watched_train_step
    train_gpt.clip_grad_norm_ = watched_clip
    FileSystemWriter.write_data = watched_write_data
    folders.publish = watched_publish


def step_of(checkpoint: Path) -> int:
    """12 of 'step-00000012', also of a hidden folder that is going to be called so."""
    return int(checkpoint.name.lstrip(".").removeprefix("step-").partition(".")[0])


def halve_files(folder: Path) -> None:
    files = list(folder.glob(f"__{RANK}_*"))
    assert files, f"rank {RANK} has written nothing to {folder}"
    for file in files:
        os.truncate(file, file.stat().st_size // 2)


def drop_outputs(build: Callable) -> Callable:
    """Build a model whose blocks drop a tenth of what they return, while training."""

    def drop(block: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, 0.1, training=torch.is_grad_enabled())

    def build_with_dropout(*args: Any) -> Any:
        model = build(*args)
        for block in model.blocks:
            block.register_forward_hook(drop)
        torch.manual_seed(1000 + RANK)
        return model

    return build_with_dropout


def main() -> None:
    plan = Plan(Path(sys.argv.pop(1)))
    watch(plan)
    if plan.content["dropout"]:
        train_gpt.build_model = drop_outputs(train_gpt.build_model)
    # The example's own text takes seconds to read, and its picture takes seconds to draw.
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(256, (2, 4000), generator=generator, dtype=torch.uint8)
    train_gpt.read_corpus = lambda: train_gpt.Corpus(*texts, num_files=0)
    report.draw_loss = lambda *args, **kwargs: None
    train_gpt.main()
    if RANK == 0:
        plan.end_attempt()


if __name__ == "__main__":
    main()
