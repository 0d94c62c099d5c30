"""Parameters that travel as int8 blocks: what the ranks compute with, what stays exact, what it saves.

The shards are exact, and the optimizer works on them; what is gathered differs from them by half a step of
the block at most, and is the same on every rank, bit for bit. Gradients are those of the values computed
with, which is checked against plain PyTorch at these values in float64 to 1e-10.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_equal
from harness import World
from models import OddModel, built, even_tower, random_batch, uneven_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from sent_bytes import counting_bytes
from strategies import seats, shard_as
from torch import Tensor, nn

from shardwise import CommPolicy, MixedPrecisionPolicy, fully_shard, unsharded
from shardwise.policies import QuantizedAllGather

BLOCK = 64


def quantized(block_size: int = BLOCK, **options: Any) -> CommPolicy:
    return CommPolicy(quantized_all_gather=QuantizedAllGather(block_size=block_size), **options)


def record_weights(model: nn.Module) -> list[dict[str, Tensor]]:
    """One entry a forward of each module: the full parameters that its code sees."""
    seen: list[dict[str, Tensor]] = []

    def look(name: str, module: nn.Module, args: Any) -> None:
        seen.append({f"{name}.{n}": getattr(module, n).detach().clone() for n in module._parameters})

    for name, module in model.named_modules():
        if module._parameters:
            module.register_forward_pre_hook(partial(look, name))
    return seen


def weights_seen(make: Any, strategy: str, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = built(make)
    exact = {name: param.detach().clone() for name, param in model.named_parameters()}
    shard_as(model, strategy, **({"comm_policy": quantized()} | options))
    seen = record_weights(model)
    with torch.no_grad():
        model(random_batch(0, 4, 7 if make is uneven_tower else 8))
    values = {name: value for each in seen for name, value in each.items()}
    assert values.keys() == exact.keys()
    return values, exact


@seats(
    (1, "zero3", OddModel),
    (3, "zero3", uneven_tower),
    (2, "zero2", OddModel),
    (4, "hybrid", uneven_tower),
    also="make",
)
def test_all_ranks_compute_with_the_same_bits(world: World, strategy: str, make: Any) -> None:
    (first, exact), *others = world.run(weights_seen, make, strategy)
    for seen, _ in others:
        for name, value in seen.items():
            assert torch.equal(value, first[name]), name
    largest = max(value.abs().max().item() for value in exact.values() if value.numel())
    differs = 0
    for name, value in first.items():
        assert value.dtype == exact[name].dtype
        assert value.shape == exact[name].shape
        if value.is_floating_point():
            error = (value - exact[name]).abs()
            assert error.numel() == 0 or error.max() <= largest / 254 * 1.001, name
            differs += (error > 0).sum().item()
        else:
            assert torch.equal(value, exact[name]), f"{name} is not exact"
    assert (differs > 0) == (world.size > 1), "nothing was quantized"


class OneWeight(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        # A matrix of one column: what has fewer than two dims is not quantised.
        self.weight = nn.Parameter((torch.randn(numel) * torch.logspace(-3, 3, numel)).unsqueeze(1))
        self.weight.data[300:500] = 0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


def one_weight_seen(numel: int, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    model = OneWeight(numel).to(dtype)
    exact = model.weight.detach().clone().squeeze(1)
    fully_shard(model, comm_policy=quantized(), **options)
    seen = record_weights(model)
    with torch.no_grad():
        model(torch.ones(2, dtype=dtype))
    return seen[0][".weight"].squeeze(1), exact


def steps_of_blocks(values: Tensor, world: int) -> Tensor:
    chunk = -(-len(values) // world)
    blocks = [block for piece in values.split(chunk) for block in piece.split(BLOCK)]
    return torch.cat([block.abs().max().expand(len(block)) / 127 for block in blocks])


@pytest.mark.parametrize(
    ("world", "numel", "dtype"),
    [(2, 2048, torch.float32), (3, 1999, torch.float32), (2, 1999, torch.float64)],
    indirect=["world"],
    ids=str,
)
def test_the_error_is_within_half_a_step_of_the_block(world: World, numel: int, dtype: torch.dtype) -> None:
    for seen, exact in world.run(one_weight_seen, numel, dtype):
        bound = steps_of_blocks(exact, world.size) / 2 * (1 + 1e-5)
        error = (seen - exact).abs()
        assert (error <= bound).all(), f"off by {(error / bound)[bound > 0].max():.3f} of half a step"
        assert (seen[320:440] == 0).all()
        assert error.max() > 0.5 * bound.max(), "nothing was quantized"


def test_under_mixed_precision_what_is_computed_with_is_rounded_to_its_dtype(world2: World) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for seen, exact in world2.run(one_weight_seen, 1999, torch.float32, mp_policy=policy):
        assert seen.dtype == torch.bfloat16
        bound = steps_of_blocks(exact, 2) / 2 * 1.01 + exact.abs() * 2**-7
        assert ((seen.float() - exact).abs() <= bound).all()


@on_ranks(3)
def test_what_does_not_travel_is_exact() -> None:
    seen, exact = weights_seen(uneven_tower, "ddp")
    assert all(torch.equal(seen[name], exact[name]) for name in exact)


# --- training -------------------------------------------------------------------------------------


@seats(
    (2, "zero3", None, OddModel),
    (2, "zero3", False, uneven_tower),
    (4, "zero3", 2, uneven_tower),
    (2, "zero1", None, uneven_tower),
    (3, "zero2", None, OddModel),
    (4, "hybrid", None, uneven_tower),
    also="reshard make",
)
@on_ranks()
def test_gradients_are_those_of_the_values_seen(strategy: str, reshard: Any, make: Any) -> None:
    """Gathered again for backward from all ranks, from some, or kept: the values are those of forward."""
    options = {} if reshard is None else {"overrides": {"blocks.*": {"reshard_after_forward": reshard}}}
    model = built(make)
    plain = copy.deepcopy(model)
    shard_as(model, strategy, comm_policy=quantized(), **options)
    seen = record_weights(model)
    optimizer = adamw(model)
    for step in range(2):
        seen.clear()
        model.zero_grad()
        plain.zero_grad()
        # The same on all ranks: the average is everybody's.
        batch = random_batch(step, 4, 7 if make is uneven_tower else 8)
        mean_of_squares(model, batch).backward()
        with torch.no_grad():
            values = {name: value for each in seen for name, value in each.items()}
            for name, param in plain.named_parameters():
                param.copy_(values[name])
        mean_of_squares(plain, batch).backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            if other.grad is not None and other.numel():
                torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=0, atol=1e-10)
        optimizer.step()


@seats((2, "zero3"), (3, "zero2"))
@on_ranks()
def test_shards_and_what_unsharded_shows_stay_exact(strategy: str) -> None:
    model = built(uneven_tower)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    shard_as(model, strategy, comm_policy=quantized())
    for step in range(3):
        mean_of_squares(model, random_batch(step, 4, 7)).backward()
        assert_equal({name: value.full_tensor() for name, value in model.state_dict().items()}, exact)
        with unsharded(model):
            assert_equal(dict(model.state_dict()), exact)


@on_ranks(2)
def test_a_copy_gathers_as_the_original_does() -> None:
    model = built(uneven_tower)
    shard_as(model, "zero3", comm_policy=quantized())
    model(random_batch(0, 4, 7)).sum().backward()
    copied = copy.deepcopy(model)
    seen, seen_of_copy = record_weights(model), record_weights(copied)
    with torch.no_grad():
        outputs = [each(random_batch(1, 4, 7)) for each in (model, copied)]
        exact = built(uneven_tower)(random_batch(1, 4, 7))
    pairs = zip(seen, seen_of_copy, strict=True)
    assert all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], exact)


# --- bytes ----------------------------------------------------------------------------------------


def bytes_of_a_forward(is_quantized: bool, block_size: int, dtype: torch.dtype | None) -> int:
    torch.manual_seed(0)
    model = nn.Linear(256, 512)
    policy = quantized(block_size) if is_quantized else None
    mp_policy = MixedPrecisionPolicy(param_dtype=dtype)
    fully_shard(model, comm_policy=policy, mp_policy=mp_policy)
    counts: list[int] = []
    with torch.no_grad():
        model(torch.ones(2, 256))
        with counting_bytes(counts):
            model(torch.ones(2, 256))
    return counts[0]


@pytest.mark.parametrize(
    ("world", "dtype", "itemsize", "block_size"),
    [(2, None, 4, 256), (4, torch.bfloat16, 2, 64)],
    indirect=["world"],
    ids=str,
)
def test_a_byte_a_number_and_a_scale_a_block_travel(
    world: World, dtype: Any, itemsize: int, block_size: int
) -> None:
    plain = sum(world.run(bytes_of_a_forward, False, block_size, dtype))
    quantized_bytes = sum(world.run(bytes_of_a_forward, True, block_size, dtype))
    numbers = (world.size - 1) * (256 * 512 + 512)
    assert plain == pytest.approx(numbers * itemsize, rel=0.02)
    assert numbers <= quantized_bytes <= numbers * (1 + 4 / block_size) * 1.02


# --- what is odd ----------------------------------------------------------------------------------


class Flags(nn.Module):
    """Numbers that are no approximations, beside some that are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 8))
        self.counts = nn.Parameter(torch.arange(1_000_000, 1_000_013), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(7) % 3 == 0, requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.single = nn.Parameter(torch.tensor([1.25, -3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).sum() * self.counts.sum() + self.mask.sum() + self.empty.sum()


@on_ranks(2, 4)
def test_integers_and_flags_are_exact() -> None:
    model = built(Flags)
    exact = {f".{name}": param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(model, comm_policy=quantized())
    seen = record_weights(model)
    model(random_batch(0, 4)).backward()
    found = seen[0]
    for name in (".counts", ".mask", ".empty"):
        assert torch.equal(found[name], exact[name])
        assert found[name].dtype == exact[name].dtype
    assert found[".single"].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@on_ranks(2)
def test_a_weight_that_is_not_finite_stays_visible(value: float) -> None:
    model = built(even_tower)
    model.blocks[1].up.weight.data[3, 3] = value
    shard_as(model, "zero3", comm_policy=quantized())
    seen = record_weights(model)
    with torch.no_grad():
        model(random_batch(0, 4))
    values = {name: weight for each in seen for name, weight in each.items()}
    assert not bool(values["blocks.1.up.weight"].isfinite().all())


# --- refused --------------------------------------------------------------------------------------


def test_a_block_size_is_a_number_and_how_to_gather_is_said_by_an_object() -> None:
    for value in (0, 1.5, "64", True):
        with pytest.raises((TypeError, ValueError), match=f"QuantizedAllGather: block_size is {value!r}"):
            QuantizedAllGather(block_size=value)  # type: ignore[arg-type]
    for how in (256, "int8", QuantizedAllGather):
        with pytest.raises(TypeError, match=r"CommPolicy: quantized_all_gather is .*QuantizedAllGather"):
            CommPolicy(quantized_all_gather=how)  # type: ignore[arg-type]
