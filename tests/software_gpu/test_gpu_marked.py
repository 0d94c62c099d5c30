"""The tests of this repository that need a GPU, in a process that has software GPUs: `pytest -m gpu`."""

import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from software_gpu.launch import run_on_gpus
from software_gpu.program import run_program

TESTS = Path(__file__).parents[1]
FEWEST = 95

NOT_SIMULATED = {
    "test_nccl_gives_what_is_asked_of_it[symmetric memory, 2 ranks]": "NCCL's windows",
}


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


def gradients_of_a_branch() -> list[float]:
    """Of a weight that is used on a side stream, read on the caller's stream after backward."""
    import torch

    x, weight = torch.full((2, 2), 3.0, device="cuda"), torch.ones(2, 2, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        branch = x @ weight
    torch.cuda.current_stream().wait_stream(side)
    branch.sum().backward()
    assert weight.grad is not None
    doubled = weight.grad * 2
    torch.cuda.current_stream().synchronize()
    return doubled.flatten().tolist()


def filled_memory() -> list[int]:
    """What an operation that does not run late has written into memory that torch fills as it allocates it."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return torch.ones(4, device="cuda").nonzero().flatten().tolist()


def both() -> tuple[list[float], list[int]]:
    return gradients_of_a_branch(), filled_memory()


def test_late_streams_keep_what_torch_promises() -> None:
    """The caller's stream waits for those of backward; what is filled is filled before it is written."""
    assert run_on_gpus(1, both, late=1) == [([12.0] * 4, [0, 1, 2, 3])]
