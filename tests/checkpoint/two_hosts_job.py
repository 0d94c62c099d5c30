"""A job that saves each step in the memory of its hosts and every tenth on a disk, started by torchrun.

    two_hosts_job.py BASE STEPS

Its host's own folder is in HOST_FOLDER. Rank 0 writes the weights it ends with to BASE/weights.pt.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from shardwise import full_state_dict, resume, save_checkpoint, shard_model


def main(base: str, num_steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
    model = nn.Sequential(*blocks, nn.Linear(32, 1)).double()
    shard_model(model, wrap=nn.Sequential)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = os.environ["HOST_FOLDER"]
    loaded = resume(f"{base}/disk", model, optimizer, local=own)
    where = "nowhere" if loaded.path is None else "disk" if "disk" in loaded.path.parts else "memory"
    print(f"resumed at {loaded.step} from {where}", flush=True)
    for step in range(loaded.step + 1, num_steps + 1):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, 32, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shared = {"step": step}
        pending = save_checkpoint(
            f"{own}/step-{step}", model, optimizer, shared=shared, keep=2, local=True, asynchronous=True
        )
        if step % 10 == 0:
            save_checkpoint(f"{base}/disk/step-{step}", model, optimizer, shared=shared, keep=2)
        pending.wait()
        print(f"saved {step}", flush=True)
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        torch.save(state, f"{base}/weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
