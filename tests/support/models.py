"""Small models for the tests. `random_batch` makes the inputs for all of them but the language model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import fully_shard

WIDTH = 8


def built(make: Callable[..., nn.Module], *args: Any, seed: int = 1234, **options: Any) -> Any:
    """The model in float64, with the same values wherever it is built."""
    torch.manual_seed(seed)
    return make(*args, **options).double()


def shard_tower(model: nn.Module, **options: Any) -> Any:
    """Each of its blocks, then what is around them."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@torch.no_grad()
def average_into(average: nn.Module, module: nn.Module) -> None:
    """Move the weights of one halfway to those of the other, as momentum encoders do."""
    for own, new in zip(average.parameters(), module.parameters(), strict=True):
        own.lerp_(new, 0.5)


def random_batch(step: int, size: int, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)


def uneven_batch(step: int, size: int) -> Tensor:
    return random_batch(step, size, 7)


def float32_batch(step: int, size: int) -> Tensor:
    return random_batch(step, size, dtype=torch.float32)


class Block(nn.Module):
    """A residual block with parameters of several shapes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class SquareBlock(nn.Module):
    """A residual block of two square matrices: every world size that divides the width divides them evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class SquareTower(nn.Module):
    """Square matrices alone, the outlet in the root's group: every number of bytes is plain arithmetic."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SquareBlock(width) for _ in range(depth))
        self.outlet = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class Tower(nn.Module):
    """Blocks between an input and an output layer, which belong to the root's group."""

    def __init__(self, width: int = WIDTH, hidden: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.outlet = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def even_tower() -> nn.Module:
    """Every dim 0 but the outlet's divides by 1, 2 and 4."""
    return Tower()


def uneven_tower() -> nn.Module:
    """No dim 0 divides by 2, 3 or 4, and the outlet's rows are fewer than the ranks."""
    return Tower(width=7, hidden=13)


class OddBlock(nn.Module):
    """Parameters that are easy to get wrong."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))  # a scalar
        self.shift = nn.Parameter(torch.zeros(1))  # fewer rows than ranks
        self.transposed = nn.Parameter(torch.randn(3, width).t())  # not contiguous
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)  # not floating
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.conv = nn.Conv2d(1, 5, (3, 3), padding=1).to(memory_format=torch.channels_last)
        self.register_buffer("offset", torch.full((3,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.transposed + self.offset.to(x.dtype)) * self.scale
        image = x.view(-1, 1, 2, x.shape[1] // 2)
        mixed = self.conv(image).mean(dim=(2, 3))
        total = hidden.sum(1, keepdim=True) + mixed.sum(1, keepdim=True) + self.shift
        return x * self.frozen + total * self.counts.sum() + self.empty.sum()


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock(), OddBlock()])
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(x)


def odd_model() -> nn.Module:
    return OddModel()


class CausalBlock(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """A small GPT; the vocabulary divides by nothing."""

    def __init__(self, vocabulary: int = 29, width: int = 12, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_model() -> nn.Module:
    return LanguageModel()


def token_batch(step: int, size: int) -> Tensor:
    return torch.randint(0, 29, (size, 6), generator=torch.Generator().manual_seed(step))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
