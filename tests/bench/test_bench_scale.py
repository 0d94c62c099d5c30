"""bench/claims/scale.py: a step that computes nothing still plans and sets everything, at any world."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scale

SCRIPT = Path(__file__).parents[2] / "bench" / "claims" / "scale.py"


def row(world: int, model: str = "175b") -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--here", "--layers", "2", "--variants", "ours"]
    command += ["--models", model, "--worlds", str(world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.processes
def test_two_blocks_of_the_largest_model_are_sharded_and_stepped_in_little_memory() -> None:
    found = row(1024, "1t")
    assert found["tensors"] == 2 * 12 + 5
    assert found["max_rss_gib"] < 2  # its blocks take 16 GB each
    assert found["steady_step_s"] > 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_step_that_would_have_to_copy_is_left_out() -> None:
    found = row(4096, "1t")
    assert found["note"] == "no step: uneven rows are copied"
    assert "steady_step_s" not in found
    assert found["shard_s"] > 0


@pytest.mark.parametrize(("seconds", "gib", "word"), [(1.0, 1.0, "holds"), (61, 1, "FAILS"), (1, 9, "FAILS")])
def test_the_claim_is_checked_by_time_and_memory(seconds: float, gib: float, word: str) -> None:
    claimed = {"model": "1t", "world": 1024, "variant": "ours", "shard_s": seconds, "shard_max_rss_gib": gib}
    said = scale.verdict([{"model": "175b", "world": 8, "variant": "ours"}, claimed])
    assert said is not None
    assert said.endswith(word)
    assert scale.verdict([{**claimed, "world": 512}]) is None
