"""The model and the data of most benchmarks: a plain GPT, sequences that it can learn at once, its training.

Knows nothing of sharding. Options read: vocab, width, heads, layers, context, batch; for training, processes.
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block of 12 width^2 weights."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attn_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens (batch, context) and targets of the same shape to a mean loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.tokens = nn.Embedding(options.vocab, width)
        self.positions = nn.Parameter(torch.randn(options.context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, options.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch_of(seed: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Tokens and their successors, (batch, context) each: counting upwards from random starts."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(options.vocab, (options.batch, 1), generator=generator)
    run = (start + torch.arange(options.context + 1)) % options.vocab
    return run[:, :-1], run[:, 1:]


class Trainer:
    """A model and its losses on this rank. ``run``: what to call, if not the model."""

    def __init__(
        self, model: nn.Module, options: argparse.Namespace, run: Any = None, optimizer: Any = None
    ) -> None:
        self.options, self.model, self.run = options, model, model if run is None else run
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.optimizer = optimizer
        self.losses: list[float] = []

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """The batch of this rank in a step."""
        return batch_of(index * self.options.processes + dist.get_rank(), self.options)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.run(*batch)

    def forward_backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed_step(self, index: int) -> dict[str, float]:
        """A step after a barrier, so that no variant pays for the one before it, nor for its batch."""
        batch = self.batch(index)
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        loss = self.forward_backward(batch)
        middle = time.perf_counter()
        self.update()
        end = time.perf_counter()
        processor = time.process_time() - used
        self.losses.append(loss.item())
        return {
            "step_ms": (end - start) * 1e3,
            "forward_backward_ms": (middle - start) * 1e3,
            "update_ms": (end - middle) * 1e3,
            "processor_ms": processor * 1e3,
        }
