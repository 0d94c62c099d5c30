"""What only the Python interpreter can tell about running code."""

import sys
from typing import Any

from torch import nn


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
