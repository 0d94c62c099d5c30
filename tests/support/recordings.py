"""Recordings of traces that are written by hand: times in ms, one group a letter."""

from collections.abc import Sequence

from shardwise.tracing.records import MemorySample, Recording, Span, TracedGroup


def span(row: str, name: str, start: float, end: float, phase: str = "forward", **more: object) -> Span:
    return Span(row, name, phase, round(start * 1e6), round(end * 1e6), **more)  # type: ignore[arg-type]


def wait(awaits: str, name: str, start: float, end: float, phase: str = "forward") -> Span:
    return span("computation", name, start, end, phase, awaits=awaits)


def recording(spans: Sequence[Span], names: str = "abc", rank: int = 0, **more: object) -> Recording:
    told = {"began": 0.0, "is_aligned": True, "knew_order": True, "prefetch": 1} | more
    prefetch = told.pop("prefetch")
    groups = tuple(TracedGroup(name, 3_000_000, prefetch, 2, 1) for name in names)  # type: ignore[arg-type]
    spans = sorted(spans, key=lambda each: each.start_ns)
    end = max((each.end_ns for each in spans), default=0)
    samples = (
        MemorySample(0, 10_000_000, 0, 3_000_000, 0, 0),
        MemorySample(end // 2, 10_000_000, 500_000, 0, 3_000_000, 0),
    )
    return Recording(
        rank=rank, device="cpu", end_ns=end, spans=tuple(spans), memory=samples, groups=groups, **told
    )  # type: ignore[arg-type]
