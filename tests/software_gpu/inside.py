"""For a process that has software GPUs: its kernels, and what the host did there."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch

# In the order of `Counted` of cpp/streams.h.
COUNTED = (
    "launches",
    "device waits",
    "stream waits",
    "event waits",
    "copies to host",
    "copies to device",
    "allocations",
    "event queries",
)


def install_kernels() -> int:
    """Replace the CUDA kernels of ATen by those of the CPU; tells how many."""
    torch.ops.load_library(str(Path(os.environ["SOFTWARE_GPU_LIBRARIES"]) / "kernels.so"))
    with _without_warnings():  # one for each kernel that is replaced
        count = torch.ops.software_gpu.install()
    # Attention by kernels of CUDA's own has no twin; the plain form does.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return count


def counts() -> dict[str, int]:
    """What the host launched and waited for since the process began."""
    count = ctypes.CDLL(None).software_gpu_count
    count.restype = ctypes.c_longlong
    return {what: count(index) for index, what in enumerate(COUNTED)}


def waits() -> int:
    counted = counts()
    return sum(counted[what] for what in ("device waits", "stream waits", "event waits"))


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
