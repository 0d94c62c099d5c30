"""Hybrid sharding: sharded within each row of a mesh, replicated across its columns.

Training equals plain training on the global batch in float64 to 1e-10 (only the order of additions
differs), whatever the shape of the mesh and whatever is deferred between microbatches.
"""

from typing import Any

import pytest
import torch
from comparing import assert_all_same, assert_as_plain
from harness import World
from meshed import Layout, gradients_of, layout_inputs, part, refusal, seat, tensors_of, train_on, whole
from models import (
    even_tower,
    next_token_loss,
    odd_model,
    random_batch,
    token_batch,
    uneven_batch,
    uneven_tower,
)
from models import language_model as text_model
from reference import (
    Recipe,
    adamw,
    assert_same_record,
    full,
    mean_of_squares,
    plain_run,
    shard,
)
from thinning import pairs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise

EVEN = Recipe(even_tower, random_batch, steps=3)
UNEVEN = Recipe(uneven_tower, uneven_batch, steps=3)
ODD = Recipe(odd_model, random_batch, steps=3)
TEXT = Recipe(text_model, token_batch, loss=next_token_loss, steps=3)
RECIPES = {"even": EVEN, "uneven": UNEVEN, "odd": ODD, "text": TEXT}

SQUARE = Layout((2, 2))
LAYOUTS = [
    SQUARE,
    Layout((1, 4)),
    Layout((4, 1)),
    Layout((1, 2)),
    Layout((2, 1)),
    Layout((3, 1)),
    Layout((1, 1)),
]

by_layout = pytest.mark.parametrize(
    ("layout", "world"), [(each, each.size) for each in LAYOUTS], indirect=["world"], ids=str
)


def hybrid(layout: Layout, recipe: Recipe, **options: Any) -> nn.Module:
    return shard(recipe.model(), recipe.but(options={"mesh": layout.mesh(), **options}))


# --- training -------------------------------------------------------------------------------------


def hybrid_run(layout: Layout, recipe: Recipe, options: dict[str, Any]) -> Any:
    return train_on(layout, hybrid(layout, recipe, **options), recipe)


@pytest.mark.thin(490)
@by_layout
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_hybrid_training_equals_plain_training(world: World, layout: Layout, recipe: Recipe) -> None:
    expected = plain_run(recipe)
    for record in world.run(hybrid_run, layout, recipe, {}):
        assert_same_record(record, expected)


@pytest.mark.parametrize("reshard", [True, False])
def test_the_policy_of_resharding_changes_no_number(world4: World, reshard: bool) -> None:
    expected = plain_run(UNEVEN)
    for record in world4.run(hybrid_run, SQUARE, UNEVEN, {"reshard_after_forward": reshard}):
        assert_same_record(record, expected)


# --- what the caller sees -------------------------------------------------------------------------


def shown(layout: Layout, recipe: Recipe) -> dict[str, Any]:
    """Placements and this rank's shards, after a step."""
    model = hybrid(layout, recipe)
    optimizer = adamw(model)
    mean_of_squares(model, part(recipe.batch(0, 12), *layout.seat())).backward()
    optimizer.step()
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert isinstance(param.grad, DTensor)
        assert param.device_mesh == layout.mesh()
        assert param.grad.device_mesh == layout.mesh()
        assert param.placements == param.grad.placements
        states = optimizer.state[param]
        assert states["exp_avg"].placements == param.placements
        found[name] = (param.placements, param.to_local().detach().clone(), param.grad.to_local().clone())
    return found


@pytest.mark.thin(27)
@pytest.mark.parametrize("recipe", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("layout", [SQUARE, Layout((1, 4)), Layout((4, 1))], ids=str)
def test_parameters_are_replicated_and_sharded_on_the_mesh(
    world4: World, layout: Layout, recipe: Recipe
) -> None:
    ranks = world4.run(shown, layout, recipe)
    replicas, shards = layout.shape
    plain = dict(recipe.model().named_parameters())
    for rank, found in enumerate(ranks):
        assert found.keys() == plain.keys()
        for name, (placements, local, gradient) in found.items():
            assert placements == (Replicate(), Shard(0))
            rows = len(plain[name])
            chunk = -(-rows // shards)
            mine = rank % shards
            assert len(local) == max(0, min(rows, (mine + 1) * chunk) - mine * chunk), name
            twin = ranks[mine][name]  # the same shard in the first replica
            assert torch.equal(local, twin[1]), f"{name}: the replicas have drifted apart"
            assert torch.equal(gradient, twin[2]), f"{name}: the replicas have different gradients"
    assert replicas * shards == len(ranks)


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


def announce(model: nn.Module, what: tuple[bool, bool]) -> None:
    if isinstance(model, shardwise.FSDPModule):
        model.set_requires_gradient_sync(what[0])
        model.set_requires_all_reduce(what[1])


def accumulated(
    layout: Layout | None, recipe: Recipe, pattern: list[tuple[bool, bool]], options: dict[str, Any]
) -> dict[str, Any]:
    model = recipe.model() if layout is None else hybrid(layout, recipe, **options)
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        for microbatch, what in enumerate(pattern):
            announce(model, what)
            inputs = part(recipe.batch(10 * step + microbatch, 12), *seat(layout))
            (mean_of_squares(model, inputs) / len(pattern)).backward()
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **tensors_of(model)}


@pytest.mark.thin(206)
@pytest.mark.parametrize("recipe", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_microbatches_add_up_however_they_are_deferred(
    world4: World, pattern: list[tuple[bool, bool]], recipe: Recipe
) -> None:
    assert_as_plain(world4, accumulated, SQUARE, recipe, pattern, {})


@pytest.mark.parametrize("layout", [Layout((4, 1)), Layout((1, 4))], ids=str)
def test_deferring_works_when_one_of_the_dimensions_is_trivial(world4: World, layout: Layout) -> None:
    pattern = PATTERNS["scatter_then_all"]
    assert_as_plain(world4, accumulated, layout, UNEVEN, pattern, {})


@pytest.mark.parametrize("reshard", [True, False])
def test_deferring_works_whatever_is_freed_after_forward(world4: World, reshard: bool) -> None:
    pattern, options = PATTERNS["keep_scatter_all"], {"reshard_after_forward": reshard}
    ranks = world4.run(accumulated, SQUARE, EVEN, pattern, options)
    assert_all_same(ranks, accumulated(None, EVEN, pattern, {}))


def clear(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    if how == "by_hand":
        for param in model.parameters():
            param.grad = None
    else:
        owner = model if how.startswith("model") else optimizer
        owner.zero_grad(set_to_none=how.endswith("none"))


def deferred_then_cleared(
    layout: Layout | None, how: str, deferred: tuple[bool, bool], has_grad: bool
) -> dict[str, Any]:
    model = EVEN.model() if layout is None else hybrid(layout, EVEN)
    optimizer = adamw(model)
    if has_grad:
        mean_of_squares(model, layout_inputs(layout, 9)).backward()
    announce(model, deferred)
    for microbatch in range(2):
        mean_of_squares(model, layout_inputs(layout, microbatch)).backward()
    clear(model, optimizer, how)
    announce(model, ALL)
    mean_of_squares(model, layout_inputs(layout, 2)).backward()
    notes = {f"first: {name}": value for name, value in gradients_of(model).items()}
    optimizer.step()
    optimizer.zero_grad()
    mean_of_squares(model, layout_inputs(layout, 3)).backward()
    return {**notes, **tensors_of(model)}


@pytest.mark.thin(53)
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("deferred", [SCATTER, KEEP], ids=["scatter", "keep"])
@pytest.mark.parametrize("how", ["model_none", "model_zeros", "optimizer_none", "optimizer_zeros", "by_hand"])
def test_clearing_gradients_clears_what_the_replicas_have_deferred(
    world4: World, how: str, deferred: tuple[bool, bool], has_grad: bool
) -> None:
    assert_as_plain(world4, deferred_then_cleared, SQUARE, how, deferred, has_grad)


def clipped(layout: Layout | None) -> dict[str, Any]:
    """A step of everyday training: two microbatches, clipping, an evaluation between the steps."""
    model = UNEVEN.model() if layout is None else hybrid(layout, UNEVEN)
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for step in range(3):
        optimizer.zero_grad()
        for microbatch, what in enumerate([SCATTER, ALL]):
            announce(model, what)
            mean_of_squares(model, layout_inputs(layout, 10 * step + microbatch, 7)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        notes[f"norm {step}"] = whole(norm)
        optimizer.step()
        with torch.no_grad():
            notes[f"evaluation {step}"] = model(random_batch(99, 3, 7))
    return {**notes, **{name: full(value) for name, value in model.state_dict().items()}}


def test_deferring_clipping_and_evaluating_train_as_plainly(world4: World) -> None:
    assert_as_plain(world4, clipped, SQUARE)


# --- the divisor ----------------------------------------------------------------------------------


def divided(layout: Layout | None, factor: float, pattern: list[tuple[bool, bool]]) -> dict[str, Any]:
    model = EVEN.model() if layout is None else hybrid(layout, EVEN)
    if layout is not None:
        model.set_gradient_divide_factor(factor)
    for microbatch, what in enumerate(pattern):
        announce(model, what)
        mean_of_squares(model, layout_inputs(layout, microbatch)).backward()
    return gradients_of(model)


@pytest.mark.thin(18)
@pytest.mark.parametrize(
    "layout", [SQUARE, Layout((4, 1)), Layout((1, 4)), Layout((4,), ("shard",), ("shard",))], ids=str
)
@pytest.mark.parametrize("factor", [1.0, 3.0, 4.0, 10.0])
@pytest.mark.parametrize("pattern", ["all_each_time", "scatter_then_all"])
def test_gradients_are_the_sum_over_all_ranks_divided_by_the_factor(
    world4: World, layout: Layout, factor: float, pattern: str
) -> None:
    ranks = world4.run(divided, layout, factor, PATTERNS[pattern])
    mean = divided(None, factor, PATTERNS[pattern])
    assert_all_same(ranks, {name: value * (4 / factor) for name, value in mean.items()}, atol=1e-9)


# --- low precision --------------------------------------------------------------------------------


class Gain(nn.Module):
    """Its gradient is what it is multiplied with: exact in bfloat16 where that is a small integer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def reduced_in_float32(pattern: list[tuple[bool, bool]], by_rank: list[float]) -> Tensor:
    rank, _ = SQUARE.seat()
    policy = shardwise.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shardwise.fully_shard(Gain(), mesh=SQUARE.mesh(), mp_policy=policy)
    for what in pattern:
        announce(model, what)
        model(torch.full((6,), by_rank[rank])).sum().backward()
    assert model.gain.grad.dtype == torch.float32
    return whole(model.gain.grad)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_bfloat16_gradients_are_reduced_and_deferred_in_float32(
    world4: World, pattern: list[tuple[bool, bool]]
) -> None:
    """In bfloat16, 256 + 1 is 256: any sum in it over ranks or microbatches would show."""
    for gradient in world4.run(reduced_in_float32, pattern, [256.0, 1.0, 3.0, 1.0]):
        assert torch.equal(gradient, torch.full((6,), len(pattern) * 261 / 4))


# --- dimensions by name ---------------------------------------------------------------------------

PAIR = Layout((2, 2), ("a", "b"), ("a", "b"))
CUBE = Layout((2, 1, 2), ("a", "b", "c"), ("a", "b", "c"))
LINE = Layout((4,), ("a",), ("a",))
ONE_OF_TWO = Layout((2, 2), ("a", "b"), ("a",))
OTHER_OF_TWO = Layout((2, 2), ("a", "b"), ("b",))

NAMED = {
    "hybrid": (PAIR, {"replicate": "a", "shard": "b"}),
    "hybrid_other_way": (PAIR, {"replicate": "b", "shard": "a"}),
    "sharded_over_both": (PAIR, {"shard": ("a", "b")}),
    "replicated_over_both": (PAIR, {"replicate": ("a", "b")}),
    "replicated": (LINE, {"replicate": "a"}),
    "sharded": (LINE, {"shard": "a"}),
    "first_of_two": (ONE_OF_TWO, {"shard": "a"}),
    "second_of_two": (OTHER_OF_TWO, {"shard": "b"}),
    "first_of_two_replicated": (ONE_OF_TWO, {"replicate": "a"}),
    "tuple_of_one": (PAIR, {"replicate": ("a",), "shard": ("b",)}),
    "cube_sharded_over_two": (CUBE, {"replicate": "a", "shard": ("b", "c")}),
    "cube_replicated_over_two": (CUBE, {"replicate": ("a", "b"), "shard": "c"}),
    "cube_sharded_over_all": (CUBE, {"shard": ("a", "b", "c")}),
}


def by_name(layout: Layout, dims: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"mesh": layout.mesh(), "dp_mesh_dims": shardwise.DataParallelMeshDims(**dims), **options}


def named_run(layout: Layout, recipe: Recipe, dims: dict[str, Any]) -> Any:
    model = shard(recipe.model(), recipe.but(options=by_name(layout, dims)))
    return train_on(layout, model, recipe)


@pairs(("chosen", "recipe"), NAMED, {"even": EVEN, "uneven": UNEVEN}, every=5)
def test_data_parallel_dimensions_are_chosen_by_name(
    world4: World, chosen: tuple[Layout, dict[str, Any]], recipe: Recipe
) -> None:
    layout, dims = chosen
    expected = plain_run(recipe)
    for record in world4.run(named_run, layout, recipe, dims):
        assert_same_record(record, expected)


def named_accumulation(layout: Layout | None, dims: dict[str, Any]) -> dict[str, Any]:
    model = UNEVEN.model()
    if layout is not None:
        shard(model, UNEVEN.but(options=by_name(layout, dims)))
    for microbatch, what in enumerate([KEEP, SCATTER, ALL]):
        announce(model, what)
        mean_of_squares(model, layout_inputs(layout, microbatch, 7)).backward()
    return gradients_of(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["hybrid", "replicated", "replicated_over_both", "cube_sharded_over_two"])
def test_named_dimensions_defer_their_gradients_too(world4: World, name: str) -> None:
    layout, dims = NAMED[name]
    assert_as_plain(world4, named_accumulation, layout, dims)


def local_sizes(layout: Layout, dims: dict[str, Any]) -> dict[str, Any]:
    model = shard(EVEN.model(), EVEN.but(options=by_name(layout, dims)))
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        found[name] = (param.placements, param.device_mesh.size(), param.to_local().numel() / param.numel())
    return found


REPLICATED, SHARDED = Replicate(), Shard(0)
PLACED = {
    "hybrid": ((REPLICATED, SHARDED), 4, 1 / 2),
    "sharded_over_both": ((SHARDED,), 4, 1 / 4),
    "replicated": ((REPLICATED,), 4, 1),
    "sharded": ((SHARDED,), 4, 1 / 4),
    "cube_sharded_over_two": ((REPLICATED, SHARDED), 4, 1 / 2),
}


@pytest.mark.parametrize("name", PLACED)
def test_parameters_show_the_named_dimensions(world4: World, name: str) -> None:
    """Several dimensions that shard show as one; replicas keep whole parameters."""
    placements, ranks, fraction = PLACED[name]
    for found in world4.run(local_sizes, *NAMED[name]):
        wide = {n: each for n, each in found.items() if not n.startswith("outlet")}  # has a single row
        assert all(each == (placements, ranks, fraction) for each in wide.values()), wide


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
        shard(distribute(model, layout), UNEVEN.but(options=by_name(layout, dims)))
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for step in range(3):
        optimizer.zero_grad()
        inputs = layout_inputs(layout, step, 7)
        if layout is not None:
            spread = [Shard(0) if name in layout.data else Replicate() for name in layout.names]
            inputs = DTensor.from_local(inputs, layout.mesh(), spread, run_check=False)
        (spmd_loss(model, inputs, is_local) * scale).backward()
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **tensors_of(model)}


SPMD = [name for name in NAMED if not name.startswith("cube")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPMD)
def test_parameters_that_are_dtensors_on_the_whole_mesh_train_as_plainly(world4: World, name: str) -> None:
    layout, dims = NAMED[name]
    assert_as_plain(world4, spmd_run, layout, dims, True)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "ranks"), [("hybrid", 4), ("sharded_over_both", 4), ("second_of_two", 2)])
def test_gradients_are_averaged_even_when_the_loss_is_a_mean_over_all_ranks(
    world4: World, name: str, ranks: int
) -> None:
    """A loss that is a DTensor is divided by the global batch already, and by the ranks again."""
    layout, dims = NAMED[name]
    expected = spmd_run(None, dims, False, scale=1 / ranks)
    assert_all_same(world4.run(spmd_run, layout, dims, False), expected)


# --- refusals -------------------------------------------------------------------------------------


def refused(case: str) -> str:
    dims = shardwise.DataParallelMeshDims
    model = EVEN.model()
    cases: dict[str, Any] = {
        "nothing_named": lambda: dims(),
        "unknown_name": lambda: shardwise.fully_shard(
            model, mesh=PAIR.mesh(), dp_mesh_dims=dims(shard="rows")
        ),
        "named_twice": lambda: shardwise.fully_shard(
            model, mesh=PAIR.mesh(), dp_mesh_dims=dims(shard="a", replicate="a")
        ),
        "three_dimensions": lambda: shardwise.fully_shard(model, mesh=CUBE.mesh()),
    }
    message = refusal(cases[case])
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    return message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nothing_named", ["ValueError", "shard", "replicate"]),
        ("unknown_name", ["ValueError", "rows"]),
        ("named_twice", ["Error", "a"]),
        ("three_dimensions", ["ValueError", "esh"]),
    ],
)
def test_meshes_that_do_not_fit_are_refused_and_nothing_changes(
    world4: World, case: str, words: list[str]
) -> None:
    for message in world4.run(refused, case):
        assert all(word in message for word in words), message
