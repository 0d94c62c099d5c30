"""A trace as a page: one file that needs nothing else, no network and no library.

The picture is SVG whose horizontal places are percentages, so that a wider drawing is a closer look: the
script only changes its width. Without the script the whole step is there, and the browser tells what a block
is.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from shardwise.tracing.analysis import HEAD, advice, cells, ms, title
from shardwise.tracing.files import colors
from shardwise.tracing.records import COMPUTATION, KINDS, ROWS, MemorySample, Recording, Span, lanes

_LANE, _GAP, _MEMORY, _AXIS = 22, 6, 90, 20  # heights in pixels

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px;color:#22262a;background:#fff}
h1{font-size:20px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 6px}p{margin:4px 0}
.advice{border-left:4px solid #d1495b;padding:4px 12px;margin:10px 0;background:#faf1f2}
.chart{display:flex;border:1px solid #dcdcdc;border-radius:4px}
.rows{flex:none;width:118px;position:relative;border-right:1px solid #dcdcdc;font-size:12px;color:#555}
.rows div{position:absolute;right:8px;white-space:nowrap}
.time{overflow-x:auto;flex:1}.time>svg{display:block;min-width:100%}
svg text{font:11px system-ui,sans-serif;pointer-events:none}
.legend span{display:inline-block;margin-right:14px;font-size:12px}
.legend i{display:inline-block;width:11px;height:11px;margin-right:5px;border-radius:2px}
table{border-collapse:collapse;font-size:13px;margin-top:8px}td,th{padding:2px 12px 2px 0;text-align:right}
td:first-child,th:first-child{text-align:left}th{border-bottom:1px solid #999;font-weight:600}
tr:last-child td{border-top:1px solid #999}button{font:inherit;padding:0 10px}
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


def write_html(recordings: Sequence[Recording], path: Path) -> None:
    """Write the recordings, one below the other on the same axis of time."""
    path.write_text(page(recordings), encoding="utf-8")


def page(recordings: Sequence[Recording]) -> str:
    """The page as text."""
    length = max(1, *(recording.end_ns for recording in recordings))
    ranks = "".join(_rank(recording, length) for recording in recordings)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>shardwise trace</title>'
        f"<style>{_STYLE}</style></head><body><h1>Trace of {ms(length)}</h1>{_legend()}"
        '<p><button value="2">closer</button> <button value="0.5">wider</button> '
        '<button value="0">all</button> '
        "or turn the wheel with Shift or Ctrl; point at a block to read what it is.</p>"
        f"{ranks}<script>{_SCRIPT}</script></body></html>\n"
    )


def _legend() -> str:
    rows = {
        "forward": colors.ROWS[COMPUTATION],
        "backward": colors.BACKWARD_COMPUTATION,
        "computation waits": colors.WAIT,
        **{row: color for row, color in colors.ROWS.items() if row != COMPUTATION},
    }
    memory = {text: colors.KINDS[kind] for kind, text in KINDS.items()}
    return f'<p class="legend">time: {_items(rows)}</p><p class="legend">memory: {_items(memory)}</p>'


def _items(shown: dict[str, str]) -> str:
    return "".join(f'<span><i style="background:{color}"></i>{text}</span>' for text, color in shown.items())


def _rank(recording: Recording, length: int) -> str:
    drawing = _Drawing(length)
    for row in ROWS:
        spans = [span for span in recording.spans if span.row == row]
        if spans:
            drawing.add_row(row, spans)
    drawing.add_memory(recording.memory, recording.end_ns)
    said = "".join(f'<p class="advice">{escape(sentence)}</p>' for sentence in advice(recording))
    return f"<h2>{escape(title(recording))}</h2>{said}{drawing.html()}{_table(recording)}"


class _Drawing:
    """The rows of one rank, and its memory, from top to bottom."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._height = _AXIS
        self._names: list[tuple[int, str]] = []
        self._parts: list[str] = []

    def add_row(self, row: str, spans: Sequence[Span]) -> None:
        """The spans of a row, in several lanes where they overlap."""
        self._names.append((self._height, row))
        for lane in lanes(spans):
            self._parts += [self._block(span) for span in lane]
            self._height += _LANE
        self._height += _GAP

    def _block(self, span: Span) -> str:
        x, width = self._percent(span.start_ns), self._percent(span.ns)
        color = colors.color_of(span)
        return (
            f'<svg x="{x}" y="{self._height}" width="{width}" height="{_LANE - 2}">'
            f"<title>{escape(_told(span))}</title>"
            f'<rect width="100%" height="100%" fill="{color}" stroke="#fff" stroke-width="0.6"/>'
            f'<text x="3" y="14">{escape(span.name)}</text></svg>'
        )

    def add_memory(self, samples: Sequence[MemorySample], end: int) -> None:
        """The memory of each kind over time, one kind upon the other."""
        most = max((sample.total for sample in samples), default=0)
        if not most:
            return
        self._names.append((self._height, f"MB held, {most / 1e6:,.1f} at most"))
        areas = "".join(_areas(samples, end, self._length, most))
        self._parts.append(
            f'<svg x="0" y="{self._height}" width="100%" height="{_MEMORY}" viewBox="0 0 100000 1000" '
            f'preserveAspectRatio="none">{areas}</svg>'
        )
        self._height += _MEMORY + _GAP

    def html(self) -> str:
        """The names of the rows, and the picture beside them."""
        names = "".join(
            f'<div style="top:{top + 1}px">{escape(part)}</div>'
            for start, name in self._names
            for top, part in zip((start, start + 15), name.split(", "), strict=False)
        )
        return (
            f'<div class="chart"><div class="rows">{names}</div><div class="time">'
            f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{self._height}">'
            f"{''.join(self._ticks())}{''.join(self._parts)}</svg></div></div>"
        )

    def _ticks(self) -> Iterator[str]:
        step = _round_step(self._length / 8)
        for number in range(int(self._length / step) + 1):
            x = self._percent(number * step)
            yield f'<line x1="{x}" x2="{x}" y1="0" y2="100%" stroke="#ececec"/>'
            yield f'<text x="{x}" dx="3" y="13" fill="#777">{number * step / 1e6:,g} ms</text>'

    def _percent(self, ns: float) -> str:
        return f"{100 * ns / self._length:.5f}%"


def _round_step(ns: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``ns``."""
    power: float = 10 ** math.floor(math.log10(ns))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= ns), 10 * power)


def _told(span: Span) -> str:
    sent = f", {span.num_bytes / 1e6:,.3f} MB" if span.num_bytes else ""
    phase = f" ({span.phase})" if span.phase and span.row != COMPUTATION else ""
    return f"{span.label}{phase}: {span.ns / 1e6:,.3f} ms from {span.start_ns / 1e6:,.3f} ms{sent}"


def _areas(samples: Sequence[MemorySample], end: int, length: int, most: int) -> Iterator[str]:
    """A step-shaped area for each kind, in a drawing of 100000 by 1000."""
    below = [0] * len(samples)
    times = [100_000 * sample.at_ns // length for sample in samples] + [100_000 * end // length]
    for kind, text in KINDS.items():
        above = [low + getattr(sample, kind) for low, sample in zip(below, samples, strict=True)]
        upper, lower = _steps(times, above, most), _steps(times, below, most)
        if above != below:
            points = " ".join(f"{x},{y:.1f}" for x, y in [*upper, *lower[::-1]])
            peak = max(high - low for high, low in zip(above, below, strict=True))
            told = f"{text}: {peak / 1e6:,.3f} MB at most"
            yield f'<polygon points="{points}" fill="{colors.KINDS[kind]}"><title>{told}</title></polygon>'
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
    return f"<table><tr>{head}</tr>{rows}</table>"
