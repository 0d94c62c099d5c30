"""Processes that are ranks of a job: each on a GPU of its own where there are enough, else all on the first.

From 2.30 on NCCL takes several ranks on one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1); before, that is skipped. On
the host gloo takes its place.
"""

import ctypes
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from gpu_parts.plan import Row, Skipped

SEVERAL_RANKS_FROM = (2, 30)
Check = Callable[[int, int, str], Row | list[Row]]
"""Of a rank, the number of ranks, and the kind of device."""


@dataclass(frozen=True)
class Start:
    """How ranks join.

    ``older``: by the older back end for NCCL, where torch has two. ``binds``: with `device_id`. ``chooses``:
    with `set_device` before. ``is_reversed``: rank 0 is on the last device. ``fails``: communication does not
    work any more in the end, so that it cannot be shut down properly.
    """

    device: str
    older: bool = False
    binds: bool = False
    chooses: bool = True
    is_reversed: bool = False
    fails: bool = False

    def device_of(self, rank: int, world: int) -> torch.device:
        if self.device == "cpu":
            return torch.device("cpu")
        if not have_their_own(world):
            return torch.device("cuda", 0)
        return torch.device("cuda", world - 1 - rank if self.is_reversed else rank)


def have_their_own(world: int) -> bool:
    return torch.cuda.device_count() >= world


def nccl_version() -> tuple[int, ...]:
    """That of the library in this process: with LD_PRELOAD, another than torch was built with."""
    found = ctypes.c_int()
    loaded = getattr(ctypes.CDLL(None), "ncclGetVersion", None)
    if loaded is None or loaded(ctypes.byref(found)) != 0:
        return torch.cuda.nccl.version()
    return found.value // 10000, found.value // 100 % 100, found.value % 100


def on_ranks(check: Check, world: int, start: Start) -> list[Any]:
    """Run ``check(rank, world, device)`` in a process for each rank; what each found."""
    if start.device == "cuda" and not have_their_own(world):
        version = nccl_version()
        if version[:2] < SEVERAL_RANKS_FROM:
            raise Skipped(f"NCCL {'.'.join(map(str, version))} takes one rank a GPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Read when torch.distributed is imported.
    chosen = {"TORCH_DIST_USE_NCCL2": "0" if start.older else os.environ.get("TORCH_DIST_USE_NCCL2", "1")}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, chosen):
        torch.multiprocessing.spawn(_be, (check, world, start, folder, port), nprocs=world)
        return [json.loads(Path(folder, f"found{rank}.json").read_text()) for rank in range(world)]


def _be(rank: int, check: Check, world: int, start: Start, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    device = start.device_of(rank, world)
    options: dict[str, Any] = {
        "init_method": f"tcp://127.0.0.1:{port}",
        "rank": rank,
        "world_size": world,
        "timeout": timedelta(seconds=60),
    }
    if start.device == "cuda":
        if have_their_own(world):
            os.environ["LOCAL_RANK"] = str(rank)  # as torchrun sets it
        else:
            os.environ |= {"LOCAL_RANK": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        if start.chooses:
            torch.cuda.set_device(device)
        if start.binds:
            options["device_id"] = device
    dist.init_process_group("nccl" if start.device == "cuda" else "gloo", **options)
    found = check(rank, world, start.device)
    Path(folder, f"found{rank}.json").write_text(json.dumps(found, default=str))
    _leave_together(rank, world)
    if start.fails:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    dist.destroy_process_group()


def _leave_together(rank: int, world: int) -> None:
    """Without collectives, which may have failed. Rank 0, which holds the store, leaves last."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"came/{rank}", "")
    store.wait([f"came/{each}" for each in range(world)])
    store.set(f"leaves/{rank}", "")
    if rank == 0:
        store.wait([f"leaves/{each}" for each in range(world)])
