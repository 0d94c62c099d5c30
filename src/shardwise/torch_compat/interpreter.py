"""The frames of Python: the one way to see that a forward was ended by an interrupt.

``nn.Module`` runs hooks after an exception, but not after a KeyboardInterrupt or SystemExit; no public
function tells that a call is over. Seen with torch 2.11 to 2.15, Python 3.11.
"""

import sys
from types import FrameType

_NAMES = ("_call_impl", "gathered")
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
