"""Where shards lie: on which dimension, on which mesh, on how many ranks after forward, on which device.

Training equals plain training on the global batch in float64 to 1e-10 with pairs of these and what people
combine them with; with each alone: test_parity.py.
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
from meshed import Layout, gradients_of, layout_inputs, parameters_of, part, tensors_of, whole
from models import WIDTH, Block, built, random_batch, shard_tower
from on_ranks import on_ranks
from reference import LocalAdamW, Recipe, adamw, full, mean_of_squares, shard
from test_parity import CONVOLUTIONS, EVEN, LINES, SQUARE, UNEVEN, largest, last, second
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardwise

LINE = LINES[4]

PlacementFn = Callable[[nn.Parameter], Any]


# --- on which dimension ---------------------------------------------------------------------------


def shown(layout: Layout, recipe: Recipe, place: PlacementFn | None) -> dict[str, Any]:
    model = shard(recipe.model(), recipe.but(options={"mesh": layout.mesh(), "shard_placement_fn": place}))
    local = {name: param.to_local().detach().clone() for name, param in model.named_parameters()}
    mean_of_squares(model, part(recipe.batch(0, 12), *layout.seat())).backward()
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor)
        assert param.device_mesh == param.grad.device_mesh == layout.mesh()
        assert param.grad.placements == param.placements
        found[name] = param.placements, local[name], param.grad.to_local()
    return found


@pytest.mark.parametrize(
    ("world", "layout", "place", "recipe"),
    [
        pytest.param(3, LINES[3], last, UNEVEN, id="uneven, last"),
        pytest.param(3, LINES[3], second, CONVOLUTIONS, id="convolutions, second"),
        pytest.param(3, LINES[3], largest, EVEN, id="even, largest"),
        pytest.param(4, SQUARE, None, UNEVEN, id="hybrid"),
    ],
    indirect=["world"],
)
def test_each_rank_holds_its_chunk_of_the_dimension(
    world: World, layout: Layout, place: PlacementFn | None, recipe: Recipe
) -> None:
    """As torch.chunk cuts: ceil(size / ranks) each, the last ranks perhaps with fewer or none. Replicas hold the same."""
    ranks = world.run(shown, layout, recipe, place)
    replicas, shards = ([], 3) if layout is LINES[3] else ([Replicate()], 2)
    for name, value in recipe.model().named_parameters():
        dim = ((place and place(value)) or Shard(0)).dim % value.ndim
        chunks = list(value.detach().chunk(shards, dim))
        for rank, found in enumerate(ranks):
            placements, local, gradient = found[name]
            assert placements == (*replicas, Shard(dim)), f"{name}: {placements}"
            assert gradient.shape == local.shape
            assert torch.equal(gradient, ranks[rank % shards][name][2])
            if rank % shards < len(chunks):
                assert torch.equal(local, chunks[rank % shards]), f"{name} on rank {rank}"
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
    "named by torch's class, uneven, checkpointed": Experts(result="torchs", hidden=13, checkpointed=True),
    "beside hybrids, on columns, in microbatches": Experts(hybrid=True, column=True, microbatches=2),
    "kept, partly frozen": Experts(options={"reshard_after_forward": False}, frozen="experts.0.up"),
}


@pytest.mark.parametrize("experts", MIXTURES.values(), ids=MIXTURES)
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


def resharded(layout: Layout | None, place: PlacementFn | None) -> dict[str, Any]:
    """What may happen between forward and backward, on 2 ranks of 4."""
    model = UNEVEN.model()
    if layout is not None:
        shard_tower(model, mesh=layout.mesh(), reshard_after_forward=2, shard_placement_fn=place)
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        with torch.no_grad():  # an evaluation, of which no backward follows
            notes[f"evaluation {step}"] = model(random_batch(50 + step, 3, 7))
        first = mean_of_squares(model, layout_inputs(layout, 10 * step, 7))
        if layout is not None:
            for param in model.parameters():
                assert isinstance(param, DTensor)
                assert param.device_mesh == layout.mesh(), "what is shown is not the shard"
        notes |= {f"between {step}: {name}": full(v) for name, v in model.state_dict().items()}
        second_loss = mean_of_squares(model, layout_inputs(layout, 10 * step + 1, 7))
        (first + second_loss).backward()
        notes[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return {**notes, **tensors_of(model)}


@pytest.mark.parametrize("place", [None, second], ids=["rows", "columns"])
def test_between_forward_and_backward_the_shards_are_shown_and_right(
    world4: World, place: PlacementFn | None
) -> None:
    assert_all_same(world4.run(resharded, LINE, place), resharded(None, None))


# --- pairs ----------------------------------------------------------------------------------------


class Checkpointed(Chain):
    def __init__(self, reentrant: bool | None, hidden: int) -> None:
        super().__init__(*[lambda: Block(WIDTH, hidden)] * 2)
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
DOES_ALL = Habit(reentrant=False, microbatches=2, clip=True, frozen=("blocks.0.norm",))

PAIRS: dict[str, tuple[Feature, Habit]] = {
    "hybrid columns, accumulation and clipping": (Feature(SQUARE, place=last), ACCUMULATES_AND_CLIPS),
    "pinned offload, frozen": (Feature(offloads=True, pins=True), FREEZES),  # nothing to pin for on a host
    "offload of kept columns, everything": (Feature(place=last, offloads=True, reshard=False), DOES_ALL),
    "hybrid, reentrant checkpointing": (Feature(SQUARE), CHECKPOINTS_REENTRANTLY),
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
