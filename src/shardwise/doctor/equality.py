"""What must be equal on all ranks: versions of software, and variables of the environment."""

from collections.abc import Mapping, Sequence

from shardwise.doctor.findings import Finding, ok, wrong
from shardwise.doctor.job import Job, Surroundings
from shardwise.layout.fqns import listed_ranks, ranks_by_value

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "SHARDWISE_", "OMP_", "MKL_", "PYTORCH_", "UCX_", "FI_")
_OF_ONE_HOST = ("_IFNAME", "_HCA", "_FILE", "_DEVICES", "_RANK", "_HOST", "_DIR")
"""Names of interfaces and files, which may differ where machines do."""


def check_versions(job: Job, around: Surroundings) -> list[Finding]:
    """Whether all ranks run the same versions."""
    facts = job.gather(dict(around.versions))
    if facts is None:
        return []
    shown = ", ".join(f"{name} {version}" for name, version in facts[0].items())
    return differences("versions", facts, "Install the same everywhere.") or [ok("versions", shown)]


def check_environment(job: Job, around: Surroundings) -> list[Finding]:
    """Whether variables that change how ranks compute and communicate are equal."""
    facts = job.gather(variables_that_matter(around.environment))
    if facts is None:
        return []
    advice = "Export the same on all machines."
    shown = ", ".join(f"{name}={value}" for name, value in facts[0].items()) or "none is set"
    return differences("environment", facts, advice) or [ok("environment", shown)]


def variables_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of communication libraries, thread pools, torch's memory and this library."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES) and not name.endswith(_OF_ONE_HOST)
    }


def differences(subject: str, facts: Sequence[Mapping[str, str]], advice: str) -> list[Finding]:
    """A finding for each name whose value is not the same on all ranks."""
    found = []
    for name in dict.fromkeys(name for each in facts for name in each):
        values = ranks_by_value((rank, each.get(name, "nothing")) for rank, each in enumerate(facts))
        if len(values) > 1:
            sides = ", ".join(f"{value} on {listed_ranks(ranks)}" for value, ranks in values.items())
            found.append(wrong(subject, f"{name} is {sides}. {advice}"))
    return found
