"""sync_module_states: all ranks begin with what one of them has.

Every rank builds the model from a seed of its own, so that nothing is equal before. Afterwards every tensor must
be what the source built, to the last bit; of shards that only their own ranks have, what the replica of the
source has.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from comparing import assert_equal
from expecttest import assert_expected_inline
from harness import World
from meshed import device_mesh, refusal
from models import LanguageModel, OddBlock, Tower, random_batch
from on_ranks import on_ranks
from refusals import wrapped
from strategies import ALWAYS, Plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from shardwise import CPUOffloadPolicy, fully_shard, unsharded
from shardwise.init import check_replicas, sync_module_states
from shardwise.ranks import replicas


class Everything(nn.Module):
    """Parameters and buffers of many shapes, dtypes and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock(), OddBlock()])
        self.norm = nn.BatchNorm1d(8)
        self.outlet = nn.Linear(8, 1)
        self.outlet_again = self.outlet
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("strided", torch.zeros(4, 3).t(), persistent=False)
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                kind = torch.float64 if tensor.is_floating_point() else torch.int64
                drawn = torch.randint(0, 100, tensor.shape).to(kind)
                tensor.copy_(drawn > 50 if tensor.dtype == torch.bool else drawn)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(self.norm(x))


def built(seed: int) -> Everything:
    torch.manual_seed(seed)
    return Everything().double()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def in_full(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors_of(model).items()
    }


# --- before sharding ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "packed_bytes"),
    [(1, replicas.PACKED_BYTES), (2, 20), (3, replicas.PACKED_BYTES)],
    indirect=["world"],
)
@on_ranks()
def test_a_model_that_is_not_sharded_comes_from_the_source_in_pieces_of_any_size(packed_bytes: int) -> None:
    src, model = dist.get_world_size() - 1, built(dist.get_rank())
    with mock.patch.object(replicas, "PACKED_BYTES", packed_bytes):
        sync_module_states(model, src=src)
    assert model.strided.stride() == (1, 3)
    assert_equal(in_full(model), in_full(built(src)))


# --- after sharding -------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("plan", "world"), [(plan, plan.ranks) for plan in ALWAYS], indirect=["world"], ids=str
)
@on_ranks()
def test_shards_come_from_the_replica_of_the_source(plan: Plan) -> None:
    src = plan.ranks - 1
    model = plan.shard(built(dist.get_rank()))
    before = {n: t.to_local().clone() for n, t in model.named_parameters()}
    theirs: list[Any] = [None] * plan.ranks
    dist.all_gather_object(theirs, before)
    sync_module_states(model, src=src)
    check_replicas(model)
    for name, param in model.named_parameters():
        ranks = param.device_mesh.mesh
        where = {r: tuple((ranks == r).nonzero()[0].tolist()) for r in range(plan.ranks)}
        own = where[dist.get_rank()]
        # Of a scalar all ranks hold the same; of others, those that differ in a replicated dim.
        place = tuple(
            where[src][dim] if placement.is_replicate() else own[dim]
            for dim, placement in enumerate(param.placements)
        )
        source = next(rank for rank, coordinate in where.items() if coordinate == place)
        assert torch.equal(param.to_local(), theirs[source][name]), name
    assert_equal(dict(model.named_buffers()), dict(built(src).named_buffers()))


@on_ranks(2)
def test_buffers_that_drifted_apart_are_made_equal() -> None:
    model = fully_shard(built(0))
    for step in range(3):  # batches of their own, of other sizes even
        model(random_batch(10 * dist.get_rank() + step, 4 + dist.get_rank()))
    drifted: list[Any] = [None, None]
    dist.all_gather_object(drifted, dict(model.named_buffers()))
    sync_module_states(model)
    assert not torch.equal(drifted[0]["norm.running_mean"], drifted[1]["norm.running_mean"])
    assert_equal(dict(model.named_buffers()), drifted[0])


def after_a_forward(option: str) -> list[Any]:
    """Full parameters that are kept unsharded, or shards on the host, show the new values."""
    model = Tower().double()
    torch.manual_seed(dist.get_rank())
    for param in model.parameters():
        nn.init.uniform_(param)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if option == "offloaded" else {}
    mesh = device_mesh((2, 1), ("replicate", "shard"))
    fully_shard(model, mesh=mesh, reshard_after_forward=False, **options)
    with torch.no_grad():
        before = model(random_batch(0, 4))
    sync_module_states(model, src=1)
    return [before, model(random_batch(0, 4)).detach(), in_full(model)]


@pytest.mark.parametrize("option", ["kept", "offloaded"])
def test_the_next_forward_computes_with_what_came(world2: World, option: str) -> None:
    (_, first, values), (wanted, second, _) = world2.run(after_a_forward, option)
    torch.testing.assert_close(first, wanted)
    torch.testing.assert_close(second, wanted)
    model = Tower().double()
    model.load_state_dict(values)
    torch.testing.assert_close(model(random_batch(0, 4)).detach(), wanted)


@on_ranks(4)
def test_what_tensor_parallelism_replicates_comes_from_the_row_of_the_source() -> None:
    """Shards over tp alone, replicas of them over dp, and a norm that tp replicates."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))

    def place(_: str, module: nn.Module, tp: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), tp, [Shard(0)]))

    distribute_module(model, mesh["tp"], place)
    fully_shard(model, mesh=mesh["dp"])
    rank = dist.get_rank()
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(rank)
    sync_module_states(model, src=2)
    # rank = 2 * dp + tp; the source is (1, 0). Shards over dp stay with their dp rank.
    assert model[0].weight.to_local().eq(rank).all()
    assert model[1].weight.to_local().eq(rank // 2 * 2).all()


@on_ranks(2)
def test_small_tensors_share_broadcasts_and_large_ones_take_several() -> None:
    model = built(dist.get_rank())
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        sync_module_states(model)
        assert broadcast.call_count < 10  # those that are not contiguous go alone
        broadcast.reset_mock()
        with mock.patch.object(replicas, "PACKED_BYTES", 64):
            sync_module_states(model)
        assert broadcast.call_count > 30


# --- ranks without values -------------------------------------------------------------------------


@pytest.mark.parametrize("src", [0, 1])
@on_ranks(2)
def test_ranks_without_values_get_those_of_the_source(src: int) -> None:
    """One rank loads, the others have built on the meta device, and have an optimizer already."""
    with torch.device("cpu" if dist.get_rank() == src else "meta"):
        model = built(src)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync_module_states(model, src=src)
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert owned == {id(param) for param in model.parameters()}
    assert model.outlet.weight is model.outlet_again.weight
    assert model.strided.stride() == (1, 3)
    want = in_full(built(src))
    assert_equal(in_full(model), want)
    fully_shard(model)
    assert_equal(in_full(model), want)


def replicas_on(devices: str) -> Everything:
    """Two replicas of two shards each, built by each rank on the device of its number."""
    with torch.device(devices.split()[dist.get_rank()]):
        model = built(7)
    fully_shard(model, mesh=device_mesh((2, 2), ("replicate", "shard")))
    return model


@on_ranks(4)
def test_replicas_without_values_get_shards_from_that_of_the_source() -> None:
    model = replicas_on("cpu cpu meta meta")
    sync_module_states(model)
    check_replicas(model)
    assert_equal(in_full(model), in_full(built(7)))


@on_ranks(4)
def test_shards_that_nobody_else_has_must_be_there() -> None:
    told = refusal(sync_module_states, replicas_on("cpu meta cpu cpu"))
    assert "sync_module_states: rank 1 must send values that it does not have: " in told
    assert "blocks.0" in told


@on_ranks(2)
def test_what_one_rank_is_refused_all_are() -> None:
    one = nn.Linear(2, 2 + dist.get_rank())
    seeded = [
        refusal(sync_module_states, one),
        refusal(sync_module_states, nn.Linear(2, 2), src=dist.get_rank() or "0"),
    ]
    sync_module_states(nn.Linear(2, 2))
    assert_expected_inline(
        "\n".join(map(wrapped, seeded)),
        """\
RuntimeError: rank 1: sync_module_states: this rank (1) has 2 tensors,
and rank 0 2; they differ in shape or dtype at: weight, bias. Build
the same model on all ranks.
TypeError: rank 0: sync_module_states: src is '0', a str; pass a
global rank.""",
    )


# --- refusals -------------------------------------------------------------------------------------


@on_ranks(1)
def test_wrong_arguments_and_moments_are_refused() -> None:
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = fully_shard(nn.Sequential(LanguageModel()))
    found = [
        refusal(sync_module_states, model, src=7),
        refusal(sync_module_states, model, src="0"),
        refusal(sync_module_states, None),
        refusal(sync_module_states, bare),
    ]
    with unsharded(model):
        found.append(refusal(sync_module_states, model))
    model[0].register_forward_hook(lambda *_: found.append(refusal(sync_module_states, model)))
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert_expected_inline(
        "\n".join(map(wrapped, found)),
        """\
ValueError: rank 7 does not hold this model: this rank shares it with
[0], and those with others perhaps. Name one of the ranks that were
given the model, by its global rank.
TypeError: sync_module_states: src is '0', a str; pass a global rank.
TypeError: sync_module_states: model is None; pass an nn.Module.
RuntimeError: sync_module_states: 7 parameters are still on the meta
device: 0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean,
1.running_var, 1.num_batches_tracked. Nothing has given them values.
Call shardwise.materialize(model), or load a checkpoint, first.
RuntimeError: Sequential: sync_module_states is not possible inside
unsharded(), which has put full parameters in place of the shards that
its group works with. Leave the context first.
RuntimeError: sync_module_states: Sequential is part of a model whose
forward is running, and that needs its parameters and gradients as
they are. Call it before.""",
    )


@on_ranks(2)
def test_replicated_tensors_outside_groups_are_made_equal() -> None:
    """A DTensor that nobody has sharded."""
    mesh = device_mesh((2,), ("tp",))
    model = nn.Linear(2, 2)
    weight = torch.full((2, 2), float(dist.get_rank()))
    model.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Replicate()], run_check=False))
    nn.init.zeros_(model.bias)
    sync_module_states(model, src=1)
    assert_equal(model.weight.to_local().detach(), torch.ones(2, 2))
