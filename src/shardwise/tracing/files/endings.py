"""The files that a trace can be written to, by their ending."""

from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.tracing.files.chrome import write_json
from shardwise.tracing.files.page import write_html
from shardwise.tracing.files.picture import write_png
from shardwise.tracing.records import Recording

_WRITERS: dict[str, Callable[[Sequence[Recording], Path], None]] = {
    ".html": write_html,
    ".json": write_json,
    ".png": write_png,
}


def writer_for(path: str | Path, caller: str) -> Callable[[Sequence[Recording], Path], None]:
    """What writes a file of this ending.

    Raises:
        ValueError: nothing does.
    """
    ending = Path(path).suffix
    if ending not in _WRITERS:
        raise ValueError(
            f"{caller}: {str(path)!r} ends with {ending!r}; a trace is written as {', '.join(_WRITERS)}. "
            "Name the file with one of these endings."
        )
    return _WRITERS[ending]
