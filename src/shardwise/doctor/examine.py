"""All checks in order, each on all ranks; rank 0 judges."""

from collections.abc import Callable, Sequence

from shardwise.doctor.equality import check_environment, check_versions
from shardwise.doctor.findings import Finding, wrong
from shardwise.doctor.job import Job, Surroundings

Check = Callable[[Job, Surroundings], list[Finding]]

CHECKS: Sequence[tuple[str, Check]] = (("versions", check_versions), ("environment", check_environment))


def examine(job: Job, around: Surroundings) -> list[Finding]:
    """The findings of all checks on rank 0; none elsewhere.

    A check that raises is a finding as well, and the next one runs.
    """
    found: list[Finding] = []
    for subject, check in CHECKS:
        try:
            found += check(job, around)
        except Exception as error:
            found.append(wrong(subject, f"{type(error).__name__}: {error}"))
    return found
