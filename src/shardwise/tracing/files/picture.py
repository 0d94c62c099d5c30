"""A trace as a picture, by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.tracing.analysis import title
from shardwise.tracing.files import colors
from shardwise.tracing.records import KINDS, ROWS, Recording, lanes

_LANE_INCHES = 0.28


def write_png(recordings: Sequence[Recording], path: Path) -> None:
    """Draw the recordings, one below the other on the same axis of time."""
    figure = draw(recordings)
    figure.savefig(path, dpi=150)


def draw(recordings: Sequence[Recording]) -> Any:
    """The picture as a figure of matplotlib: for each rank its rows, and its memory below them.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "trace: a .png is drawn by matplotlib, which is not installed. Install shardwise[pictures], or "
            "save the trace as .html, which needs nothing."
        ) from error
    heights = [height for recording in recordings for height in (_num_lanes(recording) + 1, 4)]
    figure = Figure(figsize=(14, _LANE_INCHES * sum(heights) + 1.2 * len(recordings)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    for recording, rows, memory in zip(recordings, axes[::2], axes[1::2], strict=True):
        _draw_rows(rows, recording)
        _draw_memory(memory, recording)
    axes[-1].set_xlabel("ms")
    axes[-1].set_xlim(0, max(recording.end_ns for recording in recordings) / 1e6)
    return figure


def _lanes(recording: Recording) -> list[tuple[str, list[Any]]]:
    found = {row: lanes([span for span in recording.spans if span.row == row]) for row in ROWS}
    return [(row, lane) for row, of_row in found.items() for lane in of_row]


def _num_lanes(recording: Recording) -> int:
    return len(_lanes(recording))


def _draw_rows(axes: Any, recording: Recording) -> None:
    named = _lanes(recording)
    for place, (_, lane) in enumerate(named):
        bars = [(span.start_ns / 1e6, span.ns / 1e6) for span in lane]
        shades = [colors.color_of(span) for span in lane]
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=shades, edgecolor="white", linewidth=0.4)
        for span in lane:
            if span.ns > recording.end_ns / 25:
                middle = (span.start_ns + span.ns / 2) / 1e6
                axes.text(middle, place, span.name, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(named)), [row for row, _ in named], fontsize=8)
    axes.set_ylim(len(named) - 0.4, -0.6)
    axes.set_title(title(recording), fontsize=9, loc="left")


def _draw_memory(axes: Any, recording: Recording) -> None:
    samples = recording.memory
    times = [*(sample.at_ns / 1e6 for sample in samples), recording.end_ns / 1e6]
    held = [[getattr(sample, kind) / 1e6 for sample in samples] for kind in KINDS]
    for values in held:
        values.append(values[-1])
    shades = [colors.KINDS[kind] for kind in KINDS]
    axes.stackplot(times, held, labels=list(KINDS.values()), colors=shades, step="post", linewidth=0)
    axes.set_ylim(0, 1.3 * max((sample.total for sample in samples), default=1) / 1e6)  # room for the legend
    axes.set_ylabel("MB held", fontsize=8)
    axes.legend(fontsize=7, loc="upper right", ncols=len(KINDS))
