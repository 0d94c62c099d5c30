"""The kinds of modules of a program, those of blocks.py among them. Each maps (batch, WIDTH) to (batch, WIDTH)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from campaign.blocks import KINDS, Failure
from campaign.draws import Draw

WIDTH, HIDDEN = 6, 7  # rows that divide by no world but 1 and 7


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, _) = self.lstm(torch.stack([x, -x], 1))
        return output.sum(1)[:, :WIDTH] + hidden[1]


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


def _sized(kind: Callable[[int, int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind(WIDTH, HIDDEN)


LEAF_KINDS: dict[str, Callable[[], nn.Module]] = {
    **{name: _sized(kind) for name, kind in KINDS.items()},
    **{"lstm": Lstm, "bag": Bag, "batch_norm": BatchNorm, "parametrized": Parametrized},
    **{"complex": Complex, "spectral": Spectral},
}
CONTAINER_KINDS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    **{"chain": Chain, "residual": Residual, "again": Again, "checkpoint": Checkpointed},
    **{"reentrant": Reentrant, "dict": ThroughDict, "list": ThroughList, "dataclass": ThroughDataclass},
    **{"raw": ThroughWeight, "method": ThroughMethod},
}


def built(node: Draw) -> nn.Module:
    if "children" in node:
        return CONTAINER_KINDS[node["kind"]]([built(child) for child in node["children"]])
    return LEAF_KINDS[node["kind"]]()


class Model(nn.Module):
    def __init__(self, nodes: list[Draw]) -> None:
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
