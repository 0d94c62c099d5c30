"""Where ranks stand on a mesh, for tests that run one program plainly and sharded.

def program(layout, ...):                  # module level: it is sent by name
    model = built(RECIPE)
    if layout is not None:
        fully_shard(model, mesh=layout.data_mesh())
    ... layout_inputs(layout, step) ...    # this rank's rows of the global batch
    return tensors_of(model)

def test_it(world4):
    assert_as_plain(world4, program, LAYOUT, ...)
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from comparing import assert_equal
from models import random_batch
from reference import Recipe, Record, full, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import fully_shard

BATCH_SIZE = 12  # divisible by 1, 2, 3 and 4 ranks


@cache  # every mesh opens process groups, which no test can close; a rank's process has few
def device_mesh(shape: tuple[int, ...], names: tuple[str, ...], device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=names)


@dataclass(frozen=True)
class Layout:
    """A mesh, and which of its dimensions see different data. Travels by pickle; ranks make the mesh."""

    shape: tuple[int, ...]
    names: tuple[str, ...] = ("replicate", "shard")
    data: tuple[str, ...] = ("replicate", "shard")
    device: str = "cpu"

    def __str__(self) -> str:
        return "_".join(f"{name}{size}" for name, size in zip(self.names, self.shape, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def mesh(self) -> DeviceMesh:
        return device_mesh(self.shape, self.names, self.device)

    def data_mesh(self) -> DeviceMesh:
        return self.mesh() if self.data == self.names else self.mesh()[self.data]

    def seat(self) -> tuple[int, int]:
        """Which part of the batch is this rank's, of how many."""
        where = self.mesh().get_coordinate()
        assert where is not None
        index, count = 0, 1
        for name, size, place in zip(self.names, self.shape, where, strict=True):
            if name in self.data:
                index, count = index * size + place, count * size
        return index, count


def seat(layout: Layout | None) -> tuple[int, int]:
    return (0, 1) if layout is None else layout.seat()


def layout_inputs(layout: Layout | None, step: int, width: int = 8) -> Tensor:
    """This rank's rows of the batch of `step`."""
    mine = part(random_batch(step, BATCH_SIZE, width), *seat(layout))
    return mine if layout is None else mine.to(layout.device)


def part(batch: Tensor, index: int, count: int) -> Tensor:
    share = len(batch) // count
    return batch[index * share : (index + 1) * share].clone()


def train_on(layout: Layout, model: nn.Module, recipe: Recipe) -> Record:
    """`reference.train` on this rank's part of the batch, with the losses of all."""
    record = train(model, recipe, *layout.seat())
    mean = torch.tensor(record.losses, dtype=torch.float64)
    dist.all_reduce(mean)
    record.losses = (mean / dist.get_world_size()).tolist()
    return record


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {f"gradient of {name}": full(param.grad) for name, param in model.named_parameters()}


def parameters_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(param) for name, param in model.named_parameters()}


def tensors_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {**gradients_of(model), **parameters_of(model)}


def whole(tensor: Tensor) -> Tensor:
    """Of norms and losses, which are DTensors or not."""
    found = full(tensor)
    assert found is not None
    return found


def outcome(act: Any, *args: Any, **kwargs: Any) -> str:
    """How a call is refused, as 'ValueError: ...', or that it is accepted."""
    try:
        act(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusal(act: Any, *args: Any, **kwargs: Any) -> str:
    """The same of a call that must not succeed."""
    text = outcome(act, *args, **kwargs)
    assert text != "accepted", "nothing was refused"
    return text


class Asks(nn.Module):
    """Enters a context from inside its own forward, or from a hook in its backward, as ``when`` says."""

    def __init__(self, context: Callable[[nn.Module], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.context = context
        self.about: list[nn.Module] = []  # the module to enter it for, hidden from ``modules()``
        self.when = self.message = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            self.ask()
        output = self.linear(x)
        if self.when == "backward":
            output.register_hook(self.ask)
        return output

    def ask(self, *_: Any) -> None:
        self.message = refusal(lambda: self.context(self.about[0]).__enter__())


def assert_refused_in_a_pass(
    context: Callable[[nn.Module], AbstractContextManager[Any]], when: str, *words: str, of_root: bool
) -> None:
    """`context` of the root, or of the module that runs; gradients are those of a model that never asked."""
    found = []
    for is_asking in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Asks(context), nn.Tanh())
        for each in (model[0], model):
            fully_shard(each)
        model[0].about = [model if of_root else model[0]]
        model[0].when = when if is_asking else ""
        for microbatch in range(2):
            model(random_batch(microbatch, 2, dtype=torch.float32)).sum().backward()
        found.append((model[0].message, gradients_of(model)))
    (message, got), (_, want) = found
    assert message.startswith("RuntimeError: ")
    assert all(word in message for word in (when, *words)), message
    assert_equal(got, want, "gradients", atol=1e-10)
