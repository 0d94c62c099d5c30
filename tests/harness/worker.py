"""One rank of a World: the child process that executes tasks until its parent is gone.

A task and its answer cross the pipe as plain pickle bytes. Plain, and not multiprocessing's own
pickler: torch teaches that one to send tensors as shared memory, which dies with the rank.
"""

import ctypes
import faulthandler
import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness.strict import strict

# Programs under test may take SIGUSR1, as batch systems send it; torch takes SIGUSR2 when a process crashes.
STACK_SIGNAL = signal.SIGVTALRM
_handler_stack = ctypes.create_string_buffer(1 << 20)


@dataclass(frozen=True)
class Seat:
    """Where a worker sits: its rank, its world, and the file its stack goes to."""

    rank: int
    size: int
    store_port: int
    stack_path: str


@dataclass(frozen=True)
class Answer:
    """What a rank sends back: a pickled result, or the text of what went wrong."""

    result: bytes | None = None
    error: str | None = None
    num_fds: int = 0
    num_collectives: int = 0  # of the process group of the world, so far


def serve(conn: Connection, seat: Seat) -> None:
    """Join the world, then answer one task after another; the process's whole life."""
    _die_with_parent()
    _settle_process(seat.rank)
    with open(seat.stack_path, "w") as stacks:
        _write_last_words_to(stacks)
        conn.send_bytes(pickle.dumps(_answer(_join, seat)))
        while True:
            try:
                task = conn.recv_bytes()
            except EOFError:
                os._exit(0)
            stacks.seek(0)
            stacks.truncate()  # what earlier tasks have written to stderr
            conn.send_bytes(pickle.dumps(_answer(_execute, task)))


def _write_last_words_to(file: TextIO) -> None:
    """Have a crash write all that can be known: the C++ stack of each thread, the Python stacks, and why."""
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # type: ignore[attr-defined]
    # Both work while the rank is stuck in C++, with or without the GIL.
    faulthandler.enable(file)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    _give_handlers_a_stack()
    # There C++ and libc say why they end a process, and torch writes the stacks of C++.
    os.dup2(file.fileno(), sys.stderr.fileno())


class _SignalStack(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def _give_handlers_a_stack() -> None:
    """Let handlers of crashes run on a stack that is large enough for torch's.

    faulthandler allocates one of some 10 KB on the heap, and torch's handler, which it calls, unwinds
    C++ on it: beyond its end the heap is overwritten, so that the crash became another one or a hang.
    """
    if sys.platform == "linux":  # elsewhere the fields have another order
        stack = _SignalStack(ctypes.addressof(_handler_stack), 0, len(_handler_stack))
        if ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) != 0:
            raise OSError(ctypes.get_errno(), "sigaltstack")


def _die_with_parent() -> None:
    # A signal from the kernel rather than a thread that watches: it also ends a rank that blocks
    # in C++ while holding the GIL, and it stays out of the stack dumps. The pipe becomes readable
    # when the parent goes, however it goes; a signal then ends this process, also while it is stopped.
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    if sys.platform == "linux":
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
    flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if wait([parent.sentinel], timeout=0):  # it went before we asked
        os._exit(1)


def _settle_process(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Every rank would otherwise start its own pool of compiler processes.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if rank != 0:  # of ranks that expect the same output, one may rewrite it
        os.environ.pop("EXPECTTEST_ACCEPT", None)
    torch.set_num_threads(1)
    # The modules loaded before the fork are no garbage: a collection that visits them takes 0.2 s
    # and copies every page that the ranks share.
    gc.freeze()


def _join(seat: Seat) -> None:
    store = dist.TCPStore("127.0.0.1", seat.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size)
    # gloo connects the ranks at the first collective; pay that here and not in a test.
    dist.barrier()


def _execute(task: bytes) -> Any:
    sys_path, call = pickle.loads(task)
    sys.path[:] = sys_path  # before the call is unpickled: that imports the test module
    fn, args, kwargs = pickle.loads(call)
    torch.manual_seed(0)
    return fn(*args, **kwargs)


def _answer(act: Callable[..., Any], *args: Any) -> Answer:
    result = error = None
    try:
        with strict():
            result = _pickled(act(*args))
    except BaseException as exc:  # whatever it is, the parent reports it
        error = _text(exc)
    gc.freeze()  # what outlives a task is modules and caches: out of the sight of later collections
    sys.stdout.flush()
    sys.stderr.flush()
    return Answer(result, error, len(os.listdir("/dev/fd")), _num_collectives())


def _num_collectives() -> int:
    world = dist.group.WORLD
    return 0 if world is None else int(world._get_sequence_number_for_group())


class _ResultPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):  # torch would let it through, as a wreck
            raise TypeError(
                "a DTensor cannot be a result: its mesh means nothing in the parent process. "
                "Return x.to_local() or x.full_tensor()."
            )
        return NotImplemented


def _pickled(result: Any) -> bytes:
    buffer = io.BytesIO()
    _ResultPickler(buffer).dump(result)
    return buffer.getvalue()


def _text(exc: BaseException) -> str:
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next  # start at the test's own function
    return "".join(traceback.format_exception(exc.with_traceback(tb)))
