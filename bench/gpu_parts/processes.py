"""A part in a process of its own, with time limits; its findings; the record that runs share.

    parent                                   child: python bench/gpu.py --child delays --findings FILE
    starts the child, reads FILE             {"begins": "full"}
    no line for as long as an item may       {"name": "full", "status": "ok", "seconds": 1.2, ...}
    take: kills the child's process group    {"over": "full"}
                                             {"begins": "hybrid"}
    an item that hung or killed the child    ...
    is noted; the child starts again         {"ends": true}
    without what has begun already

The record is one JSON file: {"parts": {name: {"status", "seconds", "rows", environment ...}}}. A run replaces
the parts that it ran and leaves the others, so that a day may be cut into commands.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_parts.plan import Options, Part, Row, Skipped

BAD = ("failed", "hung", "crashed")
MOST_STARTS = 6
TAIL = 3000


# --- the child ------------------------------------------------------------------------------------


def run_items(part: Part, options: Options, findings: Path, skip: Sequence[str] = ()) -> None:
    """Run the items of ``part`` but those in ``skip``, and write a line for each as soon as it is over.

    Ends the process where the device is of no use any more, after an illegal access for example.
    """

    def write(line: Row) -> None:
        with findings.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    for name, act in part.items(options):
        if name in skip:
            continue
        write({"begins": name})
        for row in rows_of(name, act):
            write(row)
        write({"over": name})
        if not is_usable(options.device):
            sys.exit(3)
    write({"ends": True})


def rows_of(name: str, act: Callable[[], Row | list[Row]]) -> Iterator[Row]:
    """What an item found, with its time; or its error."""
    start = time.perf_counter()
    try:
        found = act()
        rows = found if isinstance(found, list) else [found]
        status = {"status": "ok"}
    except Skipped as reason:
        rows, status = [{}], {"status": "skipped", "note": str(reason)}
    except Exception as error:
        traceback.print_exc()
        rows = [{}]
        status = {"status": "failed", "note": f"{type(error).__name__}: {error}"[:TAIL]}
    seconds = round(time.perf_counter() - start, 2)
    for row in rows:
        yield {"name": name, **status, "seconds": seconds, **row}


def is_usable(device: str) -> bool:
    """Whether the device still answers."""
    if device == "cuda":
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True


# --- the parent -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a part."""

    rows: list[Row] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    over: set[str] = field(default_factory=set)
    is_over: bool = False
    note: str = ""

    def read(self, path: Path) -> None:
        """Take over the lines of a child."""
        for text in path.read_text().splitlines() if path.exists() else []:
            with suppress(json.JSONDecodeError):  # killed while it wrote
                line = json.loads(text)
                if "begins" in line:
                    self.begun.append(line["begins"])
                elif "over" in line:
                    self.over.add(line["over"])
                elif "ends" in line:
                    self.is_over = True
                else:
                    self.rows.append(line)

    @property
    def unfinished(self) -> str | None:
        """The item that has begun and did not end."""
        return next((name for name in reversed(self.begun) if name not in self.over), None)

    @property
    def status(self) -> str:
        """The worst of its rows; "failed" where it never came to an end."""
        found = [row["status"] for row in self.rows]
        for each in BAD:
            if each in found:
                return each
        if not self.is_over:
            return "failed"
        return "skipped" if found and set(found) == {"skipped"} else "ok"


def run_part(part: Part, command: Sequence[str], limit_s: float) -> Row:
    """Run ``command`` as the child of ``part``, again after each item that ends it; its record."""
    outcome, start = Outcome(), time.monotonic()
    for _ in range(MOST_STARTS):
        left_s = limit_s - (time.monotonic() - start)
        if outcome.is_over or left_s <= 0:
            break
        skip = ["--skip", *dict.fromkeys(outcome.begun)] if outcome.begun else []
        before = len(outcome.begun)
        ended = _run_child([*command, *skip], part, left_s, outcome)
        name = outcome.unfinished
        if name is not None:
            outcome.rows.append({"name": name, **ended})
            outcome.over.add(name)
        elif not outcome.is_over and len(outcome.begun) == before:
            outcome.note = f"{ended['status']} before any item: {ended['note']}"
            break
    if not outcome.is_over and not outcome.note:
        outcome.note = f"ended after {time.monotonic() - start:.0f} s, with items left"
    seconds = round(time.monotonic() - start, 1)
    return {"status": outcome.status, "seconds": seconds, "note": outcome.note, "rows": outcome.rows}


def _run_child(command: Sequence[str], part: Part, left_s: float, outcome: Outcome) -> Row:
    """Run it once; what to say of the item that it was at, if it did not come to the end of it."""
    with tempfile.TemporaryDirectory() as folder:
        findings, log = Path(folder, "findings"), Path(folder, "log")
        with log.open("w") as output:
            child = subprocess.Popen(
                [*command, "--findings", str(findings)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own children end with it
            )
        try:
            why = _watch(child, findings, part.item_limit_s, left_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        outcome.read(findings)
        tail = log.read_text(errors="replace")[-TAIL:]
    if why is not None:
        return {"status": "hung", "note": f"{why}\n{tail}"}
    return {"status": "crashed", "note": f"the process ended with {_exit_text(child.returncode)}\n{tail}"}


def _watch(child: "subprocess.Popen[Any]", findings: Path, item_limit_s: float, left_s: float) -> str | None:
    """Wait for the child; why it has to be ended, or None where it ended by itself."""
    begin = last = time.monotonic()
    size = -1
    while child.poll() is None:
        time.sleep(0.1)
        now = time.monotonic()
        found = findings.stat().st_size if findings.exists() else 0
        if found != size:
            size, last = found, now
        if now - begin > left_s:
            return f"the part had {left_s:.0f} s left"
        if now - last > item_limit_s:
            return f"nothing for {item_limit_s:.0f} s"
    return None


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


# --- the record -----------------------------------------------------------------------------------


def read_record(path: Path | None) -> Row:
    """The record of earlier runs; an empty one where there is none."""
    if path is not None and path.exists():
        record = json.loads(path.read_text())
        if record.get("benchmark") == "gpu" and "parts" in record:
            return record
        raise SystemExit(f"{path} is no record of gpu.py; name another file.")
    return {"benchmark": "gpu", "parts": {}}


def write_record(path: Path | None, record: Row) -> None:
    """Write it whole or not at all: the machine may be taken away at any time."""
    if path is not None:
        beside = path.with_suffix(path.suffix + ".new")
        beside.write_text(json.dumps(record, indent=2, default=str) + "\n")
        beside.replace(path)
