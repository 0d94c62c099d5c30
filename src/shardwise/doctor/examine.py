"""All checks in order; here those of versions, environments and clocks."""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from shardwise import __version__
from shardwise.doctor.devices import check_devices
from shardwise.doctor.folders import check_folder
from shardwise.doctor.job import CheckFailed, Finding, Job, ok, wrong
from shardwise.doctor.network import check_mesh
from shardwise.layout.fqns import listed_ranks, ranks_by_value

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "SHARDWISE_", "OMP_", "MKL_", "PYTORCH_", "UCX_", "FI_")
_OF_ONE_HOST = ("_IFNAME", "_HCA", "_FILE", "_DEVICES", "_RANK", "_HOST", "_DIR")
"""Names of interfaces and files, which may differ where machines do."""

_MOST_APART_S = 0.5
_ROUNDS = 5


def examine(
    job: Job,
    *,
    folders: Sequence[Path] = (),
    mesh: tuple[int, ...] | None = None,
    names: Sequence[str] | None = None,
    device_type: str | None = None,
) -> list[Finding]:
    """The findings of all checks, up to the first that cannot be made; the same on all ranks.

    ``mesh``: its sizes, by default one dimension; ``names``: of its dimensions. ``device_type``: what to
    train on, by default the accelerator, or the host.
    """
    found: list[Finding] = []
    try:
        found += _check_ranks(job)
        found += _check_versions(job)
        found += _check_environment(job)
        found += _check_clocks(job)
        for folder in folders:
            found += check_folder(job, folder)
        found += check_devices(job, device_type)
        found += check_mesh(job, mesh, names, device_type)
    except CheckFailed as failed:
        found += failed.findings
    return found


def _check_ranks(job: Job) -> list[Finding]:
    """Whether all have come, and how many there are on each machine."""
    hosts = job.gather("ranks", platform.node)
    counts = [len(ranks) for ranks in ranks_by_value(enumerate(hosts)).values()]
    if len(counts) == 1:
        return [ok("ranks", f"{job.world} on one machine ({hosts[0]})")]
    each = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return [ok("ranks", f"{job.world} on {len(counts)} machines, {each} on each")]


def versions() -> dict[str, str]:
    """Of all that has to be the same on the ranks."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "shardwise": __version__}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _check_versions(job: Job) -> list[Finding]:
    facts = job.gather("versions", versions)
    shown = ", ".join(f"{name} {version}" for name, version in facts[0].items())
    return _differences("versions", facts, "Install the same everywhere.") or [ok("versions", shown)]


def _check_environment(job: Job) -> list[Finding]:
    """Variables that change how ranks compute and communicate: of libraries, thread pools, torch's memory."""

    def own() -> dict[str, str]:
        return {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and not name.endswith(_OF_ONE_HOST)
        }

    facts = job.gather("environment", own)
    shown = ", ".join(f"{name}={value}" for name, value in facts[0].items()) or "none is set"
    advice = "Export the same on all machines."
    return _differences("environment", facts, advice) or [ok("environment", shown)]


def _differences(subject: str, facts: Sequence[Mapping[str, str]], advice: str) -> list[Finding]:
    """A finding for each name whose value is not the same on all ranks."""
    found = []
    for name in dict.fromkeys(name for each in facts for name in each):
        values = ranks_by_value((rank, each.get(name, "nothing")) for rank, each in enumerate(facts))
        if len(values) > 1:
            sides = ", ".join(f"{value} on {listed_ranks(ranks)}" for value, ranks in values.items())
            found.append(wrong(subject, f"{name} is {sides}. {advice}"))
    return found


def _check_clocks(job: Job) -> list[Finding]:
    """How far the clock of each rank is ahead of that of rank 0: logs and traces are compared by time.

    An exchange ends on rank 0 first, and on the others when they look, within milliseconds. The median of
    several rounds leaves out those in which a rank was held up.
    """
    rounds = [job.gather("clocks", time.time) for _ in range(_ROUNDS)]
    offsets = [median(times[rank] - times[0] for times in rounds) for rank in range(job.world)]
    advice = "Logs and traces of ranks cannot be compared. Start NTP (chrony) on that machine."
    found = []
    for rank, offset in enumerate(offsets):
        if abs(offset) > _MOST_APART_S:
            where = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of rank 0"
            found.append(wrong("clocks", f"that of rank {rank} is {where}. {advice}"))
    return found or [ok("clocks", f"at most {1e3 * max(map(abs, offsets)):.1f} ms from that of rank 0")]
