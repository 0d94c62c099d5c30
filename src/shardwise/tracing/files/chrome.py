"""Recordings as JSON in Chrome's trace event format, which Perfetto (ui.perfetto.dev) shows as well.

Times of events are microseconds. Beside the events, the file has the recordings themselves, to be read again.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.tracing.records import KINDS, ROWS, Recording, dumps, lanes

_KEY = "shardwise"
_LANES = 100  # at most, of one row


def write_json(recordings: Sequence[Recording], path: Path) -> None:
    """Write the recordings, a process for each."""
    events = [event for recording in recordings for event in _events(recording)]
    content = {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        _KEY: [recording.to_dict() for recording in recordings],
    }
    path.write_text(dumps(content), encoding="utf-8")


def read_json(path: Path) -> list[Recording]:
    """The recordings of a file that ``write_json`` wrote.

    Raises:
        ValueError: it is another file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[_KEY]
        return [Recording.from_dict(each) for each in found]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"merge_traces: {path} is no trace of this library ({type(error).__name__}: {error}). Give the "
            "files that trace.save() wrote on each rank with the ending .json."
        ) from error


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    rank = recording.rank
    yield _name("process_name", rank, 0, f"rank {rank} ({recording.device})")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for number, row in enumerate(ROWS):
        spans = [span for span in recording.spans if span.row == row]
        for index, lane in enumerate(lanes(spans)):
            thread = number * _LANES + min(index, _LANES - 1)
            yield _name("thread_name", rank, thread, row)
            order = {"sort_index": thread}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": order}
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


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
