"""check_replicas: copies that differ are found and named, on all ranks alike, before the first step.

What one rank changes is one bit of one element. The check must find it wherever it is, and nothing else.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from meshed import Layout, device_mesh, refusal
from models import OddModel, Tower, built, odd_model, random_batch, shard_tower
from on_ranks import on_ranks
from refusals import wrapped
from strategies import Plan, Wire
from thread_ranks import ThreadRanks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise import CPUOffloadPolicy, fully_shard
from shardwise.init import check_replicas, sync_module_states
from shardwise.params import initial_values
from shardwise.ranks import replicas

SQUARE = Layout((2, 2))


def flip(param: Tensor, bit: int) -> None:
    """Change one bit of the last element that this rank holds, and nothing that PyTorch counts."""
    local = param.to_local().data.view(-1)
    if local.numel():
        word = local[-1:].view(torch.int64 if local.itemsize == 8 else torch.int32)
        word ^= 1 << bit


def forward(model: nn.Module) -> None:
    model(random_batch(0, 4))


# --- at the first forward -------------------------------------------------------------------------


@on_ranks(4)
def test_replicas_of_other_seeds_are_refused_at_the_first_forward() -> None:
    seeds = (0, 0, 1, 1)
    model = shard_tower(built(Tower, seed=seeds[dist.get_rank()]), mesh=SQUARE.mesh())
    twice = [refusal(forward, model), refusal(forward, model)]
    assert twice[0] == twice[1]
    sync_module_states(model)
    forward(model)
    assert_expected_inline(
        wrapped(twice[0]),
        """\
RuntimeError: inlet.weight and 15 more: the values on ranks 2, 3
differed from those on ranks 0, 1 when fully_shard cut them, so their
shards are parts of different models. Seed or load all ranks alike
before fully_shard, pass sync_module_states=True, or load the same
values on all ranks before the first forward.
check_equal_weights=False compares nothing.""",
    )


@pytest.mark.parametrize("plan", [Plan("ddp", 4), Plan("hybrid", 4, 2)], ids=str)
@on_ranks(4)
def test_one_bit_on_one_rank_is_found_and_told_on_all(plan: Plan) -> None:
    model = plan.shard(built(Tower, seed=0))
    check_replicas(model)
    others = "rank 1" if plan.strategy == "hybrid" else "ranks 0-2"
    expected = f"blocks.1.up.weight: the copies on rank 3 differ from those on {others}."
    for bit in (0, 31, 52, 62):
        if dist.get_rank() == 3:
            flip(model.blocks[1].up.weight, bit)
        assert refusal(check_replicas, model).startswith(f"RuntimeError: {expected}")
        if dist.get_rank() == 3:
            flip(model.blocks[1].up.weight, bit)  # back


@on_ranks(2)
def test_two_elements_that_have_changed_places_are_found() -> None:
    model = fully_shard(built(Tower, seed=0), mesh=device_mesh((2, 1), ("replicate", "shard")))
    if dist.get_rank() == 1:
        local = model.inlet.weight.to_local().data.view(-1)
        local[[3, 40]] = local[[40, 3]]
    assert "inlet.weight: the copies" in refusal(check_replicas, model)


@on_ranks(3)
def test_scalars_that_every_rank_keeps_are_compared() -> None:
    torch.manual_seed(0)
    model = fully_shard(odd_model().double())
    if dist.get_rank() == 2:
        for block in model.blocks:
            block.scale.to_local().data.add_(1)
    expected = "blocks.0.scale and 1 more: the copies on rank 2 differ from those on ranks 0, 1."
    assert refusal(forward, model).startswith(f"RuntimeError: {expected}")


@on_ranks(4)
def test_equal_copies_pass_with_nans_and_on_the_host() -> None:
    for model in (built(Tower, seed=0), OddModel().double()):
        with torch.no_grad():
            for param in model.parameters():
                if param.is_floating_point() and param.numel():
                    param[(0,) * param.dim()] = float("nan")
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        fully_shard(model, mesh=SQUARE.mesh(), **options)
        check_replicas(model)
        forward(model)
    check_replicas(nn.Linear(2, 2))


@on_ranks(2)
def test_what_tensor_parallelism_replicates_is_compared() -> None:
    mesh = device_mesh((2,), ("tp",))
    model = nn.LayerNorm(4)
    weight = torch.full((4,), float(dist.get_rank()))
    model.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Replicate()], run_check=False))
    assert refusal(check_replicas, model).startswith("RuntimeError: weight: ")


@on_ranks(2)
def test_what_is_nobodys_copy_is_not_compared() -> None:
    """Ignored and plain parameters, and shards that no other rank has."""
    model = built(Tower, seed=dist.get_rank())
    ignored = {model.inlet.weight.requires_grad_(False)}
    fully_shard(model.blocks[0], check_equal_weights=False)
    fully_shard(model.outlet, ignored_params=ignored, check_equal_weights=False)
    check_replicas(model)
    forward(model)


# --- what it costs --------------------------------------------------------------------------------


@on_ranks(4)
def test_the_first_forward_with_gradients_compares_and_no_other() -> None:
    model = shard_tower(built(Tower, seed=0), mesh=SQUARE.mesh())
    compare = initial_values.refuse_unequal
    with mock.patch.object(initial_values, "refuse_unequal", wraps=compare) as compared:
        with torch.no_grad():
            forward(model)
        assert compared.call_count == 0
        for _ in range(2):
            forward(model)
        model.set_requires_all_reduce(True)
        model._shardwise_state.root.start_over()
        forward(model)
        assert compared.call_count == 1


@on_ranks(4)
def test_it_reduces_a_few_numbers_whatever_the_model() -> None:
    for layout, expected in ((SQUARE, 7), (Layout((4, 1)), 2), (Layout((1, 4)), 1)):
        model = shard_tower(built(Tower, seed=0), mesh=layout.mesh())
        with Wire() as wire:
            check_replicas(model)
        assert (wire.agreements, wire.bytes) == (expected, 0.0), layout


CHECKSUMS = replicas.Checksums()  # with memory that all tensors here share


def number_of(tensor: Tensor) -> float:
    number = CHECKSUMS.of(tensor)
    assert number is not None
    return number.item()


def test_numbers_of_tensors_depend_on_every_bit_and_its_place() -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 256, (203,), dtype=torch.uint8)
    before = number_of(tensor)
    seen = {before}
    for index in range(203):
        for bit in range(8):
            tensor[index] ^= 1 << bit
            seen.add(number_of(tensor))
            tensor[index] ^= 1 << bit
    assert len(seen) == 1 + 203 * 8
    assert number_of(tensor[torch.randperm(203)]) not in seen
    assert number_of(tensor) == before


def test_numbers_depend_on_the_order_of_pieces_and_not_on_where_they_lie() -> None:
    pieces = torch.randn(3, 2 * replicas.PIECE_WORDS)
    swapped = pieces[[1, 0, 2]]
    assert number_of(pieces) != number_of(swapped)
    unaligned = torch.cat([pieces.new_zeros(1), pieces.flatten(), pieces.new_ones(1)])
    assert number_of(unaligned[1:]) == number_of(unaligned[1:].clone())
    assert number_of(pieces.flatten()) == number_of(pieces)


def test_numbers_differ_where_signs_of_pairs_do() -> None:
    values = torch.arange(1.0, 65.0, dtype=torch.float64)
    seen = {number_of(values)}
    for first in range(64):
        for second in range(first):
            changed = values.clone()
            changed[[first, second]] *= -1
            seen.add(number_of(changed))
    assert len(seen) == 1 + 64 * 63 // 2


# --- where it runs --------------------------------------------------------------------------------


@on_ranks(2)
def test_what_one_rank_cannot_compare_is_refused_on_all() -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Tower().double()
    for param in model.parameters():
        if not param.is_meta:
            nn.init.zeros_(param)
    shard_tower(model, mesh=device_mesh((2, 1), ("replicate", "shard")))
    told = refusal(check_replicas, model)
    check_replicas(shard_tower(built(Tower, seed=0), mesh=device_mesh((2, 1), ("replicate", "shard"))))
    assert "check_replicas: 22 parameters are still on the meta device" in told


@on_ranks(1)
def test_what_cannot_be_compared_is_refused() -> None:
    with torch.device("meta"):
        bare = fully_shard(nn.Linear(2, 2))
    assert_expected_inline(
        "\n".join(map(wrapped, [refusal(check_replicas, bare), refusal(check_replicas, 3)])),
        """\
RuntimeError: check_replicas: 2 parameters are still on the meta
device: weight, bias. Nothing has given them values. Call
shardwise.materialize(model), or load a checkpoint, first.
TypeError: check_replicas: model is 3, an int; pass an nn.Module.""",
    )


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="2.11 crashes when several threads enter a FakeTensorMode"
)
class RanksAsThreads(ThreadRanks):
    @property
    def world_size(self) -> int:
        return 2

    def test_copies_are_compared(self) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        fully_shard(model, mesh=mesh)
        check_replicas(model)
        if dist.get_rank() == 1:
            model.bias.to_local().data.zero_()
        text = refusal(model, torch.ones(1, 2))
        assert text.startswith("RuntimeError: bias: the copies on rank 1 differ from those on rank 0.")
