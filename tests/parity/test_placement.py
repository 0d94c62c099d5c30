"""Where shards lie: on which dimension, on which mesh, on how many ranks after forward, on which device.

Training equals plain training on the global batch in float64 to 1e-10, with each of these alone and in
pairs with what people combine them with.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_all_same, assert_as_plain
from failure_models import Chain
from harness import World
from meshed import Layout, gradients_of, layout_inputs, parameters_of, part, tensors_of, train_on, whole
from models import (
    WIDTH,
    Block,
    built,
    even_tower,
    language_model,
    next_token_loss,
    odd_model,
    random_batch,
    shard_tower,
    token_batch,
    uneven_batch,
    uneven_tower,
)
from on_ranks import on_ranks
from reference import LocalAdamW, Recipe, adamw, assert_same_record, full, mean_of_squares, plain_run, shard
from scenario import Side
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import shardwise

LINES = {size: Layout((size,), ("shard",), ("shard",)) for size in (1, 2, 3, 4)}
LINE = LINES[4]
SQUARE = Layout((2, 2))

# --- on which dimension ---------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Weights of three and four dimensions, none of which divides by 2 and 4 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(1, 8, (3, 5), padding=(1, 2))
        self.blocks = nn.ModuleList([nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 4, (2, 4), padding=1)])
        self.line = nn.Conv1d(4, 8, 4, padding=2)
        self.outlet = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x.view(-1, 1, 2, x.shape[1] // 2))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(self.line(x.flatten(2)).mean(-1))


EVEN = Recipe(even_tower, random_batch, steps=2)
UNEVEN = Recipe(uneven_tower, uneven_batch, steps=2)
ODD = Recipe(odd_model, random_batch, steps=2)
TEXT = Recipe(language_model, token_batch, loss=next_token_loss, steps=2)
CONVOLUTIONS = Recipe(Convolutions, random_batch, steps=2)


def second(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def last(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim else None


def before_last(param: nn.Parameter) -> Shard | None:
    return Shard(-2) if param.ndim > 1 else None


def largest(param: nn.Parameter) -> Shard | None:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim])) if param.ndim else None


def smallest(param: nn.Parameter) -> Shard | None:
    return Shard(min(range(param.ndim), key=lambda dim: param.shape[dim])) if param.ndim else None


PlacementFn = Callable[[nn.Parameter], Any]


@pytest.mark.parametrize(
    ("world", "layout", "recipe", "place", "reshard"),
    [
        pytest.param(1, LINES[1], UNEVEN, last, True, id="1, uneven, last"),
        pytest.param(2, LINES[2], EVEN, smallest, True, id="2, even, smallest"),
        pytest.param(2, LINES[2], CONVOLUTIONS, second, False, id="2, convolutions, second"),
        pytest.param(3, LINES[3], ODD, largest, None, id="3, odd, largest"),
        pytest.param(3, LINES[3], TEXT, before_last, None, id="3, text, before last"),
        pytest.param(4, LINE, UNEVEN, last, None, id="4, uneven, last"),
        pytest.param(4, LINE, ODD, last, False, id="4, odd, last"),
        pytest.param(4, SQUARE, CONVOLUTIONS, second, None, id="hybrid, convolutions, second"),
    ],
    indirect=["world"],
)
@on_ranks()
def test_any_number_of_ranks_and_hybrids_may_shard_parameters_on_any_dimension(
    layout: Layout, recipe: Recipe, place: PlacementFn, reshard: bool | None
) -> None:
    expected = plain_run(recipe)
    options = {"mesh": layout.mesh(), "shard_placement_fn": place, "reshard_after_forward": reshard}
    model = shard(recipe.model(), recipe.but(options=options))
    record = train_on(layout, model, recipe)
    Side(is_sharded=True).assert_settled(model)
    assert_same_record(record, expected)


def shown(layout: Layout, recipe: Recipe, place: PlacementFn) -> dict[str, Any]:
    options = {"mesh": layout.mesh(), "shard_placement_fn": place}
    model = shard(recipe.model(), recipe.but(options=options))
    mean_of_squares(model, part(recipe.batch(0, 12), *layout.seat())).backward()
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert isinstance(param.grad, DTensor)
        assert param.grad.placements == param.placements
        found[name] = param.placements, param.to_local().detach().clone(), param.grad.to_local().shape
    return found


@pytest.mark.parametrize(
    ("place", "recipe"),
    [(last, UNEVEN), (second, CONVOLUTIONS), (largest, EVEN)],
    ids=["uneven", "convolutions", "even"],
)
def test_each_rank_holds_its_chunk_of_the_dimension(
    world3: World, place: PlacementFn, recipe: Recipe
) -> None:
    """As torch.chunk cuts: ceil(size / ranks) each, the last ranks perhaps with fewer or none."""
    ranks = world3.run(shown, LINES[3], recipe, place)
    for name, value in recipe.model().named_parameters():
        dim = (place(value) or Shard(0)).dim % value.ndim
        chunks = list(value.detach().chunk(3, dim))
        for rank, found in enumerate(ranks):
            placements, local, gradient = found[name]
            assert placements == (Shard(dim),), f"{name}: {placements}"
            assert gradient == local.shape
            if rank < len(chunks):
                assert torch.equal(local, chunks[rank]), f"{name} on rank {rank}"
            else:
                assert local.numel() == 0, f"{name} on rank {rank}"


# --- on which mesh --------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class MixtureBlock(nn.Module):
    """One expert of two for each row: the first half of the batch has the first one.

    On a mesh every rank has one expert only, and all its rows are for that one.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Expert(hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.norm(x).chunk(len(self.experts))
        return x + torch.cat([expert(p) for expert, p in zip(self.experts, parts, strict=True)])


class Mixture(Chain):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__(*[lambda: MixtureBlock(hidden)] * 2)


@dataclass(frozen=True)
class Experts:
    hidden: int = 16
    frozen: str = ""  # names that contain it
    result: str = "ours"  # how the mesh is named: a DeviceMesh, or what torch's own function returns
    hybrid: bool = False  # the dense parameters are hybrid
    column: bool = False  # experts on dimension 1
    checkpointed: bool = False
    microbatches: int = 1
    options: dict[str, Any] = field(default_factory=dict)


EXPERT_MESH = Layout((2, 2), ("ep", "fsdp"), ("ep", "fsdp"))


class TorchsResult:
    """Has the attributes of torch's ShardPlacementResult and of its mesh info."""

    def __init__(self, placement: Shard, mesh: DeviceMesh) -> None:
        self.placement = placement
        self.mesh_info = self
        self.mesh = mesh
        self.shard_mesh_dim = 0


def where_experts_go(param: nn.Parameter, ids: set[int], experts: Experts) -> Any:
    if id(param) not in ids:
        return None
    placement = Shard(1) if experts.column and param.ndim > 1 else Shard(0)
    mesh = EXPERT_MESH.mesh()["fsdp"]
    if experts.result == "ours":
        return shardwise.policies.ShardPlacementResult(placement, mesh)
    return TorchsResult(placement, mesh)


def mixture(experts: Experts, only: int | None) -> Mixture:
    """Both halves have the weights that the whole model has."""
    model = built(Mixture, experts.hidden)
    if only is not None:
        for block in model.blocks:
            del block.experts[1 - only]
    names = whole_names(model, only or 0)
    for name, param in names.items():
        if experts.frozen and experts.frozen in name:
            param.requires_grad_(False)
    return model


def whole_names(model: nn.Module, only: int) -> dict[str, nn.Parameter]:
    params = dict(model.named_parameters())
    if any("experts.1." in name for name in params):
        return params
    return {name.replace("experts.0.", f"experts.{only}."): param for name, param in params.items()}


def plain_experts(experts: Experts) -> dict[str, Any]:
    """Gradients of experts are averaged over the ranks of their own mesh, half of all: twice as large."""
    model = mixture(experts, None)
    for name, param in model.named_parameters():
        if ".experts." in name and param.requires_grad:
            param.register_hook(lambda gradient: gradient * 2)
    return steps_of_experts(experts, model, dict(model.named_parameters()), 0, 1)


def steps_of_experts(
    experts: Experts, model: nn.Module, names: dict[str, nn.Parameter], index: int, count: int
) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    notes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(experts.microbatches):
            if isinstance(model, shardwise.FSDPModule):
                model.set_requires_gradient_sync(microbatch == experts.microbatches - 1)
            inputs = part(random_batch(10 * step + microbatch, 12), index, count)
            if experts.checkpointed:
                outputs = checkpoint(model, inputs, use_reentrant=False)
            else:
                outputs = model(inputs)
            (outputs - inputs.sum(-1, keepdim=True)).pow(2).mean().backward()
        notes |= {f"step {step}: gradient of {name}": full(param.grad) for name, param in names.items()}
        optimizer.step()
    return {**notes, **{name: full(param) for name, param in names.items()}}


MIXTURES = {
    "uneven": Experts(hidden=13),
    "from_torch": Experts(result="torchs"),
    "hybrid": Experts(hybrid=True),
    "columns": Experts(column=True, hidden=13),
    "frozen_half_of_an_expert": Experts(frozen="experts.0.up"),
    "checkpointed_frozen": Experts(checkpointed=True, frozen="inlet", hidden=13),
    "microbatches": Experts(microbatches=3, hidden=13),
    "kept": Experts(options={"reshard_after_forward": False}),
    "hybrid_frozen_microbatches": Experts(hybrid=True, frozen="up", microbatches=2),
}


@pytest.mark.parametrize(
    "experts",
    [
        pytest.param(
            each, id=name, marks=() if name in ("from_torch", "hybrid", "kept") else pytest.mark.slow
        )
        for name, each in MIXTURES.items()
    ],
)
@on_ranks(4)
def test_experts_lie_on_another_mesh_than_the_rest(experts: Experts) -> None:
    """One expert per half of the ranks, sharded within the half; the rest over all ranks."""
    plain = plain_experts(experts)
    only, _ = EXPERT_MESH.mesh().get_coordinate() or (0, 0)
    model = mixture(experts, only)
    ids = {id(p) for name, p in model.named_parameters() if ".experts." in name}
    dense = EXPERT_MESH.mesh() if experts.hybrid else LINE.mesh()
    options: dict[str, Any] = {
        "mesh": dense,
        "shard_placement_fn": partial(where_experts_go, ids=ids, experts=experts),
        **experts.options,
    }
    shard_tower(model, **options)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        expected = EXPERT_MESH.mesh()["fsdp"] if ".experts." in name else dense
        assert param.device_mesh == expected, name
    found = steps_of_experts(experts, model, whole_names(model, only), *EXPERT_MESH.seat())
    mine = f"experts.{dist.get_rank() // 2}."
    want = {name: v for name, v in plain.items() if ".experts." not in name or mine in name}
    assert_all_same([found], want)


# --- on how many ranks after forward --------------------------------------------------------------


def line_run(recipe: Recipe, options: dict[str, Any]) -> Any:
    layout = LINES[dist.get_world_size()]
    model = shard(recipe.model(), recipe.but(options={"mesh": layout.mesh(), **options}))
    return train_on(layout, model, recipe)


@pytest.mark.parametrize(
    ("ranks", "recipe"), [(2, ODD), (2, UNEVEN), (4, TEXT)], ids=["odd", "uneven", "text"]
)
def test_resharding_to_fewer_ranks_changes_no_number(world4: World, ranks: int, recipe: Recipe) -> None:
    expected = plain_run(recipe)
    for record in world4.run(line_run, recipe, {"reshard_after_forward": ranks}):
        assert_same_record(record, expected)


def resharded(layout: Layout | None, recipe: Recipe, place: PlacementFn | None) -> dict[str, Any]:
    """What may happen between forward and backward, on 2 ranks of 4."""
    model = recipe.model()
    if layout is not None:
        options = {"mesh": layout.mesh(), "reshard_after_forward": 2, "shard_placement_fn": place}
        shard(model, recipe.but(options=options))
    optimizer = adamw(model)
    width = recipe.batch(0, 1).shape[1]
    notes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        with torch.no_grad():  # an evaluation, of which no backward follows
            notes[f"evaluation {step}"] = model(random_batch(50 + step, 3, width))
        first = mean_of_squares(model, layout_inputs(layout, 10 * step, width))
        if layout is not None:
            for param in model.parameters():
                assert isinstance(param, DTensor)
                assert param.device_mesh == layout.mesh(), "what is shown is not the shard"
        notes |= {f"between {step}: {name}": full(v) for name, v in model.state_dict().items()}
        second_loss = mean_of_squares(model, layout_inputs(layout, 10 * step + 1, width))
        (first + second_loss).backward()
        notes[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return {**notes, **tensors_of(model)}


@pytest.mark.parametrize("place", [None, second], ids=["rows", "columns"])
def test_between_forward_and_backward_the_shards_are_shown_and_right(
    world4: World, place: PlacementFn | None
) -> None:
    assert_all_same(world4.run(resharded, LINE, UNEVEN, place), resharded(None, UNEVEN, None))


# --- pairs ----------------------------------------------------------------------------------------


class Checkpointed(Chain):
    def __init__(self, reentrant: bool | None, hidden: int) -> None:
        super().__init__(*[lambda: Block(WIDTH, hidden)] * 3)
        self.reentrant = reentrant

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[return-value]


@dataclass(frozen=True)
class Feature:
    """One choice of where shards lie."""

    layout: Layout = LINES[2]
    place: PlacementFn | None = None
    reshard: int | bool | None = None
    offloads: bool = False
    pins: bool = False

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"mesh": self.layout.mesh(), "reshard_after_forward": self.reshard}
        if self.place is not None:
            found["shard_placement_fn"] = self.place
        if self.offloads:
            found["offload_policy"] = shardwise.CPUOffloadPolicy(pin_memory=self.pins)
        return found


@dataclass(frozen=True)
class Habit:
    hidden: int = 13
    reentrant: bool | None = None  # None: no checkpointing
    microbatches: int = 1
    clip: bool = False
    frozen: tuple[str, ...] = ()


def habitual(feature: Feature | None, habit: Habit) -> dict[str, Any]:
    model = built(Checkpointed, habit.reentrant, habit.hidden)
    for name, param in model.named_parameters():
        param.requires_grad_(not (habit.frozen and name.startswith(habit.frozen)))
    layout = None if feature is None else feature.layout
    if feature is not None:
        shard_tower(model, **feature.options())
    optimizer = LocalAdamW(model.parameters(), lr=1e-2, foreach=True)
    notes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(habit.microbatches):
            if feature is not None:
                model.set_requires_gradient_sync(microbatch == habit.microbatches - 1)
            inputs = layout_inputs(layout, 10 * step + microbatch)
            mean_of_squares(model, inputs).backward()
        if habit.clip:
            notes[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **parameters_of(model)}


CHECKPOINTS, CHECKPOINTS_REENTRANTLY = Habit(reentrant=False), Habit(reentrant=True)
ACCUMULATES_AND_CLIPS = Habit(microbatches=3, clip=True)
FREEZES = Habit(frozen=("blocks.1", "blocks.0.up", "inlet.bias"))
DOES_ALL = Habit(reentrant=False, microbatches=2, clip=True, frozen=("blocks.2.norm",))

PAIRS: dict[str, tuple[Feature, Habit]] = {
    "columns, accumulation and clipping": (Feature(place=second), ACCUMULATES_AND_CLIPS),
    "columns, checkpointing": (Feature(place=second), CHECKPOINTS),
    "pinned offload, frozen": (Feature(offloads=True, pins=True), FREEZES),  # nothing to pin for on a host
    "offload of kept columns, everything": (Feature(place=second, offloads=True, reshard=False), DOES_ALL),
    "hybrid, reentrant checkpointing": (Feature(SQUARE), CHECKPOINTS_REENTRANTLY),
    "hybrid columns, accumulation and clipping": (Feature(SQUARE, place=last), ACCUMULATES_AND_CLIPS),
    "hybrid offload of columns, checkpointing": (
        Feature(SQUARE, place=largest, offloads=True, reshard=True),
        CHECKPOINTS,
    ),
    "smaller world, frozen": (Feature(LINE, reshard=2), FREEZES),
    "smaller world of columns, reentrant checkpointing": (
        Feature(LINE, reshard=2, place=last),
        CHECKPOINTS_REENTRANTLY,
    ),
    "smaller world, offload, everything": (Feature(LINE, reshard=2, offloads=True), DOES_ALL),
}


@pytest.mark.parametrize(
    ("world", "feature", "habit"),
    [pytest.param(feature.layout.size, feature, habit, id=name) for name, (feature, habit) in PAIRS.items()],
    indirect=["world"],
)
def test_placements_go_with_habits(world: World, feature: Feature, habit: Habit) -> None:
    assert_as_plain(world, habitual, feature, habit)


# --- offloading -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "recipe", "pins"),
    [(1, ODD, True), (2, TEXT, False), (3, UNEVEN, True)],
    indirect=["world"],
    ids=["odd", "text", "uneven"],
)
@on_ranks()
def test_offloading_changes_no_number(recipe: Recipe, pins: bool) -> None:
    expected = plain_run(recipe)
    record = line_run(recipe, {"offload_policy": shardwise.CPUOffloadPolicy(pin_memory=pins)})
    assert_same_record(record, expected)
