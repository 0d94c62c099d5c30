"""``merge_traces``: the traces of several ranks in one file."""

from collections.abc import Iterable
from pathlib import Path

from shardwise.tracing.files.chrome import read_json
from shardwise.tracing.files.endings import writer_for
from shardwise.tracing.records import Recording


def merge_traces(paths: Iterable[str | Path], out: str | Path) -> None:
    """Put the traces of several ranks on one axis of time, in one file.

    Where the ranks entered their traces together, zero is the same moment on all of them, to about the
    latency of an all-reduce. Else each rank's own clock of the day counts, as good as the hosts keep it.

    Args:
        paths: files that ``trace.save`` wrote with the ending ``.json``, one for each rank.
        out: where to; the ending says what, as in ``trace.save``.

    Raises:
        ValueError: no files, a file of something else, two of the same rank, or another ending.
        FileNotFoundError: one is missing.
    """
    write = writer_for(out, "merge_traces")
    found: dict[int, tuple[str, Recording]] = {}
    for path in paths:
        for recording in read_json(Path(path)):
            if recording.rank in found:
                raise ValueError(
                    f"merge_traces: {path} and {found[recording.rank][0]} are both of rank {recording.rank}. "
                    "Give one trace of each rank."
                )
            found[recording.rank] = str(path), recording
    if not found:
        raise ValueError("merge_traces: no files were given.")
    recordings = [recording for _, (_, recording) in sorted(found.items())]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write(_on_one_axis(recordings), Path(out))


def _on_one_axis(recordings: list[Recording]) -> list[Recording]:
    if all(recording.is_aligned for recording in recordings):
        return recordings
    first = min(recording.began for recording in recordings)
    return [recording.shifted(round((recording.began - first) * 1e9)) for recording in recordings]
