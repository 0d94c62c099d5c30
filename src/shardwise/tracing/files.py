"""Files of traces: by the ending of their name pages, pictures (drawings.py), or JSON, which is read again to
put the traces of several ranks in one file.

The JSON is in Chrome's trace event format, which Perfetto (ui.perfetto.dev) shows as well; times of events
are microseconds. Beside the events, it has the recordings themselves.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.tracing.drawings import draw, page
from shardwise.tracing.records import KINDS, ROWS, Recording

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
