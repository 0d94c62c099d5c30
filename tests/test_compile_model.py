"""torch.compile of a whole sharded model: one graph, whose numbers are those of an unsharded model."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from harness import World
from models import OddModel, Tower
from reference import adamw, mean_of_squares
from scenario import Side, assert_same
from torch import nn
from torch._dynamo.utils import counters

ATOL = 1e-10


def compiled(side: Side, model: nn.Module, how: str, backend: str = "aot_eager") -> Callable[..., Any]:
    """`model` itself where nothing is sharded; else compiled, as the module that it is or inside a function."""
    if not side.is_sharded:
        return model
    # Of dynamo itself, when it looks at an input that is not a leaf.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    counters.clear()
    if how == "module":
        return torch.compile(model, fullgraph=True, backend=backend)
    return torch.compile(lambda x: model(x), fullgraph=True, backend=backend)


def assert_one_graph(side: Side) -> None:
    if side.is_sharded:
        assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
        assert not counters["graph_break"]
        assert not counters["recompiles"]


def train(
    side: Side, build: Callable[[], nn.Module], how: str, backend: str, dtype: torch.dtype, **options: Any
) -> None:
    torch.manual_seed(0)
    model = build().to(dtype)
    side.shard(*model.blocks, model, **options)
    optimizer = adamw(model)
    run = compiled(side, model, how, backend)
    for step in range(3):
        optimizer.zero_grad()
        inputs = side.inputs(step).to(dtype)
        loss = mean_of_squares(run, inputs)
        loss.backward()
        side.note_mean("loss", loss)
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
    side.note_parameters(model)
    assert_one_graph(side)


@pytest.mark.parametrize("how", ["module", "function"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_is_one_graph_and_trains_right(world2: World, how: str, backend: str) -> None:
    assert_same(world2, train, Tower, how, backend, torch.float64)


@pytest.mark.parametrize("how", ["module", "function"])
def test_odd(world2: World, how: str) -> None:
    assert_same(world2, train, OddModel, how, "aot_eager", torch.float64)
