"""Sharded checkpoints: any world loads what any other has saved, beside training too, and no crash loses one."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import (
    HALF,
    Keeper,
    KeepsExtra,
    Net,
    NoScalars,
    Pair,
    Run,
    Tied,
    by_block,
    everything,
    first_half,
    inside,
    loaded_into,
    saved_step,
    second_half,
    uninterrupted,
    value_at,
)
from comparing import alike, assert_all_same
from expecttest import assert_expected_inline
from harness import World
from meshed import Layout, device_mesh, refusal
from models import odd_model, shard_tower
from on_ranks import on_ranks
from reference import adamw, full
from strategies import Plan, live_bytes
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import fully_shard, latest_checkpoint, load_checkpoint, save_checkpoint
from shardwise.checkpoint.stateful import rebuilt

# --- from any world to any other ------------------------------------------------------------------


def world_of(request: pytest.FixtureRequest, size: int) -> World:
    return request.getfixturevalue(f"world{size}")


def goes_on(request: pytest.FixtureRequest, first: Run, second: Run, sizes: tuple[int, int]) -> None:
    """Train on as many ranks as `sizes` says first, save, load on as many as it says then, and train on."""
    want = uninterrupted(replace(first, layout=None))
    saving = world_of(request, sizes[0]).run(first_half, first)
    assert_all_same(saving, want, 1e-10)
    loading = world_of(request, sizes[1]).run(second_half, second)
    assert_all_same(loading, want, 1e-10)
    if sizes[0] == sizes[1] and first == second:
        for got, same_rank in zip(loading, saving, strict=True):
            assert_all_same([got], same_rank, 0.0)


@pytest.mark.parametrize(("sizes", "build"), [((2, 2), Net), ((2, 3), Tied)])
def test_any_number_of_ranks_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path, sizes: tuple[int, int], build: Any
) -> None:
    run = Run(build=build, path=str(tmp_path / "checkpoint"))
    goes_on(request, run, run, sizes)


def second_half_from_meta(run: Run) -> dict[str, Any]:
    with torch.device("meta"):
        model = run.shard(run.build().double(), run.layout)
    optimizer = run.optimizer(model.parameters(), **run.options)
    loaded = load_checkpoint(run.path, model, optimizer)
    run.train(model, optimizer, loaded.shared["step"])
    return everything(model, optimizer)


def test_a_model_on_meta_goes_on(world2: World, world3: World, tmp_path: Path) -> None:
    run = Run(build=Tied, path=str(tmp_path / "checkpoint"))
    world2.run(first_half, run)
    assert_all_same(world3.run(second_half_from_meta, run), uninterrupted(run), 1e-10)


@on_ranks(2)
def test_a_model_on_meta_is_not_left_without_values(tmp_path: Path) -> None:
    """Nothing is left without values, and nobody computes with memory that has none."""
    run = Run(path=str(tmp_path / "checkpoint"))
    first_half(run)
    with torch.device("meta"):
        incomplete, larger = run.shard(Net().double(), None), Net().double()
        larger.register_buffer("passing", torch.ones(2), persistent=False)
        by_block(larger, None)
    told = [refusal(load_checkpoint, run.path, larger, strict=False)]
    optimizer = torch.optim.SGD(incomplete.parameters(), lr=0.1, momentum=0.9)
    told.append(refusal(load_checkpoint, run.path, incomplete, optimizer))
    told.append(refusal(incomplete, torch.ones(1, 6, dtype=torch.float64)))
    assert_expected_inline(
        "\n".join(told).replace(str(tmp_path), "RUN"),
        """\
RuntimeError: load_checkpoint: passing is on the meta device, without values, and will not be loaded (no state dict contains buffers with persistent=False). Call shardwise.materialize(model) first.
ValueError: RUN/checkpoint holds the state of AdamW, but is loaded into SGD. One kind of optimizer cannot use the state of another: build the same kind, or load only the model.
RuntimeError: Cannot run forward: 14 parameters are still on the meta device: inlet.weight, inlet.bias, outlet.weight, outlet.bias, blocks.0.gain, blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight and 6 more. Nothing has given them values. Call shardwise.materialize(model), or load a checkpoint, first.""",
    )


class TiedOutside(nn.Module):
    """A sharded part, and tied parameters and a shared buffer that no group has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.middle = nn.LSTM(4, 4)
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.inner.register_buffer("scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.middle(self.embed(x))[0])) * self.inner.scale


def ties_outside(path: str) -> None:
    """Load into memory that the meta device had not, under an optimizer that was there before."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(device):
            model = TiedOutside()
        if dist.is_initialized():
            fully_shard(model.inner)
        optimizer = torch.optim.AdamW(model.parameters())
        if device == "cpu":
            model(torch.arange(8)).square().mean().backward()
            optimizer.step()
            save_checkpoint(path, model, optimizer)
        else:
            load_checkpoint(path, model, optimizer)
            assert model.head.weight is model.embed.weight
            assert model.inner.scale is model.scale
            owned = {id(param) for param in optimizer.param_groups[0]["params"]}
            assert owned == {id(param) for param in model.parameters()}
        optimizer.zero_grad()
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        found.append(everything(model, optimizer))
    assert_all_same(found[1:], found[0], 0.0)


@pytest.mark.parametrize("world", [0, 2])
def test_ties_outside_groups_outlive_the_meta_device(
    request: pytest.FixtureRequest, tmp_path: Path, world: int
) -> None:
    path = str(tmp_path / "checkpoint")
    if world:
        world_of(request, world).run(ties_outside, path)
    else:
        ties_outside(path)


# --- from any way of sharding to any other --------------------------------------------------------


def hybrid(model: nn.Module, layout: Layout | None) -> nn.Module:
    return Plan("hybrid", 4, 2).shard(model) if dist.is_initialized() else model


def all_compiled(model: nn.Module, layout: Layout | None) -> nn.Module:
    return torch.compile(by_block(model, layout), backend="eager")


def recomputed(model: nn.Module, layout: Layout | None) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return by_block(model, layout)


@pytest.mark.parametrize(
    ("ways", "sizes"),
    [
        pytest.param((by_block, hybrid), (2, 4), id="mesh"),
        pytest.param((recomputed, by_block), (2, 2), id="names"),
        pytest.param((all_compiled, recomputed), (2, 3), id="names of compiled", marks=pytest.mark.slow),
    ],
)
def test_other_meshes_and_wrappers_go_on(
    request: pytest.FixtureRequest, tmp_path: Path, ways: Any, sizes: tuple[int, int]
) -> None:
    run = Run(path=str(tmp_path / "checkpoint"))
    goes_on(request, replace(run, shard=ways[0]), replace(run, shard=ways[1]), sizes)


def on_mesh(shape: tuple[int, ...], seed: int, hidden: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(Pair(6, hidden), nn.Linear(6, 3))
    mesh = device_mesh(shape, ("replicate", "shard", "tp"))
    if shape[2] > 1:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(model[0], mesh["tp"], plan)
    for each in (model[0], model):
        fully_shard(each, mesh=mesh["replicate", "shard"])
    return model, adamw(model)


BOTH = (1, 2, 2)


@pytest.mark.parametrize(
    ("first", "second", "hidden"),
    [(BOTH, (2, 2, 1), 8), ((2, 1, 2), BOTH, 7)],  # the second one has shards of different sizes
    ids=str,
)
@on_ranks(4)
def test_a_checkpoint_of_any_mesh_is_loaded_by_any_other(
    tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], hidden: int
) -> None:
    model, optimizer = on_mesh(first, 1, hidden)
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "x", model, optimizer)
    other, fresh = on_mesh(second, 2, hidden)
    load_checkpoint(tmp_path / "x", other, fresh)
    assert_all_same([everything(other, fresh)], everything(model, optimizer), 0.0)


@on_ranks(3)
def test_parameters_of_odd_shapes_and_dtypes(tmp_path: Path) -> None:
    found = []
    for seed, act in enumerate((save_checkpoint, load_checkpoint)):
        torch.manual_seed(seed)
        model = shard_tower(odd_model())
        act(tmp_path / "checkpoint", model)
        found.append({name: full(value) for name, value in model.state_dict().items()})
    assert_all_same(found[1:], found[0], 0.0)


def pipeline_stage(path: str, does_load: bool) -> dict[str, Any]:
    """Ranks 0 and 1 have the first half of a model, ranks 2 and 3 the other; each half is sharded."""
    torch.manual_seed(1 + does_load)
    whole = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7)).double()
    mesh = device_mesh((2, 2), ("stage", "shard"))
    stage = mesh.get_local_rank("stage")
    own = nn.Sequential(OrderedDict([(str(stage), whole[stage])]))
    fully_shard(own, mesh=mesh["shard"])
    optimizer = torch.optim.Adam(own.parameters(), lr=0.1 * (1 + stage))
    ema = shardwise.state.EMA(own)
    if does_load:
        load_checkpoint(path, own, optimizer, states={"ema": ema})
    else:
        own(torch.ones(2, 6 - stage).double()).sum().backward()
        optimizer.step()
        save_checkpoint(path, own, optimizer, states={"ema": ema})
    averages = {f"mean of {name}": full(value) for name, value in ema.state_dict()["averages"].items()}
    return everything(own, optimizer) | averages | {"lr": optimizer.param_groups[0]["lr"]}


def test_stages_of_a_pipeline_share_a_checkpoint_with_averages_of_their_own(
    world4: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    saved = world4.run(pipeline_stage, path, False)
    assert saved[0].keys() != saved[2].keys()
    for want, got in zip(saved, world4.run(pipeline_stage, path, True), strict=True):
        assert_all_same([got], want, 0.0)
    whole = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7)).double()
    load_checkpoint(path, whole)
    assert torch.equal(whole[0].weight, saved[0]["0.weight"])
    assert torch.equal(whole[1].weight, saved[3]["1.weight"])


@on_ranks(2)
def test_what_modules_save_as_tensors_may_be_of_any_length(tmp_path: Path) -> None:
    """The extra state is a tensor that is as long as it needs to be, as Transformer Engine has it."""
    model = fully_shard(nn.Sequential(KeepsExtra(torch.full((3,), 3, dtype=torch.uint8))))
    save_checkpoint(tmp_path / "checkpoint", model)
    model[0].state = torch.zeros(5, dtype=torch.uint8)
    load_checkpoint(tmp_path / "checkpoint", model)
    assert model[0].state.tolist() == [3] * 3


# --- objects beside the model ---------------------------------------------------------------------


def nested_state(fill: int) -> dict[Any, Any]:
    return {
        "by number": {0: torch.full((2,), fill), 10: [fill, {}]},
        "pair": (torch.full((), fill), fill),
        "counts": Counter({"a": fill}),
        "none": {},
        5: "five" * fill,
    }


def with_states(run: Run, does_load: bool) -> dict[str, Any]:
    """Train with a moving average and a scheduler; save in the middle, or go on from there."""
    model, optimizer = run.start(1 + does_load)
    ema = shardwise.state.EMA(model, decay=0.5, dtype=torch.float32)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    scaler, odd = torch.amp.GradScaler("cpu", enabled=False), Keeper(nested_state(0 if does_load else 3))
    beside = {"ema": ema, "scheduler": scheduler, "scaler": scaler, "odd.one": odd}
    for step in range(HALF, 2 * HALF) if does_load else range(2 * HALF):
        if step == HALF and does_load:
            load_checkpoint(run.path, model, optimizer, states=beside)
        elif step == HALF:
            pending = save_checkpoint(run.path, model, optimizer, states=beside, asynchronous=True)
        run.train(model, optimizer, step, 1)
        scheduler.step()
        ema.update()
    if not does_load:
        pending.wait()
    assert repr(odd.state) == repr(nested_state(3))
    averages = {f"mean of {name}": full(value) for name, value in ema.state_dict()["averages"].items()}
    numbers = torch.tensor([scheduler.get_last_lr()[0], scheduler.last_epoch, ema.num_updates])
    return everything(model, optimizer) | averages | {"numbers": numbers}


def test_objects_beside_the_model_go_on_from_a_save_beside_training(
    world2: World, world3: World, tmp_path: Path
) -> None:
    run = Run(path=str(tmp_path / "checkpoint"))
    want = world2.run(with_states, run, False)[0]
    assert_all_same(world3.run(with_states, run, True), want, 1e-6)
    assert_all_same([with_states(run, True)], want, 1e-6)


ONE = torch.tensor(1.0)
ODD_STATES = [
    {1: 2, "a": {2.5: 3}},
    {1: 2, "1": 3},
    {"a": {1: ONE, (0, "b"): 3, None: {True: {}}}},
    {0: ONE, 1: ONE},
    {"a": {}, "b": [], "c": {"d": {}, "e": [{}, 1], "f": ONE}, "g": [ONE, {}, {1: [ONE]}]},
    {"a": {1: 2, "1": {}}, "b": ONE},
    {},
    [{}, 1],
]


def odd_states(path: str, does_load: bool) -> list[str]:
    """All of `ODD_STATES`, as the states of objects and as the extra state of modules."""
    model = fully_shard(nn.Sequential(*(KeepsExtra({} if does_load else each) for each in ODD_STATES)))
    states = {str(i): Keeper({} if does_load else each) for i, each in enumerate(ODD_STATES)}
    if not does_load:
        save_checkpoint(path, model, states=states, asynchronous=True).wait()
    else:
        load_checkpoint(path, model, states=states)
    return [repr(each.state) for each in (*states.values(), *model)]


def test_states_and_extra_states_keep_keys_that_are_no_texts_and_what_is_empty(
    world2: World, world3: World, tmp_path: Path
) -> None:
    saved = world2.run(odd_states, str(tmp_path / "checkpoint"), False)
    loaded = world3.run(odd_states, str(tmp_path / "checkpoint"), True)
    assert alike([*loaded, *saved]) == 2 * [repr(each) for each in ODD_STATES]


def test_keys_that_no_checkpoint_can_tell_apart_are_refused(tmp_path: Path) -> None:
    state, told = {"a": [{1: ONE, "1": 3}]}, []
    told.append(refusal(save_checkpoint, tmp_path / "x", nn.Linear(2, 2), states={"own": Keeper(state)}))
    told.append(refusal(save_checkpoint, tmp_path / "x", nn.Sequential(KeepsExtra(state))))
    assert_expected_inline(
        "\n".join(told),
        """\
ValueError: save_checkpoint: states.own.a.0 has the keys 1 and '1', which have the same name in a checkpoint, so tensors under them would be confused. Rename one.
ValueError: save_checkpoint: model.0._extra_state.a.0 has the keys 1 and '1', which have the same name in a checkpoint, so tensors under them would be confused. Rename one.""",
    )
    assert not list(tmp_path.iterdir())


def test_torch_reads_extra_state_under_the_keys_that_it_has_itself(tmp_path: Path) -> None:
    model = KeepsExtra({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}], "f": {}})
    save_checkpoint(tmp_path / "x", model)
    state = {"model": KeepsExtra({"a": {"b": 0}, "d": [0, {"e": 0}]}).state_dict()}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(state, checkpoint_id=tmp_path / "x", no_dist=True)
    assert state["model"]["_extra_state"] == {"a": {"b": 1}, "d": [1, {"e": 2}]}


# --- ties -----------------------------------------------------------------------------------------


def untied_into_tied(path: str, differ: bool, on_meta: bool = False) -> str:
    """Rows of one and columns of the other: together they would fill the tied weight twice."""

    def made(is_tied: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
        if is_tied:
            model[1].weight = model[0].weight
        elif not differ:
            model[1].weight.data.copy_(model[0].weight.data).view(-1)[3] = float("nan")
            model[0].weight.data.view(-1)[3] = float("nan")
        first = model[0].weight
        return fully_shard(model, shard_placement_fn=lambda p: Shard(int(p is first and not is_tied)))

    save_checkpoint(path, made(False))
    with torch.device("meta") if on_meta else nullcontext():
        model = made(True)
    before = None if on_meta else model[0].weight.detach().full_tensor()
    try:
        load_checkpoint(path, model)
    except ValueError as error:
        assert (
            model[0].weight.is_meta if before is None else torch.equal(full(model[0].weight.detach()), before)
        )
        return str(error).replace(path, "PATH")
    return "loaded"


def test_different_values_for_tied_names_are_refused(world2: World, tmp_path: Path) -> None:
    assert world2.run(untied_into_tied, str(tmp_path / "step-1"), False) == ["loaded"] * 2
    for text in world2.run(untied_into_tied, str(tmp_path / "step-2"), True) + world2.run(
        untied_into_tied, str(tmp_path / "step-3"), True, on_meta=True
    ):
        assert_expected_inline(
            text,
            """PATH: 0.weight and 1.weight are tied in the model, but differ in the source (untie them, or load into a model without the tie and copy the one that you want).""",
        )


# --- what ranks have of their own -----------------------------------------------------------------


@on_ranks(3)
def test_copies_that_differ_are_those_of_the_first_rank(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(4)))
    fully_shard(model)
    rank, path = dist.get_rank(), tmp_path / "checkpoint"
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(rank)
    own = Keeper({"value": rank, "tensor": torch.full((1000,), rank)})
    save_checkpoint(path, model, states={"own": own})
    load_checkpoint(path, model, states={"own": own})
    assert {v for b in model.buffers() if b.is_floating_point() for v in b.tolist()} == {0.0}
    assert (own.state["value"], own.state["tensor"].unique().tolist()) == (0, [0])


# --- inference mode -------------------------------------------------------------------------------


@on_ranks(2)
def test_checkpoints_are_written_and_read_in_inference_mode(tmp_path: Path) -> None:
    run = Run(path=str(tmp_path / "checkpoint"))
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    want = everything(model, optimizer)
    with torch.inference_mode():
        save_checkpoint(run.path, model, optimizer)
        save_checkpoint(run.path, model, optimizer, asynchronous=True).wait()
    run.train(model, optimizer, HALF)
    with torch.inference_mode():
        load_checkpoint(run.path, model, optimizer)
    assert_all_same([everything(model, optimizer)], want, 0.0)
    run.train(model, optimizer, HALF)


# --- torch's own recipe ---------------------------------------------------------------------------


def of_torch(run: Run, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    def shard(model: nn.Module, layout: Layout | None) -> nn.Module:
        for module in (*model.blocks, model):
            torchs_fully_shard(module)
        return model

    return replace(run, shard=shard).start(seed)


def saved_by_torch(run: Run) -> dict[str, Any]:
    model, optimizer = of_torch(run, 1)
    run.train(model, optimizer, 0)
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optim}, checkpoint_id=run.path)
    run.train(model, optimizer, HALF)
    return everything(model, optimizer)


def loaded_from_torch(run: Run) -> dict[str, Any]:
    model, optimizer = run.start(2)
    loaded = load_checkpoint(run.path, model, optimizer)
    assert (loaded.shared, loaded.per_rank, loaded.world_size) == ({}, None, None)
    run.train(model, optimizer, HALF)
    return everything(model, optimizer)


def loaded_by_torch(run: Run) -> dict[str, Any]:
    model, optimizer = of_torch(run, 2)
    state, optim = get_state_dict(model, optimizer)
    values = {"model": state, "optimizer": optim, "shared": {"step": 0}}
    dcp.load(values, checkpoint_id=run.path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
    run.train(model, optimizer, values["shared"]["step"])
    return everything(model, optimizer)


def test_checkpoints_of_torchs_recipe_are_loaded(world2: World, world3: World, tmp_path: Path) -> None:
    run = Run(build=NoScalars, path=str(tmp_path / "checkpoint"))
    want = uninterrupted(run)
    assert_all_same(world2.run(saved_by_torch, run), want, 1e-10)
    assert_all_same(world3.run(loaded_from_torch, run), want, 1e-10)
    assert_all_same([loaded_from_torch(run)], want, 1e-10)


def test_torchs_recipe_loads_ours(world2: World, world3: World, tmp_path: Path) -> None:
    run = Run(build=NoScalars, path=str(tmp_path / "checkpoint"))
    world2.run(first_half, run)
    assert_all_same(world3.run(loaded_by_torch, run), uninterrupted(run), 1e-10)


# --- what a caller adds ---------------------------------------------------------------------------

SHARED = {
    "step": 7,
    "tokens": torch.arange(5),
    "nested": {1: [2, (3.5, None)], "empty": {}, "tensors": [torch.ones(2), torch.zeros(3)]},
    "list": [],
    "path": Path("data"),
    "dots.in.names": "kept",
}


def with_extras(path: str, does_load: bool) -> Any:
    model = fully_shard(nn.Linear(3, 4))
    if does_load:
        loaded = load_checkpoint(path, model, trust=True)
        return loaded.shared, loaded.per_rank, loaded.world_size
    rank = dist.get_rank()
    own = {"rng": torch.full((2,), rank), "seen": list(range(rank))} if rank else {}
    with pytest.warns(UserWarning, match=r"shared.path \(pathlib"):
        return save_checkpoint(path, model, shared=SHARED, per_rank=own).path


def test_what_a_caller_adds_comes_back_as_it_was(world2: World, world3: World, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    assert world2.run(with_extras, path, False) == [Path(path)] * 2
    first, second = world2.run(with_extras, path, True)
    for shared, _, world_size in (first, second, *world3.run(with_extras, path, True)):
        assert world_size == 2
        assert repr(shared) == repr({name: SHARED[name] for name in shared})
        assert shared.keys() == SHARED.keys()
    assert first[1] == {}
    assert repr(second[1]) == repr({"rng": torch.ones(2, dtype=torch.int64), "seen": [0]})
    assert [own for _, own, _ in world3.run(with_extras, path, True)] == [None] * 3


# --- beside training ------------------------------------------------------------------------------


def trained_beside(run: Run) -> dict[str, Any]:
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    want = everything(model, optimizer)
    held = threading.Event()
    with held_back(held):
        pending = save_checkpoint(run.path, model, optimizer, asynchronous=True)
        run.train(model, optimizer, HALF)
        assert not pending.done()
        assert not Path(run.path).exists()
        held.set()
        assert pending.wait() == Path(run.path)
    assert pending.done()
    assert Path(run.path).exists()
    return want


def held_back(until: threading.Event) -> Any:
    write = dcp.FileSystemWriter.write_data

    def late(*args: Any) -> Any:
        assert until.wait(60)
        return write(*args)

    return mock.patch.object(dcp.FileSystemWriter, "write_data", late)


def test_a_save_beside_training_holds_the_values_at_the_call(
    world2: World, world3: World, tmp_path: Path
) -> None:
    run = Run(path=str(tmp_path / "checkpoint"))
    want = world2.run(trained_beside, run)[0]
    assert_all_same([got for _, got in world3.run(loaded_into, run)], want, 0.0)
    alone = replace(run, build=Tied, path=str(tmp_path / "alone"))
    want = trained_beside(alone)
    assert_all_same([loaded_into(alone)[1]], want, 0.0)


@on_ranks(2)
def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    model, optimizer = Run().start(1)
    held = threading.Event()
    with held_back(held):
        first = save_checkpoint(tmp_path / "step-1", model, optimizer, asynchronous=True)
        assert not first.done()
        threading.Timer(0.0, held.set).start()
        second = save_checkpoint(tmp_path / "step-2", model, optimizer, asynchronous=True)
        assert first.done()
        assert (tmp_path / "step-1").exists()
        second.wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-2"


AT_THE_END = """
import sys, threading, time
import torch
from torch import nn
import torch.distributed.checkpoint as dcp
from shardwise import save_checkpoint

write = dcp.FileSystemWriter.write_data
def late(*args):
    threading.main_thread().join()  # until the program has ended
    return write(*args)
dcp.FileSystemWriter.write_data = late
save_checkpoint(sys.argv[1], nn.Linear(2, 2), shared={"step": 3}, asynchronous=True)
"""


@pytest.mark.processes
def test_a_save_that_is_pending_at_the_end_of_the_program_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    subprocess.run([sys.executable, "-c", AT_THE_END, str(path)], check=True, timeout=120)
    assert load_checkpoint(path, nn.Linear(2, 2)).shared == {"step": 3}


# --- crashes --------------------------------------------------------------------------------------


class Killed(BaseException):
    """As by a signal: nothing tidies up."""


def dies_at(count: int) -> Any:
    """Replace all calls that change the file system: the one of this number, and all after it, die."""
    left = [count]

    def dying(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    patches = ExitStack()
    for owner, name in [
        *((Path, n) for n in ("mkdir", "rename", "unlink")),
        *((os, n) for n in ("fsync", "rmdir", "unlink")),
    ]:
        patches.enter_context(mock.patch.object(owner, name, dying(getattr(owner, name))))
    return patches


def test_wherever_a_save_dies_a_good_checkpoint_is_found(tmp_path: Path) -> None:
    """The power fails before each single change of the file system, and after the last."""
    path = tmp_path / "step-5"
    saved_step(path, 1.0)
    found: list[float] = []
    for count in range(100):
        died = True
        with suppress(Killed), dies_at(count):
            saved_step(path, 2.0 + count)
            died = False
        found.append(value_at(latest_checkpoint(tmp_path)))
        assert value_at(path) == found[-1]
        assert found[-1] in (2.0 + count, *found[-2:-1], 1.0)
        if not died:
            break
    assert not died
    assert found[-1] == 2.0 + count
    assert len(found) > 12
    assert inside(tmp_path) == ["step-5"]


def killed_while_it_writes(path: Path, rank: int, store: str) -> None:
    """Rank 1 dies in its second save, where it would wait for the disk."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    model = fully_shard(nn.Linear(2, 2))
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        dies: Any = mock.patch("os.fsync", side_effect=lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with dies if (value, rank) == (2.0, 1) else nullcontext():
            save_checkpoint(path, model, shared={"value": value})


@pytest.mark.processes
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path, context = tmp_path / "run" / "step-1", multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=killed_while_it_writes, args=(path, rank, str(tmp_path / "store")))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
    assert [each.exitcode for each in ranks] == [1, -signal.SIGKILL]
    assert value_at(path) == 1.0
    assert value_at(latest_checkpoint(path.parent)) == 1.0
    saved_step(path, 3.0)
    assert value_at(path) == 3.0
    assert inside(path.parent) == ["step-1"]


# --- many checkpoints -----------------------------------------------------------------------------


def test_the_latest_is_the_one_of_the_highest_number(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for step in (100, 90, 9):  # the oldest file is the newest step
        saved_step(tmp_path / f"step-{step}", float(step))
    (tmp_path / "step-300").mkdir()  # complete is what has an index
    (tmp_path / ".step-200.partial").mkdir()
    (tmp_path / ".step-200.partial" / ".metadata").touch()
    (tmp_path / "step-400").touch()
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / ".metadata").touch()  # no number: nobody knows how new it is
    assert value_at(latest_checkpoint(str(tmp_path))) == 100.0


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("epoch-1-step-900", "epoch-2-step-100"),
        ("2026-01-31", "2026-02-01"),
        ("step-100-copy-2000", "step-200"),
        ("epoch-1.25", "epoch-1.5"),
        ("epoch-1", "epoch-1.25"),
        ("epoch-1.5-step-900", "epoch-2-step-100"),
        ("run-2024.9.30", "run-2024.10.1"),
        ("step-9007199254740992", "step-9007199254740993"),
    ],
)
def test_names_of_several_numbers_are_compared_from_the_left(tmp_path: Path, older: str, newer: str) -> None:
    for value, name in enumerate((newer, older)):
        saved_step(tmp_path / name, float(value))
    assert latest_checkpoint(tmp_path) == tmp_path / newer


def test_checkpoints_without_numbers_are_not_passed_by_in_silence(tmp_path: Path) -> None:
    for name in ("last", "best"):
        saved_step(tmp_path / name, 1.0)
    with pytest.warns(UserWarning, match="latest_checkpoint") as caught:
        assert latest_checkpoint(tmp_path) is None
    assert caught[0].filename == __file__
    assert_expected_inline(
        str(caught[0].message).replace(str(tmp_path), "RUN"),
        """latest_checkpoint: RUN has complete checkpoints, but their names do not end in a number (best, last), so it is unknown which is the newest. None was chosen. Save under names such as step-100, or pass the path of one to load_checkpoint.""",
    )


def kept(directory: str, steps: list[int]) -> None:
    model = fully_shard(nn.Linear(2, 2))
    for step in steps:
        save_checkpoint(f"{directory}/step-{step}", model, shared={"value": step}, keep=2)


def test_only_the_last_checkpoints_are_kept(world2: World, tmp_path: Path) -> None:
    saved_step(tmp_path / "best-1", 1.0)
    saved_step(tmp_path / "step-7b", 1.0)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "notes.txt").touch()
    (tmp_path / "step-2").touch()
    world2.run(kept, str(tmp_path), [8, 9, 10, 11])
    others = ["best-1", "step-1", "step-2", "step-7b"]
    assert inside(tmp_path) == sorted([*others, "step-10", "step-11"])
    world2.run(kept, str(tmp_path), [9])  # went back: later ones are not older
    assert inside(tmp_path) == sorted([*others, "step-10", "step-11", "step-9"])


def test_a_removal_that_did_not_end_is_no_obstacle(tmp_path: Path) -> None:
    done = save_checkpoint(tmp_path / "a" / ".." / "step-3", nn.Linear(2, 2))
    assert done.done()
    assert done.wait() == tmp_path / "step-3"
    (tmp_path / "step-3" / ".metadata").unlink()
    saved_step(tmp_path / "step-3", 2.0)
    assert value_at(tmp_path / "step-3") == 2.0
    assert inside(tmp_path) == ["step-3"]


def test_a_checkpoint_replaces_the_one_before(world2: World, tmp_path: Path) -> None:
    world2.run(kept, str(tmp_path), [3])
    before = set(inside(tmp_path / "step-3"))
    saved_step(tmp_path / "step-3", 5.0)
    assert value_at(tmp_path / "step-3") == 5.0
    assert inside(tmp_path) == ["step-3"]
    assert set(inside(tmp_path / "step-3")) < before  # one rank, one file


# --- memory ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor) and type(each) is Tensor and not each.is_meta:
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return out


ROWS, COLUMNS = 512, 64


@on_ranks(2)
def test_no_rank_ever_holds_a_full_parameter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, COLUMNS, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    full_bytes = ROWS * COLUMNS * 4
    for what in ("save", "beside", "load"):
        before = live_bytes()
        with Largest() as largest:
            if what == "load":
                load_checkpoint(tmp_path / "x", model, optimizer)
            else:
                save_checkpoint(tmp_path / "x", model, optimizer, asynchronous=what == "beside").wait()
        assert largest.num_bytes <= full_bytes // 2
        assert live_bytes() - before < 4096


# --- odd calls ------------------------------------------------------------------------------------


class NotToBeCopied:
    """Travels by pickle, and fails where it is copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise MemoryError("no room for a copy")


@on_ranks(2)
def test_a_copy_that_fails_keeps_no_later_save_waiting(tmp_path: Path) -> None:
    model, optimizer = Run().start(1)
    options = {"shared": {"odd": NotToBeCopied()}, "asynchronous": True}
    with pytest.warns(UserWarning, match="shared.odd"):
        told = refusal(save_checkpoint, tmp_path / "step-1", model, optimizer, **options)
    assert "no room for a copy" in told
    save_checkpoint(tmp_path / "step-2", model, optimizer).wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-2"


def test_items_of_a_list_come_back_in_their_order_however_they_are_read() -> None:
    values: Any = {(10,): "k", (2,): "c", (1,): "b", (0,): "a"}
    assert rebuilt(values) == ["a", "b", "c", "k"]
    assert rebuilt(values, like=(None,)) == ("a", "b", "c", "k")
