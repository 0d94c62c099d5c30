"""Files of traces: by the ending of their name a page, a picture, or JSON, which is read again to put the
traces of several ranks in one file.

A page is one file that needs nothing else, a picture is drawn by matplotlib. Both show for each rank its
rows, and its memory below them. On the page that is SVG whose horizontal places are percentages, so that a
wider drawing is a closer look: the script only changes its width. Without the script the whole step is there,
and the browser tells what a block is.

The JSON is in Chrome's trace event format, which Perfetto (ui.perfetto.dev) shows as well; times of events
are microseconds. Beside the events, it has the recordings themselves.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from shardwise.tracing.analysis import HEAD, advice, cells, ms, title
from shardwise.tracing.records import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTATION,
    COPIES,
    FORWARD,
    KINDS,
    OPTIMIZER,
    REDUCE_SCATTER,
    ROWS,
    Recording,
    Span,
)

# --- colours --------------------------------------------------------------------------------------

_COLORS = {
    "forward": "#8fb8ca",
    "backward": "#5b7f95",
    "waits": "#d1495b",
    ALL_GATHER: "#e9a23b",
    REDUCE_SCATTER: "#5f9e6e",
    ALL_REDUCE: "#8e6fb0",
    COPIES: "#b8b3a7",
    OPTIMIZER: "#6d6a75",
}
_COLORS_OF_MEMORY = {
    "shards": "#6d6a75",
    "reduced_gradients": "#5f9e6e",
    "unsharded": "#e9a23b",
    "full_gradients": "#d98880",
    "kept": "#d5d0c4",
}


def _color_of(span: Span) -> str:
    """Waits and backward stand out from the rest of their row."""
    if span.awaits is not None:
        return _COLORS["waits"]
    if span.row == COMPUTATION:
        return _COLORS["forward" if span.phase == FORWARD else "backward"]
    return _COLORS[span.row]


def _ink_on(color: str) -> str:
    """Black or white, whichever is easier to read there."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#111" if 0.3 * red + 0.59 * green + 0.11 * blue > 115 else "#fff"


# --- the page -------------------------------------------------------------------------------------

_LANE, _GAP, _MEMORY, _AXIS = 22, 6, 90, 20  # heights in pixels

_STYLE = """
:root{color-scheme:light dark;--text:#22262a;--back:#fff;--faint:#666;--line:#dcdcdc;--said:#faf1f2}
@media(prefers-color-scheme:dark){:root{--text:#e2e4e6;--back:#1b1d20;--faint:#a0a4a8;--line:#3c4045;
--said:#35252a}}
body{font:14px/1.45 system-ui,sans-serif;margin:24px;color:var(--text);background:var(--back)}
h1{font-size:20px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 6px}p{margin:4px 0}
.advice{border-left:4px solid #d1495b;padding:4px 12px;margin:10px 0;background:var(--said)}
.chart{display:flex;border:1px solid var(--line);border-radius:4px}
.rows{flex:none;width:118px;position:relative;border-right:1px solid var(--line);font-size:12px}
.rows div{position:absolute;right:8px;white-space:nowrap;color:var(--faint)}
.time{overflow-x:auto;flex:1}.time>svg{display:block;min-width:100%}
svg text{font:11px system-ui,sans-serif;pointer-events:none}
.tick line{stroke:var(--line)}.tick text{fill:var(--faint)}.block rect{stroke:var(--back);stroke-width:.6}
.legend span{display:inline-block;margin-right:14px;font-size:12px}
.legend i{display:inline-block;width:11px;height:11px;margin-right:5px;border-radius:2px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;margin-top:8px}
td,th{padding:2px 12px 2px 0;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{border-bottom:1px solid var(--faint);font-weight:600}
tr:last-child td{border-top:1px solid var(--faint)}button{font:inherit;padding:0 10px}
"""
_SCRIPT = """
let zoom=1;const all=[...document.querySelectorAll('.time')];
function scale(to,at){const old=zoom;zoom=Math.min(400,Math.max(1,to));
for(const t of all){const x=t.scrollLeft+at;t.firstElementChild.style.width=zoom*100+'%';
t.scrollLeft=x*zoom/old-at}}
for(const t of all){t.addEventListener('wheel',e=>{if(e.ctrlKey||e.shiftKey){e.preventDefault();
scale(zoom*Math.pow(1.002,-(e.deltaY||e.deltaX)),e.clientX-t.getBoundingClientRect().left)}},{passive:false});
t.addEventListener('scroll',()=>{for(const o of all)if(o!==t)o.scrollLeft=t.scrollLeft})}
for(const b of document.querySelectorAll('button'))
b.addEventListener('click',()=>scale(b.value==='0'?1:zoom*Number(b.value),all[0].clientWidth/2));
"""


def page(recordings: Sequence[Recording]) -> str:
    """The recordings as HTML, one below the other on the same axis of time."""
    length = max(1, *(recording.end_ns for recording in recordings))
    ranks = "".join(_rank(recording, length) for recording in recordings)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>shardwise trace</title>'
        f"<style>{_STYLE}</style></head><body><h1>Trace of {ms(length)}</h1>{_legend()}"
        '<p><button value="2">Zoom in</button> <button value="0.5">Zoom out</button> '
        '<button value="0">Fit</button> '
        "or turn the wheel with Shift or Ctrl; point at a block to read what it is.</p>"
        f"{ranks}<script>{_SCRIPT}</script></body></html>\n"
    )


def _legend() -> str:
    def items(shown: dict[str, str]) -> str:
        return "".join(
            f'<span><i style="background:{each}"></i>{text}</span>' for text, each in shown.items()
        )

    memory = {text: _COLORS_OF_MEMORY[kind] for kind, text in KINDS.items()}
    return f'<p class="legend">time: {items(_COLORS)}</p><p class="legend">memory: {items(memory)}</p>'


def _rank(recording: Recording, length: int) -> str:
    said = "".join(f'<p class="advice">{escape(sentence)}</p>' for sentence in advice(recording))
    return f"<h2>{escape(title(recording))}</h2>{said}{_chart(recording, length)}{_table(recording)}"


def _chart(recording: Recording, length: int) -> str:
    """The rows of one rank, and its memory, from top to bottom, with their names beside them."""
    names, parts, top = [], list(_ticks(length)), _AXIS
    for row, lanes in recording.rows().items():
        names.append((top, row))
        for lane in lanes:
            parts += [_block(span, top, length) for span in lane]
            top += _LANE
        top += _GAP
    if most := max((sample.total for sample in recording.memory), default=0):
        names += [(top, "MB held"), (top + 15, f"{most / 1e6:,.1f} at most")]
        parts.append(
            f'<svg x="0" y="{top}" width="100%" height="{_MEMORY}" viewBox="0 0 100000 1000" '
            f'preserveAspectRatio="none">{"".join(_areas(recording, length, most))}</svg>'
        )
        top += _MEMORY + _GAP
    labels = "".join(f'<div style="top:{place + 1}px">{escape(name)}</div>' for place, name in names)
    return (
        f'<div class="chart"><div class="rows">{labels}</div><div class="time">'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{top}">'
        f"{''.join(parts)}</svg></div></div>"
    )


def _block(span: Span, top: int, length: int) -> str:
    sent = f", {span.num_bytes / 1e6:,.3f} MB" if span.num_bytes else ""
    phase = f" ({span.phase})" if span.phase and span.row != COMPUTATION else ""
    late = f", {span.late_ns / 1e6:,.3f} ms of it for rank {span.late_rank}" if span.late_ns else ""
    told = f"{span.label}{phase}: {span.ns / 1e6:,.3f} ms from {span.start_ns / 1e6:,.3f} ms{sent}{late}"
    x, width, color = _percent(span.start_ns, length), _percent(span.ns, length), _color_of(span)
    return (
        f'<svg class="block" x="{x}" y="{top}" width="{width}" height="{_LANE - 2}">'
        f'<title>{escape(told)}</title><rect width="100%" height="100%" fill="{color}"/>'
        f'<text x="3" y="14" fill="{_ink_on(color)}">{escape(span.name)}</text></svg>'
    )


def _percent(ns: float, length: int) -> str:
    return f"{100 * ns / length:.5f}%"


def _ticks(length: int) -> Iterator[str]:
    step = _round_step(length / 8)
    for number in range(int(length / step) + 1):
        x = _percent(number * step, length)
        yield f'<g class="tick"><line x1="{x}" x2="{x}" y1="0" y2="100%"/>'
        yield f'<text x="{x}" dx="3" y="13">{number * step / 1e6:,g} ms</text></g>'


def _round_step(ns: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``ns``."""
    power: float = 10 ** math.floor(math.log10(ns))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= ns), 10 * power)


def _areas(recording: Recording, length: int, most: int) -> Iterator[str]:
    """A step-shaped area for each kind of memory, one upon the other, in a drawing of 100000 by 1000."""
    samples = recording.memory
    below = [0] * len(samples)
    moments = [*(sample.at_ns for sample in samples), recording.end_ns]
    times = [100_000 * moment // length for moment in moments]
    for kind, text in KINDS.items():
        above = [low + getattr(sample, kind) for low, sample in zip(below, samples, strict=True)]
        upper, lower = _steps(times, above, most), _steps(times, below, most)
        if above != below:
            points = " ".join(f"{x},{y:.1f}" for x, y in [*upper, *lower[::-1]])
            peak = max(high - low for high, low in zip(above, below, strict=True))
            told = f"{text}: {peak / 1e6:,.3f} MB at most"
            color = _COLORS_OF_MEMORY[kind]
            yield f'<polygon points="{points}" fill="{color}"><title>{told}</title></polygon>'
        below = above


def _steps(times: Sequence[int], values: Sequence[int], most: int) -> list[tuple[int, float]]:
    """The corners of a line that goes from value to value in steps."""
    heights = [1000 * (1 - value / most) for value in values]
    return [
        corner
        for start, end, height in zip(times, times[1:], heights, strict=False)
        for corner in ((start, height), (end, height))
    ]


def _table(recording: Recording) -> str:
    head = "".join(f"<th>{text}</th>" for text in HEAD)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells(recording)
    )
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


# --- the picture ----------------------------------------------------------------------------------


def draw(recordings: Sequence[Recording]) -> Any:
    """The recordings as a figure of matplotlib, one below the other on the same axis of time."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "trace: a .png is drawn by matplotlib, which is not installed. Install shardwise[pictures], or "
            "save the trace as .html, which needs nothing."
        ) from error
    heights = [
        height for recording in recordings for height in (sum(map(len, recording.rows().values())) + 1, 4)
    ]
    figure = Figure(figsize=(14, 0.28 * sum(heights) + 1.2 * len(recordings)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    for recording, rows, memory in zip(recordings, axes[::2], axes[1::2], strict=True):
        _draw_rows(rows, recording)
        _draw_memory(memory, recording)
    shown = [Patch(color=color, label=text) for text, color in _COLORS.items()]
    figure.legend(handles=shown, loc="outside upper center", ncols=len(shown), fontsize=8, frameon=False)
    axes[-1].set_xlabel("ms")
    axes[-1].set_xlim(0, max(recording.end_ns for recording in recordings) / 1e6)
    return figure


def _draw_rows(axes: Any, recording: Recording) -> None:
    named = [(row, lane) for row, lanes in recording.rows().items() for lane in lanes]
    for place, (_, lane) in enumerate(named):
        bars = [(span.start_ns / 1e6, span.ns / 1e6) for span in lane]
        shades = [_color_of(span) for span in lane]
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=shades, edgecolor="white", linewidth=0.4)
        for span in lane:
            if span.ns > recording.end_ns / 25:
                middle = (span.start_ns + span.ns / 2) / 1e6
                ink = _ink_on(_color_of(span))
                axes.text(
                    middle, place, span.name, ha="center", va="center", color=ink, fontsize=7, clip_on=True
                )
    axes.set_yticks(range(len(named)), [row for row, _ in named], fontsize=8)
    axes.set_ylim(len(named) - 0.4, -0.6)
    axes.set_title(title(recording), fontsize=9, loc="left")


def _draw_memory(axes: Any, recording: Recording) -> None:
    samples = recording.memory
    times = [*(sample.at_ns / 1e6 for sample in samples), recording.end_ns / 1e6]
    held = [[getattr(sample, kind) / 1e6 for sample in samples] for kind in KINDS]
    for values in held:
        values.append(values[-1])
    shades = [_COLORS_OF_MEMORY[kind] for kind in KINDS]
    axes.stackplot(times, held, labels=list(KINDS.values()), colors=shades, step="post", linewidth=0)
    axes.set_ylim(0, 1.3 * max((sample.total for sample in samples), default=1) / 1e6)  # room for the legend
    axes.set_ylabel("MB held", fontsize=8)
    axes.legend(fontsize=7, loc="upper right", ncols=len(KINDS))


_KEY = "shardwise"
_LANES = 100  # at most, of one row


def merge_traces(paths: Iterable[str | Path], out: str | Path) -> None:
    """Put the traces of several ranks on one time axis, in one file.

    If the ranks entered their traces together, zero is the same moment on all of them, to about the latency
    of an all-reduce. Otherwise the clocks of the hosts are compared, and are only as exact as those clocks.

    Args:
        paths: files that ``trace.save`` wrote with the ending ``.json``, one for each rank.
        out: the file to write; its ending selects the format, as in ``trace.save``.

    Raises:
        ValueError: there are no files, a file is not a trace, two are of the same rank, or the ending is
            unknown.
        FileNotFoundError: one is missing.
    """
    write = writer_for(out, "merge_traces")
    found: dict[int, tuple[str | Path, Recording]] = {}
    for path in paths:
        for recording in read_json(Path(path)):
            if recording.rank in found:
                raise ValueError(
                    f"merge_traces: {path} and {found[recording.rank][0]} are both of rank {recording.rank}. "
                    "Give one trace of each rank."
                )
            found[recording.rank] = path, recording
    if not found:
        raise ValueError("merge_traces: no files were given.")
    recordings = [found[rank][1] for rank in sorted(found)]
    if not all(recording.is_aligned for recording in recordings):
        first = min(recording.began for recording in recordings)
        recordings = [each.shifted(round((each.began - first) * 1e9)) for each in recordings]
    write(recordings, Path(out))


def writer_for(path: str | Path, caller: str) -> Callable[[Sequence[Recording], Path], None]:
    """What writes a file of this ending, and makes the folders that it lies in."""
    ending = Path(path).suffix
    if ending not in _WRITERS:
        raise ValueError(
            f"{caller}: {str(path)!r} ends with {ending!r}; a trace is written as {', '.join(_WRITERS)}. "
            "Name the file with one of these endings."
        )

    def write(recordings: Sequence[Recording], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[ending](recordings, path)

    return write


# --- JSON -----------------------------------------------------------------------------------------


def write_json(recordings: Sequence[Recording], path: Path) -> None:
    """Write the recordings, a process for each."""
    events = [event for recording in recordings for event in _events(recording)]
    content = {"displayTimeUnit": "ms", "traceEvents": events, _KEY: list(map(asdict, recordings))}
    path.write_text(json.dumps(content, separators=(",", ":"), allow_nan=False), encoding="utf-8")


def read_json(path: Path) -> list[Recording]:
    """The recordings of a file that ``write_json`` wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[_KEY]
        return [Recording.from_dict(each) for each in found]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"merge_traces: {path} is not a trace of this library ({type(error).__name__}: {error}). Give "
            "the files that trace.save() wrote on each rank with the ending .json."
        ) from error


_WRITERS: dict[str, Callable[[Sequence[Recording], Path], Any]] = {
    ".html": lambda recordings, path: path.write_text(page(recordings), encoding="utf-8"),
    ".json": write_json,
    ".png": lambda recordings, path: draw(recordings).savefig(path, dpi=150),
}


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    rank = recording.rank

    def meta(what: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}

    yield meta("process_name", 0, name=f"rank {rank} ({recording.device})")
    yield meta("process_sort_index", 0, sort_index=rank)
    for row, lanes in recording.rows().items():
        for index, lane in enumerate(lanes):
            thread = ROWS.index(row) * _LANES + min(index, _LANES - 1)
            yield meta("thread_name", thread, name=row)
            yield meta("thread_sort_index", thread, sort_index=thread)
            for span in lane:
                told = {"group": span.name, "phase": span.phase, "bytes": span.num_bytes}
                yield {
                    "ph": "X",
                    "name": span.label,
                    "cat": "wait" if span.awaits is not None else row,
                    "pid": rank,
                    "tid": thread,
                    "ts": span.start_ns / 1e3,
                    "dur": span.ns / 1e3,
                    "args": {key: value for key, value in told.items() if value},
                }
    for sample in recording.memory:
        held = {text: getattr(sample, kind) / 1e6 for kind, text in KINDS.items()}
        yield {"ph": "C", "name": "MB held", "pid": rank, "tid": 0, "ts": sample.at_ns / 1e3, "args": held}
