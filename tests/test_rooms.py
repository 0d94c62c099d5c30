"""The architecture: imports run one way, and the library stands without torch's FSDP."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(shardwise.__file__).parent
# A room may import only rooms to its left.
ORDER = [
    "policy", "naming", "wrap", "runtime.compat", "runtime.transforms", "runtime.layout", "runtime.boxes", "runtime.mesh", "runtime.agreement", "runtime.spread",
    "runtime.replicas", "runtime.notes", "runtime.disagreement", "runtime.relay", "runtime.comparison", "runtime.streams", "runtime.outputs", "runtime.deferred",
    "runtime.precision", "runtime.buffers", "runtime.collectives", "runtime.transfer", "runtime.custom",
    "runtime.quantized", "runtime.comm_hook", "runtime.reduction", "runtime.param", "runtime.equal_start", "runtime.watch", "runtime.landing",
    "runtime.filling", "runtime.departures", "runtime.additions", "runtime.bucket", "runtime.extension", "runtime.group", "runtime.double_backward", "runtime.inference", "runtime.lending",
    "runtime.functional", "runtime.order", "runtime.fingerprint", "runtime.plan_check", "runtime.finalization", "runtime.schedule", "runtime.traced", "runtime.overlap", "runtime.hooks", "runtime.outside", "runtime.copying", "module", "checks", "collect",
    "ties", "api", "offload", "norms", "gradients", "scaler", "flat_runs", "flat_optimizer", "contexts", "comm_hooks", "compiling", "strategy", "explain", "observe",
    "states.partial_loads", "states.names", "states.named_state", "states.inventory", "states.meta_memory", "states.initialise",
    "states.loading", "states.model_files", "states.optimizer_state", "states.full_state", "states.full_load", "checkpoints.folders", "states.export",
    "states.ema", "checkpoints.consensus",
    "checkpoints.coverage", "checkpoints.metadata_file", "checkpoints.digests", "checkpoints.manifest", "checkpoints.reading", "checkpoints.beside", "checkpoints.optimizer_plan", "checkpoints.pending",
    "checkpoints.writing", "checkpoints.checkpoint", "stopping",
]  # fmt: skip


def room_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardwise"):
            base = node.module.removeprefix("shardwise").lstrip(".")
            found |= {f"{base}.{a.name}".lstrip(".") for a in node.names} | {base}
    return found & set(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    path = SOURCE / (room.replace(".", "/") + ".py")
    later = set(ORDER[ORDER.index(room) :])
    assert not imports_of(path) & later


def test_every_file_is_a_known_room() -> None:
    rooms = {room_of(p) for p in SOURCE.rglob("*.py") if p.name != "__init__.py"}
    assert rooms == set(ORDER)


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


def test_training_neither_imports_nor_calls_torchs_fsdp() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "trained", done.stderr
