import os

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

from shardwise import FSDPModule, resume, save_checkpoint, shard_model

replica = int(os.environ["REPLICA"])
dist.init_process_group("gloo")  # the ranks of this replica, and no others
rank = dist.get_rank()

torch.manual_seed(0)  # all replicas begin with the same weights
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))
shard_model(model, wrap=nn.Sequential)
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)


def save() -> dict:
    return {"model": model.state_dict(), "optimizer": adamw.state_dict()}  # this rank's shards


def load(state: dict) -> None:
    model.load_state_dict(state["model"])
    adamw.load_state_dict(state["optimizer"])


loaded = resume("runs/ft", model, adamw)  # where no replica is left to heal from
manager = Manager(ProcessGroupGloo(), load, save, 1, replica_id=f"replica{replica}", init_sync=False)
manager.load_state_dict(loaded.shared.get("manager", manager.state_dict()))
optimizer = Optimizer(manager, adamw)


def average(gradients: torch.Tensor) -> None:
    manager.allreduce(gradients).wait()


for module in model.modules():
    if isinstance(module, FSDPModule):
        module.set_all_reduce_hook(average)

while manager.current_step() < 200:
    optimizer.zero_grad()  # asks which replicas take part in this step
    torch.manual_seed(1000 * manager.current_step() + 10 * replica + rank)  # each rank reads different data
    inputs = torch.randn(16, 64)
    loss = (model(inputs).squeeze(1) - inputs[:, :8].sum(1)).square().mean()
    loss.backward()
    optimizer.step()  # does nothing if a replica was lost; otherwise current_step() is one more
    step = manager.current_step()
    if step % 20 == 0 and rank == 0:
        print(
            f"replica {replica}, step {step}: loss {loss.item():.3f}, {manager.num_participants()} replicas"
        )
    if step % 100 == 0 and manager.participating_rank() == 0:
        shared = {"step": step, "manager": manager.state_dict()}
        save_checkpoint(f"runs/ft/step-{step}", model, adamw, shared=shared, keep=2)
dist.barrier()  # rank 0 serves the manager of this replica's other ranks
manager.shutdown(wait=False)
dist.destroy_process_group()
