"""What the benchmarks record is compared and drawn as it is: a number that got worse is seen."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import check
import host_instructions
import pictures
import pytest
from check import Ratio

import shardwise

BENCH = Path(check.__file__).parent
LIBRARY = Path(shardwise.__file__).parent
ABOUT = {"torch": "2.13.0", "cpu": "one", "cores": 2, "date": "2026-01-01T00:00:00+00:00"}


def spread(median: float) -> dict[str, float]:
    return {"median": median, "q1": median * 0.9, "q3": median * 1.1}


def step_time_record(ours: float, **options: Any) -> dict[str, Any]:
    rows = [
        {"variant": name, "step_ms": spread(ms), "ratio_to_peer": spread(ms / 10), "parameters_mb": 100}
        | {"copied_mb": copied}
        for name, ms, copied in (
            ("plain", 4, 0),
            ("peer", 10, 200),
            ("peer tuned", 9, 200),
            ("ours", ours, 1),
        )
    ]
    wire = {"variant": "wire", "step_ms": spread(2)}
    return {"benchmark": "step_time", "options": {"processes": 2} | options, "rows": [*rows, wire]} | ABOUT


def memory_record() -> dict[str, Any]:
    rows = [
        {"variant": name, "backend": "fake 8", "dtype": dtype}
        | {f"{phase}_units": units for phase in ("forward", "backward")}
        | {f"{phase}_to_peer": units / 4 for phase in ("forward", "backward")}
        for name, units in (("peer", 4.0), ("ours", 3.0))
        for dtype in ("float32", "bf16")
    ]
    return {"benchmark": "memory", "options": {}, "rows": rows} | ABOUT


def two_hosts_record() -> dict[str, Any]:
    rows = [
        {"variant": name, "rate_mbit": rate, "step_ms": spread(ms), "sent_mb": 150.0}
        | {"ratio_to_peer": spread(ms / 4000), "to_bound": None if name == "plain" else spread(ms / 1500)}
        for rate in (1000, 200)
        for name, ms in (("plain", 1500), ("peer", 4000), ("ours", 1800))
    ]
    return {"benchmark": "two_hosts", "options": {}, "rows": rows} | ABOUT


def run_of_the_example(optimizer: str) -> dict[str, Any]:
    settings = {"optimizer": optimizer, "layers": 4, "width": 128, "lr": 0.003}
    curve = {"val_steps": [25, 50], "val_loss": [2.8, 2.6]}
    return {"settings": settings, "versions": {"torch": "2.13.0"}, **curve}


def test_a_ratio_is_worse_only_beyond_its_margin() -> None:
    recorded = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    measured = {"a": Ratio(1.09, 0.1), "b": Ratio(1.11, 0.1), "c": Ratio(0.8, 0.1), "e": Ratio(9.0, 0.1)}
    rows = check.compare(recorded, measured)
    verdicts = {row["name"]: row["verdict"] for row in rows}
    assert verdicts == {"a": "as recorded", "b": "worse", "c": "better", "d": "gone", "e": "new"}
    assert [row["name"] for row in rows if check.is_failure(row)] == ["b", "d"]


def test_copies_are_compared_with_the_peers() -> None:
    ratios = check.ratios_in("step_time", step_time_record(6.0)["rows"])
    assert {name: ratio.value for name, ratio in ratios.items()} == {
        "step_time, ratio to peer": 0.6,
        "step_time, copied to peer": 0.005,
    }


def test_each_row_of_memory_has_a_name_of_its_own() -> None:
    assert list(check.ratios_in("memory", memory_record()["rows"])) == [
        "memory, fake 8, float32, forward to peer",
        "memory, fake 8, float32, backward to peer",
        "memory, fake 8, bf16, forward to peer",
        "memory, fake 8, bf16, backward to peer",
    ]


@pytest.mark.parametrize(("second", "kept", "runs"), [(0.5, 0.5, 2), (0.9, 0.7, 2), (None, 0.7, 1)])
def test_what_got_worse_is_measured_twice(
    monkeypatch: pytest.MonkeyPatch, second: float | None, kept: float, runs: int
) -> None:
    values = [0.7, second]
    monkeypatch.setattr(check, "run", lambda _: {"a": Ratio(values.pop(0), 0.1)})  # type: ignore[arg-type]
    recorded = {"a": 0.5 if second is not None else 0.7}
    assert check.measure("memory", recorded) == {"a": Ratio(kept, 0.1)}
    assert len(values) == 2 - runs


def test_calls_of_a_step_are_counted_exactly() -> None:
    """Of the library, a block and a step; plain modules have none."""
    with host_instructions.fake_world(2) as mesh:
        step = host_instructions.steady_step("ours", 8, 2, mesh)
        first, second = (host_instructions.calls_of(step, str(LIBRARY)) for _ in range(2))
        plain = host_instructions.calls_of(host_instructions.steady_step("plain", 8, 2, mesh), str(LIBRARY))
    assert first == second
    assert first["python"] > first["own"] > plain["own"] == 0


def test_what_cannot_be_measured_here_fails_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instructions, where valgrind is missing."""
    path = tmp_path / "recorded.json"
    ratios = {"host_instructions, width 32, added to peer": 0.3, "memory, a": 1.0}
    path.write_text(json.dumps(ABOUT | {"ratios": ratios}))
    answers = {"host_instructions": {}, "memory": {"memory, a": Ratio(1.0, 0.1)}}
    monkeypatch.setattr(check, "run", answers.__getitem__)
    monkeypatch.setattr(sys, "argv", ["check.py", "--only", *answers, "--recorded", str(path)])
    check.main()
    assert "gone" not in capsys.readouterr().out


def test_recording_one_benchmark_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    check.write_recorded(path, {"memory, x": Ratio(1.0, 0.1), "step_time, y": Ratio(2.0, 0.1)}, ["memory"])
    check.write_recorded(path, {"memory, z": Ratio(3.0, 0.1)}, ["memory"])
    assert json.loads(path.read_text())["ratios"] == {"memory, z": 3.0, "step_time, y": 2.0}
    assert check.read_recorded(path, ["memory"]) == {"memory, z": 3.0}


def test_every_subject_is_drawn_and_drawn_alike(tmp_path: Path) -> None:
    records = [step_time_record(6.0), step_time_record(5.0, processes=4, reduce_dtype="bf16")]
    records += [memory_record(), two_hosts_record(), run_of_the_example("adamw"), run_of_the_example("muon")]
    for index, record in enumerate(records):
        (tmp_path / f"{index}.json").write_text(json.dumps(record))
    found = pictures.read_records(tmp_path)
    counts = {"step_time": 2, "memory": 1, "two_hosts": 1, "train_gpt": 2}
    assert {name: len(found[name]) for name in found} == counts
    for benchmark in found:
        name, subject = pictures.SUBJECTS[benchmark]
        first, again = (subject(found[benchmark], tmp_path / f"{turn} {name}").read_text() for turn in (1, 2))
        assert first == again
        assert not re.search(r"#(fff|ffffff|000|000000)\b", first), (
            "neither white nor black: unseen on one of them"
        )


def test_ratios_in_pictures_are_the_records_own() -> None:
    """Taken within rounds: not the quotient of the medians that the bars show."""
    record = step_time_record(6.0)
    record["rows"][3]["ratio_to_peer"] = spread(0.55)
    assert pictures.step_group(record).ratio == spread(0.55)


@pytest.mark.slow
@pytest.mark.processes
def test_host_overhead_records_what_check_and_pictures_read(tmp_path: Path) -> None:
    small = ["--worlds", "1", "2", "--params", "4", "--blocks", "2", "--steps", "1", "--warmup", "1"]
    path = tmp_path / "host_overhead.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / "host_overhead.py"), *small, "--no-noise", "--json", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    passes = ["plain", "floor", "peer", "peer tuned", "ours"]
    assert [row["variant"] for row in rows if row["world"] == 2] == passes
    assert {row["what"] for row in rows} == {"forward + backward", "optimizer step", "clipping"}
    assert len(check.ratios_in("host_overhead", rows)) == 4
    records = pictures.read_records(tmp_path)["host_overhead"]
    assert "<svg" in pictures.host_time(records, tmp_path / "host_time.svg").read_text()
