"""The process group, the mesh, and latency and bandwidth of each of its dimensions.

Bandwidth counts the bytes that a rank sends: (N - 1) / N of the unsharded ones in an all-gather or a
reduce-scatter of N ranks, and twice that in an all-reduce. All process groups of a dimension run at once, as
in training. Calls that may block run in a thread: a network that does not deliver is a finding, not a hang.
"""

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.doctor.devices import own_device
from shardwise.doctor.job import CannotGoOn, Finding, Job, ok, slow, wrong
from shardwise.layout.fqns import listed_ranks
from shardwise.torch_compat import c10d

SIZES = (4 << 10, 1 << 20, 32 << 20)
"""Unsharded bytes of a collective: the first shows the latency, the others the bandwidth."""

Ready = tuple[Callable[[], Any], Callable[[], bool]]
"""What runs a collective, and what tells whether its first result is right."""

Collective = Callable[[dist.ProcessGroup, int, torch.device], Ready]
"""Prepares a collective of shards with so many numbers."""

_REPEATS = 5
_MOST_BEHIND = 2.0
"""How many times longer than in the median of its like a process group may take."""


def check_mesh(
    job: Job, sizes: tuple[int, ...] | None, names: Sequence[str] | None, wanted: str | None
) -> list[Finding]:
    """Connect the ranks and run each collective in each dimension; a finding each."""
    connect = partial(_mesh, job, sizes or (job.world,), names, wanted)
    mesh = job.run("mesh", partial(job.within_timeout, "connecting the ranks", connect))
    backend = c10d.backend_name(mesh.get_group(0), torch.device(mesh.device_type))
    dims = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    found = [ok("mesh", f"{' x '.join(f'{name} {size}' for name, size in dims.items())}, over {backend}")]
    for name, size in dims.items():
        for kind, collective in _COLLECTIVES.items() if size > 1 else ():
            subject = f"{name}: {kind}"
            measure = partial(_measured, mesh.get_group(name), collective, wanted)
            found += judge(subject, job.gather(subject, partial(job.within_timeout, subject, measure)))
    return found


def _mesh(job: Job, sizes: tuple[int, ...], names: Sequence[str] | None, wanted: str | None) -> DeviceMesh:
    if (size := math.prod(sizes)) != job.world:
        raise CannotGoOn(f"--mesh holds {size} ranks, and the job has {job.world}.")
    names = names or {1: ("shard",), 2: ("replicate", "shard")}.get(len(sizes), ())
    if len(names) != len(sizes):
        raise CannotGoOn(f"the mesh has {len(sizes)} dimensions. Give as many different --names.")
    device = own_device(wanted)
    if not dist.is_initialized():
        # Later than the job's own timeout, since NCCL's is the end of the process.
        later = timedelta(seconds=2 * job.timeout_s)
        store = dist.PrefixStore("shardwise/doctor/process_group", job.store)
        dist.init_process_group(store=store, rank=job.rank, world_size=job.world, timeout=later)
    return init_device_mesh(device.type, sizes, mesh_dim_names=tuple(names))


def _measured(pg: dist.ProcessGroup, collective: Collective, wanted: str | None) -> dict[str, Any]:
    """For each size the seconds of the fastest of several, and whether the first has given what it should."""
    device = own_device(wanted)
    seconds, are_right = [], True
    for num_bytes in SIZES:
        run, is_right = collective(pg, max(1, num_bytes // torch.float32.itemsize // pg.size()), device)
        run()  # connects
        are_right &= is_right()
        seconds.append(min(_timed(run, device) for _ in range(_REPEATS)))
    return {"ranks": c10d.ranks_of(pg), "seconds": seconds, "is_right": are_right}


def judge(subject: str, facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """The findings from the ``ranks``, ``seconds`` by size, and whether it ``is_right``, of each rank."""
    bad = [rank for rank, each in enumerate(facts) if not each["is_right"]]
    if bad:
        text = f"{listed_ranks(bad)} received wrong numbers. Memory, driver or network are broken there"
        return [wrong(subject, f"{text}; train on other machines.")]
    largest = {tuple(each["ranks"]): each["seconds"][-1] for each in facts}
    median_s = sorted(largest.values())[(len(largest) - 1) // 2]
    behind = {
        ranks: seconds / median_s for ranks, seconds in largest.items() if seconds > _MOST_BEHIND * median_s
    }
    world = len(facts[0]["ranks"])
    sent = (world - 1) / world * (2 if subject.endswith("all-reduce") else 1)
    slowest = [max(each["seconds"][index] for each in facts) for index in range(len(SIZES))]
    figures = f"{1e6 * slowest[0]:.0f} us; " + ", ".join(
        f"{sent * size / seconds / 1e9:.2f} GB/s at {size >> 20} MiB"
        for size, seconds in list(zip(SIZES, slowest, strict=True))[1:]
    )
    if not behind:
        return [ok(subject, f"{world} ranks, {figures}")]
    advice = f"as most ({figures}). Look at the links of their machines."
    texts = [f"{listed_ranks(ranks)} take {times:.1f} times as long" for ranks, times in behind.items()]
    return [slow(subject, f"{text} {advice}") for text in texts]


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    synchronize = partial(torch.accelerator.synchronize, device) if device.type != "cpu" else lambda: None
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def _all_gather(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Ready:
    own = torch.full((numel,), float(pg.rank()), device=device)
    full = torch.empty(numel * pg.size(), device=device)
    expected = torch.arange(float(pg.size()), device=device).repeat_interleave(numel)
    return lambda: _finish(c10d.all_gather(pg, full, own, True)), lambda: torch.equal(full, expected)


def _reduce_scatter(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Ready:
    full, own = torch.ones(numel * pg.size(), device=device), torch.empty(numel, device=device)
    reduce = partial(c10d.reduce_scatter, pg, own, full, dist.ReduceOp.SUM, True)
    return lambda: _finish(reduce()), lambda: bool((own == pg.size()).all())


def _all_reduce(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Ready:
    full = torch.ones(numel * pg.size(), device=device)
    # It has run once: the result is in place, and later runs sum it further.
    return lambda: dist.all_reduce(full, group=pg), lambda: bool((full == pg.size()).all())


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


_COLLECTIVES: dict[str, Collective] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
}
