"""What only the Python interpreter can tell about running code. Seen with Python 3.11.

Frames: ``nn.Module`` runs hooks after an exception, but not after a KeyboardInterrupt or SystemExit; no
public function tells that a call is over.
"""

import sys
from types import FrameType
from typing import Any

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
    """True if ``call`` is the frame of a caller of ours."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def handled_exceptions() -> dict[int, BaseException | None]:
    """The exception that each thread handles now, by thread.

    ``sys`` documents it with an underscore: from Python 3.12 on it gives exceptions, before that tuples.
    """
    current: dict[int, Any] = sys._current_exceptions()
    return {ident: each[1] if isinstance(each, tuple) else each for ident, each in current.items()}


def is_called_by_init(depth: int) -> bool:
    """Whether the frame ``depth`` above the caller belongs to ``torch.nn.init``.

    Those functions do nothing to a tensor on the meta device, and ask only whether it is there.
    """
    return sys._getframe(depth + 1).f_globals.get("__name__") == nn.init.__name__
