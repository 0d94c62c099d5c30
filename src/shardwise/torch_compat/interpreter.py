"""What only the Python interpreter can tell about running code. Seen with Python 3.11.

Frames: ``nn.Module`` runs hooks after an exception, but not after a KeyboardInterrupt or SystemExit; no
public function tells that a call is over.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_NAMES = ("_call_impl", "unsharding_call")
"""Of the functions that run hooks: that of ``nn.Module``, and that around a method of the caller's."""


def frame_of_call() -> FrameType | None:
    """The frame of ``nn.Module.__call__`` (or of a registered method) that is being entered."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _NAMES:
        frame = frame.f_back
    return frame


def is_running(call: FrameType) -> bool:
    """True if the frame ``call`` is on the stack of any thread: ours, or one that may be waiting for ours."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None or any(frame is call for frame in _frames_of_all_threads())


def runs_in_any_thread(code: CodeType) -> bool:
    """True if a thread of this process is inside of the function that ``code`` belongs to."""
    return any(frame.f_code is code for frame in _frames_of_all_threads())


def _frames_of_all_threads() -> Iterator[FrameType]:
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            yield frame
            frame = frame.f_back


def handled_exceptions() -> dict[int, BaseException | None]:
    """The exception that each thread handles now, by thread.

    ``sys`` documents it with an underscore: from Python 3.12 on it gives exceptions, before that tuples.
    """
    current: dict[int, Any] = sys._current_exceptions()
    return {ident: each[1] if isinstance(each, tuple) else each for ident, each in current.items()}


# Where torch is installed other packages are, too.
_LIBRARIES = (
    str(Path(torch.__file__).parents[1]),
    str(Path(threading.__file__).parent),
    str(Path(__file__).parents[1]),
)


def where_main_thread_is() -> str:
    """The innermost line of the caller's program that the main thread runs, for a report to people.

    What is installed is left out, and so are this library and Python's own. Empty if nothing else runs.

    Frames are walked here because what a rank does that others wait for is not the library's doing (it
    evaluates, reads data, is at a prompt), and nothing else knows. Only the text of a report depends on it,
    and it happens only while one is written, after a wait of many seconds.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES) and not path.startswith("<"):
            return f"{Path(path).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def is_called_by_init(depth: int) -> bool:
    """Whether the frame ``depth`` above the caller belongs to ``torch.nn.init``.

    Those functions do nothing to a tensor on the meta device, and ask only whether it is there.
    """
    return sys._getframe(depth + 1).f_globals.get("__name__") == nn.init.__name__
