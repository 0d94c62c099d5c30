"""What a finished run leaves behind: a verdict on the terminal, a picture and a JSON file.

Only rank 0 comes here, and no function here talks to other ranks.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

# By how many nats per byte a loss must beat the byte frequencies before we call it clear.
CLEAR_MARGIN = 0.5


@dataclass
class History:
    """What was measured during a run. Losses are nats per byte, averaged over all ranks."""

    unigram: float
    train_loss: list[float] = field(default_factory=list)  # one per step
    val_steps: list[int] = field(default_factory=list)  # how many steps were done when ...
    val_loss: list[float] = field(default_factory=list)  # ... this was measured
    step_seconds: list[float] = field(default_factory=list)  # training only, no validation
    memory_mb: list[float] = field(default_factory=list)  # of rank 0, after each step

    def tokens_per_s(self, tokens_per_step: int, last: int | None = None) -> float:
        """Over the whole run, or its last steps. The first step is left out: it also warms up."""
        seconds = self.step_seconds[1:] or self.step_seconds
        seconds = seconds[-last:] if last else seconds
        return tokens_per_step * len(seconds) / sum(seconds)


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


def write_metrics(path: Path, history: History, **facts: object) -> None:
    """Write the history and whatever else describes the run (settings, versions) as JSON."""
    text = json.dumps({**facts, **asdict(history)}, indent=1, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def draw_loss(path: Path, history: History, title: str) -> None:
    """Draw training loss per step, validation points and the unigram line as a PNG."""
    # Imported here so that only rank 0 pays for it. Agg draws without a display.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(history.train_loss) + 1)
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
    figure.savefig(path, dpi=150)
    plt.close(figure)


def smoothed(values: list[float], reach: int = 10) -> list[float]:
    """Average each value with up to `reach` neighbours on either side, equally many on both.

    Being symmetric it does not lag behind the curve, as a running average would.
    """
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        means.append(sum(values[i - near : i + near + 1]) / (2 * near + 1))
    return means
