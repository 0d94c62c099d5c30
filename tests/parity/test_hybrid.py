"""Hybrid sharding: sharded within each row of a mesh, replicated across its columns.

Training equals plain training on the global batch in float64 to 1e-10 (only the order of additions
differs), whatever the shape of the mesh and whatever is deferred between microbatches.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_all_same, assert_as_plain
from harness import World
from meshed import Layout, gradients_of, layout_inputs, tensors_of, whole
from models import Tower, random_batch, uneven_batch
from on_ranks import on_ranks
from reference import Recipe, adamw, full, mean_of_squares, shard
from test_parity import LINES, REPLICAS, SHARDS, SQUARE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise

# Two blocks: of the last one the full parameters stay until backward.
EVEN = Recipe(partial(Tower, depth=2), random_batch)
UNEVEN = Recipe(partial(Tower, width=7, hidden=13, depth=2), uneven_batch)


def hybrid(layout: Layout, recipe: Recipe, **options: Any) -> nn.Module:
    return shard(recipe.model(), recipe.but(options={"mesh": layout.mesh(), **options}))


# --- accumulation ---------------------------------------------------------------------------------

# What each microbatch does with its gradients.
KEEP = (False, True)  # nothing is sent
SCATTER = (True, False)  # reduced within the row; the replicas wait
ALL = (True, True)

PATTERNS = {
    "scatter_then_all": [SCATTER, SCATTER, ALL],
    "keep_then_all": [KEEP, KEEP, ALL],
    "keep_scatter_all": [KEEP, SCATTER, ALL],
    "scatter_keep_all": [SCATTER, KEEP, ALL],
    "all_scatter_all": [ALL, SCATTER, ALL],
    "all_each_time": [ALL, ALL, ALL],
    "neither_then_all": [(False, False), SCATTER, ALL],
}


@on_ranks(2)
def test_synchronising_gradients_sums_them_over_replicas_as_well() -> None:
    """As with the peer: ``set_requires_gradient_sync`` also switches what ``set_requires_all_reduce`` does."""
    model = nn.Linear(4, 1, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    shardwise.fully_shard(model, mesh=mesh, check_equal_weights=False)
    rows = torch.full((2, 4), dist.get_rank() + 1.0, dtype=torch.float64)
    model.set_requires_all_reduce(False)
    model(rows).sum().backward()
    model.set_requires_gradient_sync(True)
    model(rows).sum().backward()
    assert full(model.weight.grad).tolist() == [[(2 * 1.0 + 2 * 2.0) / 2 * 2] * 4]


def announce(model: nn.Module, what: tuple[bool, bool]) -> None:
    if isinstance(model, shardwise.FSDPModule):
        model.set_requires_gradient_sync(what[0])
        model.set_requires_all_reduce(what[1])


def accumulated(
    layout: Layout | None, patterns: list[list[tuple[bool, bool]]], options: dict[str, Any]
) -> dict[str, Any]:
    """Everyday training: microbatches, clipping, an evaluation between the steps."""
    model = UNEVEN.model() if layout is None else hybrid(layout, UNEVEN, **options)
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for step, pattern in enumerate(patterns):
        optimizer.zero_grad()
        for microbatch, what in enumerate(pattern):
            announce(model, what)
            inputs = layout_inputs(layout, 10 * step + microbatch, 7)
            (mean_of_squares(model, inputs) / len(pattern)).backward()
        notes[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
        with torch.no_grad():
            notes[f"evaluation {step}"] = model(random_batch(99, 3, 7))
    return {**notes, **tensors_of(model)}


@pytest.mark.parametrize(
    ("world", "layout", "reshard"),
    [(4, SQUARE, None), (2, REPLICAS, False), (2, SHARDS, True)],
    ids=str,
    indirect=["world"],
)
def test_microbatches_add_up_however_they_are_deferred(
    world: World, layout: Layout, reshard: bool | None
) -> None:
    patterns = list(PATTERNS.values())
    ranks = world.run(accumulated, layout, patterns, {"reshard_after_forward": reshard})
    assert_all_same(ranks, accumulated(None, patterns, {}))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, names: str) -> Tensor:
        return sum(getattr(self, name)(x) for name in names.split())  # type: ignore[return-value]


def absent_at_first(layout: Layout | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Heads().double()
    if layout is not None:
        shardwise.fully_shard(model, mesh=layout.mesh())
    torch.use_deterministic_algorithms(True)  # torch.empty() is then filled with NaN
    try:
        for microbatch, (what, names) in enumerate([(SCATTER, "first"), (ALL, "first second")]):
            announce(model, what)
            model(layout_inputs(layout, microbatch), names).pow(2).mean().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return gradients_of(model)


@pytest.mark.parametrize(
    ("world", "layout"), [(4, SQUARE), (2, REPLICAS)], ids=["square", "replicas"], indirect=["world"]
)
def test_a_parameter_without_a_gradient_in_one_microbatch_adds_nothing_to_the_next(
    world: World, layout: Layout
) -> None:
    assert_as_plain(world, absent_at_first, layout)


def clear(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    if how.endswith("by_hand"):
        for index, param in enumerate(model.parameters()):
            if index % 2 == 0 or how == "by_hand":
                param.grad = None
    else:
        owner = model if how.startswith("model") else optimizer
        owner.zero_grad(set_to_none=how.endswith("none"))


WAYS_TO_CLEAR = ["model_none", "model_zeros", "optimizer_none", "optimizer_zeros", "by_hand", "half_by_hand"]


def deferred_then_cleared(layout: Layout | None) -> dict[str, Any]:
    """In every way, from sums within the row and from full gradients, by turns without and with others before."""
    model = EVEN.model() if layout is None else hybrid(layout, EVEN)
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for index, (deferred, how) in enumerate(product((SCATTER, KEEP), WAYS_TO_CLEAR)):
        optimizer.zero_grad()
        if index % 2 == 1:
            announce(model, ALL)
            mean_of_squares(model, layout_inputs(layout, 9)).backward()
        announce(model, deferred)
        for microbatch in range(2):
            mean_of_squares(model, layout_inputs(layout, microbatch)).backward()
        clear(model, optimizer, how)
        announce(model, ALL)
        mean_of_squares(model, layout_inputs(layout, 2)).backward()
        notes |= {f"{how}, {deferred}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **tensors_of(model)}


def test_clearing_gradients_clears_what_the_replicas_have_deferred(world4: World) -> None:
    assert_as_plain(world4, deferred_then_cleared, SQUARE)


# --- the divisor ----------------------------------------------------------------------------------


FACTORS = [1.0, 3.0]


def divided(layout: Layout | None) -> dict[float, dict[str, Any]]:
    model = UNEVEN.model() if layout is None else hybrid(layout, UNEVEN)
    found: dict[float, dict[str, Any]] = {}
    for factor in FACTORS:
        if layout is not None:
            model.set_gradient_divide_factor(factor)
        for pattern in ("all_each_time", "scatter_then_all"):
            model.zero_grad()
            for microbatch, what in enumerate(PATTERNS[pattern]):
                announce(model, what)
                mean_of_squares(model, layout_inputs(layout, microbatch, 7)).backward()
            named = {f"{pattern}: {name}": value for name, value in gradients_of(model).items()}
            found.setdefault(factor, {}).update(named)
    return found


@pytest.mark.parametrize(
    ("layout", "world"),
    [(each, each.size) for each in (SQUARE, REPLICAS, LINES[2])],
    indirect=["world"],
    ids=str,
)
def test_gradients_are_the_sum_over_all_ranks_divided_by_the_factor(world: World, layout: Layout) -> None:
    ranks = world.run(divided, layout)
    for factor, mean in divided(None).items():
        want = {name: value * (world.size / factor) for name, value in mean.items()}
        assert_all_same([found[factor] for found in ranks], want, atol=1e-9)


# --- low precision --------------------------------------------------------------------------------


class Gain(nn.Module):
    """Its gradient is what it is multiplied with: exact in bfloat16 where that is a small integer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@on_ranks(4)
def test_bfloat16_gradients_are_reduced_and_deferred_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256: any sum in it over ranks or microbatches would show."""
    by_rank = [256.0, 1.0, 3.0, 1.0]
    rank, _ = SQUARE.seat()
    policy = shardwise.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shardwise.fully_shard(Gain(), mesh=SQUARE.mesh(), mp_policy=policy)
    found = []
    for pattern in PATTERNS.values():
        model.zero_grad()
        for what in pattern:
            announce(model, what)
            model(torch.full((6,), by_rank[rank])).sum().backward()
        assert model.gain.grad.dtype == torch.float32
        found.append(whole(model.gain.grad))
    for gradient, pattern in zip(found, PATTERNS.values(), strict=True):
        assert torch.equal(gradient, torch.full((6,), len(pattern) * 261 / 4))


# --- dimensions by name ---------------------------------------------------------------------------

PAIR = Layout((2, 2), ("a", "b"), ("a", "b"))
CUBE = Layout((2, 1, 2), ("a", "b", "c"), ("a", "b", "c"))
LINE = Layout((4,), ("a",), ("a",))
ONE_OF_TWO = Layout((2, 2), ("a", "b"), ("a",))
OTHER_OF_TWO = Layout((2, 2), ("a", "b"), ("b",))

HYBRID, SHARDED, REPLICATED = (Replicate(), Shard(0)), (Shard(0),), (Replicate(),)
# The mesh, what its dimensions are named for, what parameters show (several dimensions that shard as one), and
# over how many ranks their rows lie.
NAMED: dict[str, tuple[Layout, dict[str, Any], Any, int]] = {
    "hybrid_other_way": (PAIR, {"replicate": ("b",), "shard": ("a",)}, HYBRID, 2),
    "sharded_over_both": (PAIR, {"shard": ("a", "b")}, SHARDED, 4),
    "replicated_over_both": (PAIR, {"replicate": ("a", "b")}, REPLICATED, 1),
    "second_of_two": (OTHER_OF_TWO, {"shard": "b"}, SHARDED, 2),
    "first_of_two_replicated": (ONE_OF_TWO, {"replicate": "a"}, REPLICATED, 1),
    "cube_sharded_over_two": (CUBE, {"replicate": "a", "shard": ("b", "c")}, HYBRID, 2),
    "cube_replicated_over_two": (CUBE, {"replicate": ("a", "b"), "shard": "c"}, HYBRID, 2),
}


def by_name(dims: dict[str, Any]) -> dict[str, Any]:
    return {"dp_mesh_dims": shardwise.DataParallelMeshDims(**dims)}


def named_run(layout: Layout | None, dims: dict[str, Any], placements: Any, shards: int) -> dict[str, Any]:
    if layout is not None:
        for name, param in hybrid(layout, UNEVEN, **by_name(dims)).named_parameters():
            assert isinstance(param, DTensor)
            assert (param.placements, param.device_mesh.size()) == (placements, layout.seat()[1]), name
            assert len(param.to_local()) in {len(rows) for rows in torch.ones(len(param)).chunk(shards)} | {0}
    return accumulated(layout, [[KEEP, SCATTER, ALL]] * 2, by_name(dims))


@pytest.mark.parametrize("name", NAMED)
def test_data_parallel_dimensions_are_chosen_by_name_and_shown_and_defer_gradients(
    world4: World, name: str
) -> None:
    assert_as_plain(world4, named_run, *NAMED[name])


# --- parameters that lie on the whole mesh --------------------------------------------------------


def distribute(model: nn.Module, layout: Layout) -> nn.Module:
    """Every parameter as a DTensor, whole on every rank of the mesh."""
    mesh = layout.mesh()
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                placed = distribute_tensor(param.detach(), mesh, [Replicate()] * mesh.ndim)
                setattr(module, name, nn.Parameter(placed))
    return model


def spmd_loss(model: nn.Module, inputs: Tensor, is_local: bool) -> Tensor:
    """The mean over this rank's rows, or over all."""
    outputs = model(inputs)
    if is_local and isinstance(outputs, DTensor):
        outputs, inputs = outputs.to_local(), inputs.to_local()  # type: ignore[attr-defined]
    return (outputs - inputs.sum(dim=-1, keepdim=True)).pow(2).mean()


def spmd_run(
    layout: Layout | None, dims: dict[str, Any], is_local: bool, scale: float = 1.0
) -> dict[str, Any]:
    """Inputs are DTensors on the whole mesh, each rank's rows of one global batch."""
    model = UNEVEN.model()
    if layout is not None:
        shard(distribute(model, layout), UNEVEN.but(options={"mesh": layout.mesh(), **by_name(dims)}))
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        inputs = layout_inputs(layout, step, 7)
        if layout is not None:
            spread = [Shard(0) if name in layout.data else Replicate() for name in layout.names]
            inputs = DTensor.from_local(inputs, layout.mesh(), spread, run_check=False)
        (spmd_loss(model, inputs, is_local) * scale).backward()
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **tensors_of(model)}


@pytest.mark.parametrize(
    ("name", "ranks", "is_local"),
    [
        ("second_of_two", 2, False),
        *(
            pytest.param(name, 4, is_local, marks=pytest.mark.slow)
            for name in ("hybrid_other_way", "sharded_over_both", "replicated_over_both")
            for is_local in (True, False)
        ),
    ],
)
def test_parameters_that_are_dtensors_on_the_whole_mesh_train_as_plainly(
    world4: World, name: str, ranks: int, is_local: bool
) -> None:
    """A loss that is a DTensor, a mean over all ranks, is divided by the global batch already, and by the ranks again."""
    layout, dims, _, _ = NAMED[name]
    expected = spmd_run(None, dims, is_local, scale=1.0 if is_local else 1 / ranks)
    assert_all_same(world4.run(spmd_run, layout, dims, is_local), expected)
