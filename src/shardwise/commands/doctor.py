"""Check a job's machines, network and folders before training on them.

Run it as the training will run: by torchrun with the same number of machines and processes, in the same
environment.

    torchrun --nproc-per-node 8 -m shardwise doctor

Rank 0 prints a table. The exit status is 0 if nothing is wrong, and 1 otherwise.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise import __version__
from shardwise.commands import UsageError
from shardwise.doctor.examine import examine
from shardwise.doctor.findings import Verdict, table
from shardwise.doctor.job import Job, Surroundings
from shardwise.torch_compat import c10d


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``doctor``."""
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank (default 60)")
    parser.add_argument("--device", help="type of the devices to train on (default: the accelerator, or cpu)")


def run(arguments: argparse.Namespace, around: Surroundings | None = None) -> int:
    """Examine the job; 1 if anything is wrong. ``around``: what to find on this rank."""
    with _process_group(arguments.timeout):
        job = Job(
            dist.get_rank(),
            dist.get_world_size(),
            _device(arguments.device),
            dist.PrefixStore("shardwise/doctor", c10d.job_store()),
            arguments.timeout,
        )
        found = examine(job, around or Surroundings.of_this_process(__version__))
        if job.rank == 0:
            print(table(found))
        return int(job.share(any(each.verdict is Verdict.WRONG for each in found)))


@contextmanager
def _process_group(timeout_s: float) -> Iterator[None]:
    """The process group of the job: that which is there, that of torchrun, or one of a process alone."""
    if dist.is_initialized():
        yield
        return
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(timeout=timeout)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device(kind: str | None) -> torch.device:
    """This rank's device: of its number on the machine, as torchrun tells it."""
    if kind is None:
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.accelerator.device_count():
        raise UsageError(
            f"rank {os.environ.get('RANK', 0)} is number {index} on its machine, which has "
            f"{torch.accelerator.device_count()} devices. Start one process for each device."
        )
    device = torch.device(kind, index)
    torch.accelerator.set_device_index(index)
    return device
