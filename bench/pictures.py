"""Pictures of what the benchmarks recorded, for the README: one SVG a subject, from a folder of JSON files.

    host_time.svg   host time added per block, by parameters per block and world (host_overhead.py)
    step_time.svg   step time on one machine against the floor, a group of bars for each record (step_time.py)
    two_hosts.svg   step time over a thin wire against its bound, a group for each rate (two_hosts.py)
    memory.svg      peak transient memory of forward and backward, in units of a block (memory.py)
    optimizers.svg  validation loss with each optimizer (metrics.json of runs of loss_curves.py)

Every `*.json` in the folder is read; what it is about, the record says itself. Several records of
step_time.py stand side by side in the order of their names. Of other benchmarks the newest counts. A
subject without a record has no picture.

The background is transparent, and the greys and colours are such that they can be read on white and on
black alike. Whiskers are quartiles. The same records make the same files, byte for byte.

    python bench/pictures.py --from FOLDER_OF_JSON --to bench/pictures
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from common import OURS, PEER, PEER_TUNED, PLAIN, plain_parser

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Record = Mapping[str, Any]
Row = Mapping[str, Any]

TEXT, LINE = "#7d8590", "#7d859060"  # contrast above 3.7 to white and to black
COLORS = {PEER: "#d9772b", PEER_TUNED: "#a8862f", OURS: "#2f8fd6"}
STYLES_OF_FLOORS = ("-", ":")
EXAMPLE = "train_gpt"
LABELS = {PEER: "FSDP2", PEER_TUNED: "FSDP2, tuned", OURS: "shardwise"}
STYLE = {
    "svg.hashsalt": "shardwise",
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "ytick.left": False,
    "xtick.bottom": False,
    "legend.frameon": False,
}


@dataclass
class Group:
    label: str
    bars: dict[str, Any]
    """By variant: a number, or a spread as the records have it."""
    ratio: Any = None
    """Ours to the peer, as the records have it: taken within rounds, not of the medians of the bars."""
    floors: dict[str, float] = field(default_factory=dict)
    """Lines across the group, by their place in the legend."""


def median(value: Any) -> float:
    return float(value["median"] if isinstance(value, Mapping) else value)


def highest(value: Any) -> float:
    """Where a bar ends, its whisker included."""
    return max(median(value), float(value["q3"])) if isinstance(value, Mapping) else float(value)


def draw(axes: Any, groups: Sequence[Group], title: str = "", *, scale: float = 1.0) -> None:
    """Groups of bars of all variants that have a color, and the lines across each group."""
    variants = [v for v in COLORS if any(v in group.bars for group in groups)]
    width = 0.8 / len(variants)
    for x, group in enumerate(groups):
        for place, variant in enumerate(variants):
            if variant in group.bars:
                at = x + (place - (len(variants) - 1) / 2) * width
                bar(axes, at, width * 0.9, variant, group, scale)
        for style, height in zip(STYLES_OF_FLOORS, group.floors.values(), strict=False):
            axes.hlines(height * scale, x - 0.45, x + 0.45, colors=TEXT, linestyles=style, linewidth=1.4)
    axes.set_xticks(range(len(groups)), [group.label for group in groups])
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_ylim(0, 1.12 * scale * max(highest(value) for group in groups for value in group.bars.values()))
    axes.set_title(title, fontsize=9, loc="left")


def bar(axes: Any, at: float, width: float, variant: str, group: Group, scale: float) -> None:
    value = group.bars[variant]
    axes.bar(at, median(value) * scale, width, color=COLORS[variant])
    if isinstance(value, Mapping):
        axes.vlines(at, value["q1"] * scale, value["q3"] * scale, colors=TEXT, linewidth=1.2)
    if variant == OURS and group.ratio is not None:
        # From the bar's left edge on: the bar to the left is higher, to the right is room.
        where = (at - width / 2, highest(value) * scale)
        axes.annotate(
            f"{median(group.ratio):.2f}",
            where,
            xytext=(0, 2),
            textcoords="offset points",
            color=COLORS[OURS],
            fontsize=8,
            weight="bold",
        )


def legend(figure: Any, groups: Iterable[Group], note: str) -> None:
    """What the colors and lines are, above the picture; ``note`` beneath it."""
    groups = list(groups)
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=COLORS[v], label=LABELS[v])
        for v in COLORS
        if any(v in group.bars for group in groups)
    ]
    floors = list(dict.fromkeys(name for group in groups for name in group.floors))
    handles += [
        plt.Line2D([], [], color=TEXT, linestyle=style, linewidth=1.4, label=name)
        for style, name in zip(STYLES_OF_FLOORS, floors, strict=False)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=int(figure.get_figwidth() / 1.4))
    figure.supxlabel(note, fontsize=7.5, color=TEXT)


@contextmanager
def figure_of(num_panels: int, width: float = 7.2, height: float = 3.0):  # type: ignore[no-untyped-def]
    """A figure with panels side by side, in the style of all pictures."""
    with matplotlib.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, num_panels, figsize=(width, height), layout="constrained", squeeze=False
        )
        try:
            yield figure, panels[0]
        finally:
            plt.close(figure)


def about(record: Record, more: str) -> str:
    """The lines beneath a picture: what was measured, and on what."""
    return f"{more}\ntorch {record['torch']}, {record['cores']} cores, {record['date'][:10]}"


def save(figure: Any, path: Path) -> Path:
    """Write without a date, so that the same records make the same file."""
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    return path


def panels(
    path: Path,
    titled: Sequence[tuple[str, Sequence[Group]]],
    ylabel: str,
    note: str,
    *,
    scale: float = 1.0,
    width: float = 7.2,
    xlabel: str = "",
) -> Path:
    """A picture of several panels, each with its title."""
    with figure_of(len(titled), width=width) as (figure, axes):
        for each, (title, groups) in zip(axes, titled, strict=True):
            draw(each, groups, title, scale=scale)
            each.set_xlabel(xlabel)
        axes[0].set_ylabel(ylabel)
        legend(figure, [group for _, groups in titled for group in groups], note)
        return save(figure, path)


# --- one function a subject -----------------------------------------------------------------------


def host_time(records: Sequence[Record], path: Path) -> Path:
    """A panel for each world, a group of bars for each number of parameters."""
    record = records[-1]
    rows = [row for row in record["rows"] if "added_us_per_block" in row]
    width = rows[0]["width"]
    cases = sorted({(row["world"], row["params"]) for row in rows if row["width"] == width})
    found = {
        case: added_group([r for r in rows if (r["world"], r["params"], r["width"]) == (*case, width)])
        for case in cases
    }
    titled = [
        (f"world {world}", [group for case, group in found.items() if case[0] == world])
        for world in dict(cases)
    ]
    note = f"host time of forward + backward (fake process group, width {width}); number: ratio to FSDP2"
    ylabel = "added per block, ms"
    return panels(path, titled, ylabel, about(record, note), scale=1e-3, xlabel="parameters per block")


def added_group(rows: Sequence[Row]) -> Group:
    """What each variant adds in one case, and the floor."""
    case = {row["variant"]: row for row in rows}
    bars = {v: case[v]["added_us_per_block"] for v in COLORS if v in case}
    floors = {"collectives alone": median(case["floor"]["added_us_per_block"])}
    return Group(f"{rows[0]['params']}", bars, ratio_of(case), floors)


def ratio_of(rows: Mapping[str, Row], measure: str = "ratio_to_peer") -> Any:
    """Ours to the peer, from rows by variant; None where either did not run."""
    return rows[OURS].get(measure) if OURS in rows else None


def step_time(records: Sequence[Record], path: Path) -> Path:
    """A panel for each record: they differ too much in size for one axis."""
    titled = [("", [step_group(record)]) for record in records]
    note = about(records[-1], "one machine, gloo; number: ratio to FSDP2")
    return panels(path, titled, "step, ms", note, width=max(7.2, 1.6 * len(titled)))


def step_group(record: Record) -> Group:
    """Bars of one record of step_time.py, and its two floors."""
    options, rows = record["options"], {row["variant"]: row for row in record["rows"]}
    size = rows[PLAIN]["parameters_mb"] / 4
    dtype = options.get("reduce_dtype", "float32")
    label = f"{options['processes']} processes\n{size:.3g} M" + ", bf16 sums" * (dtype == "bf16")
    floors = {"compute alone": median(rows[PLAIN]["step_ms"])}
    if "wire" in rows:
        floors["transport alone"] = median(rows["wire"]["step_ms"])
    return Group(label, {v: rows[v]["step_ms"] for v in COLORS if v in rows}, ratio_of(rows), floors)


def two_hosts(records: Sequence[Record], path: Path) -> Path:
    """A panel for each rate, with the bound."""
    record = records[-1]
    groups = []
    for rate in sorted({row["rate_mbit"] for row in record["rows"]}, reverse=True):
        rows = {row["variant"]: row for row in record["rows"] if row["rate_mbit"] == rate}
        bars = {v: rows[v]["step_ms"] for v in COLORS if v in rows}
        first = next(iter(bars))
        bound = median(rows[first]["step_ms"]) / median(rows[first]["to_bound"])
        label = f"{rate / 1000:g} Gbit/s" if rate >= 1000 else f"{rate:g} Mbit/s"
        groups.append(Group(label, bars, ratio_of(rows), {"bound": bound}))
    note = "two hosts, gloo; bound: the larger of compute and bytes / bandwidth; number: ratio to FSDP2"
    return panels(path, [("", [group]) for group in groups], "step, s", about(record, note), scale=1e-3)


def memory(records: Sequence[Record], path: Path) -> Path:
    """A panel each for forward and backward, a group of bars for each back end and dtype."""
    record = records[-1]
    cases = list(dict.fromkeys((row["backend"], row["dtype"]) for row in record["rows"]))
    rows = {case: [r for r in record["rows"] if (r["backend"], r["dtype"]) == case] for case in cases}
    titled = [
        (phase, [memory_group(phase, own) for own in rows.values()]) for phase in ("forward", "backward")
    ]
    note = about(record, "memory beside shards and activations; number: ratio to FSDP2")
    return panels(path, titled, "peak, in blocks' parameters", note)


def memory_group(phase: str, rows: Sequence[Row]) -> Group:
    case = {row["variant"]: row for row in rows}
    bars = {v: case[v][f"{phase}_units"] for v in COLORS if v in case}
    return Group(f"{rows[0]['backend']}\n{rows[0]['dtype']}", bars, ratio_of(case, f"{phase}_to_peer"))


def optimizers(records: Sequence[Record], path: Path) -> Path:
    with figure_of(1, width=4.4) as (figure, (axes,)):
        for record, color in zip(records, COLORS.values(), strict=False):
            name = record["settings"]["optimizer"]
            axes.plot(record["val_steps"], record["val_loss"], color=color, marker=".", label=name)
        axes.set_xlabel("step")
        axes.set_ylabel("validation loss, nats a byte")
        axes.legend()
        settings = records[0]["settings"]
        size = f"{settings['layers']} blocks of width {settings['width']}, learning rate {settings['lr']}"
        figure.supxlabel(f"{size}\ntorch {records[0]['versions']['torch']}", fontsize=7.5, color=TEXT)
        return save(figure, path)


SUBJECTS: dict[str, tuple[str, Callable[[Sequence[Record], Path], Path]]] = {
    "host_overhead": ("host_time.svg", host_time),
    "step_time": ("step_time.svg", step_time),
    "two_hosts": ("two_hosts.svg", two_hosts),
    "memory": ("memory.svg", memory),
    EXAMPLE: ("optimizers.svg", optimizers),
}


def benchmark_of(record: Record) -> str:
    """Its name; runs of the example have none."""
    return EXAMPLE if "val_loss" in record else record.get("benchmark", "")


def read_records(folder: Path) -> dict[str, list[Record]]:
    """Records by benchmark: of step_time.py and the example by file name, of others the newest last."""
    found: dict[str, list[Record]] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and (benchmark := benchmark_of(record)) in SUBJECTS:
            found.setdefault(benchmark, []).append(record)
    for benchmark, records in found.items():
        if benchmark not in ("step_time", EXAMPLE):
            records.sort(key=lambda record: record["date"])
    return found


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="folder of JSON files")
    parser.add_argument("--to", dest="target", type=Path, default=Path(__file__).parent / "pictures")
    options = parser.parse_args()
    records = read_records(options.source)
    if not records:
        raise SystemExit(
            f"{options.source} has no records of {', '.join(SUBJECTS)}. Make some first: "
            f"python bench/host_overhead.py --json {options.source}/host_overhead.json"
        )
    options.target.mkdir(parents=True, exist_ok=True)
    for benchmark, (name, subject) in SUBJECTS.items():
        if benchmark in records:
            print(f"wrote {subject(records[benchmark], options.target / name)}")
        else:
            print(f"no record of {benchmark}.py: {name} is left as it is")


if __name__ == "__main__":
    main()
