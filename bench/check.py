"""Whether a number got worse: the short benchmarks, against the ratios recorded in recorded.json.

A figure above the recorded one by more than its margin is worse; its benchmark is run once more then and the
smaller figure counts, since other programs only ever add time. Exits with 1 where one is worse, or is no
longer measured, with 2 where a benchmark fails. Ratios to the peer, taken in turns within one run, carry over
to other days of the same machine; to other machines and versions of torch less well: the record says where it
is from.

    python bench/check.py                       # six minutes, on a machine that does nothing else
    python bench/check.py --only host_calls     # calls are the same everywhere: .ci/run compares these
    python bench/check.py --record              # after a change that was meant, or on a new machine
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import OURS, PEER, environment, plain_parser, print_table
from host_instructions import NO_VALGRIND

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
COLUMNS = {"name": "ratio", "recorded": "recorded", "measured": "measured", "margin": "margin", "verdict": ""}
COPIED = "copied_to_peer"


@dataclass(frozen=True)
class Watched:
    """A benchmark, how it is run here, and which of its ratios are watched."""

    arguments: str
    named_by: tuple[str, ...]
    """Keys whose values tell its rows apart."""
    margins: Mapping[str, float]
    """Measures, and how much above the recorded ratio is still noise, as a part of it."""
    script: str = ""
    """Its program, if not of the same name."""


# Times are noisier the shorter they are, and processes on shared cores more than one alone. Memory and copies
# do not depend on time, but buffers may lie differently.
# Counts do not depend on time at all.
WATCHED = {
    "host_calls": Watched(
        "--variants ours",
        ("width",),
        dict.fromkeys(("own_per_block", "own_fixed", "own_per_stepped"), 0.03),
        "host_instructions.py",
    ),
    "host_instructions": Watched("--instructions", ("width",), {"added_to_peer": 0.03}),
    "host_overhead": Watched(
        "--params 12 --worlds 8 --widths 32 128 --steps 40 --no-noise --variants plain peer ours",
        ("what", "params", "world", "width"),
        {"ratio_to_peer": 0.12},
    ),
    "memory": Watched(
        "--backends fake --variants plain peer ours",
        ("backend", "dtype"),
        {"forward_to_peer": 0.03, "backward_to_peer": 0.03},
    ),
    "step_time": Watched(
        "--steps 8 --warmup 2 --variants plain peer ours", (), {"ratio_to_peer": 0.2, COPIED: 0.05}
    ),
    "whole_parameters": Watched(
        "--optimizers reference --layers 4 --width 256 --steps 8",
        ("optimizer",),
        {"step_to_replicated": 0.2, "state_to_replicated": 0.03},
    ),
}
COUNTS = {"host_calls", "host_instructions"}
"""They do not depend on the machine, of which the record tells."""


@dataclass(frozen=True)
class Ratio:
    value: float
    margin: float


def ratios_in(benchmark: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Ratio]:
    watched = WATCHED[benchmark]
    return {
        ", ".join([benchmark, *_labels(row, watched.named_by), measure.replace("_", " ")]): Ratio(
            _value(row, measure, rows), margin
        )
        for row in rows
        if row["variant"] == OURS
        for measure, margin in watched.margins.items()
    }


def _labels(row: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    for key in keys:
        yield f"{row[key]}" if isinstance(row[key], str) else f"{key} {row[key]}"


def _value(row: Mapping[str, Any], measure: str, rows: Sequence[Mapping[str, Any]]) -> float:
    """A ratio of a row; copies are recorded in megabytes, of which the peer has a row of its own."""
    if measure == COPIED:
        (peer,) = [other for other in rows if other["variant"] == PEER]
        ratio = row["copied_mb"] / peer["copied_mb"]
    else:
        ratio = row[measure]["median"] if isinstance(row[measure], Mapping) else row[measure]
    return float(f"{ratio:.4g}")


def compare(recorded: Mapping[str, float], measured: Mapping[str, Ratio]) -> list[dict[str, Any]]:
    """One row a ratio, with its verdict; those that are "worse" or "gone" fail the check."""
    names = [*recorded, *(name for name in measured if name not in recorded)]
    return [_verdict(name, recorded.get(name), measured.get(name)) for name in names]


def _verdict(name: str, recorded: float | None, measured: Ratio | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "recorded": recorded}
    if measured is None:
        return row | {"verdict": "gone"}
    row |= {"measured": measured.value, "margin": f"{measured.margin:.0%}"}
    if recorded is None:
        return row | {"verdict": "new"}
    if measured.value > recorded * (1 + measured.margin):
        return row | {"verdict": "worse"}
    is_better = measured.value < recorded * (1 - measured.margin)
    return row | {"verdict": "better" if is_better else "as recorded"}


def is_failure(row: Mapping[str, Any]) -> bool:
    return row["verdict"] in ("worse", "gone")


def run(benchmark: str) -> dict[str, Ratio]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        watched = WATCHED[benchmark]
        script = [
            sys.executable,
            str(HERE / (watched.script or f"{benchmark}.py")),
            *watched.arguments.split(),
        ]
        print(f"running {' '.join(script[1:])}", flush=True)
        done = subprocess.run([*script, "--json", str(path)], capture_output=True, text=True)
        if done.returncode == NO_VALGRIND:
            print(done.stdout.strip())
            return {}
        if done.returncode != 0 or not path.exists():
            print(
                f"{benchmark}.py failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
            raise SystemExit(2)
        return ratios_in(benchmark, json.loads(path.read_text())["rows"])


def measure(benchmark: str, recorded: Mapping[str, float]) -> dict[str, Ratio]:
    """A benchmark's ratios; of two runs the smaller ones where the first has one that is worse."""
    first = run(benchmark)
    if not any(row["verdict"] == "worse" for row in compare(recorded, first)):
        return first
    again = run(benchmark)
    return {name: min(ratio, again.get(name, ratio), key=lambda r: r.value) for name, ratio in first.items()}


def read_recorded(path: Path, benchmarks: Sequence[str]) -> dict[str, float]:
    if not path.exists():
        return {}
    record, here = json.loads(path.read_text()), environment()
    for key in ("torch", "cpu", "cores"):
        if record[key] != here[key]:
            print(f"recorded with {key} {record[key]}, here {here[key]}: expect other ratios")
    return {name: ratio for name, ratio in record["ratios"].items() if name.split(", ")[0] in benchmarks}


def write_recorded(path: Path, measured: Mapping[str, Ratio], benchmarks: Sequence[str]) -> None:
    """Record what was measured; other benchmarks keep their ratios."""
    record = json.loads(path.read_text()) if path.exists() else {"ratios": {}}
    before = record.pop("ratios")
    kept = {name: ratio for name, ratio in before.items() if name.split(", ")[0] not in benchmarks}
    about = record if record and COUNTS.issuperset(benchmarks) else environment()
    ratios = kept | {name: ratio.value for name, ratio in measured.items()}
    path.write_text(json.dumps({**about, "ratios": dict(sorted(ratios.items()))}, indent=2) + "\n")
    print(f"wrote {path}")


def parse() -> argparse.Namespace:
    parser = plain_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=WATCHED, default=list(WATCHED))
    parser.add_argument("--record", action="store_true", help="take what is measured now as the record")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="where the record is")
    return parser.parse_args()


def main() -> None:
    options = parse()
    recorded = read_recorded(options.recorded, options.only)
    measured: dict[str, Ratio] = {}
    for benchmark in options.only:
        its = {name: ratio for name, ratio in recorded.items() if name.split(", ")[0] == benchmark}
        found = run(benchmark) if options.record else measure(benchmark, its)
        if not found:  # it could not be measured here, and says why
            recorded = {name: ratio for name, ratio in recorded.items() if name not in its}
        measured |= found
    rows = compare(recorded, measured)
    print_table(rows, COLUMNS)
    if options.record:
        write_recorded(options.recorded, measured, options.only)
    elif not recorded:
        raise SystemExit(f"Nothing is recorded in {options.recorded}: run this with --record first.")
    elif failures := [row for row in rows if is_failure(row)]:
        raise SystemExit(f"{len(failures)} of {len(rows)} ratios are worse than recorded, or gone.")


if __name__ == "__main__":
    main()
