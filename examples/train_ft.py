"""Train in replicas of which any may die and come back: hybrid sharding with torchft.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA=0 torchrun --nproc-per-node 2 --max-restarts 9 --rdzv-endpoint localhost:0 examples/train_ft.py &
    REPLICA=1 torchrun --nproc-per-node 2 --max-restarts 9 --rdzv-endpoint localhost:0 examples/train_ft.py

The model is sharded over the two processes of a replica; torchft averages the gradients over the replicas.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

from shardwise import FSDPModule, shard_model

REPLICA = int(os.environ["REPLICA"])
STEPS = 100
dist.init_process_group("gloo")  # the processes of this replica, and no others
print(
    "ATT",
    os.environ.get("TORCHELASTIC_RESTART_COUNT"),
    os.environ["MASTER_PORT"],
    os.environ.get("TORCHELASTIC_USE_AGENT_STORE"),
    flush=True,
)
torch.manual_seed(0)  # every replica begins with the same weights
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
shard_model(model)
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)


def save() -> dict:
    return {"model": model.state_dict(), "optimizer": adamw.state_dict()}  # this rank's shards


def load(state: dict) -> None:
    model.load_state_dict(state["model"])
    adamw.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
    load_state_dict=load,
    state_dict=save,
    min_replica_size=1,
    init_sync=False,
    replica_id=f"replica_{REPLICA}",
    connect_timeout=timedelta(seconds=10),
)


def average(gradient: torch.Tensor) -> None:
    manager.allreduce(gradient).wait()


for module in model.modules():
    if isinstance(module, FSDPModule):
        module.set_all_reduce_hook(average)
optimizer = Optimizer(manager, adamw)
import time

while manager.current_step() < STEPS:
    optimizer.zero_grad()
    step = manager.current_step()
    torch.manual_seed(step * 100 + REPLICA * 10 + dist.get_rank())
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.2)
    if step % 10 == 0:
        print(REPLICA, dist.get_rank(), step, loss.item(), manager.num_participants(), flush=True)
print(
    "END",
    REPLICA,
    dist.get_rank(),
    sum(p.to_local().double().sum().item() for p in model.parameters()),
    flush=True,
)
dist.destroy_process_group()
