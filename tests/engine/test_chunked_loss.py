"""A list of modules as one group, of which forward runs a part: the loss is computed in chunks.

The head's logits are the largest tensor of a language model. Running norm in the model's forward, and the
head on one chunk of rows at a time, each with its own backward, never holds all of them.
"""

from typing import Any

import pytest
import torch
from models import built, random_batch
from reference import adamw
from scenario import BATCH_SIZE, Side, same_as_plain
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.block(x)))  # the caller runs the head


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "chunks", "reshard", "keeps_graph"),
    [(2, 2, True, False), (2, 2, None, True), (3, 2, False, False), (1, 1, None, False)],
    indirect=["world"],
)
def test_a_head_run_in_chunks_trains_as_a_whole_one(
    side: Side, chunks: int, reshard: bool | None, keeps_graph: bool
) -> None:
    model = built(Model, seed=0)
    side.shard(model.block, [model.norm, model.head], model, reshard_after_forward=reshard)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        hidden = model(side.part(random_batch(step, BATCH_SIZE, 8)))
        total: Any = 0.0
        if keeps_graph:  # one backward through all chunks
            loss = sum(model.head(rows).pow(2).sum() for rows in hidden.chunk(chunks)) / len(hidden)
            loss.backward()
            total = loss.detach()
        else:  # one a chunk, and the rest of the model at the end
            leaf = hidden.detach().requires_grad_()
            for rows in leaf.chunk(chunks):
                loss = model.head(rows).pow(2).sum() / len(hidden)
                loss.backward()
                total = total + loss.detach()
            hidden.backward(leaf.grad)
        side.note_mean(f"loss {step}", total)
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
    side.note_parameters(model)
