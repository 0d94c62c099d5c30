"""The tests of this repository that need a GPU, in a process that has software GPUs: `pytest -m gpu`."""

import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from software_gpu.program import run_program

TESTS = Path(__file__).parents[1]
FEWEST = 95

NOT_SIMULATED = {"test_nccl_gives_what_is_asked_of_it[symmetric memory, 2 ranks]": "NCCL's windows"}


def results_of(path: Path) -> tuple[set[str], dict[str, str]]:
    """The names of tests that passed, and of others the reasons, from a report of pytest."""
    passed, others = set(), {}
    for case in xml.parse(path).getroot().iter("testcase"):
        name = case.get("name", "")
        bad = [each for each in case if each.tag in ("failure", "error")]
        if bad:
            others[name] = (bad[0].get("message") or "") + "\n" + (bad[0].text or "")[-3000:]
        elif case.find("skipped") is None:
            passed.add(name)
    return passed, others


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "late"), [(1, 17), (2, 17)])
def test_what_needs_a_gpu_passes(devices: int, late: int, tmp_path: Path) -> None:
    """Late, as tests are among it that leave out waits, and ranks that fail: at once, collectives block the host."""
    report = tmp_path / "report.xml"
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"]
    here = [str(TESTS), f"--ignore={Path(__file__).parent}", f"--junitxml={report}"]
    done = run_program(devices, ["-m", "pytest", *options, *here], late=late, timeout_s=1500)
    assert report.exists(), done.stdout[-6000:]
    passed, others = results_of(report)
    unexpected = {name: why for name, why in others.items() if name not in NOT_SIMULATED}
    assert not unexpected, "\n\n".join(f"{name}: {why}" for name, why in unexpected.items())
    assert set(others) == set(NOT_SIMULATED), f"these pass now: {set(NOT_SIMULATED) - set(others)}"
    assert len(passed) >= FEWEST, f"only {len(passed)} tests ran:\n{done.stdout[-3000:]}"
