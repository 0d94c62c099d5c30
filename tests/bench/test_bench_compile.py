"""bench/compile.py: every variant is one graph or none, and one that trains otherwise is noticed."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import compile as bench
import pytest
from dynamo import forget_graphs
from harness import World
from torch.distributed.device_mesh import init_device_mesh

SCRIPT = Path(__file__).parents[2] / "bench" / "compile.py"


@pytest.mark.processes
@pytest.mark.slow
def test_each_variant_trains_alike_in_as_many_graphs_as_it_should_have(tmp_path: Path) -> None:
    record = tmp_path / "compile.json"
    small = ["--model", "tiny", "--backend", "aot_eager", "--steps", "2", "--warmup", "1"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *small, "--json", str(record)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(record.read_text())
    rows = {row["variant"]: row for row in report["rows"]}
    assert list(rows) == ["plain", "eager", "blocks", "model", "peer", "peer blocks"]
    graphs = {name: (row["graphs"], row["graph_breaks"]) for name, row in rows.items() if "graphs" in row}
    assert graphs == {"blocks": (1, 0), "model": (1, 0), "peer blocks": (1, 0)}
    assert all(row["compile_s"] > 0 for name, row in rows.items() if name in graphs)
    assert all(row["step_ms"]["median"] > 0 for row in rows.values())
    assert rows["peer blocks"]["ratio_to_peer_blocks"]["median"] == 1
    for name in ("eager", "blocks", "model"):
        assert rows[name]["backward_mb"] > rows["plain"]["backward_mb"]


def train_where_the_model_is_not_sharded() -> bench.RankRecord | dict[str, bench.RankRecord]:
    forget_graphs()
    options = argparse.Namespace(processes=2, batch=2, backend="aot_eager", **bench.MODELS["tiny"])
    mesh = init_device_mesh("cpu", (2,))
    libraries = bench.LIBRARIES
    bench.LIBRARIES = {**libraries, bench.MODEL: bench.PLAIN}
    try:
        found = {}
        for variant in (bench.PLAIN, bench.EAGER, bench.MODEL, bench.PEER):
            trainer = bench.Trainer(variant, options, mesh)
            times = [trainer.timed_step(index)["step_ms"] for index in range(3)]
            found[variant] = bench.RankRecord(times, times[0], trainer.losses, trainer.graphs, 0)
        return found
    finally:
        bench.LIBRARIES = libraries


@pytest.mark.slow
def test_a_variant_that_learns_from_its_own_data_alone_is_noticed(
    world2: World, capsys: pytest.CaptureFixture[str]
) -> None:
    differences = bench.disagreement(world2.run(train_where_the_model_is_not_sharded, timeout=120))
    assert differences["peer against plain"] < 1e-5  # of the first step
    assert differences["peer against eager"] < 1e-5
    with pytest.raises(SystemExit, match="do not train the same"):
        bench.refuse_differences(differences)
    told = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert [pair for pair, verdict in told.items() if "DIFFERENT" in verdict] == [
        "losses, peer against model"
    ]


def test_losses_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(SystemExit):
        bench.refuse_differences({"peer against model": float("nan")})
