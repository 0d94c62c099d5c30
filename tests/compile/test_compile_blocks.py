"""torch.compile of single blocks over a training run: no graph more than without sharding."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from dynamo import forget_graphs
from harness import World
from models import Tower, built, random_batch
from on_ranks import on_ranks
from reference import full, mean_of_squares
from test_compile_model import part
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise import FSDPModule, fully_shard

HOWS = ["method before", "method after", "wrapper before", "wrapper after", "wrapper itself"]


class Dropping(Tower):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Sequential(block.norm, nn.Dropout(1.0))  # nothing random comes through


def compile_blocks(model: nn.Module, how: str, shards: bool, backend: str, **options: Any) -> None:
    settings: dict[str, Any] = {"backend": backend, "fullgraph": True}
    for index, block in enumerate(model.blocks):
        if how == "method before":
            block.compile(**settings)
        if how in ("wrapper before", "wrapper itself"):
            model.blocks[index] = torch.compile(block, **settings)
        if shards:
            fully_shard(model.blocks[index] if how == "wrapper itself" else block, **options)
        if how == "method after":
            block.compile(**settings)
        if how == "wrapper after":
            model.blocks[index] = torch.compile(block, **settings)
    if shards:
        fully_shard(model, **options)


def nothing(model: nn.Module) -> None:
    pass


def on_blocks(act: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    def event(model: nn.Module) -> None:
        for block in model.blocks:
            for each in (block, getattr(block, "_orig_mod", None)):
                if isinstance(each, FSDPModule):  # nothing to do without sharding
                    act(each)

    return event


EVENTS: list[Callable[[nn.Module], Any]] = [
    nothing,
    nothing,
    on_blocks(lambda block: block.set_reshard_after_forward(False)),
    nothing,
    on_blocks(lambda block: block.set_reshard_after_forward(True)),
    on_blocks(lambda block: block.unshard()),
    on_blocks(lambda block: (block.unshard(), block.reshard())),
    *(nn.Module.eval, nn.Module.train, nothing),
]


def life(
    model: nn.Module, inputs: Tensor
) -> tuple[list[int], list[dict[str, Tensor | None]], dict[str, int]]:
    """Graphs and gradients after each step; what dynamo counted of breaks and recompilations."""
    found: list[int] = []
    gradients: list[dict[str, Tensor | None]] = []
    for event in EVENTS:
        event(model)
        model.zero_grad()
        mean_of_squares(model, inputs).backward()
        with torch.no_grad():
            model(inputs)
        found.append(counters["stats"]["unique_graphs"])
        named = {n.replace("_orig_mod.", ""): full(p.grad) for n, p in model.named_parameters()}
        gradients.append(named)
    return found, gradients, {**counters["graph_break"], **counters["recompiles"]}


def lives(
    how: str, model_class: type[Tower], backend: str, dtype: torch.dtype
) -> tuple[list[int], list[int], list[str], dict[str, int]]:
    torch.manual_seed(0)
    plain = model_class().to(dtype)
    model = copy.deepcopy(plain)
    inputs = random_batch(0, 8).to(dtype)
    outcomes = []
    for own, shards in ((plain, False), (model, True)):
        forget_graphs()
        compile_blocks(own, how, shards, backend)
        outcomes.append(life(own, part(inputs) if shards else inputs))
    (before, expected, _), (after, actual, counted) = outcomes
    atol = 1e-10 if dtype is torch.float64 else 1e-5
    wrong = [
        f"{index}: {name}"
        for index, (want, got) in enumerate(zip(expected, actual, strict=True))
        for name, gradient in want.items()
        if gradient is None or not torch.allclose(got[name], gradient, rtol=0, atol=atol)  # type: ignore
    ]
    return before, after, wrong, counted


@pytest.mark.parametrize(
    ("how", "model_class", "backend"),
    [
        (HOWS[0], Tower, "aot_eager"),
        *(pytest.param(how, Tower, "aot_eager", marks=pytest.mark.slow) for how in HOWS[1:]),
        pytest.param(HOWS[1], Dropping, "aot_eager", marks=pytest.mark.slow),
        *(pytest.param(how, Tower, "inductor", marks=pytest.mark.slow) for how in HOWS),
    ],
)
def test_no_graph_is_made_that_would_not_be_without_sharding(
    world2: World, how: str, model_class: type[Tower], backend: str
) -> None:
    dtype = torch.float32 if backend == "inductor" else torch.float64
    for before, after, wrong, counted in world2.run(lives, how, model_class, backend, dtype, timeout=400):
        assert after == before
        assert after[1] == after[6]  # nor by unsharding, keeping and freeing
        assert (wrong, counted) == ([], {})


# --- compiled wrappers of activation checkpointing ------------------------------------------------


def random_tower() -> Tower:
    model = built(Tower, seed=0)
    for block in model.blocks:
        block.norm = nn.Sequential(block.norm, nn.Dropout(0.5))
    return model


@on_ranks(2, timeout=180)
def test_a_compiled_checkpoint_of_a_sharded_block_draws_the_same_random_numbers_again() -> None:
    """Block and wrapper sharded, and the wrapper compiled, as Accelerate does with its regions."""
    forget_graphs()
    plain, model = random_tower(), random_tower()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(fully_shard(block))
        fully_shard(model.blocks[index]).compile(backend="aot_eager", fullgraph=True)
    fully_shard(model)
    wrong = []
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(step)  # the same random numbers in both, and on all ranks
            mean_of_squares(each, random_batch(step, 4).double()).backward()
        gradients = zip(model.named_parameters(), plain.parameters(), strict=True)
        wrong += [n for (n, p), want in gradients if not torch.allclose(full(p.grad), want.grad, 0, 1e-10)]
    assert wrong == []
