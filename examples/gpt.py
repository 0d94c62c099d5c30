"""A small GPT over bytes: an ordinary torch model that knows nothing of sharding.

    tokens (batch, length) -> embed + position -> block 0 .. block n-1 -> norm -> head
                                                                 -> logits (batch, length, 256)

`model.blocks` is where it is sharded, block by block: a block is the unit whose weights are unsharded
together, used, and given back. Every layer draws its own weights in `reset_parameters`: so a model that was
built on the meta device can get them afterwards, layer by layer (`shardwise.materialize`).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB = 256  # one token is one byte


class Embedding(nn.Embedding):
    """Draws small weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Linear(nn.Linear):
    """Without a bias; draws normal weights that keep the size of what flows through, at any width and depth.

    A sum of n products grows as sqrt(n), hence 1 / sqrt(inputs). The residual stream sums several outputs, so
    those of layers that add to it are smaller by sqrt(summands) (Radford et al. 2019, "Language Models are
    Unsupervised Multitask Learners", section 2.3). GPT-2's fixed 0.02 is about 1 / sqrt(n) at its widths; at
    ours it would be too small and cost a few hundred steps.
    """

    def __init__(self, inputs: int, outputs: int, summands: int = 1):
        self.std = 1 / math.sqrt(inputs * summands)
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Attention(nn.Module):
    """Causal self-attention with several heads, one of `layers` in the model."""

    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width, summands=2 * layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalized first and added to its input.

    With `recompute`, backward computes the block's activations once more instead of finding them in memory.
    The checkpoint is inside the block, so that a sharded block unshards its weights once for both.
    """

    def __init__(self, width: int, heads: int, layers: int, recompute: bool = False):
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, layers)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = Linear(width, 4 * width)
        self.mlp_out = Linear(4 * width, width, summands=2 * layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Predicts, at every position, the byte that comes next.

    The weights are drawn from torch's default generator: call `torch.manual_seed` with one seed on every rank
    before, so that all ranks cut their shards out of the same weights. (`materialize` sees to that itself.)
    """

    def __init__(self, *, layers: int, width: int, heads: int, context: int, recompute: bool = False):
        super().__init__()
        self.context = context
        self.embed = Embedding(VOCAB, width)
        self.position = Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, layers, recompute) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, seed: int, temperature: float = 0.8) -> bytes:
    """Continue `prompt` by `count` bytes.

    Every rank has to call this with the same arguments: each forward all-gathers the weights,
    which needs all ranks. The number of forwards does not depend on what is drawn, so the ranks
    stay together.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        recent = torch.tensor([tokens[-model.context :]], device=device)
        logits = model(recent)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / temperature, dim=0)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens)
