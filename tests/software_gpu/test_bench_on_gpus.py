"""`bench/gpu.py --tiny` on software GPUs: every part runs, and finds nothing wrong but what is not simulated."""

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_parts.plan import PARTS

from software_gpu.program import run_program

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.py"

NOT_SIMULATED = {
    "symmetric memory, 2 ranks": "NCCL's windows",
    "reduce-overhead, each block": "kernels of Triton",
    "Inductor, whole model": "kernels of Triton",
    "Inductor, whole model, the peer": "kernels of Triton",
    **{
        f"memory, {variant}, expandable_segments:True": "virtual memory"
        for variant in ("plain", "peer", "ours")
    },
}
# A wait that is left out shows where the computation alone is late; what else is asked, where everything is.
LATE = dict.fromkeys(PARTS, 1) | {"delays": 2}
SKIPPED = {"memcheck, direct": "there is no compute-sanitizer"}


def rows_of(part: str, tmp_path: Path) -> list[dict[str, Any]]:
    """What a part found on two devices, with streams that run late."""
    record = tmp_path / "gpu.json"
    options = ["--tiny", "--only", part, "--json", str(record), "--folder", str(tmp_path)]
    done = run_program(2, [str(SCRIPT), *options], late=LATE[part], timeout_s=600)
    assert record.exists(), done.stdout[-6000:]
    return json.loads(record.read_text())["parts"][part]["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_finds_what_it_claims(part: str, tmp_path: Path) -> None:
    rows = rows_of(part, tmp_path)
    names = {row["name"] for row in rows}
    assert names
    bad = {row["name"]: row["note"] for row in rows if row["status"] not in ("ok", "skipped")}
    skipped = {row["name"] for row in rows if row["status"] == "skipped"}
    unexpected = {name: note for name, note in bad.items() if name not in NOT_SIMULATED}
    assert not unexpected, "\n\n".join(f"{name}: {note[-3000:]}" for name, note in unexpected.items())
    assert skipped <= set(SKIPPED)
    assert set(bad) == names & set(NOT_SIMULATED), "some of what is not simulated ran"
