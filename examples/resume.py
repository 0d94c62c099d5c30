"""How a run of train_gpt.py survives being killed: what it saves, and how it is put back.

A run that goes on from a checkpoint is to be the run that was never broken, bit for bit. So whatever
the next step depends on is saved, and all of it is listed here: the weights, the optimizer's state,
where the generator stands that draws the data, torch's own random state on each rank, and the history,
whose length says how many steps are done. The learning rate follows from the step.
"""

import argparse
import contextlib
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from report import History

KEPT = 2  # checkpoints: the newest one, and one more should a disk lose that

# What the losses depend on. A run that goes on with other ones would be neither the old nor a new one.
# (The number of processes, the strategy and the like may change: they change nothing but rounding.)
COURSE = ("heads", "context", "batch", "steps", "lr", "seed", "optimizer")


@dataclasses.dataclass
class Progress:
    """Where a run stands, besides its model and optimizer."""

    generator: torch.Generator  # draws where windows begin; the same on all ranks
    history: History

    @property
    def steps_done(self) -> int:
        """How many steps are behind."""
        return len(self.history.train_loss)

    def as_saved(self) -> dict[str, Any]:
        """Take down where the run stands; the run then goes on, and this does not."""
        history = dataclasses.asdict(self.history)
        return {"step": self.steps_done, "data": self.generator.get_state(), "history": history}

    def put_back(self, saved: dict[str, Any]) -> None:
        """Stand where `saved` was taken down."""
        self.generator.set_state(saved["data"])
        for name, values in saved["history"].items():
            setattr(self.history, name, values)


class Checkpoints:
    """The folder that `model`, `optimizer` and `progress` are saved to, and gone on from.

    Without --checkpoint-dir every method does nothing. Collective: all ranks make the same calls.
    """

    def __init__(
        self,
        settings: argparse.Namespace,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
    ):
        self.settings = settings
        self.model, self.optimizer, self.progress = model, optimizer, progress
        self.pending: Any = None  # the save that may still be going on

    def resume(self) -> None:
        """Go on from the newest checkpoint, if that is asked for and there is one."""
        if self.settings.checkpoint_dir is None:
            return
        from shardwise import latest_checkpoint, load_checkpoint

        path = latest_checkpoint(self.settings.checkpoint_dir)
        if path is None:
            return
        if not self.settings.resume:
            raise FileExistsError(
                f"{path} is there already. Give --resume to go on from it, or another --checkpoint-dir: "
                f"a later --resume could not tell the checkpoints of two runs apart."
            )
        loaded = load_checkpoint(path, self.model, self.optimizer)
        check_course(loaded.shared["settings"], self.settings)
        self.progress.put_back(loaded.shared)
        # Another number of processes has begun anew, with the state that the seed gives.
        if loaded.per_rank is not None:
            set_random_states(loaded.per_rank)
        if dist.get_rank() == 0:
            print(f"resumed at step {self.progress.steps_done} from {loaded.path}", flush=True)

    def stop_signal(self) -> contextlib.AbstractContextManager[Any]:
        """Note SIGTERM, which ends a job that is preempted, instead of dying of it; None without a folder."""
        if self.settings.checkpoint_dir is None:
            return contextlib.nullcontext()
        from shardwise.ranks import StopSignal

        return StopSignal()

    def save_if_due(self, stopping: bool) -> None:
        """Save every `checkpoint_every` steps and after the last one, while training goes on.

        A save that dies with its process leaves the one before it in place.
        """
        settings, done = self.settings, self.progress.steps_done
        is_due = stopping or done % settings.checkpoint_every == 0 or done == settings.steps
        if settings.checkpoint_dir is None or not is_due:
            return
        from shardwise import save_checkpoint

        self.wait()
        self.pending = save_checkpoint(
            settings.checkpoint_dir / f"step-{done:08}",
            self.model,
            self.optimizer,
            shared={**self.progress.as_saved(), "settings": course(settings)},
            per_rank=random_states(),
            asynchronous=True,
            keep=KEPT,
        )

    def wait(self) -> None:
        """Let the last save end; if it has failed, this raises on all ranks."""
        if self.pending is not None:
            self.pending.wait()


def random_states() -> dict[str, torch.Tensor]:
    """Take down torch's random state of this rank, on the CPU and on the GPU it uses."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Put back what `random_states` returned, as far as this run is on the same devices."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def course(settings: argparse.Namespace) -> dict[str, Any]:
    """Pick the settings that the losses depend on."""
    return {name: getattr(settings, name) for name in COURSE}


def check_course(saved: dict[str, Any], settings: argparse.Namespace) -> None:
    """Refuse to go on with a run that was asked for with other settings."""
    now = course(settings)
    different = [name for name in COURSE if saved.get(name, now[name]) != now[name]]
    if different:
        was, wanted = (" ".join(f"--{name} {each[name]}" for name in different) for each in (saved, now))
        raise ValueError(
            f"{settings.checkpoint_dir} holds a run with {was}, and this one has {wanted}. It cannot go on "
            f"from there and be either of them: ask for what it began with, or give another "
            f"--checkpoint-dir."
        )
