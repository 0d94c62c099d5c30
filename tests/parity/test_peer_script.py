"""A whole training script for torch's fully_shard runs here by a change of its import line.

The script is peer_script.py; the change is a replacement in its text.
"""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from comparing import alike
from harness import World

SCRIPT = Path(__file__).with_name("peer_script.py")
OURS, PEERS = "shardwise", "torch.distributed.fsdp"

History = dict[str, list[float]]


def run_script(library: str, **settings: Any) -> History:
    """Runs on every rank: the script with its one import line naming ``library``."""
    text, lines_changed = re.subn(
        rf"^from {re.escape(PEERS)} import ",
        f"from {library} import ",
        SCRIPT.read_text(),
        flags=re.MULTILINE,
    )
    assert lines_changed == 1
    module = types.ModuleType(f"peer_script_on_{library.replace('.', '_')}")
    sys.modules[module.__name__] = module
    exec(compile(text, str(SCRIPT), "exec"), module.__dict__)
    return module.main(**settings)


def one_history(world: World, library: str, **settings: Any) -> History:
    first = alike(world.run(run_script, library, **settings))
    return first


# Where two ranks add, nothing depends on the order, and every bit must agree; more ranks may add in another
# order, and a bfloat16 forward rounds weights that differ in the last bit to neighbours 2**-8 apart.
RUNS = [
    pytest.param(2, (2,), "bfloat16", 0.0, id="2-bfloat16", marks=pytest.mark.slow),
    pytest.param(4, (4,), "float32", 1e-5, id="4-float32", marks=pytest.mark.slow),
    pytest.param(4, (2, 2), "bfloat16", 2e-3, id="2x2-bfloat16"),
]


@pytest.mark.parametrize(("world", "mesh_shape", "precision", "rtol"), RUNS, indirect=["world"])
def test_the_script_prints_the_same(
    world: World, mesh_shape: tuple[int, ...], precision: str, rtol: float
) -> None:
    settings = {"mesh_shape": mesh_shape, "precision": precision}
    theirs = one_history(world, PEERS, **settings)
    ours = one_history(world, OURS, **settings)
    assert_close(ours, theirs, rtol)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("saver", "loader"), [(OURS, PEERS), (PEERS, OURS), (OURS, OURS)])
def test_a_run_resumes_from_the_others_checkpoint(
    world2: World, tmp_path: Path, saver: str, loader: str
) -> None:
    """The loader starts from other weights; from the checkpoint on it prints what the saver prints."""
    whole = one_history(world2, saver, mesh_shape=(2,), save_to=tmp_path)
    resumed = one_history(world2, loader, mesh_shape=(2,), resume_from=tmp_path, seed=1)
    rest = {name: values[-len(resumed[name]) :] for name, values in whole.items()}
    assert 0 < len(resumed["loss"]) < len(whole["loss"])
    assert_close(resumed, rest, rtol=0.0)


def assert_close(ours: History, theirs: History, rtol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert len(set(values)) == len(values), f"{name} never changes: {values}"
        assert ours[name] == pytest.approx(values, rel=rtol, abs=0.0), name
