"""What the tests of checkpoints share: a training run that is interrupted, and the same one that is not.

`Run` says what is trained, and how it is sharded; `first_half` trains and saves, `second_half` loads and trains
on, in the same world or another, and `uninterrupted` is plain PyTorch in one process without any checkpoint.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamo import quiet_dynamo
from meshed import Layout, part, refusal
from models import random_batch
from reference import full, mean_of_squares
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from shardwise import fully_shard, load_checkpoint, save_checkpoint
from shardwise.checkpoint import Loaded

BATCH_SIZE = 12
HALF = 2  # steps


class Pair(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gain = nn.Parameter(torch.tensor(1.5))  # a scalar

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks, shards of different sizes, a frozen parameter and a buffer."""

    def __init__(self, width: int = 6, hidden: int = 7) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Pair(width, hidden), Pair(width, hidden)])
        self.outlet = nn.Linear(width, 3)
        self.inlet.bias.requires_grad_(False)
        self.register_buffer("offset", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class NoScalars(Net):
    """For torch's own `fully_shard`, which takes none."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.gain = nn.Parameter(torch.full((1,), 1.5))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.middle, self.outlet = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.outlet.weight = self.inlet.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(torch.tanh(self.middle(self.inlet(x))))


class Keeper:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class KeepsExtra(nn.Linear):
    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def by_block(model: nn.Module, layout: Layout | None) -> nn.Module:
    """`fully_shard`, bottom up; nothing where there are no ranks."""
    if dist.is_initialized():
        mesh = {} if layout is None else {"mesh": layout.data_mesh()}
        for block in getattr(model, "blocks", []):
            fully_shard(block, **mesh)
        fully_shard(model, **mesh)
    return model


@dataclass(frozen=True)
class Run:
    """Travels by pickle: all callables are of modules."""

    build: Callable[[], nn.Module] = Net
    shard: Callable[[nn.Module, Layout | None], nn.Module] = by_block
    layout: Layout | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05})
    path: str = ""

    def start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = self.shard(self.build().double(), self.layout)
        return model, self.optimizer(model.parameters(), **self.options)

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int = HALF
    ) -> None:
        quiet_dynamo()
        for number in range(first, first + steps):
            optimizer.zero_grad()
            self.loss(model, number).backward()
            optimizer.step()

    def loss(self, model: nn.Module, number: int) -> Tensor:
        batch = random_batch(number, BATCH_SIZE, 6)
        if self.layout is not None:
            batch = part(batch, *self.layout.seat())
        elif dist.is_initialized():
            batch = part(batch, dist.get_rank(), dist.get_world_size())
        return model(batch).square().mean()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All parameters, buffers and states, whole, by name."""
    found: dict[str, Any] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        found[name] = full(value)
        for key, state in optimizer.state.get(value, {}).items():
            found[f"{name} {key}"] = full(state) if isinstance(state, Tensor) else state
    return found


def uninterrupted(run: Run) -> dict[str, Any]:
    """Plain, in one process, without a checkpoint."""
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0, 2 * HALF)
    return everything(model, optimizer)


def first_half(run: Run, **options: Any) -> dict[str, Any]:
    """Train and save; then train on, for what the loading run is to do next."""
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    save_checkpoint(run.path, model, optimizer, shared={"step": HALF}, **options).wait()
    run.train(model, optimizer, HALF)
    return everything(model, optimizer)


def second_half(run: Run, strict: bool = True) -> dict[str, Any]:
    """Load into another model and train on."""
    model, optimizer = run.start(2)
    loaded = load_checkpoint(run.path, model, optimizer, strict=strict)
    run.train(model, optimizer, loaded.shared["step"])
    return everything(model, optimizer)


def loaded_into(run: Run) -> tuple[Loaded, dict[str, Any]]:
    model, optimizer = run.start(2)
    return load_checkpoint(run.path, model, optimizer), everything(model, optimizer)


def train_tower(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Each rank has its rows of the same batches, whatever the number of ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        mean_of_squares(model, random_batch(step, BATCH_SIZE, 7).chunk(world)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- one layer, whose weight is one number ------------------------------------------------------------


def saved_step(path: Path, value: float = 1.0, **options: Any) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    save_checkpoint(path, model, shared={"value": value}, **options)


def value_at(path: Path | None) -> float:
    assert path is not None
    model = nn.Linear(2, 2)
    value: float = load_checkpoint(path, model).shared["value"]
    assert model.weight.unique().tolist() == [value]
    return value


def refused_to_save(path: str | Path) -> str:
    return refusal(save_checkpoint, path, fully_shard(nn.Linear(2, 2)))


def rewritten(path: Path, edit: Callable[[Metadata], Any]) -> None:
    """Another index, as one writes it who does not know of digests: changed, or what `edit` returns."""
    index = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(edit(index) or index))
    (path / ".digests").unlink(missing_ok=True)


def inside(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


# --- hosts --------------------------------------------------------------------------------------------

OWN = Path("/proc/self/cwd")  # for each rank another place inside `on_own_disk`, as a disk of its host is


def on_own_disk(folder: str, act: Callable[..., Any], *args: Any) -> Any:
    before = Path.cwd()
    own = Path(folder) / f"host-{dist.get_rank()}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    try:
        return act(*args)
    finally:
        os.chdir(before)


needs_own_disks = pytest.mark.skipif(not OWN.exists(), reason="there is no such path here")
