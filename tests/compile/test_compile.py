"""torch.compile of single blocks: the hooks run outside of their graphs, and the numbers are plain ones."""

import copy

import pytest
import torch
import torch._dynamo
from dynamo import forget_graphs
from harness import World
from models import Tower, built, random_batch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from shardwise import fully_shard


def gradients(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(inputs).pow(2).mean().backward()
    names = {n.replace("_orig_mod.", ""): p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in names.items()}


def train_compiled(how: str) -> int:
    forget_graphs()
    plain = built(Tower, seed=0)
    model = copy.deepcopy(plain)
    counter = CompileCounterWithBackend("aot_eager")
    compile_options = {"backend": counter, "fullgraph": True}
    for index, block in enumerate(model.blocks):
        if how == "method before":
            block.compile(**compile_options)
        fully_shard(block)
        if how == "method after":
            block.compile(**compile_options)
        if how == "wrapper after":
            model.blocks[index] = torch.compile(block, **compile_options)
    fully_shard(model)
    run = torch.compile(model, **compile_options) if how == "parent" else model
    inputs = random_batch(0, 6)
    expected = gradients(plain, inputs)
    for _ in range(3):
        actual = gradients(run, inputs)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=0, atol=1e-10)
    return counter.frame_count


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", ["method before", "method after", "wrapper after"])
def test_a_compiled_block_is_one_graph_and_trains_right(world2: World, how: str) -> None:
    assert world2.run(train_compiled, how, timeout=120) == [1, 1]  # the blocks share their code


def test_a_compiled_parent_is_one_graph_with_its_blocks_and_trains_right(world2: World) -> None:
    assert world2.run(train_compiled, "parent", timeout=120) == [1, 1]  # test_compile_model.py has the rest
