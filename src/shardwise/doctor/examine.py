"""All checks in order, each on all ranks; rank 0 judges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwise.doctor.clocks import check_clocks
from shardwise.doctor.devices import check_devices
from shardwise.doctor.equality import check_environment, check_versions
from shardwise.doctor.findings import Finding, ok, wrong
from shardwise.doctor.folders import check_folder
from shardwise.doctor.job import CannotGoOn, Hung, Job, NoAnswer, OtherRankFailed, Surroundings
from shardwise.doctor.network import check_mesh
from shardwise.layout.fqns import listed_ranks, ranks_by_value

Check = Callable[[], list[Finding]]

_LONGEST_ERROR = 400


@dataclass(frozen=True)
class ExaminationPlan:
    """How the job is going to train, as the options say it: on a mesh of such sizes (``2x8``; by default one
    dimension) and names (``replicate,shard``), on devices of a type (by default the accelerator, or the
    host), with checkpoints in these folders."""

    mesh: str | None = None
    names: str | None = None
    device_type: str | None = None
    folders: Sequence[Path] = ()


def examine(job: Job, around: Surroundings, plan: ExaminationPlan) -> list[Finding]:
    """The findings of all checks on rank 0, and none elsewhere.

    A check that raises on any rank ends the examination: ranks would not meet in those that follow.
    """
    checks: list[tuple[str, Check]] = [
        ("ranks", partial(_check_ranks, job, around)),
        ("versions", partial(check_versions, job, around)),
        ("environment", partial(check_environment, job, around)),
        ("clocks", partial(check_clocks, job, around)),
        *((f"folder {folder}", partial(check_folder, job, folder)) for folder in plan.folders),
        ("devices", partial(check_devices, job, around, plan.device_type)),
        ("mesh", partial(check_mesh, job, plan.mesh, plan.names, plan.device_type)),
    ]
    found: list[Finding] = []
    for number, (subject, check) in enumerate(checks):
        job.begin(f"check {number}")
        error = _error_of(check, found, job)
        job.begin(f"errors {number}")
        failed = _causes(job, job.answers(error))
        found += [wrong(subject, f"{listed_ranks(ranks)}: {text}") for text, ranks in failed.items()]
        if job.share(bool(failed)):
            break
    return found


def _check_ranks(job: Job, around: Surroundings) -> list[Finding]:
    """Whether all have come, and how many there are on each machine."""
    hosts = job.gather(around.host)
    if hosts is None:
        return []
    counts = [len(ranks) for ranks in ranks_by_value(enumerate(hosts)).values()]
    if len(counts) == 1:
        return [ok("ranks", f"{job.world} on one machine ({hosts[0]})")]
    each = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return [ok("ranks", f"{job.world} on {len(counts)} machines, {each} on each")]


def _error_of(check: Check, found: list[Finding], job: Job) -> dict[str, str]:
    """Run the check and add what it finds; the text of what it raises, and whether others are the cause."""
    try:
        found += check()
    except OtherRankFailed:
        return {"consequence": "another rank failed"}
    except NoAnswer as error:
        return {"consequence": str(error)}
    except Exception as error:
        if not isinstance(error, Hung):  # each rank tells that itself
            job.fail()
        text = str(error) if isinstance(error, CannotGoOn) else f"{type(error).__name__}: {error}"
        return {"cause": " ".join(text.split())[:_LONGEST_ERROR]}
    return {}


def _causes(job: Job, errors: dict[int, dict[str, str]] | None) -> dict[str, list[int]]:
    """Why the check failed, and on which ranks; consequences are left out if there is a cause."""
    if errors is None:
        return {}
    causes = [(rank, error["cause"]) for rank, error in errors.items() if "cause" in error]
    silent = [rank for rank in range(job.world) if rank not in errors]
    causes += [(rank, f"no answer within {job.timeout_s:g} s. Has its process ended?") for rank in silent]
    consequences = [(rank, text) for rank, error in errors.items() for text in error.values()]
    return ranks_by_value(causes or consequences)
