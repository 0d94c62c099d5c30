"""What was found: two accesses that nothing orders, with the lines of `src/shardwise` that caused them.

RACE on 128 bytes of memory that all-gather allocated
  all-gather writes them (all_gather)
      comm/communicators.py:159 in all_gather: return waiting_for([c10d.all_gather(...
  computing reads them (aten.mm)
      the caller's own computation
  MISSING: computing does not wait for all-gather between the two. ...
"""

import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = "/src/shardwise/"
_MOST_LINES = 4


@dataclass(frozen=True, slots=True)
class Line:
    file: str
    number: int
    function: str

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        _, is_source, inside = self.file.rpartition(SOURCE)
        name = inside if is_source else Path(self.file).name
        return f"{name}:{self.number} in {self.function}: {code}"


def calling_lines() -> tuple[Line, ...]:
    """The innermost lines of `src/shardwise` that are being run; none in the caller's own computation."""
    found: list[Line] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _MOST_LINES:
        code = frame.f_code
        if SOURCE in code.co_filename:
            found.append(Line(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def calling_functions(most: int, outside: str) -> tuple[str, ...]:
    """Qualified names of the innermost functions of `src/shardwise` that are being run, except those of a file."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < most:
        file = frame.f_code.co_filename
        if SOURCE in file and not file.endswith(outside):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Use:
    lane: str
    verb: str  # reads, writes
    operation: str
    lines: Sequence[Line]

    def __str__(self) -> str:
        where = self.lines or ["the caller's own computation"]
        return "\n".join(
            [f"  {self.lane} {self.verb} them ({self.operation})", *(f"      {line}" for line in where)]
        )


@dataclass(frozen=True, slots=True)
class Race:
    """Two uses of the same bytes that nothing orders, of which one writes."""

    num_bytes: int
    owner: str
    earlier: Use
    later: Use

    @property
    def kind(self) -> str:
        """For counting: what races with what."""
        return f"{self.earlier.lane} {self.earlier.verb}, {self.later.lane} {self.later.verb}"

    def __str__(self) -> str:
        return "\n".join(
            [
                f"RACE on {self.num_bytes} bytes of memory that {self.owner} allocated",
                str(self.earlier),
                str(self.later),
                f"  MISSING: {self.later.lane} does not wait for {self.earlier.lane} between the two. Record an "
                f"event on {self.earlier.lane} behind the first, and have {self.later.lane} wait for it before the "
                "second.",
            ]
        )


@dataclass(frozen=True, slots=True)
class EarlyReuse:
    """Freed memory that its pool may give out again while another lane still uses it."""

    num_bytes: int
    owner: str
    last: Use
    freed: Sequence[Line]
    next_allocation: Sequence[Line]

    @property
    def kind(self) -> str:
        """For counting: whose memory is used by whom when it is allocated again."""
        return f"{self.owner} allocates again, {self.last.lane} {self.last.verb}"

    def __str__(self) -> str:
        def block(title: str, lines: Sequence[Line]) -> list[str]:
            return [f"  {title}", *(f"      {line}" for line in lines or ["the caller's own computation"])]

        return "\n".join(
            [
                f"EARLY REUSE of {self.num_bytes} bytes of memory that {self.owner} allocated",
                str(self.last),
                *block("they are freed by", self.freed),
                *block(f"{self.owner} may get them again, and write, in", self.next_allocation),
                f"  MISSING: {self.owner} does not wait for {self.last.lane} before it allocates again. Have it wait "
                "before the memory is freed, or keep the memory until it has.",
            ]
        )


Finding = Race | EarlyReuse


def told(findings: Sequence[Finding], most: int = 3) -> str:
    """The first findings of different kinds, and how many there are of each."""
    first: dict[str, Finding] = {}
    counts: dict[str, int] = {}
    for finding in findings:
        first.setdefault(finding.kind, finding)
        counts[finding.kind] = counts.get(finding.kind, 0) + 1
    parts = [f"{count} x {kind}" for kind, count in counts.items()]
    return "\n\n".join(["; ".join(parts), *(str(finding) for finding in list(first.values())[:most])])
