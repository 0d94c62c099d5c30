"""bench/gpu.py: parts that fail, hang and crash are survived; records are merged; what a trace says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu_parts import compiled, speed, tools
from gpu_parts.plan import PARTS, Options, Part, Skipped
from gpu_parts.processes import read_record, rows_of, run_items, run_part, write_record
from gpu_parts.trace import COUNTED, read_trace
from one_device.groups import IN_GROUP

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.py"
TINY = Options("cpu", is_tiny=True)


# --- a trace --------------------------------------------------------------------------------------


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


TRACE = [
    {"ph": "M", "name": "process_name", "ts": 0},
    span("user_annotation", COUNTED, 100, 100),
    span("cpu_op", "c10d::_allgather_base_", 120, 20),
    span("user_annotation", IN_GROUP, 180, 10),
    span("cuda_runtime", "cudaLaunchKernel", 90, 1, correlation=1),  # before the step
    span("cuda_runtime", "cudaLaunchKernel", 110, 1, correlation=2),
    span("cuda_runtime", "cudaMemcpyAsync", 125, 1, correlation=3),  # inside the collective
    span("cuda_runtime", "cudaMemcpyAsync", 130, 1, tid=2, correlation=4),  # beside it, on another thread
    span("cuda_driver", "cuLaunchKernel", 150, 1, tid=2, correlation=5),
    span("cuda_runtime", "cudaStreamSynchronize", 160, 5, correlation=6),
    span("cuda_runtime", "cudaMalloc", 170, 5, correlation=7),
    span("cuda_runtime", "cudaLaunchKernel", 185, 1, correlation=9),  # inside one of a group in Python
    span("cuda_runtime", "cudaDeviceSynchronize", 210, 5, correlation=8),  # after the step
    span("kernel", "early", 95, 10, correlation=1),
    span("kernel", "gemm", 300, 1000, correlation=2),
    span("gpu_memcpy", "Memcpy DtoD", 1000, 500, correlation=3, bytes=4096),
    span("gpu_memcpy", "Memcpy DtoD", 2000, 500, correlation=4, bytes=100),
    span("kernel", "gemm", 2600, 400, correlation=5),
    span("kernel", "copy", 2900, 300, correlation=9),
    span("gpu_user_annotation", COUNTED, 300, 3000),
]


def test_a_trace_is_read_by_who_launched_what() -> None:
    found = read_trace(TRACE)
    assert (found.kernels, found.in_group_kernels) == (3, 2)
    assert dict(found.by_name) == {"gemm": 2, "Memcpy DtoD": 1}
    assert (found.memcpy_bytes, found.in_group_memcpy_bytes) == (100, 4096)
    assert (found.syncs, found.mallocs) == (1, 1)
    assert found.busy_ms == pytest.approx((1200 + 500 + 600) / 1e3)  # collectives overlap with both gemms
    assert found.in_group_ms == pytest.approx(0.8)
    assert found.exposed_ms == pytest.approx(0.4)


# --- a part ---------------------------------------------------------------------------------------


def test_what_an_item_finds_and_how_it_fails_stand_in_rows() -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("off by one")

    def skip() -> dict[str, Any]:
        raise Skipped("there is no tool")

    def shown(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["name"], row["status"], row.get("note"), row.get("off_by")

    assert [shown(row) for row in rows_of("two", lambda: [{"off_by": 1}, {"off_by": 2}])] == [
        ("two", "ok", None, 1),
        ("two", "ok", None, 2),
    ]
    assert [shown(row) for row in rows_of("a", fail)] == [("a", "failed", "ValueError: off by one", None)]
    assert [shown(row) for row in rows_of("b", skip)] == [("b", "skipped", "there is no tool", None)]


CHILD = """
import json, os, sys, time
acts, findings = json.loads(sys.argv[1]), sys.argv[sys.argv.index("--findings") + 1]
skip = sys.argv[sys.argv.index("--skip") + 1 : -2] if "--skip" in sys.argv else []
def write(line):
    with open(findings, "a") as file:
        file.write(json.dumps(line) + "\\n")
for name, act in acts.items():
    if name in skip:
        continue
    write({"begins": name})
    if act == "hang":
        time.sleep(600)
    if act == "crash":
        print("about to abort", flush=True)
        os.abort()
    write({"name": f"a row of {name}", "status": act})
    write({"over": name})
write({"ends": True})
"""


def outcome_of(tmp_path: Path, limit_s: float = 60, **acts: str) -> dict[str, Any]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    part = Part("part", "nothing", 1, 1, 3, "nowhere:nothing")
    return run_part(part, [sys.executable, str(script), json.dumps(acts)], limit_s)


@pytest.mark.slow
@pytest.mark.processes
def test_items_after_one_that_hangs_or_crashes_still_run(tmp_path: Path) -> None:
    found = outcome_of(tmp_path, a="ok", b="crash", c="skipped", d="hang", e="failed", f="ok")
    assert [(row["name"], row["status"]) for row in found["rows"]] == [
        *(("a row of a", "ok"), ("b", "crashed"), ("a row of c", "skipped"), ("d", "hung")),
        *(("a row of e", "failed"), ("a row of f", "ok")),
    ]
    assert found["status"] == "failed"
    assert "SIGABRT" in found["rows"][1]["note"]
    assert "about to abort" in found["rows"][1]["note"]
    assert "nothing for 3 s" in found["rows"][3]["note"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_part_that_takes_too_long_ends_with_what_it_has(tmp_path: Path) -> None:
    found = outcome_of(tmp_path, 2, a="ok", b="hang", c="ok")
    assert [(row["name"], row["status"]) for row in found["rows"]] == [("a row of a", "ok"), ("b", "hung")]
    assert found["status"] == "hung"
    assert "with items left" in found["note"]


@pytest.mark.processes
def test_a_part_that_never_begins_is_not_started_again(tmp_path: Path) -> None:
    part = Part("part", "nothing", 1, 1, 30, "nowhere:nothing")
    found = run_part(part, [sys.executable, "-c", "raise OSError('no such library')"], 60)
    assert (found["status"], found["rows"]) == ("failed", [])
    assert "crashed before any item" in found["note"]
    assert "no such library" in found["note"]


@pytest.mark.processes
def test_parts_are_ok_only_where_all_items_are(tmp_path: Path) -> None:
    assert outcome_of(tmp_path, a="ok", b="skipped")["status"] == "ok"
    assert outcome_of(tmp_path, a="skipped")["status"] == "skipped"


def test_an_item_that_was_begun_before_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    items = [(name, lambda name=name: ran.append(name) or {}) for name in ("a", "b", "c")]
    monkeypatch.setattr(Part, "items", lambda self, options: iter(items))
    run_items(PARTS["probes"], TINY, tmp_path / "findings", skip=["a"])
    lines = [json.loads(line) for line in (tmp_path / "findings").read_text().splitlines()]
    assert ran == ["b", "c"]
    assert [line.get("begins") for line in lines] == ["b", None, None, "c", None, None, None]
    assert lines[-1] == {"ends": True}


# --- the record -----------------------------------------------------------------------------------


def test_a_record_keeps_the_parts_of_earlier_runs(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    record = read_record(path)
    record["parts"]["probes"] = {"status": "ok"}
    write_record(path, record)
    again = read_record(path)
    again["parts"]["nccl"] = {"status": "failed"}
    write_record(path, again)
    assert read_record(path)["parts"] == {"probes": {"status": "ok"}, "nccl": {"status": "failed"}}
    assert [each.name for each in tmp_path.iterdir()] == ["gpu.json"]


def test_a_file_that_is_no_record_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(SystemExit, match=r"is no record of gpu\.py"):
        read_record(path)


# --- the command ----------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_without_a_device_it_says_so_and_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        gpu.main([])
    assert stopped.value.code == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def test_the_plan_fits_into_its_time_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--plan"])
    said = capsys.readouterr().out
    assert all(name in said for name in PARTS)
    assert sum(part.minutes for part in PARTS.values()) <= 35
    assert all(
        part.minutes <= part.limit_minutes < 10 for part in PARTS.values()
    )  # a command each, if need be


def test_what_the_record_has_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    done = {name: {"status": "ok"} for name in PARTS} | {"nccl": {"status": "hung"}}
    write_record(path, {"benchmark": "gpu", "parts": done})
    gpu.main(["--plan", "--resume", "--json", str(path)])
    said = capsys.readouterr().out
    assert [name for name in PARTS if f"\n{name} " in said] == ["nccl"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_part_runs_on_the_host_and_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    write_record(path, {"benchmark": "gpu", "parts": {"nccl": {"status": "ok"}}})
    done = run("--device", "cpu", "--tiny", "--only", "probes", "--json", str(path))
    assert done.returncode == 0, done.stderr + done.stdout
    parts = json.loads(path.read_text())["parts"]
    assert parts["nccl"] == {"status": "ok"}
    assert parts["probes"]["torch"] == torch.__version__
    found = {row["name"]: row["status"] for row in parts["probes"]["rows"]}
    assert found.pop("versions") == "ok"
    assert set(found.values()) == {"skipped"}


# --- parts, as far as the host goes ---------------------------------------------------------------


def rows_of_part(name: str, *items: str) -> list[dict[str, Any]]:
    """Of these items, or of all; any error is the test's."""
    acts = {item: act for item, act in PARTS[name].items(TINY) if not items or item in items}
    found = [act() for act in acts.values()]
    return [row for each in found for row in (each if isinstance(each, list) else [each])]


@pytest.mark.slow
@pytest.mark.processes
def test_steps_are_measured_beside_the_peers() -> None:
    rows = rows_of_part("speed", "tiny, mixed")
    assert [row["variant"] for row in rows] == ["plain", "peer", "peer tuned", "ours"]
    assert all(row["step_ms"]["median"] > 0 for row in rows)
    plain, peer, *_ = rows
    assert plain["copied_mb"] == 0 < peer["copied_mb"]
    speed.print_rows(rows)


@pytest.mark.slow
@pytest.mark.processes
def test_a_wire_takes_the_time_of_its_bytes() -> None:
    rows = rows_of_part("overlap")
    assert [row["variant"] for row in rows] == ["peer", "peer tuned", "ours"] * 2
    slow, fast = rows[0]["wire_ms"], rows[3]["wire_ms"]
    assert fast > 0
    assert slow == pytest.approx(4 * fast)
    speed.print_rows(rows)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # dynamo's own, which it meets while it traces
def test_compiled_steps_come_to_the_same_loss() -> None:
    rows = rows_of_part("compiled", "reduce-overhead, each block", "Inductor, whole model")
    assert all(row["off_by"] <= compiled.TOLERANCE for row in rows)
    with pytest.raises(Skipped, match="no CUDA graphs"):
        rows_of_part("compiled", "CUDA graph of a step")


def test_what_only_a_device_can_show_is_skipped_on_the_host() -> None:
    skipped = {
        "nccl": (
            "communicators, 2 ranks",
            "CUDA graph of an iteration, 2 ranks",
            "symmetric memory, 2 ranks",
        ),
        "ranks": ("devices in reverse order", "the same without device_id", "no set_device"),
        "steady": ("ten steps, bf16", "a wait is noticed", "memory, ours, expandable_segments:True"),
    }
    for part, names in skipped.items():
        for name in names:
            with pytest.raises(Skipped):
                rows_of_part(part, name)


@pytest.mark.slow
@pytest.mark.processes
def test_the_program_that_the_sanitizer_runs_comes_to_its_end() -> None:
    assert tools.memcheck("direct", "cpu")["found"] == "ran without the sanitizer"
