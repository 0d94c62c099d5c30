"""The kinds of modules of a program. Each maps (batch, WIDTH) to (batch, WIDTH), in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from campaign.program import Node

WIDTH = 6


class Linear(nn.Module):
    """Rows that divide by no world but 1 and 7."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.back = nn.Conv2d(4, 2, 1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(len(x), 2, 1, WIDTH // 2).to(memory_format=torch.channels_last)
        return self.back(torch.tanh(self.conv(image))).flatten(1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, _) = self.lstm(torch.stack([x, -x], 1))
        return output.sum(1)[:, :WIDTH] + hidden[1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, torch.tanh(x)], 1)
        return self.mixed(tokens, tokens, tokens, need_weights=False)[0].sum(1)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(5, WIDTH, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(torch.stack([(x[:, 0] > 0).long(), 2 + (x[:, 1] > 0).long()], 1))


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2, WIDTH // 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        rotated = torch.view_as_complex(x.reshape(len(x), -1, 2)) @ self.weight
        return torch.tanh(torch.view_as_real(rotated).flatten(1))


class Odd(nn.Module):
    """A scalar, one without elements, a transposed one, integers, and one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, WIDTH).t())
        self.row = nn.Parameter(torch.randn(1, 3))
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(x @ self.transposed) * self.row
        return x * self.scale + mixed.sum(1, keepdim=True) + self.empty.sum() + self.counts.sum() / 100


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class Frozen(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class TwiceUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(torch.tanh(self.lin(x)))


# --- around other modules -------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(children)

    def chained(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.chained(x)


class Residual(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return (self.chained(x) + x).mul_(0.5)


class Again(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.chained(torch.tanh(self.chained(x)))


class Checkpointed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.chained, x, use_reentrant=False)


class Reentrant(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.chained, x, use_reentrant=x.requires_grad)


class AddsToDict(nn.Module):
    """Changes the dict that it was given, as caches do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        state["h"] = self.inner(state["h"])
        state["seen"].append(state["h"])
        return state


class ThroughDict(Chain):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__([AddsToDict(child) for child in children])

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"h": x, "seen": []}
        for module in self.inner:
            state = module(state)
        return state["h"] + sum(state["seen"]) / 2


class AddsToList(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, outputs: list[Tensor]) -> None:
        outputs.append(self.inner(outputs[-1]))


class ThroughList(Chain):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__([AddsToList(child) for child in children])

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for module in self.inner:
            module(outputs)
        return outputs[-1] + outputs[0]


@dataclass
class Output:
    value: Tensor
    views: tuple[Tensor, ...]


class GivesDataclass(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Output:
        value = self.inner(x)
        return Output(value, value.split(2, dim=1))


class ThroughDataclass(Chain):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__([GivesDataclass(child) for child in children])

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inner:
            output = module(x)
            x = output.value + torch.cat(output.views[::-1], 1)
        return x


class GivesWeight(nn.Module):
    """Returns a parameter as it is, beside its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.weight


class ThroughWeight(Chain):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__([GivesWeight(child) for child in children])

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x, weight = module(x)
            x = torch.tanh(x @ weight)
        return x


class ThroughMethod(Chain):
    """Its forward calls a method that is registered as a forward as well."""

    def encode(self, x: Tensor) -> Tensor:
        return self.chained(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


LEAF_KINDS: dict[str, Callable[[], nn.Module]] = {
    **{"linear": Linear, "norm": Norm, "conv": Conv, "lstm": Lstm, "attention": Attention, "bag": Bag},
    **{"batch_norm": BatchNorm, "parametrized": Parametrized, "complex": Complex, "odd": Odd, "tied": Tied},
    **{"frozen": Frozen, "lora": Lora, "unused": Unused, "twice_used": TwiceUsed, "spectral": Spectral},
}
CONTAINER_KINDS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    **{"chain": Chain, "residual": Residual, "again": Again, "checkpoint": Checkpointed},
    **{"reentrant": Reentrant, "dict": ThroughDict, "list": ThroughList, "dataclass": ThroughDataclass},
    **{"raw": ThroughWeight, "method": ThroughMethod},
}


def built(node: Node) -> nn.Module:
    if "children" in node:
        return CONTAINER_KINDS[node["kind"]]([built(child) for child in node["children"]])
    return LEAF_KINDS[node["kind"]]()


class Failure(Exception):
    """Raised on purpose."""


class Model(nn.Module):
    def __init__(self, nodes: list[Node]) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(built, nodes))
        self.outlet = nn.Linear(WIDTH, WIDTH)
        self.fails_before: int | None = None  # the block before which forward raises

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for index, block in enumerate(self.blocks):
            if index == self.fails_before:
                raise Failure
            x = block(x) + 0.1 * x
        return self.outlet(x)
