"""The architecture: imports run one way, and the library stands without torch's FSDP."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(shardwise.__file__).parent
# What each package, or file at the top, may import beside what those may that it imports.
ARROWS = {
    "torch_compat": [],
    "arguments": [],
    "policies": ["arguments"],
    "layout": ["torch_compat", "policies"],
    "ranks": ["layout"],
    "comm": ["ranks"],
    "params": ["ranks"],
    "buckets": ["comm", "params"],
    "groups": ["buckets"],
    "engine": ["groups"],
    "features": ["engine"],
    "compile": ["features"],
    "fsdp_module": ["compile"],
    "setup": ["fsdp_module"],
    "fully_shard": ["setup", "tracing"],
    "strategies": ["fully_shard", "dry_run"],
    "dry_run": ["fsdp_module"],
    "planning": ["strategies"],
    "init": ["setup"],
    "optim": ["setup"],
    "state": ["init", "optim"],
    "checkpoint": ["state"],
    "observe": ["fsdp_module"],
    "doctor": ["ranks"],
    "interop": ["strategies", "state"],
    "commands": ["planning", "checkpoint", "observe", "doctor", "interop"],
    "__main__": ["commands"],
    "tracing": ["observe"],
}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports_of(path: Path) -> set[str]:
    """The packages that ``path`` imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shardwise":
            inside = node.module.split(".")[1:]
            found |= {inside[0]} if inside else {alias.name for alias in node.names} - {"__version__"}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("shardwise")}
    return found


def allowed(package: str) -> set[str]:
    """What ``package`` may import: itself, and what its arrows lead to."""
    found, waiting = {package}, [package]
    while waiting:
        new = set(ARROWS[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


def files_of(package: str) -> list[Path]:
    return [path for path in SOURCE.rglob("*.py") if package_of(path) == package]


@pytest.mark.parametrize("package", ARROWS)
def test_a_package_imports_only_where_its_arrows_lead(package: str) -> None:
    beyond = {path.name: imports_of(path) - allowed(package) for path in files_of(package)}
    assert not {name: found for name, found in beyond.items() if found}


def circle_of(files: dict[str, set[str]]) -> list[str]:
    """Files that import each other, in a circle; annotations count. Empty if there are none."""
    while files:
        free = {name for name, needs in files.items() if not needs & files.keys()}
        if not free:
            return sorted(files)
        files = {name: needs for name, needs in files.items() if name not in free}
    return []


@pytest.mark.parametrize("package", ["engine", "groups", "features", "comm", "ranks"])
def test_the_files_of_a_package_import_each_other_one_way(package: str) -> None:
    """So that a reader may begin with any, and stop at those that it imports."""
    needs = {}
    for path in files_of(package):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        needs[f"shardwise.{package}.{path.stem}"] = {str(node.module) for node in nodes}
    assert circle_of(needs) == []


def test_every_package_has_its_arrows() -> None:
    assert {package_of(path) for path in SOURCE.rglob("*.py")} == {*ARROWS, "__init__"}


TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn


class Blocker:
    # torch imports its own FSDP when dynamo is imported, which its first DTensor does: that is its
    # own affair. Nobody else may.
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torch.distributed.fsdp", "torch.distributed._composable.fsdp")):
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if "/torch/" not in frame.f_code.co_filename:
                raise ImportError(f"{frame.f_code.co_filename} imports {name}")


def forbidden(*args, **kwargs):
    raise AssertionError("a function of torch's FSDP was called")


def disable_the_peer():
    import inspect
    import torch._dynamo
    count = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.fsdp._fully_shard"):
            for key, value in list(vars(module).items()):
                if inspect.isfunction(value) and value.__module__ == name:
                    setattr(module, key, forbidden)
                    count += 1
    assert count > 20


sys.meta_path.insert(0, Blocker())
from shardwise import fully_shard
import shardwise.interop  # imports it when install() is called

disable_the_peer()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
before = model[2].bias.full_tensor().clone()
model(torch.randn(5, 3)).sum().backward()
optimizer.step()
torch.testing.assert_close(model[2].bias.full_tensor(), before - 5)
assert set(model.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
print("trained")
"""


@pytest.mark.processes
def test_training_neither_imports_nor_calls_torchs_fsdp() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "trained", done.stderr
