"""Where shards lie: on which dimension, on which mesh, on how many ranks after forward, on which device.

Training equals plain training on the global batch in float64 to 1e-10 with pairs of these and what people
combine them with; with each alone: test_parity.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_all_same
from failure_models import Chain
from harness import World
from meshed import Layout, gradients_of, layout_inputs, parameters_of, part, tensors_of, whole
from models import WIDTH, Block, built, random_batch, shard_tower
from on_ranks import on_ranks
from reference import Recipe, adamw, full, mean_of_squares, shard
from scenario import Side, same_as_plain
from test_parity import CONVOLUTIONS, EVEN, LINES, SQUARE, UNEVEN, largest, last, second
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import CPUOffloadPolicy

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
    def __init__(self) -> None:
        super().__init__(*[lambda: MixtureBlock(13)] * 2)


EXPERT_MESH = Layout((2, 2), ("ep", "fsdp"), ("ep", "fsdp"))


class TorchsResult:
    """Has the attributes of torch's ShardPlacementResult and of its mesh info."""

    def __init__(self, placement: Shard, mesh: DeviceMesh) -> None:
        self.placement = placement
        self.mesh_info = self
        self.mesh = mesh
        self.shard_mesh_dim = 0


def where_experts_go(param: nn.Parameter, ids: set[int], by_torch: bool) -> Any:
    if id(param) not in ids:
        return None
    placement = Shard(1) if by_torch and param.ndim > 1 else Shard(0)
    result = TorchsResult if by_torch else shardwise.policies.ShardPlacementResult
    return result(placement, EXPERT_MESH.mesh()["fsdp"])


def mixture(only: int | None) -> Mixture:
    """Both halves have the weights that the whole model has."""
    model = built(Mixture)
    if only is not None:
        for block in model.blocks:
            del block.experts[1 - only]
    return model


def plain_experts() -> dict[str, Any]:
    """Gradients of experts are averaged over the ranks of their own mesh, half of all: twice as large."""
    model = mixture(None)
    for name, param in model.named_parameters():
        if ".experts." in name:
            param.register_hook(lambda gradient: gradient * 2)
    return steps_of_experts(model, 0, 1)


def steps_of_experts(model: nn.Module, index: int, count: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    notes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(2):
            if isinstance(model, shardwise.FSDPModule):
                model.set_requires_gradient_sync(microbatch == 1)
            mean_of_squares(model, part(random_batch(10 * step + microbatch, 12), index, count)).backward()
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **parameters_of(model)}


@pytest.mark.parametrize(
    ("dense", "by_torch", "reshard"),
    [(LINE, True, None), (SQUARE, False, None), (LINE, False, False)],
    ids=str,
)
@on_ranks(4)
def test_experts_lie_on_another_mesh_than_the_rest(
    dense: Layout, by_torch: bool, reshard: bool | None
) -> None:
    """One expert per half of the ranks, sharded within the half; the rest over all ranks."""
    plain = plain_experts()
    only, _ = EXPERT_MESH.mesh().get_coordinate() or (0, 0)
    model = mixture(only)
    ids = {id(p) for name, p in model.named_parameters() if ".experts." in name}
    place = partial(where_experts_go, ids=ids, by_torch=by_torch)
    shard_tower(model, mesh=dense.mesh(), shard_placement_fn=place, reshard_after_forward=reshard)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        expected = EXPERT_MESH.mesh()["fsdp"] if ".experts." in name else dense.mesh()
        assert param.device_mesh == expected, name
    found = steps_of_experts(model, *EXPERT_MESH.seat())
    mine, other = f"experts.{only}.", f"experts.{1 - only}."
    want = {name.replace(mine, "experts.0."): v for name, v in plain.items() if other not in name}
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
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(*[lambda: Block(WIDTH, 13)] * 2)
        self.reentrant = reentrant

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[return-value]


@dataclass(frozen=True)
class Habit:
    reentrant: bool | None = None  # None: no checkpointing
    microbatches: int = 1
    clip: bool = False
    frozen: tuple[str, ...] = ()


CHECKPOINTS, CHECKPOINTS_REENTRANTLY = Habit(reentrant=False), Habit(reentrant=True)
ACCUMULATES_AND_CLIPS = Habit(microbatches=3, clip=True)
FREEZES = Habit(frozen=("blocks.1", "blocks.0.up", "inlet.bias"))
DOES_ALL = Habit(reentrant=False, microbatches=2, clip=True, frozen=("blocks.0.norm",))
COLUMNS, SMALLER = {"shard_placement_fn": last}, {"reshard_after_forward": 2}
HOST, PINNED = ({"offload_policy": CPUOffloadPolicy(pin_memory=pins)} for pins in (False, True))

PAIRS: dict[str, tuple[Layout, dict[str, Any], Habit]] = {
    "hybrid columns, accumulation and clipping": (SQUARE, COLUMNS, ACCUMULATES_AND_CLIPS),
    "pinned offload, frozen": (LINES[2], PINNED, FREEZES),  # nothing to pin for on a host
    "kept columns on the host, everything": (
        LINES[2],
        {**COLUMNS, **HOST, "reshard_after_forward": False},
        DOES_ALL,
    ),
    "hybrid, reentrant checkpointing": (SQUARE, {}, CHECKPOINTS_REENTRANTLY),
    "hybrid columns on the host, checkpointing": (SQUARE, {**COLUMNS, **HOST}, CHECKPOINTS),
    "smaller world, frozen": (LINE, SMALLER, FREEZES),
    "smaller world of columns, reentrant checkpointing": (
        LINE,
        {**SMALLER, **COLUMNS},
        CHECKPOINTS_REENTRANTLY,
    ),
    "smaller world, host, everything": (LINE, {**SMALLER, **HOST}, DOES_ALL),
}


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "layout", "options", "habit"),
    [pytest.param(case[0].size, *case, id=name) for name, case in PAIRS.items()],
    indirect=["world"],
)
def test_placements_go_with_habits(side: Side, layout: Layout, options: dict[str, Any], habit: Habit) -> None:
    model = built(Checkpointed, habit.reentrant)
    for name, param in model.named_parameters():
        param.requires_grad_(not (habit.frozen and name.startswith(habit.frozen)))
    if side.is_sharded:
        shard_tower(model, mesh=layout.mesh(), **options)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(habit.microbatches):
            side.sync(model, microbatch == habit.microbatches - 1)
            mean_of_squares(model, side.inputs(10 * step + microbatch)).backward()
        if habit.clip:
            side.note("norm", whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        for name, gradient in gradients_of(model).items():
            side.note(name, gradient)
        optimizer.step()
    for name, value in parameters_of(model).items():
        side.note(name, value)
