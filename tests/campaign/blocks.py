"""What the campaigns over settings and strategies share: kinds of blocks, precisions, and placements by chance."""

import random
from collections.abc import Callable
from typing import Any

import torch
from models import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from campaign.draws import Draw
from campaign.notes import Mismatch, close
from shardwise.policies import ShardPlacementResult


def names(*lines: str) -> tuple[str, ...]:
    return tuple(name for line in lines for name in line.split())


# --- blocks: (batch, width) to (batch, width) -----------------------------------------------------


SIZES = {"even": (8, 16), "uneven": (7, 13), "few_rows": (5, 3)}  # width, hidden


class Knobs(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.transposed = nn.Parameter(torch.randn(3, width).t())
        self.fixed = nn.Parameter(torch.randn(width), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("offset", torch.full((3,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(x @ self.transposed + self.offset.to(x.dtype)) * self.scale
        total = mixed.sum(1, keepdim=True) + self.shift + self.empty.sum()
        return x + torch.tanh(self.fixed * total) * self.counts.sum() / 10


class Convolution(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.conv(x[:, None, None]))).mean(1)[:, 0]


class Lora(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x) + self.b(self.a(x)))


class PartlyUnused(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lin, self.unused = nn.Linear(width, width), nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Frozen(Block):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.requires_grad_(False)


class Twice(nn.Module):
    """Calls one layer twice; a second one shares its weight."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lin, self.twin = nn.Linear(width, width), nn.Linear(width, width)
        self.twin.weight = self.lin.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(torch.tanh(self.lin(x)))) - self.twin(x)


class Bare(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x)


class Recurrent(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(torch.stack([x, -x], 1))[0].sum(1)


class Attention(nn.Module):
    """Reads weights of a layer that it never calls."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mixed = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, torch.tanh(x)], 1)
        return x + self.mixed(tokens, tokens, tokens, need_weights=False)[0].sum(1)


class Lookup(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long() + 2 * (x[:, -1] > 0).long())


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    **{"plain": Block, "knobs": Knobs, "conv": Convolution, "lora": Lora, "unused": PartlyUnused},
    **{"frozen": Frozen, "twice": Twice, "bare": Bare, "gru": Recurrent, "attention": Attention},
    "lookup": Lookup,
}


HAVE_LIN = ("lora", "unused", "twice")  # a square layer, whose weight can be tied


class Failure(Exception):
    """Raised on purpose."""


class Net(nn.Module):
    """Blocks between two layers, in the order of the draw."""

    def __init__(self, draw: Draw, kinds: dict[str, Callable[[int, int], nn.Module]] = KINDS) -> None:
        super().__init__()
        width, hidden = SIZES[draw["sizes"]]
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(kinds[kind](width, hidden) for kind in draw["blocks"])
        self.outlet = nn.Linear(width, width)
        with_lin = [block for block in self.blocks if hasattr(block, "lin")]
        if draw["tie"] == "ends":
            self.outlet.weight = self.inlet.weight
        if draw["tie"] == "root_block":
            self.outlet.weight = with_lin[0].lin.weight
        if draw["tie"] == "blocks":
            with_lin[1].lin.weight = with_lin[0].lin.weight
        everyone = [i for i in range(len(self.blocks)) if i != draw.get("unused")]
        self.order = {
            "once": everyone,
            "again": [*everyone, *everyone[:1]],
            "twice": [*everyone, *everyone],
            "doubled": [i for i in everyone for _ in range(2)],
            "reversed": everyone[::-1],
        }[draw["order"]]
        self.checkpoint = draw["checkpoint"]
        self.fails_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for place, index in enumerate(self.order):
            if place == self.fails_at:
                raise Failure
            x = self.run_block(index, x)
        if self.fails_at is not None:
            raise Failure
        return self.outlet(x)

    def run_block(self, index: int, x: Tensor) -> Tensor:
        block = self.blocks[index]
        if self.checkpoint is None or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=self.checkpoint == "reentrant")  # type: ignore[return-value]


# --- sharding -------------------------------------------------------------------------------------

EXACT, NEAR = close(atol=1e-9, rtol=0.0), close(atol=1e-4, rtol=1e-3)


def LOOSE(got: Tensor, want: Tensor) -> str | None:
    """bf16 has 8 bits, and errors of single gradients cancel or do not: only the scale is certain."""
    got, want = got.double(), want.double()
    is_good = got.shape == want.shape and bool((got - want).norm() <= 0.3 * want.norm() + 0.3)
    return None if is_good else f"{got} where {want} is expected"


PRECISIONS: dict[str | None, tuple[dict[str, Any], Mismatch]] = {
    None: ({}, EXACT),
    "same": ({"param_dtype": torch.float64, "reduce_dtype": torch.float64}, EXACT),
    "kept": ({"accumulate_dtype": torch.float64, "keep_low_precision_grads": True}, EXACT),
    "norms_alone": ({"param_dtype": torch.float64, "full_precision": nn.LayerNorm}, EXACT),
    "float64_over_float32": ({"param_dtype": torch.float64}, NEAR),
    "float32": ({"param_dtype": torch.float32, "reduce_dtype": torch.float64}, NEAR),
    "float32_but_norms": (
        {"param_dtype": torch.float32, "full_precision": (nn.LayerNorm, nn.GroupNorm)},
        NEAR,
    ),
    "bfloat16": ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, LOOSE),
    "bfloat16_all": ({"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}, LOOSE),
}


def chosen_placement(salt: int, other: DeviceMesh | None, param: nn.Parameter) -> Any:
    """Some dim, or none, or another mesh: by chance, and the same on every rank."""
    chance = random.Random(salt * 1000003 + param.numel() * 31 + param.dim())
    dim = None if param.dim() == 0 else chance.choice([None, *range(-param.dim(), param.dim())])
    placement = None if dim is None else Shard(dim)
    if other is not None and chance.random() < 0.5:
        return ShardPlacementResult(placement, other)
    return placement
