"""A small GPT over bytes: an ordinary torch model that knows nothing of sharding.

    tokens (batch, length) -> embed + position -> block 0 .. block n-1 -> norm -> head
                                                                 -> logits (batch, length, 256)

`model.blocks` is where `fully_shard` is applied block by block: a block is the unit whose weights
are unsharded together, used, and given back.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256  # one token is one byte


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalized first and added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Predicts, at every position, the byte that comes next.

    The weights are drawn from torch's default generator: call `torch.manual_seed` with one seed on
    every rank before, so that all ranks cut their shards out of the same weights.
    """

    def __init__(self, *, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw normal weights that keep the size of what flows through them at any width and depth.

        A linear layer of n inputs sums n products, hence 1 / sqrt(n). The residual stream sums two
        outputs per block, hence 1 / sqrt(2 * layers) on top (Radford et al. 2019, "Language Models
        are Unsupervised Multitask Learners", section 2.3). GPT-2's fixed 0.02 is about 1 / sqrt(n)
        at its widths; at ours it would be too small and cost a few hundred steps.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                adds_to_stream = name.endswith((".out", ".mlp_out"))
                terms = module.in_features * (2 * len(self.blocks) if adds_to_stream else 1)
                nn.init.normal_(module.weight, std=1 / math.sqrt(terms))

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
