"""Ranks begin with one model: what they cut is compared at the first forward, or made equal before.

The reference is plain PyTorch with the weights of the first rank.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import alike, assert_equal
from expecttest import assert_expected_inline
from harness import World
from meshed import device_mesh, refusal
from models import Tower, built, random_batch, shard_tower
from on_ranks import on_ranks
from reference import full
from refusals import wrapped
from torch import Tensor, nn
from towers import backward

from shardwise import fully_shard, load_full_state_dict, materialize, shard_model
from shardwise.init import sync_module_states


def assert_values(model: nn.Module, want: dict[str, Tensor]) -> None:
    assert_equal({name: full(value) for name, value in model.state_dict().items()}, dict(want))


# --- compared -------------------------------------------------------------------------------------


def apart(seeds: tuple[int, ...], shape: tuple[int, ...], strategy: str | None) -> list[str]:
    """What is told where ranks draw from their own seeds; and that each forward says so again."""
    model = built(Tower, seed=seeds[dist.get_rank()])
    mesh = device_mesh(shape, ("replicate", "shard")[-len(shape) :])
    if strategy is None:
        shard_tower(model, mesh=mesh)
    else:
        shard_model(model, strategy=strategy, mesh=mesh)
    told = [refusal(backward, model), refusal(backward, model)]
    with torch.no_grad():
        model(random_batch(0, 4))  # nothing is compared, and nothing raised
    return told


def test_weights_of_one_rank_alone_are_refused_at_the_first_forward(world2: World) -> None:
    first = alike(world2.run(apart, (0, 1), (2,), None))
    assert first[0] == first[1]
    assert_expected_inline(
        wrapped(first[0]),
        """\
RuntimeError: inlet.weight and 13 more: the values on rank 1 differed
from those on rank 0 when fully_shard cut them, so their shards are
parts of different models. Seed or load all ranks alike before
fully_shard, pass sync_module_states=True, or load the same values on
all ranks before the first forward. check_equal_weights=False compares
nothing.""",
    )
    for strategy in ("zero1", "zero2"):
        assert world2.run(apart, (0, 1), (2,), strategy) == [first, first]


def test_hybrid_meshes_name_the_ranks_on_either_side(world4: World) -> None:
    for seeds, sides in (
        ((0, 1, 0, 1), "ranks 1, 3 differed from those on ranks 0, 2"),
        ((0, 0, 0, 3), "rank 3 differed from those on ranks 0-2"),
    ):
        first, *_ = alike(world4.run(apart, seeds, (2, 2), None))
        assert first.startswith("RuntimeError: inlet.weight and ")
        assert f": the values on {sides} when" in first


@on_ranks(2)
def test_one_element_is_found_whoever_keeps_it() -> None:
    """A difference that only one rank keeps, in one bias."""
    for holder in range(dist.get_world_size()):
        model = built(Tower, seed=0)
        with torch.no_grad():
            if dist.get_rank() == 0:
                model.blocks[1].up.bias[-1 if holder else 0] += 1e-9
        text = refusal(backward, shard_tower(model))
        assert text.startswith(
            "RuntimeError: blocks.1.up.bias: the values on rank 1 differed from those on rank 0"
        )


@on_ranks(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["load_state_dict", "assign", "load_full_state_dict", "data", "copy"])
def test_weights_that_are_loaded_after_sharding_may_have_begun_apart(how: str) -> None:
    """Other values on every rank before sharding, the same on all after it: as checkpoints are loaded."""
    wanted = built(Tower, seed=7).state_dict()
    model = shard_tower(built(Tower, seed=dist.get_rank()))
    if how in ("load_state_dict", "assign"):
        model.load_state_dict(wanted, assign=how == "assign")
    elif how == "load_full_state_dict":
        load_full_state_dict(model, wanted if dist.get_rank() == 0 else {})
    else:
        for name, param in model.named_parameters():
            local = param.to_local().data if how == "data" else param.to_local()
            rows = torch.chunk(wanted[name], dist.get_world_size())
            with torch.no_grad():
                local.copy_(rows[dist.get_rank()] if dist.get_rank() < len(rows) else wanted[name][:0])
    backward(model)
    assert_values(model, wanted)


def loaded_apart(when: str, seeds: tuple[int | None, ...]) -> list[str]:
    torch.manual_seed(0)
    if when == "after materialize":
        with torch.device("meta"):
            model = shard_tower(Tower().double())
        materialize(model)
    else:
        model = shard_tower(built(Tower, seed=0))
    if when == "between steps":
        backward(model)
    seed = seeds[dist.get_rank()]
    if seed is not None:
        model.load_state_dict(built(Tower, seed=seed).state_dict(), assign=when == "assigned")
    told = [refusal(backward, model), refusal(backward, model)]
    model.load_state_dict(built(Tower, seed=9).state_dict())
    backward(model)
    assert_values(model, built(Tower, seed=9).state_dict())
    return told


@pytest.mark.parametrize(
    ("when", "seeds"),
    [
        ("before the first step", (1, None)),
        ("assigned", (1, 2)),
        ("after materialize", (1, None)),
        ("between steps", (1, 2)),
    ],
)
def test_full_values_that_differ_by_rank_are_refused_at_the_next_forward(
    world2: World, when: str, seeds: tuple[int | None, ...]
) -> None:
    first = alike(world2.run(loaded_apart, when, seeds))
    assert first[0] == first[1]
    checksum = "inlet.weight: the checksum of the full value that load_state_dict was given is "
    assert first[0].startswith(f"RuntimeError: The ranks have loaded different values. {checksum}")
    if when == "before the first step":
        assert_expected_inline(
            wrapped(first[0]),
            """\
RuntimeError: The ranks have loaded different values. inlet.weight:
the checksum of the full value that load_state_dict was given is
1342ecd2b2f799bd on rank 0, missing on rank 1 (21 more differences
follow). Each rank keeps its own rows of what it is given, so the
parameter would be put together from different models. Give
load_state_dict the same full values on all ranks, or call
load_full_state_dict, which sends those of one rank.""",
        )


LOADED_LAST = [
    "each its own, and then all",
    "each its own, and then shards",
    "one replica, and sent to the other",
]


@on_ranks(4)
@pytest.mark.parametrize("how", LOADED_LAST)
def test_only_what_was_loaded_last_counts(how: str) -> None:
    """Values that ranks load alike in the end, between two steps and the next."""
    rank, own, wanted = dist.get_rank(), built(Tower, seed=dist.get_rank()), built(Tower, seed=7).state_dict()
    mesh = {"mesh": device_mesh((2, 2), ("replicate", "shard"))} if how == LOADED_LAST[2] else {}
    model = shard_tower(built(Tower, seed=0), **mesh)
    backward(model)
    if how == LOADED_LAST[0]:
        model.load_state_dict(own.state_dict())
        load_full_state_dict(model, wanted if rank == 0 else None)
    elif how == LOADED_LAST[1]:
        shards = shard_tower(built(Tower, seed=7)).state_dict()
        model.load_state_dict(own.state_dict())
        model.load_state_dict({name: value.detach().clone() for name, value in shards.items()})
    else:
        if rank < 2:
            model.load_state_dict(wanted)
        sync_module_states(model)
    backward(model)
    assert_values(model, wanted)


@on_ranks(2)
def test_what_is_not_to_be_compared_is_not() -> None:
    rank = dist.get_rank()
    backward(shard_tower(built(Tower, seed=rank), check_equal_weights=False))
    backward(shard_model(built(Tower, seed=rank), strategy="ddp", check_equal_weights=False))
    with torch.device("meta"):
        model = shard_tower(Tower().double())
    torch.manual_seed(rank)
    backward(materialize(model))
    # Loaded where rank 0 had these values already, and parts of it are constant or empty.
    model = nn.Sequential(nn.Linear(8, 2), nn.LayerNorm(2), nn.Linear(2, 1)).double()
    torch.manual_seed(7 if rank == 0 else rank)
    for param in model.parameters():
        nn.init.normal_(param)
    torch.manual_seed(7)
    wanted = {name: nn.init.normal_(torch.empty_like(p)) for name, p in model.named_parameters()}
    fully_shard(model)
    model.load_state_dict(wanted)
    model(random_batch(0, 4)).sum().backward()
    text = refusal(fully_shard, nn.Linear(2, 2), check_equal_weights=1)
    assert text == "TypeError: fully_shard: check_equal_weights is 1, an int; pass True or False."


@on_ranks(2)
def test_checksums_are_dropped_once_they_were_equal() -> None:
    model = shard_tower(built(Tower, seed=0))
    params = [
        p for m in model.modules() if (g := vars(m).get("_shardwise_state")) for p in g.group.shards.params
    ]
    assert all(param.initial_checksums is not None for param in params)
    backward(model)
    assert all(param.initial_checksums is None for param in params)


# --- made equal -----------------------------------------------------------------------------------


class WithBuffer(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(3))


@pytest.mark.parametrize(
    ("world", "shape", "strategy", "others_on_meta"),
    [
        (2, (2,), None, False),
        (2, (2,), "ddp", True),
        (2, (2,), "zero2", True),
        (4, (2, 2), None, True),
    ],
    indirect=["world"],
)
@on_ranks()
def test_sync_module_states_spreads_what_the_first_rank_has(
    shape: tuple[int, ...], strategy: str | None, others_on_meta: bool
) -> None:
    torch.manual_seed(dist.get_rank())
    with torch.device("meta" if others_on_meta and dist.get_rank() else "cpu"):
        model: Any = WithBuffer().double()
    mesh = device_mesh(shape, ("replicate", "shard")[-len(shape) :])
    if strategy is None:
        shard_tower(model, mesh=mesh, sync_module_states=True)
    else:
        shard_model(model, strategy=strategy, mesh=mesh, sync_module_states=True)
    backward(model)
    torch.manual_seed(0)
    assert_values(model, WithBuffer().double().state_dict())


@on_ranks(2)
def test_sync_module_states_refuses_models_that_do_not_fit() -> None:
    narrow = nn.Linear(2, 2 + dist.get_rank())
    with torch.device("meta" if dist.get_rank() == 0 else "cpu"):
        empty = nn.Linear(2, 2)
    longer = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + dist.get_rank())))
    told = [refusal(fully_shard, m, sync_module_states=True) for m in (narrow, empty, longer)]
    assert "rank 1 has 2 tensors to shard and the first rank 2; they differ at" in told[0]
    assert "weight is on the meta device on the first rank of the mesh, which is to send it" in told[1]
    assert "rank 1 has 4 tensors to shard and the first rank 2; they differ at their end" in told[2]
