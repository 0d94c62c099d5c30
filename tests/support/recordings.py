"""Recordings of traces that are written by hand: times in ms, one group a letter."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from shardwise.tracing.analysis import compare
from shardwise.tracing.records import TRANSFERS, MemorySample, Recording, Span, TracedGroup


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


def compared(
    recordings: Sequence[Recording], sharers: Callable[[int, str], Collection[int]] | None = None
) -> list[Recording]:
    """What ranks that have recorded these make of them.

    ``sharers``: from a rank and the name of a group, the ranks that share its transfers; default: all.
    """
    world = len(recordings)
    told: dict[int, object] = {}
    barrier = Barrier(world, timeout=60)

    def of_rank(rank: int) -> Recording:
        def gather(own: object) -> dict[int, object]:
            told[rank] = own
            barrier.wait()
            everyone = dict(sorted(told.items()))
            barrier.wait()
            return everyone

        names = {span.name for span in recordings[rank].spans}
        ranks = {name: sharers(rank, name) if sharers else range(world) for name in names}
        found = {(row, name): ranks[name] for row in TRANSFERS for name in names}
        return compare(recordings[rank], found, gather)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(of_rank, range(world)))
