"""Recipes in a world of clones, with delays, and with ranks as threads: right in any order of waits.

Claim: a training step of every recipe reads only what is there, and only while it is there; and ranks that
exchange what they hold train as one process with the whole batch does. README.md says what refutes it.

In clones (`check_in_clones`): rank 0 of 8 is there, and the others are taken for its clones. The recipe runs
undelayed; then with each lane delayed in turn; all must be equal bit for bit, and finite. And close to plain
training of the same world: an unsharded model whose weights are put together from clones of rank 0's shard,
and whose gradients are those of that shard (`Tile`). In threads (`check_in_threads`): 2 or 4 ranks on one
device, each with its streams, against plain training on the global batch. `check_that_a_missing_wait_is_seen`
fails unless removed waits are noticed: else the delays would be too short to show anything.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from one_device.groups import CloneWorld, ThreadWorld
from one_device.lanes import COPIES, LANES, Lanes, counted_copies, poisoned_memory
from one_device.recipes import RECIPES, Recipe, Wrapper
from one_device.side import Side, building
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrize

from gpu_parts.plan import Item, Options, Row, Skipped
from shardwise.comm import streams

CLONES = 8
MISSING_WAITS = (("wait_event", "gather"), ("wait_stream", "compute"))
NEEDS_FOUR = ("hybrid", "no all-reduce", "tensor parallel", "experts", "hybrid_zero2", "bf16 hybrid")
"""Recipes on meshes of two dimensions."""


@dataclass(frozen=True)
class ShardOfRank0:
    """What rank 0 holds of a parameter, and which of its numbers clones put where in the full one."""

    shape: tuple[int, ...]
    positions: Tensor

    def of(self, full: Tensor) -> Tensor:
        """Rank 0's part: in every dimension it begins with the first."""
        return full[tuple(slice(0, size) for size in self.shape)]


@dataclass(frozen=True)
class Trained:
    """What a run came to. ``parameters``: this rank's shards, or full ones of a plain run."""

    losses: Tensor
    outputs: Tensor
    parameters: dict[str, Tensor]

    @classmethod
    def of(cls, side: Side) -> "Trained":
        return cls(
            torch.stack(side.losses).cpu(),
            torch.stack(side.outputs).detach().cpu() if side.outputs else torch.zeros(0),
            {name: _content(param) for name, param in side.model.named_parameters()},
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "losses", self.losses
        yield "outputs", self.outputs
        yield from self.parameters.items()


def _content(param: Any) -> Tensor:
    local = param.to_local() if isinstance(param, DTensor) else param
    if isinstance(local, Wrapper):
        local = local.values()
    return local.detach().cpu().clone()


# --- items ----------------------------------------------------------------------------------------


def items_in_clones(options: Options) -> Iterator[Item]:
    """Every recipe; then whether a missing wait would have been noticed."""
    names = ("full", "hybrid", "mixed") if options.is_tiny else tuple(RECIPES)
    for name in names:
        yield name, functools.partial(check_in_clones, name, options.device)
    for missing, lane in MISSING_WAITS:
        yield f"without {missing}", functools.partial(_missing, missing, lane, options.device)


def items_in_threads(options: Options) -> Iterator[Item]:
    """Every recipe with 2 and with 4 ranks, and two with each lane delayed."""
    names = ("full", "hybrid") if options.is_tiny else tuple(RECIPES)
    for name in names:
        yield name, functools.partial(_in_threads, name, options)
    for lane in LANES if options.device == "cuda" else LANES[:1]:
        yield f"{lane} delayed", functools.partial(_with_delay, lane, options.device)


def refuse_threads(device: str) -> None:
    """Builds of torch 2.11 for CUDA crash where there is no GPU: each FakeTensorMode, which DTensor enters,
    replaces the device guard of the whole process, also for other threads that use it.

    Raises:
        Skipped: this is one.
    """
    if device == "cpu" and torch.__version__.startswith("2.11") and not torch.cuda.is_available():
        raise Skipped("torch 2.11 without a GPU crashes when several threads use DTensors")


def _with_delay(lane: str, device: str) -> Row:
    refuse_threads(device)
    return check_in_threads("offload" if lane in COPIES else "hybrid", device, 4, Lanes(lane))


def _in_threads(name: str, options: Options) -> Row:
    refuse_threads(options.device)
    sizes = (4,) if name in NEEDS_FOUR or options.is_tiny else (2, 4)
    found = [check_in_threads(name, options.device, size) for size in sizes]
    return {"ranks": ", ".join(map(str, sizes)), "off_by": max(each["off_by"] for each in found)}


def _missing(missing: str, lane: str, device: str) -> Row:
    if device != "cuda":
        raise Skipped("there are no streams on the host, which might not wait")
    return check_that_a_missing_wait_is_seen(missing, lane)


# --- clones ---------------------------------------------------------------------------------------


def check_in_clones(name: str, device: str, lanes: Sequence[str] = LANES) -> Row:
    """Run a recipe in a world of clones, undelayed and with each of ``lanes`` delayed that it passes through;
    returns figures.

    Raises:
        AssertionError: runs differ from each other, or from plain training.
    """
    recipe = RECIPES[name]
    shards: dict[str, ShardOfRank0] = {}
    note = functools.partial(_note_shards, shards=shards) if recipe.in_clones else None
    undelayed = Lanes(reuses=True)
    expected = in_clones(name, device, undelayed, note)
    assert_finite(expected, name)
    for lane in filter(undelayed.passages.__contains__, lanes):
        delayed = Lanes(lane, reuses=True)
        assert_equal(in_clones(name, device, delayed), expected, f"{name}, {lane} delayed")
        assert delayed.passages == undelayed.passages, f"{name}: other work with {lane} delayed"
    figures: dict[str, Any] = {"delays": {lane: undelayed.passages[lane] for lane in lanes}}
    if recipe.in_clones:
        side = Side(
            torch.device(device),
            sees_all=True,
            experts=(0,),
            prepare=functools.partial(_tile_parameters, shards=shards),
        )
        recipe.act(side)
        figures["off_by"] = assert_close(expected, _untiled(Trained.of(side)), recipe.tolerance, name)
    return figures


def in_clones(
    name: str, device: str, lanes: Lanes, prepare: Callable[[nn.Module], None] | None = None
) -> Trained:
    world = CloneWorld(CLONES, lanes)
    with world.joined(), poisoned_memory(), counted_copies(lanes):
        side = Side(torch.device(device), 0, CLONES, is_sharded=True, sees_all=True, lanes=lanes)
        if prepare is not None:
            side.prepare = functools.partial(_uncounted, prepare, lanes)
        RECIPES[name].act(side)
        if device == "cuda":
            torch.cuda.synchronize()
        return Trained.of(side)


def _uncounted(prepare: Callable[[nn.Module], None], lanes: Lanes, model: nn.Module) -> None:
    """What is prepared is no work of the recipe."""
    before = lanes.passages.copy()
    prepare(model)
    lanes.passages = before


def _note_shards(model: nn.Module, shards: dict[str, ShardOfRank0]) -> None:
    """Which numbers of rank 0's shards clones put where: DTensor puts them together, not this library."""
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            local = param.to_local()
            numbers = torch.arange(local.numel(), device=param.device_mesh.device_type).view(local.shape)
            together = DTensor.from_local(
                numbers,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
            shards[name] = ShardOfRank0(tuple(local.shape), together.full_tensor().to(local.device))


class Tile(nn.Module):
    """A full parameter of clones of a shard, whose gradient is that of rank 0's part of it."""

    def __init__(self, shard: ShardOfRank0) -> None:
        super().__init__()
        self.shard = shard

    def forward(self, local: Tensor) -> Tensor:
        return _Tiled.apply(local, self.shard)

    def right_inverse(self, full: Tensor) -> Tensor:
        """What rank 0 holds of a full parameter."""
        return self.shard.of(full).clone()


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: ShardOfRank0) -> Tensor:
        ctx.shard = shard
        return local.reshape(-1)[shard.positions.to(local.device)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.of(gradients[0]).clone(), None


def _tile_parameters(model: nn.Module, shards: dict[str, ShardOfRank0]) -> None:
    """Make ``model`` what a world of clones trains."""
    for name, shard in shards.items():
        path, _, last = name.rpartition(".")
        parametrize.register_parametrization(model.get_submodule(path), last, Tile(shard), unsafe=True)


def _untiled(trained: Trained) -> Trained:
    names = {
        name: name.replace("parametrizations.", "").removesuffix(".original") for name in trained.parameters
    }
    return Trained(
        trained.losses, trained.outputs, {names[name]: value for name, value in trained.parameters.items()}
    )


# --- threads --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainTraining:
    """A recipe on the global batch, in one process; ``full``: what its parameters came to, on the device."""

    recipe: Recipe
    trained: Trained
    full: dict[str, Tensor]


def plain_training(name: str, device: str) -> PlainTraining:
    side = Side(torch.device(device), scale_experts=2.0)
    recipe = RECIPES[name]
    recipe.act(side)
    full = {param: value.detach().to(device) for param, value in side.model.named_parameters()}
    return PlainTraining(recipe, Trained.of(side), full)


def check_in_threads(name: str, device: str, world: int, lanes: Lanes | None = None) -> Row:
    """Train a recipe with ``world`` ranks as threads, and plainly on the global batch; returns figures.

    Raises:
        AssertionError: ranks disagree, or train otherwise than one process.
        RuntimeError: from the error of a rank.
    """
    plain = plain_training(name, device)
    threads = ThreadWorld(world, lanes=lanes or Lanes(), device=torch.device(device))

    def be(rank: int) -> tuple[Trained, dict[str, Tensor]]:
        side = Side(threads.device, rank, world, is_sharded=True, lanes=threads.lanes)
        plain.recipe.act(side)
        if device == "cuda":
            torch.cuda.synchronize()
        with building:
            return Trained.of(side), parts_of(plain.full, side.model)

    with poisoned_memory(), counted_copies(threads.lanes):
        ranks = threads.run(be)
    # Of losses and outputs, each rank has the mean over its rows.
    losses = torch.stack([trained.losses for trained, _ in ranks]).mean(0)
    outputs = torch.stack([trained.outputs for trained, _ in ranks]).mean(0)
    worst = 0.0
    for rank, (trained, parts) in enumerate(ranks):
        got = Trained(losses, outputs, trained.parameters)
        expected = Trained(plain.trained.losses, plain.trained.outputs, parts)
        what = f"{name}, rank {rank} of {world}"
        worst = max(worst, assert_close(got, expected, plain.recipe.tolerance, what))
    return {"off_by": worst}


def parts_of(full: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """This rank's parts of full parameters, as torch cuts them."""
    return {name: _part_of(full[name], held) for name, held in model.named_parameters()}


def _part_of(full: Tensor, held: Any) -> Tensor:
    if not isinstance(held, DTensor):
        return full.cpu()
    with torch.no_grad():
        cut = distribute_tensor(full, held.device_mesh, held.placements, src_data_rank=None)
        return cut.to_local().cpu()


# --- comparisons ----------------------------------------------------------------------------------


def assert_finite(trained: Trained, what: str) -> None:
    """NaN is memory that was read too early or too late."""
    for name, value in trained.tensors():
        assert torch.isfinite(value).all(), f"{what}: {name} holds {value[~torch.isfinite(value)][0].item()}"


def assert_equal(got: Trained, expected: Trained, what: str) -> None:
    wanted = dict(expected.tensors())
    for name, value in got.tensors():
        assert torch.equal(value, wanted[name]), f"{what}: {name} is another one than without delay"


def assert_close(got: Trained, expected: Trained, tolerance: float, what: str) -> float:
    """The largest difference."""
    wanted, worst = dict(expected.tensors()), 0.0
    assert {name for name, _ in got.tensors()} <= wanted.keys(), f"{what}: other names than in plain training"
    for name, value in got.tensors():
        if not value.numel():
            continue
        off = (value.double() - wanted[name].double()).abs().max().item()
        assert off <= tolerance, f"{what}: {name} is off by {off:.2e}, more than {tolerance:.0e}"
        worst = max(worst, off)
    return worst


# --- whether it would be noticed ------------------------------------------------------------------


@contextmanager
def without_wait(name: str) -> Iterator[None]:
    """Inside, streams of CUDA do not wait for each other where the library asks them to in Python.

    Its own streams record and wait by methods of torch.Stream, in C, which cannot be replaced; so they use
    those of torch.cuda as well.
    """
    kind, method = {"wait_event": (torch.cuda.Event, "wait"), "wait_stream": (torch.cuda.Stream, name)}[name]
    in_python = (torch.cuda.Stream.record_event, lambda stream, other: stream.wait_stream(other))
    with (
        patch.object(streams, "ordering_of", lambda _: in_python),
        patch.object(kind, method, lambda *_: None),
    ):
        yield


def check_that_a_missing_wait_is_seen(missing: str, lane: str, name: str = "direct") -> Row:
    """Remove one kind of wait; delays of ``lane`` must show it. On CUDA only.

    Raises:
        AssertionError: nothing was noticed.
    """
    expected = in_clones(name, "cuda", Lanes(reuses=True))
    with without_wait(missing):
        broken = in_clones(name, "cuda", Lanes(lane, reuses=True))
    try:
        assert_finite(broken, name)
        assert_equal(broken, expected, name)
    except AssertionError as error:
        return {"noticed": str(error)}
    raise AssertionError(f"without {missing}, and with {lane} delayed, everything is as with it")
