"""Whole gradients on the host lie in the memory of earlier ones, unless something still refers to that."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from comparing import assert_all_same
from meshed import device_mesh, gradients_of
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import DataParallelMeshDims, fully_shard, no_sync
from shardwise.comm import buffers


class Large(nn.Module):
    """Gradients of 2 MiB, in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512, 512, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def replicated(model: nn.Module) -> Any:
    dims = DataParallelMeshDims(replicate="data")
    return fully_shard(model, mesh=device_mesh((2,), ("data",)), dp_mesh_dims=dims)


def inputs(step: int) -> Tensor:
    return torch.full((2, 512), 1.0 + step, dtype=torch.float64)


def backward(model: nn.Module, step: int) -> None:
    model(inputs(step)).sum().backward()


def gradient(model: Any) -> Tensor:
    grad = model.weight.grad
    assert isinstance(grad, DTensor)
    return grad.to_local()


def expected(*steps: int) -> float:
    return sum(2 * (1.0 + step) for step in steps)  # two rows, equal on all ranks


@on_ranks(2)
def test_later_steps_write_to_the_same_memory() -> None:
    model = replicated(Large())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with mock.patch.object(buffers, "buffer_for", wraps=buffers.buffer_for) as allocate:
        for step in range(8):
            backward(model, step)
            assert torch.all(gradient(model) == expected(step))
            optimizer.step()
            optimizer.zero_grad()
    # One, and some while a thread of gloo's still refers to what it has summed.
    assert 1 <= allocate.call_count < 8


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "the gradient": lambda grad: grad,
    "a view": lambda grad: grad[3:4, :5],
    "a detached view": lambda grad: grad.detach().view(-1)[7:],
    "numpy": lambda grad: grad.numpy()[2:3],
    "the storage": lambda grad: grad.untyped_storage(),
    "a graph": lambda grad: (grad * torch.ones((), dtype=torch.float64, requires_grad=True)).grad_fn,
}


@pytest.mark.parametrize("who", HOLDERS)
@on_ranks(2)
def test_what_still_refers_to_a_gradient_keeps_its_values(who: str) -> None:
    model = replicated(Large())
    backward(model, 0)
    place = gradient(model).data_ptr()
    held = HOLDERS[who](gradient(model))
    model.zero_grad()
    for step in (1, 2):
        backward(model, step)
        assert gradient(model).data_ptr() != place
        assert torch.all(gradient(model) == expected(step))
        model.zero_grad()
    values: Any = held
    if who == "the storage":
        values = torch.empty(0, dtype=torch.float64).set_(held)
    elif who == "a graph":
        values = held._saved_self
    assert set(values.reshape(-1).tolist()) == {expected(0)}
    del held, values
    for step in range(500):  # it is free again, once no thread of gloo's refers to it
        backward(model, step)
        if is_there := gradient(model).data_ptr() == place:
            break
        model.zero_grad()
    assert is_there


@on_ranks(2)
def test_gradients_of_several_backwards_add_up() -> None:
    model = replicated(Large())
    for first in (0, 3):
        backward(model, first)
        with no_sync(model):
            backward(model, first + 1)
        backward(model, first + 2)
        assert torch.all(gradient(model) == expected(first, first + 1, first + 2))
        model.zero_grad()


@on_ranks(2)
def test_memory_that_the_caller_has_emptied_is_replaced() -> None:
    model = replicated(Large())
    backward(model, 0)
    gradient(model).untyped_storage().resize_(0)
    model.zero_grad()
    backward(model, 1)
    assert torch.all(gradient(model) == expected(1))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Large() for _ in range(2))

    def forward(self, step: int, used: str) -> Tensor:
        return sum((self.parts[int(index)](inputs(step)).sum() for index in used), torch.zeros(()))


@on_ranks(2)
def test_parameters_without_a_gradient_have_none_of_an_earlier_step() -> None:
    model, plain = replicated(Two()), Two()
    for step, used in enumerate(("01", "0", "1", "01")):
        for each in (model, plain):
            each.zero_grad()
            each(step, used).backward()
        assert_all_same([gradients_of(model)], gradients_of(plain))
