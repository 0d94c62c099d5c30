import os

import torch
import torch.distributed as dist
from torch import nn

from shardwise import clip_grad_norm_, explain, materialize, save_checkpoint, shard_model

has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each process?
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu")
if has_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpus else "gloo")


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)


with torch.device("meta"):  # uses no memory
    model = nn.Sequential(nn.Embedding(16, 64), *(block() for _ in range(4)), nn.Linear(64, 16))
shard_model(model)  # from here on every parameter is a DTensor
materialize(model)  # each rank draws the rows that it keeps
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if dist.get_rank() == 0:
    print(f"on {device.type}\n{explain(model)}")

torch.manual_seed(dist.get_rank())  # each rank reads different data
for step in range(1, 101):  # learn how often each token occurs in its row
    tokens = torch.randint(16, (16, 16), device=device)
    counts = (tokens[:, :, None] == tokens[:, None, :]).sum(2) - 1
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
    loss.backward()  # averages the gradients over the ranks
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
save_checkpoint("runs/step-100", model, optimizer)
dist.destroy_process_group()
