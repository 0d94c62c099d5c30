"""A small model, plain and sharded, and how tests look at it: its events, gradients and attributes."""

from typing import Any

from comparing import assert_equal
from models import Tower, built, random_batch, shard_tower
from reference import full
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def plain_tower() -> Tower:
    return built(Tower, seed=0)


def sharded_tower(**options: Any) -> Tower:
    return shard_tower(plain_tower(), **options)


def backward(model: nn.Module, step: int = 0) -> None:
    """Forward and backward of a batch that is the same on all ranks."""
    model(random_batch(step, 4)).pow(2).mean().backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(param.grad) for name, param in model.named_parameters()}


def assert_close(got: dict[str, Tensor | None], want: dict[str, Tensor | None], factor: float = 1.0) -> None:
    """`got` is `want` times the factor."""
    expected = {name: None if tensor is None else tensor * factor for name, tensor in want.items()}
    assert_equal(got, expected, atol=1e-10 * factor)


def plain_gradients(*steps: int) -> dict[str, Tensor | None]:
    """Summed over microbatches."""
    model = plain_tower()
    for step in steps:
        backward(model, step)
    return gradients(model)


def names_of_dtensors(module: nn.Module) -> list[str]:
    """Which of the module's parameters its own code sees as shards."""
    names = [name for name, _ in module.named_parameters()]
    return [name for name in names if isinstance(attribute(module, name), DTensor)]


def attribute(module: nn.Module, name: str) -> Any:
    *path, last = name.split(".")
    for part in path:
        module = getattr(module, part)
    return getattr(module, last)


ROOT = ["inlet.weight", "inlet.bias", "outlet.weight", "outlet.bias"]
GROUPS = ["Tower", "blocks.0", "blocks.1", "blocks.2"]
