"""How long it takes to save and to resume in the memory of hosts, and on disk.

Claim: a job resumes from the memory of its hosts no later than from a local disk whose files are not cached,
and also after one of two hosts is lost.

How: one launch, a GPT sharded over all processes, with AdamW's state. Half of the processes are one host, the
others another: each half has a folder of its own in --memory. Times are the maximum over ranks, between two
barriers. Files on disk are written back and dropped from the cache before they are read.

Refuted by: a time of `memory` above that of `disk` by more than the noise.

What it cannot show: a shared file system, which local checkpoints are for, and a network between the hosts:
copies go over loopback.

    python bench/claims/resume.py --json resume.json
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import numpy
import torch
import torch.distributed as dist
from common import Spread, gpt_parser, launch, print_table, write_json
from gpt import GPT, batch_of

from shardwise import resume, save_checkpoint, shard_model

COLUMNS = {"what": "what", "save_s": "save, s", "resume_s": "resume, s"}


def seconds(act: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - start


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def work(options: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = GPT(options)
    shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model(*batch_of(dist.get_rank(), options)).backward()
    optimizer.step()
    optimizer.zero_grad()
    host = dist.get_rank() * 2 // dist.get_world_size()
    disk, memory = Path(options.disk), Path(options.memory) / f"host{host}"
    is_first = dist.get_rank() * 2 % dist.get_world_size() == 0  # of its host
    found: dict[str, list[float]] = {}

    def record(what: str, act: Callable[[], Any]) -> None:
        found.setdefault(what, []).append(seconds(act))

    def save_in_memory() -> None:
        save_checkpoint(memory / "step-1", model, optimizer, local=True, keep=1)

    for step in range(1, options.steps + 1):
        record("save memory", save_in_memory)
        record("resume memory", lambda: resume(disk / "none", model, optimizer, local=memory))
        if host == 0 and is_first:
            shutil.rmtree(memory)
        record("resume memory, a host lost", lambda: resume(disk / "none", model, optimizer, local=memory))
        record("save disk", lambda: save_checkpoint(disk / "step-1", model, optimizer))
        record("resume disk, cached", lambda: resume(disk, model, optimizer))
        if is_first:
            drop_from_cache(disk)
        record("resume disk", lambda: resume(disk, model, optimizer))
        if dist.get_rank() == 0:
            print(f"round {step} of {options.steps}", flush=True)
        dist.barrier()
        if is_first:
            shutil.rmtree(memory, ignore_errors=True)
            shutil.rmtree(disk, ignore_errors=True)
    return found


def main() -> None:
    parser = gpt_parser(__doc__, processes=4, steps=5, layers=12, width=768, vocab=10240, batch=1, context=32)
    parser.add_argument("--memory", default="/dev/shm", help="a folder in memory")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.memory) as options.memory,
        tempfile.TemporaryDirectory(dir=".") as options.disk,
    ):
        ranks = launch(work, options)
    longest = {what: numpy.max([of_rank[what] for of_rank in ranks], axis=0) for what in ranks[0]}
    rows = []
    for what in ("memory", "memory, a host lost", "disk", "disk, cached"):
        row: dict[str, Any] = {"what": what}
        for kind in ("save", "resume"):
            if f"{kind} {what}" in longest:
                row[f"{kind}_s"] = vars(Spread.of(longest[f"{kind} {what}"]))
        rows.append(row)
    print_table(rows, COLUMNS)
    write_json(options.json, "resume", vars(options), rows)


if __name__ == "__main__":
    main()
