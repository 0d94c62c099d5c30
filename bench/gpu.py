"""A day's work on one GPU, in one command: probes, correctness, NCCL, speed, compiled steps, tools.

Each part of `gpu_parts/plan.py` runs in a process of its own with time limits: one that fails, hangs or
crashes is noted, with its error, and the others go on. What each claims, its floor and what refutes it stand
at the top of its file. --plan says what would run, and for how long; all of it takes about 20 minutes.

    PYTHONPATH=src python bench/gpu.py --plan
    PYTHONPATH=src python bench/gpu.py --json gpu.json
    PYTHONPATH=src python bench/gpu.py --json gpu.json --only delays nccl     # replaces these in it
    PYTHONPATH=src python bench/gpu.py --json gpu.json --minutes 9 --resume   # the rest, as far as it goes
    PYTHONPATH=src python bench/gpu.py --device cpu --tiny                    # tries out its logic

A part that would not fit into the minutes left is not begun, unless --only names it. Exit status: 0 if
nothing failed, 1 if something did, 2 where there is no CUDA device.

Needs torch, numpy, tabulate and psutil.
"""

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import environment, plain_parser, print_table
from gpu_parts.plan import PARTS, Options, Row
from gpu_parts.processes import BAD, read_record, run_items, run_part, write_record

MINUTES = 40.0
TITLES = {"name": "", "status": "", "seconds": "s", "num_rows": "rows", "num_bad": "bad", "note": ""}


def machine() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() or None
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def print_plan(names: Sequence[str]) -> None:
    rows = [vars(PARTS[name]) for name in names]
    print_table(rows, {"name": "part", "shows": "shows", "minutes": "minutes", "limit_minutes": "at most"})
    print(f"{sum(row['minutes'] for row in rows):.0f} minutes in all, at most {MINUTES:.0f} (--minutes)")


def print_part(name: str, found: dict[str, Any]) -> None:
    """Its rows: in tables of its own where it has them."""
    part = PARTS[name]
    print(f"\n{name}: {part.shows}. {found['status']}, {found['seconds']:.0f} s. {_line(found['note'])}")
    rows = [{**row, "note": _line(row.get("note", ""))} for row in found["rows"]]
    if any("variant" in row for row in rows):
        importlib.import_module(f"gpu_parts.{part.where.partition(':')[0]}").print_rows(rows)
        rows = [row for row in rows if "variant" not in row]
    if rows:
        own = {column: column for column in part.columns}
        cells = [{key: _cell(value) for key, value in row.items()} for row in rows]
        print_table(cells, {"name": "", "status": "", "seconds": "s", **own, "note": ""})


def _line(text: str, width: int = 110) -> str:
    """The first line, shortened; the record has all of it."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= width else first[: width - 3] + "..."


def _cell(value: Any) -> Any:
    if isinstance(value, dict) and "median" not in value:
        return _line(", ".join(f"{key} {each}" for key, each in value.items()), 80)
    return _line(value, 80) if isinstance(value, str) else value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = plain_parser(__doc__)
    parser.add_argument("--plan", action="store_true", help="say what would run, and for how long")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help="these parts alone")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what the record has as ok or skipped"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="as small as it can be, to try out the logic")
    parser.add_argument("--json", type=Path, help="the record; a run adds to it")
    parser.add_argument("--folder", type=Path, default=Path(), help="where pictures go")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.child:
        if options.device == "cpu":
            torch.set_num_threads(1)
        where = Options(options.device, options.tiny, options.folder)
        run_items(PARTS[options.child], where, options.findings, options.skip)
        return
    record = read_record(options.json)
    names = [name for name in PARTS if options.only is None or name in options.only]
    if options.resume:
        names = [n for n in names if record["parts"].get(n, {}).get("status") not in ("ok", "skipped")]
    if options.plan:
        print_plan(names)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu.py cannot run here: torch {torch.__version__} sees no CUDA device. "
            "(--device cpu --tiny tries out its logic, and measures nothing.)",
            file=sys.stderr,
        )
        raise SystemExit(2)
    print("CPU: no measurement" if options.device == "cpu" else machine()["gpu"], flush=True)
    found = run(names, options, record)
    print()
    print_table([{"name": name, **found[name]} for name in found], TITLES)
    left = [name for name in names if name not in found]
    if left:
        print(f"no time was left for {', '.join(left)}: run again with --resume")
    if options.json:
        print(f"wrote {options.json}")
    raise SystemExit(any(each["status"] in BAD for each in found.values()))


def run(names: Sequence[str], options: argparse.Namespace, record: Row) -> dict[str, Row]:
    """Run parts, print and record each; what to say of them in the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the child ends as well
    begin, said = time.monotonic(), {}
    where = {**environment(), **machine(), "device": options.device, "tiny": options.tiny}
    for name in names:
        part = PARTS[name]
        left_s = 60 * options.minutes - (time.monotonic() - begin)
        if options.only is None and left_s < (20 if options.tiny else 60 * part.minutes):
            continue
        command = [sys.executable, "-W", "ignore", __file__, "--child", name, "--device", options.device]
        command += ["--tiny"] * options.tiny + ["--folder", str(options.folder)]
        found = run_part(part, command, min(60 * part.limit_minutes, left_s))
        record["parts"][name] = {**found, **where}
        write_record(options.json, record)
        print_part(name, found)
        counts = {
            "num_rows": len(found["rows"]),
            "num_bad": sum(row["status"] in BAD for row in found["rows"]),
        }
        said[name] = {**found, **counts, "note": _line(found["note"])}
    return said


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
    main()
