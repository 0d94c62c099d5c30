"""What a run shows and leaves behind: a bar while it trains, then a verdict, a picture and a JSON file.

Rank 0 shows and writes. Only a trace talks to other ranks.
"""

import argparse
import contextlib
import json
import math
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from processes import device_name, world_size
from torch import nn
from tqdm import tqdm

import shardwise

# 10^12 dense operations a second, as the maker states them. The first name that fits counts.
PEAK_TFLOPS = {
    "A100": {"bf16": 312, "float32": 19.5},
    "H100 PCIe": {"bf16": 756, "float32": 51},
    "H100 NVL": {"bf16": 835, "float32": 60},
    "H100": {"bf16": 989, "float32": 67},
    "H200": {"bf16": 989, "float32": 67},
}

# By how many nats per byte a loss must beat the byte frequencies before we call it clear.
CLEAR_MARGIN = 0.5


@dataclass
class History:
    """What was measured during a run. Losses are nats per byte, averaged over all ranks."""

    unigram: float
    tokens_per_step: int
    train_loss: list[float] = field(default_factory=list)  # one per step
    grad_norm: list[float] = field(default_factory=list)  # before clipping
    step_seconds: list[float] = field(default_factory=list)  # training only, no validation
    memory_mb: list[float] = field(default_factory=list)  # of rank 0, after each step
    val_steps: list[int] = field(default_factory=list)  # how many steps were done when ...
    val_loss: list[float] = field(default_factory=list)  # ... this was measured

    @property
    def steps_done(self) -> int:
        """How many steps are behind."""
        return len(self.train_loss)

    def note_step(self, loss: float, norm: float, seconds: float) -> None:
        """Take down one step; refuse to go on where training has failed, on all ranks alike."""
        self.train_loss.append(loss)
        self.grad_norm.append(norm)
        self.step_seconds.append(seconds)
        self.memory_mb.append(memory_mb())
        if not math.isfinite(loss):
            raise FloatingPointError(f"step {self.steps_done}: the loss is {loss}; try a smaller --lr")

    def note_validation(self, loss: float) -> None:
        """Take down a validation after the steps that are done."""
        self.val_steps.append(self.steps_done)
        self.val_loss.append(loss)

    def tokens_per_s(self, last: int | None = None) -> float:
        """Over the whole run, or its last steps. The first step is left out: it also warms up."""
        seconds = self.step_seconds[1:] or self.step_seconds
        return self.tokens_per_step / statistics.fmean(seconds[-last:] if last else seconds)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


def memory_mb() -> float:
    """Return the peak of allocated memory on the GPU in use, or without one what the process occupies now."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e6
    return psutil.Process().memory_info().rss / 1e6


# --- while it runs --------------------------------------------------------------------------------


def progress_bar(history: History, settings: argparse.Namespace) -> tqdm:
    """A bar of all steps, on rank 0; it begins where the run does."""
    return tqdm(
        total=settings.steps,
        initial=history.steps_done,
        unit="step",
        disable=dist.get_rank() != 0,
        dynamic_ncols=True,
    )


def show_step(bar: tqdm, history: History, **more: str) -> None:
    """Move the bar on by a step, with the newest numbers behind it."""
    shown = {
        "loss": f"{history.train_loss[-1]:.3f}",
        "norm": f"{history.grad_norm[-1]:.2f}",
        "tokens/s": f"{history.tokens_per_s(last=20):,.0f}",
        **more,
        "MB": f"{history.memory_mb[-1]:,.0f}",
    }
    if history.val_loss:
        shown["val"] = f"{history.val_loss[-1]:.3f}"
    bar.set_postfix(shown, refresh=False)
    bar.update()


def utilization(history: History, flops_per_token: float, settings: argparse.Namespace) -> dict[str, str]:
    """Model FLOPs utilization of the last steps (Chowdhery et al. 2022, "PaLM", appendix B), where known."""
    peak = peak_flops(settings)
    if peak is None:
        return {}
    return {"MFU": f"{history.tokens_per_s(last=20) * flops_per_token / (peak * world_size()):.1%}"}


def peak_flops(settings: argparse.Namespace) -> float | None:
    """Operations that one device can do in a second, if that is known or told by --peak-tflops."""
    if settings.peak_tflops is not None:
        return settings.peak_tflops * 1e12
    name = device_name(settings.device)
    known = next((peaks for part, peaks in PEAK_TFLOPS.items() if part in name), None)
    return None if known is None else known[settings.dtype] * 1e12


@contextlib.contextmanager
def traced(model: nn.Module, folder: Path) -> Iterator[None]:
    """Record what happens inside: a file for each rank, and a page of all."""
    with shardwise.trace(model) as trace:
        yield
    paths = [folder / f"rank{rank}.json" for rank in range(dist.get_world_size())]
    trace.save(paths[dist.get_rank()])
    dist.barrier()
    if dist.get_rank() == 0:
        shardwise.merge_traces(paths, folder / "step.html")
        print(f"\n{trace}\nAll ranks: {folder / 'step.html'}", flush=True)


# --- when it is over ------------------------------------------------------------------------------


def write_report(settings: argparse.Namespace, history: History, how: str) -> None:
    """Write metrics.json and loss.png, and print how the run went; `how` says how it was parallelized."""
    if dist.get_rank() != 0:
        return
    how = f"{how}, {history.tokens_per_s():,.0f} tokens/s"
    settings.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "settings": vars(settings),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "shardwise": shardwise.__version__,
        },
        "world_size": dist.get_world_size(),
        "tokens_per_s": history.tokens_per_s(),
    }
    text = json.dumps(facts | asdict(history), indent=1, default=str)
    (settings.out / "metrics.json").write_text(text + "\n", encoding="utf-8")
    draw_loss(settings, history, how)
    print(f"\n{verdict(history)}\n\n{how}; curve and metrics are in {settings.out}")


def verdict(history: History) -> str:
    """Say in three lines whether the model learned more than how often each byte occurs."""
    loss, unigram = history.val_loss[-1], history.unigram
    if loss < unigram - CLEAR_MARGIN:
        conclusion = f"clearly below: the model saves {1 - loss / unigram:.0%} of the bits"
    elif loss < unigram:
        conclusion = f"below, but by less than {CLEAR_MARGIN} nats: train for more --steps"
    else:
        conclusion = "NOT below: the model has learned nothing from context yet"
    return (
        f"validation loss   {loss:.3f} nats/byte   {loss / math.log(2):.3f} bits/byte\n"
        f"byte frequencies  {unigram:.3f} nats/byte   {unigram / math.log(2):.3f} bits/byte\n"
        f"{conclusion}"
    )


def draw_loss(settings: argparse.Namespace, history: History, title: str) -> None:
    """Draw training loss per step, validation points and the unigram line as loss.png."""
    # Imported here so that only rank 0 pays for it. Agg draws without a display.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, history.steps_done + 1)
    axes.axhline(history.unigram, color="gray", linestyle="--", label="byte frequencies alone")
    axes.plot(steps, history.train_loss, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(steps, smoothed(history.train_loss), color="tab:blue", label="training, smoothed")
    axes.plot(history.val_steps, history.val_loss, "o-", color="tab:orange", label="validation")
    axes.annotate(
        f"{history.val_loss[-1]:.2f}",
        (history.val_steps[-1], history.val_loss[-1]),
        textcoords="offset points",
        xytext=(0, 8),
        ha="center",
        color="tab:orange",
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(settings.out / "loss.png", dpi=150)
    plt.close(figure)


def smoothed(values: list[float], reach: int = 10) -> list[float]:
    """Average each value with up to `reach` neighbours on either side, equally many on both.

    Being symmetric it does not lag behind the curve, as a running average would.
    """
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        means.append(statistics.fmean(values[i - near : i + near + 1]))
    return means
