"""Ways to spread one model over ranks, for tests of what must not depend on the way: states and files.

@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it(way, request):
    world_of(way, request).run(program, way)
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import World
from meshed import device_mesh
from models import even_tower, odd_model, uneven_tower
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise import fully_shard


class Tied(nn.Module):
    """Tied embeddings, buffers of all kinds, a frozen and an integer parameter, rows that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x) * self.scale.to(x.dtype)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "even": even_tower,
    "uneven": uneven_tower,
    "odd": odd_model,
    "tied": Tied,
}


def built(build: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(seed)
    return BUILDS[build]().to(dtype)


@dataclass(frozen=True)
class Way:
    """A model and how it is spread. Travels by pickle."""

    ranks: int
    kind: str = "plain"
    build: str = "uneven"

    def __str__(self) -> str:
        return f"{self.kind}_{self.ranks}_{self.build}"

    def model(self, seed: int = 0, **options: Any) -> Any:
        """Built and spread; ``device="meta"`` builds it without values."""
        with torch.device(options.pop("device", "cpu")):
            model = built(self.build, seed)
        return self.spread(model)

    def spread(self, model: Any) -> Any:
        kind, mesh = self.kind, device_mesh((self.ranks,), ("shard",))
        pairs = ((2, self.ranks // 2), ("replicate", "shard"))
        if kind == "none":
            return model
        if kind in ("ddp", "zero1", "zero2", "zero3"):
            return shardwise.shard_model(model, strategy=kind, mesh=mesh)
        if kind == "hybrid_zero2":
            return shardwise.shard_model(model, strategy=kind, mesh=device_mesh(*pairs))
        options: dict[str, Any] = {"mesh": device_mesh(*pairs) if kind == "hybrid" else mesh}
        if kind == "columns":
            options["shard_placement_fn"] = lambda p: Shard(max(p.dim() - 1, 0))
        elif kind == "offload":
            options["offload_policy"] = shardwise.CPUOffloadPolicy()
        elif kind == "keeps":
            options["reshard_after_forward"] = False
        elif kind == "reshards to 2":
            options["reshard_after_forward"] = 2
        elif kind == "bf16":
            options["mp_policy"] = shardwise.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        elif kind == "tp":
            whole = device_mesh((self.ranks // 2, 2), ("shard", "tp"))
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks:
                parallelize_module(block, whole["tp"], plan)
            options["mesh"] = whole["shard"]
        elif kind == "ignored":
            options["ignored_params"] = {next(iter(model.blocks[0].parameters()))}
            warnings.filterwarnings("ignore", message=".*ignored_params contains trainable")
        elif kind == "compiled":
            for block in model.blocks:
                block.compile(backend="eager")
        if kind == "one list":
            fully_shard(list(model.blocks), **options)
        elif kind == "mixed":
            fully_shard(model.blocks[0], **options, reshard_after_forward=False)
        elif kind != "root only":
            for block in model.blocks:
                fully_shard(block, **options)
        if kind != "blocks only":
            fully_shard(model, **options)
        return torch.compile(model, backend="eager") if kind == "compiled" else model


WAYS = [
    Way(1),
    Way(2),
    Way(3, build="even"),
    Way(4),
    Way(4, build="odd"),
    Way(3, build="tied"),
    Way(2, "none", "tied"),
    Way(2, "blocks only", "tied"),
    Way(2, "ddp", "tied"),
    Way(4, "zero1", "even"),
    Way(4, "zero2"),
    Way(4, "hybrid", "tied"),
    Way(4, "hybrid", "odd"),
    Way(4, "tp", "even"),
    Way(4, "tp"),
    Way(3, "columns"),
    Way(2, "offload", "tied"),
    Way(2, "bf16"),
    Way(2, "compiled"),
]


def world_of(way: Any, request: pytest.FixtureRequest) -> World:
    """The one of its `ranks`."""
    return request.getfixturevalue(f"world{way.ranks}")
