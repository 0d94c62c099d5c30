"""Memory over one step as a picture, stacked by kind."""

from collections.abc import Collection
from typing import Any

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        f"a picture needs matplotlib, which cannot be imported: {error}. Install it with pip install "
        "'shardwise[pictures]'."
    ) from error

from shardwise.dry_run.memory_log import KINDS
from shardwise.layout.text_tables import in_own_unit, unit_for
from shardwise.planning.report import Estimate, StrategyEstimate

# Of KINDS, in their order.
_COLOURS = ["#1f4e79", "#2e75b6", "#9dc3e6", "#7f7f7f", "#c55a11", "#f4b183", "#7030a0", "#70ad47", "#bf9000"]


def formats() -> Collection[str]:
    """The suffixes of files that can be written."""
    return Figure().canvas.get_supported_filetypes()


def figure_of(estimate: Estimate) -> Figure:
    """The picture of ``estimate``."""
    columns = 1 if len(estimate.rows) == 1 else 2
    lines = -(-len(estimate.rows) // columns)
    figure = Figure(figsize=(8 * columns, 3.2 * lines + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    highest = max(row.peak.num_bytes for row in estimate.rows)
    unit, size = unit_for(highest)
    for axes, row in zip(grid, estimate.rows, strict=False):
        _draw_row(axes, row, size, unit)
        if estimate.memory is not None:
            _draw_limit(axes, estimate.memory, size, is_far=estimate.memory > 2 * highest)
    for axes in grid[len(estimate.rows) :]:
        axes.remove()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.suptitle(estimate.model, fontsize=12)
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    return figure


def _draw_row(axes: Any, row: StrategyEstimate, size: int, unit: str) -> None:
    timeline = row.step.timeline
    times = list(range(len(timeline)))  # what is resized twice at a time has two moments
    stacks = [[moment.by_kind[kind] / size for moment in timeline] for kind in KINDS]
    axes.stackplot(times, stacks, labels=KINDS, colors=_COLOURS, step="post")
    index_of = {moment.time: index for index, moment in enumerate(timeline)}
    for phase in row.peaks:
        begin, end = row.step.phase(phase)
        x = next((index_of[time] for time in range(begin, end + 1) if time in index_of), 0)
        axes.axvline(x, color="black", linewidth=0.6)
        is_at_edge = x > 0.85 * len(times)
        text, side = (f"{phase} ", "right") if is_at_edge else (f" {phase}", "left")
        axes.text(x, 1.0, text, transform=axes.get_xaxis_transform(), va="bottom", ha=side, fontsize=8)
    title = row.strategy + (", checkpointing" if row.is_checkpointed else "")
    axes.set_title(f"{title}: {row.peak.num_bytes / size:,.2f} {unit}", loc="right", fontsize=10, pad=14)
    axes.set_xlim(0, max(1, len(times) - 1))
    axes.set_xticks([])
    axes.set_xlabel("allocations and releases, in order", fontsize=8)
    axes.set_ylabel(f"{unit} on a rank")


def _draw_limit(axes: Any, memory: int, size: int, is_far: bool) -> None:
    """The memory of a rank as a line; in words alone if a line would leave little room for the rest."""
    text, right = f"memory of a rank: {in_own_unit(memory)}", axes.get_yaxis_transform()
    style = {"color": "red", "fontsize": 8, "ha": "right"}
    if is_far:
        axes.text(0.99, 0.97, text, transform=axes.transAxes, va="top", **style)
    else:
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axes.axhline(memory / size, color="red", linestyle="--", linewidth=1)
        axes.text(0.99, memory / size, text, transform=right, va="bottom", bbox=ground, **style)
