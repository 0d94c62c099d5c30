"""Check a job's machines, network and folders before training on them.

Run it as the training will run: by torchrun with the same number of machines and processes, in the same
environment.

    torchrun --nproc-per-node 8 -m shardwise doctor --mesh 2x4 --names replicate,shard --folder /data/run

A missing folder is created, as a save creates it, and removed again.

Rank 0 prints a table to stdout. The exit status is 0 if nothing is wrong, and 1 otherwise: torchrun then
reports processes that have failed, with a traceback of its own on stderr, which adds nothing.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shardwise.commands import RankError, UsageError
from shardwise.doctor import Job, examine, table
from shardwise.torch_compat import c10d


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``doctor``."""
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank (default 60)")
    parser.add_argument("--mesh", type=sizes, help="ranks in each dimension, as 2x8 (default: all in one)")
    parser.add_argument(
        "--names",
        type=lambda text: text.split(","),
        help="of the dimensions, as replicate,shard (default: shard, or these two)",
    )
    parser.add_argument(
        "--folder", action="append", default=[], type=Path, help="for checkpoints; repeatable"
    )
    parser.add_argument("--device", help="type of the devices to train on (default: the accelerator, or cpu)")


def sizes(text: str) -> tuple[int, ...]:
    """Those in ``2x8``."""
    return tuple(map(int, text.split("x")))


def run(arguments: argparse.Namespace) -> int:
    """Examine the job; 1 if anything is wrong."""
    if not arguments.timeout > 0:
        raise UsageError(f"--timeout is {arguments.timeout:g}; give seconds to wait.")
    with _joined(arguments.timeout) as job:
        found = examine(
            job,
            folders=arguments.folder,
            mesh=arguments.mesh,
            names=arguments.names,
            device_type=arguments.device,
        )
        if job.rank == 0:
            print(table(found), flush=True)
        status = int(any(each.verdict == "wrong" for each in found))
        job.leave()
        if job.has_hung:  # a thread that does not come back would keep the process
            sys.stdout.flush()
            os._exit(status)
        return status


@contextmanager
def _joined(timeout_s: float) -> Iterator[Job]:
    """The job of the process group that is there, of torchrun, or of a process alone."""
    if dist.is_initialized():
        yield Job(dist.get_rank(), dist.get_world_size(), c10d.job_store(), timeout_s)
        return
    base: dist.Store
    if "RANK" in os.environ:
        base, rank, world = _rendezvous(timeout_s)
    else:
        base, rank, world = dist.HashStore(), 0, 1
    job = Job(rank, world, base, timeout_s)
    yield job
    if dist.is_initialized() and not job.has_hung:
        dist.destroy_process_group()


def _rendezvous(timeout_s: float) -> tuple[dist.Store, int, int]:
    """The store at the address that a launcher has put into the environment, the rank, and how many."""
    try:
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (dist.DistError, ValueError) as error:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        around = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        why = str(error).splitlines()[0].rstrip(".")
        raise RankError(
            f"this rank has not met the others ({around}): {why}. Start all of them, and look at the address "
            "and at firewalls."
        ) from error
