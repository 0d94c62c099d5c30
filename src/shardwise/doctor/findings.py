"""What a check has found, and the table of all findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from shardwise.layout.text_tables import aligned


class Verdict(Enum):
    """How a finding is judged, from best to worst."""

    OK = "ok"
    SLOW = "slow"  # training works, and takes longer than it would have to
    WRONG = "wrong"  # training fails, hangs or goes astray


@dataclass(frozen=True)
class Finding:
    """What one check has found on ``subject``: the figures, or what is not well and what to do."""

    subject: str
    verdict: Verdict
    text: str


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(subject, Verdict.OK, text)


def slow(subject: str, text: str) -> Finding:
    """Training works, and takes longer than it would have to."""
    return Finding(subject, Verdict.SLOW, text)


def wrong(subject: str, text: str) -> Finding:
    """Training fails, hangs or goes astray."""
    return Finding(subject, Verdict.WRONG, text)


def table(findings: Sequence[Finding]) -> str:
    """One line for each finding, and a last one with the count of those that are not well."""
    rows = [(each.verdict.value, each.subject, each.text) for each in findings]
    lines = aligned([("verdict", "what", "found"), *rows], right=())
    counts = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Verdict}
    summary = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    return "\n".join([*lines, "", summary])
