"""Make a rank fail on what Python would only print.

pytest does this for the parent process; the ranks are processes of their own, so they do it here:
a warning is an error, and so is an exception that nobody could catch (in a destructor, in a
weakref callback, in a thread).
"""

import gc
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# torch's own noise, which no test can avoid: (category, start of the message as a regex).
# Whoever adds one says which torch says it, and when.
KNOWN_NOISE: list[tuple[type[Warning], str]] = [
    # Importing Inductor, up to 2.13: it defines its MKL-DNN modules in TorchScript. The first use of forward mode:
    # decompositions of its own; a FutureWarning from 2.14 on.
    (DeprecationWarning, "`torch.jit.script"),
    (FutureWarning, "`torch.jit.script"),
    # Compiling on this one patch release of Python, with torch 2.13.
    (RuntimeWarning, "Guards may run slower on Python 3.13.0"),
    # Entering torch.profiler.profile(), once per process, whatever its arguments.
    (UserWarning, "Warning: Profiler clears events at the end of each cycle"),
]


@contextmanager
def strict() -> Iterator[None]:
    """Turn warnings into errors, and raise at the end what escaped meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for category, message in KNOWN_NOISE:
            warnings.filterwarnings("ignore", message=message, category=category)
        with _raise_what_escapes():
            yield


@contextmanager
def _raise_what_escapes() -> Iterator[None]:
    escaped: list[str] = []  # text only: an exception kept here would keep its frames alive

    def unraisable(error: "sys.UnraisableHookArgs") -> None:
        if "NoCloseWriter" in repr(error.object):  # torch's, after a failed write; Python 3.13 began to tell
            return
        escaped.append(f"{error.err_msg or 'Exception ignored in'}: {error.object!r}\n")
        escaped.append(_text(error.exc_type, error.exc_value, error.exc_traceback))

    def in_thread(error: threading.ExceptHookArgs) -> None:
        escaped.append(f"Exception in thread {error.thread and error.thread.name}\n")
        escaped.append(_text(error.exc_type, error.exc_value, error.exc_traceback))

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, in_thread
    try:
        yield
        gc.collect()  # run the destructors of this task while their errors can be blamed on it
    finally:
        sys.unraisablehook, threading.excepthook = hooks
    if escaped:
        raise AssertionError("an error escaped where nobody could catch it\n" + "".join(escaped))


def _text(kind: type[BaseException], error: BaseException | None, tb: types.TracebackType | None) -> str:
    return "".join(traceback.format_exception(kind, error, tb))
