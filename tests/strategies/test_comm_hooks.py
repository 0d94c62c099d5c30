"""Hooks that reduce gradients in place of the library: FSDP1's, torch's ready-made ones, and our own.

A hook of the user's that averages changes no number: training equals plain training in float64 to 1e-10.
What compresses is held to the rounding it claims, block by block, and to the bytes that it claims, which
are counted where nothing can hide: in the kernel's own record of what each socket has sent.

Reductions differ by what a group's mesh does: shards (zero3, which reduces as zero2 does), replicas (ddp), or
both (hybrid).
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from failure_models import Failure, PartlyUsed
from harness import World
from meshed import outcome, refusal
from models import WIDTH, built, even_tower, odd_model, random_batch, uneven_tower
from on_ranks import on_ranks
from reference import adamw, full, mean_of_squares
from refusals import assert_says
from scenario import Side, assert_same, one_thread, same_as_plain
from sent_bytes import counting_bytes
from strategies import seats, shard_as
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.tensor import Shard

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard, no_sync
from shardwise.policies import LowPrecisionReduction, QuantizedReduction
from shardwise.strategies import register_comm_hook

both_kinds = pytest.mark.parametrize("strategy", ["zero3", "ddp"])

# The older name warns where there is a newer one.
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- hooks as they are written for FSDP1 ----------------------------------------------------------


@dataclass
class State:
    """What a hook is given back at each call."""

    process_group: Any
    calls: list[dict[str, Any]] = field(default_factory=list)
    fails: bool = False

    @property
    def world(self) -> int:
        return dist.get_world_size(self.process_group)

    def note(self, grad: Tensor, output: Tensor | None = None) -> None:
        if self.fails:
            raise Failure("in the hook")
        call = {
            "numel": grad.numel(),
            "dtype": grad.dtype,
            "squares": grad.double().pow(2).sum().item(),
            "output": None if output is None else output.numel(),
        }
        assert grad.dim() == 1
        assert grad.is_contiguous()
        if output is not None:
            assert output.dim() == 1
            assert output.is_contiguous()
            assert output.dtype == grad.dtype
            assert output.device == grad.device
            assert grad.numel() == self.world * output.numel()
        self.calls.append(call)

    def taken(self, what: str) -> list[Any]:
        """Of the calls since it was asked last."""
        found = [call[what] for call in self.calls]
        self.calls.clear()
        return found


def scatters(state: State, grad: Tensor, output: Tensor) -> None:
    """For sharded groups, as FSDP1's documents describe it."""
    state.note(grad, output)
    reduce_scatter_tensor(output, grad, group=state.process_group)
    output.div_(state.world)


def sums(state: State, grad: Tensor) -> None:
    """For replicated groups."""
    state.note(grad)
    dist.all_reduce(grad, group=state.process_group)
    grad.div_(state.world)


def either(state: State, grad: Tensor, output: Tensor | None = None) -> None:
    """For both, as torch's compressing hooks are written."""
    if output is None:
        sums(state, grad)
    else:
        scatters(state, grad, output)


class Callable_:
    def __call__(self, state: State, grad: Tensor, output: Tensor | None = None, *rest: Any) -> None:
        either(state, grad, output)

    def method(self, state: State, grad: Tensor, output: Tensor | None = None, scale: float = 1.0) -> None:
        either(state, grad, output)


def fitting(strategy: str) -> Callable[..., None]:
    return sums if strategy == "ddp" else scatters


MIXED = {"blocks.1": "ddp"}


def hooked(model: nn.Module, strategy: str, hook: Any = None, is_sharded: bool = True, **options: Any) -> Any:
    if not is_sharded:
        return State(None)
    if strategy == "mixed":
        strategy, options = "zero3", {"overrides": MIXED}
    state = State(shard_as(model, strategy, **options))
    register_comm_hook(model, state, hook or fitting(strategy))
    return state


@same_as_plain()
@seats(
    (1, "zero3", uneven_tower, scatters),
    (1, "ddp", even_tower, sums),
    (2, "zero2", odd_model, Callable_()),
    (2, "zero3", even_tower, partial(Callable_().method, scale=2.0)),
    (2, "ddp", odd_model, either),
    (2, "mixed", even_tower, either),  # a hook for both is called with what each needs
    (3, "zero3", odd_model, scatters),
    (3, "ddp", uneven_tower, Callable_()),
    (4, "hybrid", uneven_tower, scatters),
    also="make hook",
)
def test_a_hook_written_for_fsdp1_trains_as_the_plain_model(
    side: Side, strategy: str, make: Any, hook: Any
) -> None:
    """Also with scalars, strided and empty parameters."""
    model = built(make)
    state = hooked(model, strategy, hook, side.is_sharded)
    optimizer = adamw(model)
    for step in range(2):
        side.step(model, optimizer, step, width=7 if make is uneven_tower else 8)
        outputs = state.taken("output")
        groups = [m for m in model.modules() if isinstance(m, shardwise.FSDPModule)]
        assert len(outputs) == len(groups), "the hook is called once a group and step"
        assert outputs.count(None) == {"ddp": len(groups), "mixed": side.is_sharded}.get(strategy, 0)
    side.note_parameters(model)


# --- what a hook sees -----------------------------------------------------------------------------


class Given(nn.Module):
    """Parameters whose gradients are what its forward is given."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"w{index}", nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        weights = [getattr(self, f"w{index}") for index in range(len(gradients))]
        return torch.stack([(w * g).sum() for w, g in zip(weights, gradients, strict=True)]).sum()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Any) -> Tensor:
        return self.inner(inputs)


def given(strategy: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = Around(Given(*shapes, dtype=dtype))
    return model, shard_as(model, strategy, wrap=Given)


@seats((3, "zero3"), (2, "ddp"))
@on_ranks()
def test_a_hook_gets_each_number_once_and_zeros_between_them(strategy: str) -> None:
    model = built(uneven_tower)
    plain = copy.deepcopy(model)
    state = hooked(model, strategy)
    batch = random_batch(dist.get_rank(), 4, 7)
    for each in (model, plain):
        mean_of_squares(each, batch).backward()
    own = [sum(p.grad.pow(2).sum().item() for p in block.parameters()) for block in plain.blocks]
    rest = sum(p.grad.pow(2).sum().item() for p in plain.parameters()) - sum(own)
    assert sorted(state.taken("squares")) == pytest.approx(sorted([*own, rest]), abs=1e-12)


class TwoKinds(nn.Module):
    """Parameters of two dtypes, all trainable, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Parameter(torch.randn(5, WIDTH))
        self.fine = nn.Parameter(torch.randn(7, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x.float() @ self.coarse.t()).sum(1, keepdim=True) + (x @ self.fine.t()).sum(1, keepdim=True)
        return x + torch.tanh(mixed)


@same_as_plain(atol=1e-05)
@seats((3, "zero3"), (2, "ddp"))
def test_a_hook_is_called_once_a_dtype_that_has_gradients(side: Side, strategy: str) -> None:
    """To the accuracy of float32, in which half of the gradients are summed."""
    torch.manual_seed(3)
    model = nn.Sequential(TwoKinds(), TwoKinds())
    state = hooked(model, strategy, is_sharded=side.is_sharded)
    optimizer = adamw(model)
    for step in range(2):
        side.step(model, optimizer, step)
        if side.is_sharded:
            assert sorted(map(str, state.taken("dtype"))) == 2 * ["torch.float32"] + 2 * ["torch.float64"]


@both_kinds
@on_ranks(2)
def test_a_hook_gets_the_dtype_of_reduction(strategy: str) -> None:
    for dtypes, seen in (
        ({"param_dtype": torch.bfloat16}, torch.bfloat16),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, torch.float32),
    ):
        model = built(even_tower).float()
        state = hooked(model, strategy, mp_policy=MixedPrecisionPolicy(**dtypes))
        model(random_batch(0, 4).float()).sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert set(state.taken("dtype")) == {seen}


# --- when it is called ----------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize(("strategy", "is_synced"), [("zero3", False), ("ddp", False), ("hybrid", True)])
def test_a_hook_is_called_when_gradients_are_synchronised(side: Side, strategy: str, is_synced: bool) -> None:
    """Three microbatches a step; all but the last under no_sync, or each reduced by itself."""
    model = built(uneven_tower)
    state = hooked(model, strategy, is_sharded=side.is_sharded)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(3):
            waits = side.is_sharded and not is_synced and microbatch < 2
            with no_sync(model) if waits else contextlib.nullcontext():
                mean_of_squares(model, side.inputs(3 * step + microbatch, 7)).backward()
            assert len(state.taken("numel")) == (4 if side.is_sharded and not waits else 0)
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
    side.note_parameters(model)


@same_as_plain(2)
@both_kinds
def test_a_hook_is_not_called_for_frozen_groups(side: Side, strategy: str) -> None:
    """A frozen block, a block that is frozen in part, and one with a parameter that forward never uses."""
    model = built(even_tower)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    model.blocks.append(PartlyUsed().double())
    wrap = (type(model.blocks[0]), PartlyUsed)
    state = hooked(model, strategy, is_sharded=side.is_sharded, wrap=wrap)
    optimizer = adamw(model)
    for step in range(2):
        side.step(model, optimizer, step)
        assert len(state.taken("numel")) == 4 * side.is_sharded, "frozen groups have nothing to reduce"
    side.note_parameters(model)


@same_as_plain(2)
@both_kinds
def test_a_hook_may_be_registered_between_steps_and_outlives_its_failure_and_copies(
    side: Side, strategy: str
) -> None:
    """FSDP1 allows it before the first forward only."""
    model = built(even_tower)
    if side.is_sharded:
        state = State(shard_as(model, strategy))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    if side.is_sharded:
        register_comm_hook(model, state, fitting(strategy))
    side.step(model, optimizer, 1)
    if side.is_sharded:
        state.fails = True
        with pytest.raises(Failure):
            mean_of_squares(model, side.inputs(2)).backward()
        state.fails = False
        assert len(state.taken("numel")) == 4
    side.steps(model, optimizer, [3])
    copied = copy.deepcopy(model)
    side.steps(copied, adamw(copied), [4, 5])
    side.steps(model, optimizer, [6])


# --- torch's own hooks ----------------------------------------------------------------------------


@same_as_plain()
@seats((3, "zero3"), (2, "ddp"))
def test_torchs_own_hooks_train_as_the_plain_model(side: Side, strategy: str) -> None:
    hook = default_hooks.allreduce_hook if strategy == "ddp" else default_hooks.reduce_scatter_hook
    model = built(uneven_tower)
    if side.is_sharded:
        register_comm_hook(model, default_hooks.DefaultState(shard_as(model, strategy)), hook)
    side.steps(model, adamw(model), range(2), width=7)


SHAPES = ((37, 5), (11,), (3, 2), ())


def gradients_to_give(rank: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def reduce_given(model: nn.Module, gradients: Sequence[Tensor], is_part: bool = False) -> list[Tensor]:
    """The reduced gradients, whole or this rank's part."""
    model.zero_grad()
    model(gradients).backward()
    grads = [p.grad for p in model.parameters()]
    return [g.to_local().clone() if is_part else g.full_tensor() for g in grads]


def reduced_by_torchs_compression(strategy: str, hook: Any) -> list[Tensor]:
    # These hooks ask the current stream to keep memory; torch has none to ask on the CPU and raises.
    with mock.patch.object(Tensor, "record_stream"):
        model, pg = given(strategy, *SHAPES)
        register_comm_hook(model, default_hooks.LowPrecisionState(pg), hook)
        results = reduce_given(model, gradients_to_give(dist.get_rank(), *SHAPES))
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        return results


@seats(
    (3, "zero3", default_hooks.bf16_compress_hook, torch.bfloat16),
    (2, "ddp", default_hooks.fp16_compress_hook, torch.float16),
    also="hook dtype",
)
def test_torchs_compressing_hooks_replace_the_memory_of_their_output(
    world: World, strategy: str, hook: Any, dtype: torch.dtype
) -> None:
    """They assign ``output.data``: the result is where the hook has put it, not where it was expected."""
    assert_rounded(world, world.run(reduced_by_torchs_compression, strategy, hook), dtype)


def assert_rounded(world: World, results: list[list[Tensor]], dtype: torch.dtype, scale: float = 1.0) -> None:
    """Within what ``dtype`` rounds in each rank's gradient and in the sum of them, and not more exact."""
    everyones = [gradients_to_give(rank, *SHAPES) for rank in range(world.size)]
    errors: list[Tensor] = []
    for result in results:
        for index, got in enumerate(result):
            all_of_it = scale * torch.stack([gradients[index].double() for gradients in everyones])
            unit = torch.finfo(dtype).eps / 2
            bound = (world.size + 1) * unit * all_of_it.abs().mean(0) + torch.finfo(dtype).smallest_normal
            error = (got.double() - all_of_it.mean(0)).abs()
            assert (error <= bound).all(), f"off by {(error / bound).max():.2f} of the bound"
            errors.append(error.flatten())
    assert torch.cat(errors).max() > 0, "nothing was rounded"


# --- gossip ---------------------------------------------------------------------------------------


def swaps(state: State, grad: Tensor) -> None:
    """Instead of a sum: the gradient of the rank before this one, by messages of the hook's own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(grad)
    sent = dist.P2POp(dist.isend, grad.clone(), (rank + 1) % world)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, (rank - 1) % world)]):
        work.wait()
    grad.copy_(received)


def gradients_apart(other: int | None) -> list[Tensor]:
    """On the batch of the rank before this one, or of rank `other`."""
    model = built(even_tower)
    rank = other
    if other is None:
        hooked(model, "ddp", swaps)
        rank = dist.get_rank()
    mean_of_squares(model, random_batch(rank, 4)).backward()
    return [full_or_own(param.grad) for param in model.parameters()]


def full_or_own(tensor: Any) -> Tensor:
    return getattr(tensor, "to_local", lambda: tensor)().detach().clone()


def test_a_hook_may_leave_replicas_apart_as_gossip_does(world3: World) -> None:
    """What it leaves is what the rank gets: nothing is summed after it, and no message meets its own."""
    with one_thread():
        expected = [gradients_apart(rank) for rank in range(3)]
    assert not torch.equal(expected[0][0], expected[1][0])
    for rank, found in enumerate(world3.run(gradients_apart, None)):
        torch.testing.assert_close(found, expected[rank - 1], rtol=0, atol=1e-10)


# --- ready-made hooks -----------------------------------------------------------------------------

HALF = LowPrecisionReduction(torch.bfloat16)
INT8, FORGETFUL = QuantizedReduction(block_size=64), QuantizedReduction(block_size=64, error_feedback=False)

ready_made = seats(
    (2, "ddp", HALF), (3, "zero3", INT8), (3, "ddp", FORGETFUL), (4, "hybrid", INT8), also="hook"
)


def reduced_by(
    strategy: str, hook: Any, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    model, _ = given(strategy, *SHAPES, dtype=dtype)
    register_comm_hook(model, None, hook)
    gradients = gradients_to_give(dist.get_rank(), *SHAPES)
    return reduce_given(model, [(scale * g).to(dtype) for g in gradients])


@seats(
    (3, "zero3", torch.bfloat16, torch.float32),
    (2, "zero3", torch.float16, torch.float64),
    (3, "ddp", torch.bfloat16, torch.float64),
    (4, "hybrid", torch.float16, torch.float32),
    also="dtype param_dtype",
)
def test_low_precision_rounds_and_does_nothing_else(
    world: World, strategy: str, dtype: torch.dtype, param_dtype: torch.dtype
) -> None:
    results = world.run(reduced_by, strategy, LowPrecisionReduction(dtype), dtype=param_dtype)
    assert_rounded(world, results, dtype)


@seats((2, "zero3"), (2, "ddp"), (4, "hybrid"))
def test_low_precision_in_float16_leaves_room_for_the_sum(world: World, strategy: str) -> None:
    """The gradients are all below float16's 65504, and sums of them are not."""
    scale = 18e3
    everyones = scale * torch.stack(
        [torch.cat([g.flatten() for g in gradients_to_give(rank, *SHAPES)]) for rank in range(world.size)]
    )
    assert everyones.abs().max() < 65504 < everyones.sum(0).abs().max()
    results = world.run(reduced_by, strategy, LowPrecisionReduction(torch.float16), scale)
    assert_rounded(world, results, torch.float16, scale)


LARGE = (512, 256)
BLOCK = 256


def bytes_of_reduction(strategy: str, hook: Any) -> int:
    """Of the second backward: the first may set things up."""
    model, _ = given(strategy, LARGE)
    if hook is not None:
        register_comm_hook(model, None, hook)
    gradients = gradients_to_give(dist.get_rank(), LARGE)
    model(gradients).backward()
    model.inner.set_reshard_after_forward(False)  # else backward would unshard
    loss = model(gradients)
    counts: list[int] = []
    with counting_bytes(counts):
        loss.backward()
    return counts[0]


@seats((2, "zero3"), (3, "ddp"), (4, "hybrid"))
def test_low_precision_sends_half_and_quantized_a_quarter_and_the_scales(world: World, strategy: str) -> None:
    hooks = (None, HALF, QuantizedReduction(block_size=BLOCK))
    plain, low, quantized = (sum(world.run(bytes_of_reduction, strategy, hook)) for hook in hooks)
    assert plain >= (world.size - 1) * 4 * LARGE[0] * LARGE[1]
    assert 0.48 <= low / plain <= 0.52
    assert 0.25 <= quantized / plain <= 0.25 * (1 + 4 / BLOCK) + 0.01


VECTOR = (10_007, 1)  # chunks that no block divides; what has fewer than two dims is not quantised


def vector_to_give(rank: int) -> Tensor:
    """Numbers whose size changes a thousandfold from end to end, with a stretch of zeros."""
    values = gradients_to_give(rank, VECTOR)[0].flatten()
    values *= torch.logspace(-2, 1, VECTOR[0])
    values[3000:4200] = 0
    return values


def vectors_to_give(world: World) -> Tensor:
    return torch.stack([vector_to_give(rank) for rank in range(world.size)]).double()


def steps_of_blocks(values: Tensor, world: int) -> Tensor:
    """For each number, the step of the int8 block in which a rank sends it to the one that keeps it."""
    chunk = -(-len(values) // world)
    padded = values.new_zeros(world * chunk)
    padded[: len(values)] = values
    blocks = [block for piece in padded.view(world, chunk) for block in piece.split(BLOCK)]
    return torch.cat([block.abs().max().expand(len(block)) / 127 for block in blocks])[: len(values)].double()


def reduced_vector(strategy: str, hook: Any, steps: int = 1) -> list[Tensor]:
    """The vector's gradient of each step; the same is given each time."""
    model, _ = given(strategy, VECTOR)
    register_comm_hook(model, None, hook)
    given_here = vector_to_give(dist.get_rank()).view(VECTOR)
    return [reduce_given(model, [given_here])[0].flatten() for _ in range(steps)]


@pytest.mark.parametrize(("world", "feedback"), [(2, True), (3, False)], indirect=["world"])
def test_quantized_is_within_half_a_step_of_each_rank_in_each_block(world: World, feedback: bool) -> None:
    hook = QuantizedReduction(block_size=BLOCK, error_feedback=feedback)
    vectors = vectors_to_give(world)
    steps = torch.stack([steps_of_blocks(vector, world.size) for vector in vectors])
    bound = steps.mean(0) / 2 + 1e-6 * vectors.abs().mean(0)
    for (got,) in world.run(reduced_vector, "zero3", hook):
        error = (got - vectors.mean(0)).abs()
        assert (error <= bound).all(), f"off by {(error / bound)[bound > 0].max():.2f} of half a step"
        assert error.max() > 0.2 * bound.max(), "nothing was quantized"
        assert (got[3000:4200] == 0).all()


@seats((1, "zero3"), (3, "ddp"), (4, "hybrid"))
def test_quantized_small_numbers_do_not_suffer_from_large_ones_far_away(world: World, strategy: str) -> None:
    """Half a step of each rank, and half a step of the mean where that travels as well: to replicas."""
    vectors = vectors_to_give(world)
    for (got,) in world.run(reduced_vector, strategy, QuantizedReduction(block_size=BLOCK)):
        error = (got - vectors.mean(0)).abs()
        for start in range(0, VECTOR[0], 1000):
            # Wherever blocks begin, those of this stretch end within a block's length of it.
            near = vectors[:, max(0, start - BLOCK) : start + 1000 + BLOCK]
            largest = near.abs().max().item() / 127
            assert error[start : start + 1000].max() <= largest * 1.01


@on_ranks(2)
def test_quantized_leaves_vectors_exact() -> None:
    shapes = (1000,), VECTOR
    model, _ = given("zero3", *shapes)
    register_comm_hook(model, None, QuantizedReduction(block_size=BLOCK))
    of_ranks = [gradients_to_give(rank, *shapes) for rank in range(2)]
    got, _ = reduce_given(model, of_ranks[dist.get_rank()])
    assert torch.equal(got, (of_ranks[0][0] + of_ranks[1][0]) / 2)


@on_ranks(2)
def test_error_feedback_begins_anew_where_numbers_lie_elsewhere() -> None:
    model = fully_shard(nn.Linear(6, 6), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    register_comm_hook(model, None, QuantizedReduction(block_size=64))
    model(torch.ones(4, 6)).sum().backward()
    model.zero_grad()
    model.to(torch.bfloat16)
    model(torch.ones(4, 6, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(full(model.bias.grad), torch.full((6,), 4.0, dtype=torch.bfloat16))


def spike_reduced(strategy: str) -> list[Tensor]:
    """Of the second step: the gradient before it was a million times as large."""
    model, _ = given(strategy, VECTOR)
    register_comm_hook(model, None, QuantizedReduction(block_size=BLOCK))
    given_here = vector_to_give(dist.get_rank()).view(VECTOR)
    reduce_given(model, [1e6 * given_here])
    return reduce_given(model, [given_here])


@seats((2, "zero3"), (2, "ddp"), (4, "hybrid"))
def test_a_spike_whose_step_is_skipped_leaves_no_error(world: World, strategy: str) -> None:
    vectors = vectors_to_give(world)
    step = vectors.abs().max().item() / 127
    for (got,) in world.run(spike_reduced, strategy):
        assert (got.flatten() - vectors.mean(0)).abs().max() <= 1.1 * step


def reduced_with_zeros_after(strategy: str) -> list[Tensor]:
    model, _ = given(strategy, VECTOR)
    register_comm_hook(model, None, QuantizedReduction(block_size=BLOCK))
    given_here = vector_to_give(dist.get_rank()).view(VECTOR)
    return [reduce_given(model, [each])[0] for each in (given_here, torch.zeros(VECTOR))]


@seats((2, "zero3"), (3, "zero3"))
def test_error_feedback_sends_what_is_left_with_a_gradient_of_zeros(world: World, strategy: str) -> None:
    """As of an expert that gets tokens in every other batch."""
    vectors = vectors_to_give(world)
    step = vectors.abs().max().item() / 127
    for first, second in world.run(reduced_with_zeros_after, strategy):
        assert ((first + second).flatten() - vectors.mean(0)).abs().max() <= 0.05 * step


@seats((3, "zero3"), (2, "ddp"))
def test_error_feedback_lets_no_bias_grow(world: World, strategy: str) -> None:
    """What one step leaves out comes in the next: the sum stays near the truth however long it runs."""
    vectors = vectors_to_give(world)
    step = vectors.abs().max().item() / 127
    errors = []
    for feedback in (True, False):
        hook = QuantizedReduction(block_size=BLOCK, error_feedback=feedback)
        first, *others = world.run(reduced_vector, strategy, hook, 24)
        assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))
        errors.append((torch.stack(first).double().sum(0) - 24 * vectors.mean(0)).abs().max().item())
    with_feedback, without = errors
    assert with_feedback <= 1.5 * step
    assert without >= 4 * step


# --- numbers that must not be hidden --------------------------------------------------------------


NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


def reduced_with_accidents(strategy: str, hook: Any) -> tuple[list[tuple[bool, Tensor]], float]:
    """For each bad number on the last rank: whether this rank sees it; then what it gets in a good step.

    And what zeros add up to.
    """
    model, _ = given(strategy, VECTOR)
    register_comm_hook(model, None, hook)
    (zeros,) = reduce_given(model, [torch.zeros(VECTOR)])
    results = []
    for value in NOT_FINITE:
        bad = torch.ones(VECTOR)
        if dist.get_rank() == dist.get_world_size() - 1:
            bad[5] = value
        (spoilt,) = reduce_given(model, [bad], is_part=True)
        (healthy,) = reduce_given(model, [vector_to_give(dist.get_rank()).view(VECTOR)])
        results.append((not bool(spoilt.isfinite().all()), healthy.flatten()))
    return results, zeros.abs().sum().item()


@ready_made
def test_what_is_not_finite_stays_visible_and_is_gone_the_next_step_and_zeros_stay_zeros(
    world: World, strategy: str, hook: Any
) -> None:
    keepers = {"zero3": 1, "ddp": world.size, "hybrid": 2}[strategy]
    vectors = vectors_to_give(world)
    results, zeros = zip(*world.run(reduced_with_accidents, strategy, hook), strict=True)
    assert zeros == (0.0,) * world.size
    for value, of_ranks in zip(NOT_FINITE, zip(*results, strict=True), strict=True):
        assert sum(is_seen for is_seen, _ in of_ranks) == keepers, f"who sees {value}: {of_ranks}"
        for _, healthy in of_ranks:
            error = (healthy - vectors.mean(0)).abs().max().item()
            assert error <= 3 * vectors.abs().max().item() / 127  # no NaN: nothing bad was fed back


# --- hooks and the rest ---------------------------------------------------------------------------


def train_everything(side: Side, strategy: str, hook: Any) -> None:
    """Frozen and unused parameters, scalars, empty shards, microbatches; to the accuracy of the hook."""
    model = built(odd_model)
    model.blocks[1].conv.requires_grad_(False)
    if side.is_sharded:
        shard_as(model, strategy)
        register_comm_hook(model, None, hook)
    for step in range(2):
        model.zero_grad()
        for microbatch in range(2):
            waits = side.is_sharded and microbatch == 0
            with no_sync(model) if waits else contextlib.nullcontext():
                loss = mean_of_squares(model, side.inputs(2 * step + microbatch)) / 2
                loss.backward()
        side.note_gradients(model)
        side.assert_settled(model)


@ready_made
def test_ready_made_hooks_reduce_every_kind_of_parameter(world: World, strategy: str, hook: Any) -> None:
    with one_thread():
        plain = Side(is_sharded=False)
        train_everything(plain, strategy, hook)
    noted = [value for _, value in plain.notes.values() if value is not None and value.numel()]
    largest = max(value.abs().max().item() for value in noted)
    assert_same(world, train_everything, strategy, hook, atol=0.03 * largest)


class Scaled(nn.Module):
    """A scalar has no dim to shard: it is replicated, also where all else is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(37, WIDTH) / 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).sum(1, keepdim=True) * self.scale


def scaled_after_training(strategy: str, hook: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    model = Around(Scaled())
    pg = shard_as(model, strategy, wrap=Scaled)
    register_comm_hook(model, State(pg) if hook is scatters else None, hook)
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        mean_of_squares(model, random_batch(10 * step + dist.get_rank(), 4, dtype=torch.float32)).backward()
        optimizer.step()
    weight, scale = (full_or_own(param) for param in model.parameters())
    return weight, scale


@seats(
    (3, "zero3", INT8, 3),
    (3, "ddp", FORGETFUL, 1),
    (2, "ddp", HALF, 1),
    (4, "hybrid", scatters, 2),
    (4, "hybrid", INT8, 2),
    also="hook shards",
)
def test_replicas_and_scalars_stay_the_same_bit_for_bit(
    world: World, strategy: str, hook: Any, shards: int
) -> None:
    ranks = world.run(scaled_after_training, strategy, hook)
    for rank, (weight, scale) in enumerate(ranks):
        assert torch.equal(weight, ranks[rank % shards][0])
        assert torch.equal(scale, ranks[0][1])
        assert weight.isfinite().all()


def shard_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 else None


class Apart(nn.Module):
    """Its parameters are packed in several segments: integers between two kinds of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(8) / 3)
        self.counts = nn.Parameter(torch.arange(8), requires_grad=False)
        self.columns = nn.Parameter(torch.randn(3, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.rows + self.counts / 8) @ self.columns.t()


class EmptyLast(nn.Module):
    """Gradients are reduced from the last parameter on."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.rows + self.shift) + self.empty.sum()


@same_as_plain()
@pytest.mark.parametrize(("world", "make"), [(3, Apart), (1, EmptyLast)], indirect=["world"])
def test_a_hook_reduces_what_is_packed_apart_sharded_on_another_dim_or_empty(side: Side, make: Any) -> None:
    model = built(lambda: Around(make()))
    if side.is_sharded:
        pg = shard_as(model, "zero3", shard_placement_fn=shard_columns, wrap=make)
        register_comm_hook(model, State(pg), scatters)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        mean_of_squares(model, side.inputs(step)).backward()
        for name, param in model.named_parameters():
            if param.numel():
                side.note(name, param.grad)
        optimizer.step()


# --- refused --------------------------------------------------------------------------------------


def wants_a_keyword(state: State, grad: Tensor, output: Tensor | None = None, *, more: int) -> None: ...


def refused(strategy: str, state: Any, hook: Any, overrides: Any = None) -> tuple[str, bool]:
    """What the caller is told; whether a right hook is accepted after that and trains."""
    model = built(even_tower)
    pg = shard_as(model, strategy, overrides=overrides)
    text = outcome(register_comm_hook, model, state, hook)
    right = State(pg)
    register_comm_hook(model, right, either)
    mean_of_squares(model, random_batch(0, 4)).backward()
    return text, len(right.calls) == 4


REFUSED: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    # What is passed to `refused`, and words of the message: a hook of another signature, ...
    "no output": (("zero3", None, sums), ("TypeError: register_comm_hook: ", "Tower", "grad")),
    "an output": (("ddp", None, scatters), ("TypeError: register_comm_hook: ", "Tower", "grad")),
    "a keyword": (("zero3", None, wants_a_keyword), ("TypeError: register_comm_hook: ", "Tower", "grad")),
    # ... that does not fit one group, which is named, ...
    "the root": (("zero3", None, sums, MIXED), ("TypeError", " Tower ")),
    "a block": (("zero3", None, scatters, MIXED), ("TypeError", " blocks.1 ")),
    # ... no hook at all, and a state for a ready-made one.
    "a word": (("zero3", None, "mean"), ("TypeError: register_comm_hook: hook is 'mean'", "pass a function")),
    "a class": (("zero3", None, LowPrecisionReduction), ("TypeError: register_comm_hook: ", "LowPrecisionR")),
    "state 0": (("ddp", 0, HALF), ("register_comm_hook: state is 0", "LowPrecisionReduction", "None")),
    "a state": (("ddp", "state", INT8), ("register_comm_hook: state", "QuantizedReduction", "None")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_fitting_hook_is_refused_by_name_and_leaves_none_behind(world2: World, case: str) -> None:
    args, words = REFUSED[case]
    (text, trains), *others = world2.run(refused, *args)
    assert trains, f"a hook was left behind, after {text}"
    assert others == [(text, True)]
    assert_says(text, *words)


@on_ranks(2)
def test_a_hook_that_divides_itself_is_refused_where_a_factor_is_set() -> None:
    model = built(even_tower)
    state = State(shard_as(model, "zero3"))
    model.set_gradient_divide_factor(8.0)
    text = refusal(register_comm_hook, model, state, scatters)
    register_comm_hook(model, None, HALF)  # divides as usual
    assert_says(text, "register_comm_hook: ", "Tower", "set_gradient_divide_factor")


@on_ranks(2)
def test_complex_gradients_are_not_sent_as_real_ones() -> None:
    model = fully_shard(nn.Linear(4, 4, dtype=torch.complex64))
    texts = [refusal(register_comm_hook, model, None, hook) for hook in (HALF, INT8)]
    for text in texts:
        assert "register_comm_hook: weight, bias are complex" in text


@pytest.mark.parametrize(
    ("first_on", "second_on", "calls", "hook"),
    [
        ("", "", 4, None),
        ("blocks.1", "", 1, None),
        ("", "blocks.1", 4, HALF),
    ],
)
@on_ranks(2)
def test_a_second_hook_is_refused_and_the_first_stays(
    first_on: str, second_on: str, calls: int, hook: Any
) -> None:
    model = built(even_tower)
    pg = shard_as(model, "zero3")
    first, second = State(pg), State(pg)
    register_comm_hook(model.get_submodule(first_on), first, scatters)
    with pytest.raises(RuntimeError) as caught:
        register_comm_hook(model.get_submodule(second_on), None if hook else second, hook or scatters)
    mean_of_squares(model, random_batch(0, 4)).backward()
    assert_says(str(caught.value), "register_comm_hook: ", first_on)
    assert (len(first.calls), len(second.calls)) == (calls, 0)


@on_ranks(2)
def test_a_factor_is_refused_where_a_hook_divides_itself_and_memory_may_be_let_go_of_before() -> None:
    model = built(even_tower)
    state = State(shard_as(model, "zero3"))
    for enable in (True, False):
        model.set_allocate_memory_from_process_group_for_comm(enable)
    register_comm_hook(model, state, scatters)
    told = refusal(model.set_gradient_divide_factor, 2.0)
    assert_says(told, "ValueError: set_gradient_divide_factor: the gradients of Tower are reduced by a hook")


@on_ranks(2)
def test_no_hook_is_registered_while_gradients_wait() -> None:
    model = built(even_tower)
    state = State(shard_as(model, "zero3"))
    with no_sync(model):
        mean_of_squares(model, random_batch(0, 4)).backward()
    with pytest.raises(RuntimeError) as caught:
        register_comm_hook(model, state, scatters)
    mean_of_squares(model, random_batch(1, 4)).backward()
    assert not state.calls
    register_comm_hook(model, state, scatters)
    mean_of_squares(model, random_batch(1, 4)).backward()
    calls = len(state.calls)
    assert_says(str(caught.value), "register_comm_hook: ", "Tower", "wait")
    assert calls == 4


def test_values_that_a_ready_made_hook_cannot_use_are_refused_by_name() -> None:
    for make, options in (
        (LowPrecisionReduction, {"dtype": torch.int8}),
        (QuantizedReduction, {"block_size": 0}),
        (QuantizedReduction, {"block_size": 1.5}),
        (QuantizedReduction, {"error_feedback": 1}),
    ):
        with pytest.raises((TypeError, ValueError), match=f"{make.__name__}: {next(iter(options))}"):
            make(**options)
