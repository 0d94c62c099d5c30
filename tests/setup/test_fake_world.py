"""Planning at any world size, in one process, on torch's fake process group."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from shardwise import fully_shard

world, device = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
with torch.device(device):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)) for _ in range(3)))
for block in model:
    fully_shard(block, mesh=torch.distributed.init_device_mesh("cpu", (world,)))
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (world,)))
result = {
    "local": [list(p.to_local().shape) for p in model[0].parameters()],
    "full": [list(p.shape) for p in model[0].parameters()],
    "bytes": sum(b.flat_shard.bytes.numel() for b in model[0]._shardwise_state.group.buckets),
}
try:
    events = []
    model._shardwise_state.root.observe(lambda event, name: events.append(f"{event} {name}"))
    model(torch.ones(2, 256)).sum().backward()
    result["events"] = len(events)
except RuntimeError as error:
    result["error"] = str(error)
print(json.dumps(result))
"""


def planned(world: int, device: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(world), device],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "local"),
    [
        pytest.param(8, [[64, 256], [64], [32, 512], [32]], marks=pytest.mark.slow),
        (86, [[2, 256], [2], [1, 512], [1]]),  # what is left for the last of 86 ranks
        pytest.param(4096, [[0, 256], [0], [0, 512], [0]], marks=pytest.mark.slow),
    ],
)
def test_a_step_is_planned_for_a_rank_of_any_world(world: int, local: list[list[int]]) -> None:
    result = planned(world, "cpu")
    assert result["local"] == local
    assert result["full"] == [[512, 256], [512], [256, 512], [256]]
    assert result["events"] > 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_model_on_the_meta_device_is_planned_but_does_not_run() -> None:
    result = planned(1024, "meta")
    assert result["bytes"] == 256 * 4 + 16 + 512 * 4 + 16
    assert result["error"].startswith(
        "Cannot run forward: 12 parameters are still on the meta device: 0.0.weight"
    )


THRESHOLDS = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from shardwise import MixedPrecisionPolicy, fully_shard

world = int(sys.argv[1])
dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
mesh = torch.distributed.init_device_mesh("cpu", (world,))

def counts(block):
    fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    (bucket,) = block._shardwise_state.group.buckets
    collectives = len(bucket.computed.direct) + bool(bucket.computed.packed_bytes)
    parts = bucket.reduction.parts
    return collectives, len(parts), min(part.num_bytes for part in parts) // world >> 10

with torch.device("meta"):
    wide = nn.Sequential(*(nn.Linear(4096, 3072) for _ in range(8)))
    experts = nn.Sequential(*(nn.Linear(2048, 768, bias=False) for _ in range(384)))
print(json.dumps({"block": counts(wide), "experts": counts(experts)}))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "block", "experts"),
    [
        (8, (9, 3, 12300), (65, 1, 294912)),
        (64, (9, 3, 1537), (1, 1, 36864)),
        (512, (1, 1, 768), (1, 1, 6144)),
    ],
)
def test_collectives_stay_few_and_large_in_any_world(
    world: int, block: tuple[int, int, int], experts: tuple[int, int, int]
) -> None:
    """All-gathers of a group, its reductions, and KiB of a rank in the smallest of those.

    8 matrices of 24 MiB and their biases; 384 experts of 3 MiB.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THRESHOLDS, str(world)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"block": list(block), "experts": list(experts)}
