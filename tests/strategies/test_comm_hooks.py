"""Hooks that reduce gradients in place of the library: FSDP1's, torch's ready-made ones, and our own.

A hook of the user's that averages changes no number: training equals plain training in float64 to 1e-10.
What compresses is held to the rounding it claims, block by block, and to the bytes that it claims, which
are counted where nothing can hide: in the kernel's own record of what each socket has sent.
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
from meshed import refusal
from models import WIDTH, built, even_tower, odd_model, random_batch, uneven_tower
from reference import adamw, full, mean_of_squares
from refusals import assert_says, sharded_tower
from scenario import Side, assert_same, one_thread, same_as_plain
from sent_bytes import counting_bytes
from strategies import losses_of_regression, seats, shard_as
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.tensor import Shard

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard, no_sync
from shardwise.policies import LowPrecisionReduction, QuantizedReduction
from shardwise.strategies import register_comm_hook

worlds = pytest.mark.parametrize("world", [1, 2, 3, 4], indirect=True)
strategies = pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp", "hybrid"])


every_kind = seats((3, "zero3"), (2, "zero2"), (3, "ddp"), (4, "hybrid"))

# The older name warns where there is a newer one.
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- what it sends --------------------------------------------------------------------------------


def sent_of_plain_tensors() -> int:
    counts: list[int] = []
    with counting_bytes(counts):
        dist.all_to_all_single(torch.empty(2 * 50_000), torch.ones(2 * 50_000))
    return counts[0]


def test_the_bytes_counted_are_those_that_are_sent(world2: World) -> None:
    for sent in world2.run(sent_of_plain_tensors):
        assert 200_000 <= sent <= 202_000


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
            "flat": grad.dim() == 1 and grad.is_contiguous(),
            "squares": grad.double().pow(2).sum().item(),
            "output": None if output is None else output.numel(),
        }
        if output is not None:
            assert output.dim() == 1
            assert output.is_contiguous()
            assert output.dtype == grad.dtype
            assert output.device == grad.device
            assert grad.numel() == self.world * output.numel()
        self.calls.append(call)


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
    """An object that can be called, and a method that can."""

    def __call__(self, state: State, grad: Tensor, output: Tensor | None = None, *rest: Any) -> None:
        either(state, grad, output)

    def method(self, state: State, grad: Tensor, output: Tensor | None = None, scale: float = 1.0) -> None:
        either(state, grad, output)


def fitting(strategy: str) -> Callable[..., None]:
    return sums if strategy == "ddp" else scatters


def train_hooked(side: Side, make: Any, strategy: str, hook: Callable[..., None]) -> None:
    model = built(make)
    width = 7 if make is uneven_tower else 8
    if not side.is_sharded:
        side.steps(model, adamw(model), range(3), width=width)
        return
    state = State(shard_as(model, strategy))
    register_comm_hook(model, state, hook)
    optimizer = adamw(model)
    for step in range(3):
        side.step(model, optimizer, step, width=width)
        groups = len([m for m in model.modules() if isinstance(m, shardwise.FSDPModule)])
        assert len(state.calls) == groups, "the hook is called once a group and step"
        assert all(call["flat"] for call in state.calls)
        assert all((call["output"] is None) == (strategy == "ddp") for call in state.calls)
        state.calls.clear()
    side.note_parameters(model)


@pytest.mark.thin(288)
@strategies
@worlds
def test_a_hook_written_for_fsdp1_trains_as_the_plain_model(world: World, strategy: str) -> None:
    assert_same(world, train_hooked, uneven_tower, strategy, fitting(strategy))


@pytest.mark.sample(2)
@every_kind
def test_a_hook_reduces_scalars_strided_and_empty_parameters(world: World, strategy: str) -> None:
    assert_same(world, train_hooked, odd_model, strategy, fitting(strategy))


@pytest.mark.thin(14)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("hook", [either, Callable_(), partial(Callable_().method, scale=2.0)])
def test_a_hook_with_an_optional_output_serves_both_kinds(world2: World, strategy: str, hook: Any) -> None:
    assert_same(world2, train_hooked, even_tower, strategy, hook)


@same_as_plain(2, 3)
def test_a_hook_for_both_kinds_serves_a_model_of_mixed_strategies(side: Side) -> None:
    """One block replicated among sharded ones: a hook for both is called with what each needs."""
    model = built(even_tower)
    if not side.is_sharded:
        side.steps(model, adamw(model), range(3))
        return
    state = State(shard_as(model, "zero3", overrides={"blocks.1": "ddp"}))
    register_comm_hook(model, state, either)
    optimizer = adamw(model)
    for step in range(3):
        side.step(model, optimizer, step)
        outputs = [call["output"] for call in state.calls]
        assert len(outputs) == 4
        assert outputs.count(None) == 1
        state.calls.clear()
    side.note_parameters(model)


@same_as_plain(2)
def test_parts_of_a_model_may_have_hooks_of_their_own(side: Side) -> None:
    """Each block has another hook, the root none."""
    model = built(even_tower)
    if not side.is_sharded:
        side.steps(model, adamw(model), range(2))
        return
    pg = shard_as(model, "zero3")
    states = [State(pg) for _ in model.blocks]
    for block, state in zip(model.blocks, states, strict=True):
        register_comm_hook(block, state, scatters)
    side.steps(model, adamw(model), range(2))
    assert [len(state.calls) for state in states] == [2, 2, 2]


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
    """Has no parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return self.inner(gradients)


def given(strategy: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A sharded model whose gradients are given, and the process group for its hook."""
    model = Around(Given(*shapes, dtype=dtype))
    return model, shard_as(model, strategy, wrap=Given)


def leaves_out_the_others(state: State, grad: Tensor, output: Tensor) -> None:
    """Where all ranks have the same gradients, the average is there already: this rank's chunk of it."""
    state.note(grad, output)
    output.copy_(grad.chunk(state.world)[dist.get_rank(state.process_group)])


def leaves_it(state: State, grad: Tensor) -> None:
    state.note(grad)


@same_as_plain()
@pytest.mark.thin(18)
@pytest.mark.parametrize("make", [uneven_tower, odd_model])
@seats((3, "zero3"), (2, "zero2"), (3, "ddp"), (4, "hybrid"), (1, "zero3"), (1, "ddp"))
def test_chunk_r_of_what_a_hook_gets_is_what_rank_r_keeps(side: Side, make: Any, strategy: str) -> None:
    """No rank sends anything to another: all that counts is where the hook finds and puts things."""
    model = built(make)
    width = 7 if make is uneven_tower else 8
    if side.is_sharded:
        state = State(shard_as(model, strategy))
        hook: Any = leaves_it if strategy == "ddp" else leaves_out_the_others
        register_comm_hook(model, state, hook)
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        mean_of_squares(model, random_batch(step, 4, width)).backward()
        side.note_gradients(model)
        optimizer.step()
    side.note_parameters(model)
    if side.is_sharded:
        assert len(state.calls) >= 9, "the hook was not called"


def squares_of_gradients(strategy: str) -> tuple[list[float], list[float]]:
    model = built(uneven_tower)
    plain = copy.deepcopy(model)
    state = State(shard_as(model, strategy))
    register_comm_hook(model, state, fitting(strategy))
    batch = random_batch(dist.get_rank(), 4, 7)
    for each in (model, plain):
        mean_of_squares(each, batch).backward()
    own = [sum(p.grad.pow(2).sum().item() for p in block.parameters()) for block in plain.blocks]
    rest = sum(p.grad.pow(2).sum().item() for p in plain.parameters()) - sum(own)
    return sorted(call["squares"] for call in state.calls), sorted([*own, rest])


@pytest.mark.sample(2)
@every_kind
def test_a_hook_gets_each_number_once_and_zeros_between_them(world: World, strategy: str) -> None:
    for seen, expected in world.run(squares_of_gradients, strategy):
        assert seen == pytest.approx(expected, abs=1e-12)


class TwoKinds(nn.Module):
    """Parameters of two dtypes, all trainable, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Parameter(torch.randn(5, WIDTH))
        self.fine = nn.Parameter(torch.randn(7, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(
            (x.float() @ self.coarse.t()).sum(1, keepdim=True) + (x @ self.fine.t()).sum(1, keepdim=True)
        )


class TwoKindsModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoKinds(), TwoKinds()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def two_kinds() -> nn.Module:
    torch.manual_seed(3)
    return TwoKindsModel()


@same_as_plain(atol=1e-05)
@pytest.mark.sample(2)
@every_kind
def test_a_hook_is_called_once_a_dtype(side: Side, strategy: str) -> None:
    """To the accuracy of float32, in which half of the gradients are summed."""
    model = two_kinds()
    if side.is_sharded:
        state = State(shard_as(model, strategy))
        register_comm_hook(model, state, fitting(strategy))
    optimizer = adamw(model)
    for step in range(3):
        side.step(model, optimizer, step)
        if side.is_sharded:
            dtypes = [call["dtype"] for call in state.calls]
            assert sorted(map(str, dtypes)) == 2 * ["torch.float32"] + 2 * ["torch.float64"]
            state.calls.clear()


def dtypes_seen(strategy: str, **dtypes: torch.dtype) -> set[torch.dtype]:
    model = built(even_tower).float()
    state = State(shard_as(model, strategy, mp_policy=MixedPrecisionPolicy(**dtypes)))
    register_comm_hook(model, state, fitting(strategy))
    model(random_batch(0, 4).float()).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return {call["dtype"] for call in state.calls}


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_hook_gets_the_dtype_of_reduction(world2: World, strategy: str) -> None:
    low, high = torch.bfloat16, torch.float32
    assert world2.run(dtypes_seen, strategy, param_dtype=low) == [{low}] * 2
    assert world2.run(dtypes_seen, strategy, param_dtype=low, reduce_dtype=high) == [{high}] * 2


# --- when it is called ----------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.thin(24)
@pytest.mark.parametrize("is_synced", [True, False])
@strategies
def test_a_hook_is_called_when_gradients_are_synchronised(side: Side, strategy: str, is_synced: bool) -> None:
    """Three microbatches a step; all but the last under no_sync, or each reduced by itself."""
    model = built(uneven_tower)
    if side.is_sharded:
        state = State(shard_as(model, strategy))
        register_comm_hook(model, state, fitting(strategy))
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(3):
            waits = side.is_sharded and not is_synced and microbatch < 2
            with no_sync(model) if waits else contextlib.nullcontext():
                mean_of_squares(model, side.inputs(3 * step + microbatch, 7)).backward()
            if side.is_sharded:
                assert len(state.calls) == (4 * (microbatch + 1) if is_synced else 4 * (microbatch == 2))
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
        if side.is_sharded:
            state.calls.clear()
    side.note_parameters(model)


@same_as_plain(2)
@pytest.mark.sample(2)
@strategies
def test_a_hook_is_not_called_for_frozen_groups(side: Side, strategy: str) -> None:
    """A frozen block, a block that is frozen in part, and one with a parameter that forward never uses."""
    model = built(even_tower)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    model.blocks.append(PartlyUsed().double())
    if side.is_sharded:
        state = State(shard_as(model, strategy, wrap=(type(model.blocks[0]), PartlyUsed)))
        register_comm_hook(model, state, fitting(strategy))
    optimizer = adamw(model)
    for step in range(3):
        side.step(model, optimizer, step)
        if side.is_sharded:
            assert len(state.calls) == 4, "frozen groups have nothing to reduce"
            state.calls.clear()
    side.note_parameters(model)


class Adapter(nn.Module):
    """A frozen base of another dtype than what is trained, and a number of no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x.float() @ self.base).double() / self.count
        return x + torch.tanh(mixed @ self.trained.t()).sum(1, keepdim=True)


@same_as_plain(atol=1e-05)
@pytest.mark.sample(2)
@every_kind
def test_a_hook_is_not_called_for_dtypes_without_gradients(side: Side, strategy: str) -> None:
    """To the accuracy of float32, in which half of the computation is."""
    torch.manual_seed(3)
    model = nn.Sequential(Adapter(), Adapter())
    if side.is_sharded:
        state = State(shard_as(model, strategy))
        register_comm_hook(model, state, fitting(strategy))
    side.steps(model, adamw(model), range(2))
    if side.is_sharded:
        assert [call["dtype"] for call in state.calls] == 4 * [torch.float64]


@same_as_plain(2)
@pytest.mark.sample(2)
@strategies
def test_a_hook_may_be_registered_between_steps(side: Side, strategy: str) -> None:
    """FSDP1 allows it before the first forward only."""
    model = built(even_tower)
    if side.is_sharded:
        state = State(shard_as(model, strategy))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    if side.is_sharded:
        register_comm_hook(model, state, fitting(strategy))
    side.steps(model, optimizer, [1, 2])
    assert not side.is_sharded or len(state.calls) == 8


@same_as_plain(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_after_a_hook_has_raised_the_next_step_runs(side: Side, strategy: str) -> None:
    model = built(even_tower)
    if side.is_sharded:
        state = State(shard_as(model, strategy))
        register_comm_hook(model, state, fitting(strategy))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    if side.is_sharded:
        state.fails = True
        optimizer.zero_grad()
        with pytest.raises(Failure):
            mean_of_squares(model, side.inputs(1)).backward()
        state.fails = False
    side.steps(model, optimizer, [2, 3])


@same_as_plain(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_copy_of_a_hooked_model_trains(side: Side, strategy: str) -> None:
    model = built(even_tower)
    if side.is_sharded:
        register_comm_hook(model, State(shard_as(model, strategy)), fitting(strategy))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    copied = copy.deepcopy(model)
    side.steps(copied, adamw(copied), [1, 2])
    side.steps(model, optimizer, [3])


# --- torch's own hooks ----------------------------------------------------------------------------


def train_with_torchs_hook(side: Side, strategy: str, hook: Any) -> None:
    model = built(uneven_tower)
    if side.is_sharded:
        register_comm_hook(model, default_hooks.DefaultState(shard_as(model, strategy)), hook)
    side.steps(model, adamw(model), range(3), width=7)


@pytest.mark.sample(2)
@every_kind
def test_torchs_own_hooks_train_as_the_plain_model(world: World, strategy: str) -> None:
    hook = default_hooks.allreduce_hook if strategy == "ddp" else default_hooks.reduce_scatter_hook
    assert_same(world, train_with_torchs_hook, strategy, hook)


SHAPES = ((37, 5), (11,), (3, 2), ())
HALVES = {
    torch.bfloat16: default_hooks.bf16_compress_hook,
    torch.float16: default_hooks.fp16_compress_hook,
}


def gradients_to_give(rank: int, step: int, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def reduce_given(model: nn.Module, gradients: Sequence[Tensor], is_part: bool = False) -> list[Tensor]:
    """The reduced gradients, whole or this rank's part."""
    model.zero_grad()
    model(gradients).backward()
    grads = [p.grad for p in model.parameters()]
    return [g.to_local().clone() if is_part else g.full_tensor() for g in grads]


def reduced_by_torchs_compression(strategy: str, dtype: torch.dtype) -> list[Tensor]:
    # These hooks ask the current stream to keep memory; torch has none to ask on the CPU and raises.
    with mock.patch.object(Tensor, "record_stream"):
        model, pg = given(strategy, *SHAPES)
        register_comm_hook(model, default_hooks.LowPrecisionState(pg), HALVES[dtype])
        gradients = gradients_to_give(dist.get_rank(), 0, *SHAPES, dtype=torch.float32)
        results = reduce_given(model, gradients)
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        return results


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@every_kind
def test_torchs_compressing_hooks_replace_the_memory_of_their_output(
    world: World, strategy: str, dtype: torch.dtype
) -> None:
    """They assign ``output.data``: the result is where the hook has put it, not where it was expected."""
    assert_rounded(world, world.run(reduced_by_torchs_compression, strategy, dtype), dtype)


def assert_rounded(world: World, results: list[list[Tensor]], dtype: torch.dtype, scale: float = 1.0) -> None:
    """Within what ``dtype`` rounds in each rank's gradient and in the sum of them, and not more exact."""
    everyones = [gradients_to_give(rank, 0, *SHAPES, dtype=torch.float32) for rank in range(world.size)]
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


class Gossip:
    """State of GossipGrad: each step, gradients are averaged with one peer, and another the next time."""

    def __init__(self, process_group: Any, groups: int) -> None:
        self.process_group = process_group
        self.groups = groups
        self.calls = 0

    def distance(self) -> int:
        step, self.calls = self.calls // self.groups, self.calls + 1
        return distance_at(step, dist.get_world_size(self.process_group))


def distance_at(step: int, world: int) -> int:
    return 1 + step % (world - 1)


def gossips(state: Gossip, grad: Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    distance = state.distance()
    received = torch.empty_like(grad)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, grad.clone(), (rank + distance) % world),
            dist.P2POp(dist.irecv, received, (rank - distance) % world),
        ]
    )
    for work in works:
        work.wait()
    grad.add_(received).div_(2)


def gossip_run() -> dict[str, Tensor]:
    model = built(even_tower)
    register_comm_hook(model, Gossip(shard_as(model, "ddp"), groups=4), gossips)
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        mean_of_squares(model, random_batch(10 * step + dist.get_rank(), 4)).backward()
        optimizer.step()
    return {name: param.to_local().detach().clone() for name, param in model.named_parameters()}


def gossip_in_one_process(world: int) -> list[dict[str, Tensor]]:
    models = [built(even_tower) for _ in range(world)]
    optimizers = [adamw(model) for model in models]
    for step in range(4):
        for rank, model in enumerate(models):
            model.zero_grad()
            mean_of_squares(model, random_batch(10 * step + rank, 4)).backward()
        for params in zip(*[model.parameters() for model in models], strict=True):
            grads = [param.grad for param in params]
            distance = distance_at(step, world)
            for rank, param in enumerate(params):
                param.grad = (grads[rank] + grads[rank - distance]) / 2
        for optimizer in optimizers:
            optimizer.step()
    return [{name: param.detach() for name, param in model.named_parameters()} for model in models]


@pytest.mark.parametrize("world", [2, 4], indirect=True)
def test_gossip_averages_with_one_peer_at_a_time(world: World) -> None:
    with one_thread():
        expected = gossip_in_one_process(world.size)
    for got, want in zip(world.run(gossip_run), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    if world.size > 2:  # it is gossip: the replicas have drifted apart
        assert not torch.equal(expected[0]["outlet.weight"], expected[1]["outlet.weight"])


# --- LowPrecisionReduction ------------------------------------------------------------------------


def reduced_by(
    strategy: str, hook: Any, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    model, _ = given(strategy, *SHAPES, dtype=dtype)
    register_comm_hook(model, None, hook)
    gradients = gradients_to_give(dist.get_rank(), 0, *SHAPES, dtype=torch.float32)
    return reduce_given(model, [(scale * g).to(dtype) for g in gradients])


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("dtype", "param_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float64)],
    ids=str,
)
@seats((3, "zero3"), (2, "zero2"), (3, "ddp"), (4, "ddp"), (4, "hybrid"))
def test_low_precision_rounds_and_does_nothing_else(
    world: World, strategy: str, dtype: torch.dtype, param_dtype: torch.dtype
) -> None:
    results = world.run(reduced_by, strategy, LowPrecisionReduction(dtype), dtype=param_dtype)
    assert_rounded(world, results, dtype)


@strategies
def test_low_precision_in_float16_leaves_room_for_the_sum(world4: World, strategy: str) -> None:
    """The largest of these gradients is about 5e4, four of which are above float16's 65504."""
    scale = 5e4 / 4
    results = world4.run(reduced_by, strategy, LowPrecisionReduction(torch.float16), scale)
    assert_rounded(world4, results, torch.float16, scale)


def bytes_of_reduction(strategy: str, hook: Any, shape: tuple[int, ...]) -> int:
    """Of the second backward: the first may set things up."""
    model, _ = given(strategy, shape)
    if hook is not None:
        register_comm_hook(model, None, hook)
    gradients = gradients_to_give(dist.get_rank(), 0, shape, dtype=torch.float32)
    model(gradients).backward()
    model.inner.set_reshard_after_forward(False)  # else backward would unshard
    loss = model(gradients)
    counts: list[int] = []
    with counting_bytes(counts):
        loss.backward()
    return counts[0]


LARGE = (512, 256)


@seats((2, "zero3"), (4, "zero2"), (4, "ddp"), (4, "hybrid"))
def test_low_precision_halves_the_bytes(world: World, strategy: str) -> None:
    plain = sum(world.run(bytes_of_reduction, strategy, None, LARGE))
    low = sum(world.run(bytes_of_reduction, strategy, LowPrecisionReduction(torch.bfloat16), LARGE))
    assert plain >= (world.size - 1) * 4 * LARGE[0] * LARGE[1]
    assert 0.48 <= low / plain <= 0.52


# --- QuantizedReduction ---------------------------------------------------------------------------

VECTOR = (10_007, 1)  # chunks that no block divides; what has fewer than two dims is not quantised
BLOCK = 256


def vector_to_give(rank: int, step: int = 0) -> Tensor:
    """Numbers whose size changes a thousandfold from end to end, with a stretch of zeros."""
    values = gradients_to_give(rank, step, VECTOR, dtype=torch.float32)[0].flatten()
    values *= torch.logspace(-2, 1, VECTOR[0])
    values[3000:4200] = 0
    return values


def steps_of_blocks(values: Tensor, world: int) -> Tensor:
    """For each number, the step of the int8 block in which a rank sends it to the one that keeps it."""
    chunk = -(-len(values) // world)
    padded = values.new_zeros(world * chunk)
    padded[: len(values)] = values
    blocks = [block for piece in padded.view(world, chunk) for block in piece.split(BLOCK)]
    return torch.cat([block.abs().max().expand(len(block)) / 127 for block in blocks])[: len(values)].double()


def reduced_vector(strategy: str, hook: Any, steps: int = 1, is_part: bool = False) -> list[Tensor]:
    """The vector's gradient of each step; the same is given each time."""
    model, _ = given(strategy, VECTOR)
    register_comm_hook(model, None, hook)
    rank = dist.get_rank()
    given_here = vector_to_give(rank).view(VECTOR)
    return [reduce_given(model, [given_here], is_part)[0].flatten() for _ in range(steps)]


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4], indirect=True)
def test_quantized_is_within_half_a_step_of_each_rank_in_each_block(world: World, feedback: bool) -> None:
    hook = QuantizedReduction(block_size=BLOCK, error_feedback=feedback)
    vectors = torch.stack([vector_to_give(rank) for rank in range(world.size)]).double()
    steps = torch.stack([steps_of_blocks(vector, world.size) for vector in vectors])
    bound = steps.mean(0) / 2 + 1e-6 * vectors.abs().mean(0)
    for (got,) in world.run(reduced_vector, "zero3", hook):
        error = (got - vectors.mean(0)).abs()
        assert (error <= bound).all(), f"off by {(error / bound)[bound > 0].max():.2f} of half a step"
        assert error.max() > 0.2 * bound.max(), "nothing was quantized"
        assert (got[3000:4200] == 0).all()


@seats((1, "zero3"), (2, "zero2"), (1, "ddp"), (3, "ddp"), (4, "hybrid"))
def test_quantized_small_numbers_do_not_suffer_from_large_ones_far_away(world: World, strategy: str) -> None:
    """Half a step of each rank, and half a step of the mean where that travels as well: to replicas."""
    hook = QuantizedReduction(block_size=BLOCK)
    vectors = torch.stack([vector_to_give(rank) for rank in range(world.size)]).double()
    exact = vectors.mean(0)
    for (got,) in world.run(reduced_vector, strategy, hook):
        error = (got - exact).abs()
        for start in range(0, VECTOR[0], 1000):
            # Wherever blocks begin, those of this stretch end within a block's length of it.
            near = vectors[:, max(0, start - BLOCK) : start + 1000 + BLOCK]
            largest = near.abs().max().item() / 127
            assert error[start : start + 1000].max() <= largest * 1.01


def sum_of_errors(world: World, strategy: str, feedback: bool, steps: int) -> Tensor:
    hook = QuantizedReduction(block_size=BLOCK, error_feedback=feedback)
    vectors = torch.stack([vector_to_give(rank) for rank in range(world.size)]).double()
    results = world.run(reduced_vector, strategy, hook, steps)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    applied = torch.stack(results[0]).double().sum(0)
    return (applied - steps * vectors.mean(0)).abs()


def feedback_after_a_cast() -> bool:
    model = fully_shard(nn.Linear(6, 6), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    register_comm_hook(model, None, QuantizedReduction(block_size=64))
    model(torch.ones(4, 6)).sum().backward()
    model.zero_grad()
    model.to(torch.bfloat16)
    model(torch.ones(4, 6, dtype=torch.bfloat16)).sum().backward()
    return torch.equal(full(model.bias.grad), torch.full((6,), 4.0, dtype=torch.bfloat16))


def test_error_feedback_begins_anew_where_numbers_lie_elsewhere(world2: World) -> None:
    assert world2.run(feedback_after_a_cast) == [True, True]


def complex_weights() -> list[str]:
    model = fully_shard(nn.Linear(4, 4, dtype=torch.complex64))
    return [
        refusal(register_comm_hook, model, None, hook)
        for hook in (LowPrecisionReduction(), QuantizedReduction())
    ]


def test_complex_gradients_are_not_sent_as_real_ones(world2: World) -> None:
    for texts in world2.run(complex_weights):
        for text in texts:
            assert "register_comm_hook: weight, bias are complex" in text


@seats((3, "zero3"), (2, "ddp"), (4, "hybrid"))
def test_error_feedback_lets_no_bias_grow(world: World, strategy: str) -> None:
    """What one step leaves out comes in the next: the sum stays near the truth however long it runs."""
    vectors = torch.stack([vector_to_give(rank) for rank in range(world.size)]).double()
    step = vectors.abs().max().item() / 127
    with_feedback = sum_of_errors(world, strategy, True, 24).max().item()
    without = sum_of_errors(world, strategy, False, 24).max().item()
    assert with_feedback <= 1.5 * step
    assert without >= 4 * step


def ranks_that_differ(strategy: str, hook: Any) -> list[Tensor]:
    """This rank's own bits after some steps: of replicas, all must be the same."""
    model = built(uneven_tower).float()
    shard_as(model, strategy)
    register_comm_hook(model, None, hook)
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        mean_of_squares(model, random_batch(10 * step + dist.get_rank(), 4, 7, torch.float32)).backward()
        optimizer.step()
    return [param.to_local().detach().clone() for param in model.parameters()]


READY_MADE = [
    LowPrecisionReduction(torch.bfloat16),
    QuantizedReduction(block_size=64),
    QuantizedReduction(block_size=64, error_feedback=False),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("hook", READY_MADE, ids=str)
@seats((3, "ddp"), (4, "hybrid"))
def test_replicas_stay_the_same_bit_for_bit(world: World, strategy: str, hook: Any) -> None:
    ranks = world.run(ranks_that_differ, strategy, hook)
    shards = 1 if strategy == "ddp" else (world.size // 2 if world.size % 2 == 0 else world.size)
    for rank, params in enumerate(ranks):
        for param, other in zip(params, ranks[rank % shards], strict=True):
            assert torch.equal(param, other)
    assert not ranks[0][0].isnan().any()


@seats((2, "zero3"), (4, "zero2"), (4, "ddp"), (4, "hybrid"))
def test_quantized_sends_a_quarter_and_the_scales(world: World, strategy: str) -> None:
    plain = sum(world.run(bytes_of_reduction, strategy, None, LARGE))
    hook = QuantizedReduction(block_size=BLOCK)
    quantized = sum(world.run(bytes_of_reduction, strategy, hook, LARGE))
    assert 0.25 <= quantized / plain <= 0.25 * (1 + 4 / BLOCK) + 0.01


def regression_on_ranks(strategy: str, hook: Any) -> list[float]:
    return losses_of_regression(dist.get_rank(), dist.get_world_size(), strategy, hook)


@pytest.mark.thin(135)
@pytest.mark.parametrize("hook", READY_MADE, ids=str)
@seats((2, "zero3"), (2, "ddp"))
def test_compressed_training_arrives_where_exact_training_does(
    world: World, strategy: str, hook: Any
) -> None:
    with one_thread():
        exact = losses_of_regression(0, 1, None, None)
    ranks = world.run(regression_on_ranks, strategy, hook)
    losses = [sum(step) / 2 for step in zip(*ranks, strict=True)]
    assert exact[-1] < 0.2 * exact[0], "it does not learn"
    assert losses != exact, "nothing is compressed"
    assert sum(losses[-5:]) == pytest.approx(sum(exact[-5:]), rel=0.05)


# --- numbers that must not be hidden --------------------------------------------------------------


NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


def reduced_with_accidents(strategy: str, hook: Any) -> list[tuple[bool, Tensor]]:
    """For each bad number on the last rank: whether this rank sees it; then what it gets in a good step."""
    model, _ = given(strategy, VECTOR)
    register_comm_hook(model, None, hook)
    results = []
    for value in NOT_FINITE:
        bad = torch.ones(VECTOR)
        if dist.get_rank() == dist.get_world_size() - 1:
            bad[5] = value
        (spoilt,) = reduce_given(model, [bad], is_part=True)
        (healthy,) = reduce_given(model, [vector_to_give(dist.get_rank()).view(VECTOR)])
        results.append((not bool(spoilt.isfinite().all()), healthy.flatten()))
    return results


@pytest.mark.thin(3)
@pytest.mark.parametrize("hook", READY_MADE, ids=str)
@every_kind
def test_what_is_not_finite_stays_visible_and_is_gone_the_next_step(
    world: World, strategy: str, hook: Any
) -> None:
    keepers = {"zero3": 1, "zero2": 1, "ddp": world.size, "hybrid": 2}[strategy]
    vectors = torch.stack([vector_to_give(rank) for rank in range(world.size)]).double()
    results = world.run(reduced_with_accidents, strategy, hook)
    for value, of_ranks in zip(NOT_FINITE, zip(*results, strict=True), strict=True):
        assert sum(is_seen for is_seen, _ in of_ranks) == keepers, f"who sees {value}: {of_ranks}"
        for _, healthy in of_ranks:
            error = (healthy - vectors.mean(0)).abs().max().item()
            assert error <= 3 * vectors.abs().max().item() / 127  # no NaN: nothing bad was fed back


def train_zeros(hook: Any) -> list[float]:
    sums = []
    for strategy in ("zero3", "ddp", "hybrid"):
        model, _ = given(strategy, *SHAPES)
        register_comm_hook(model, None, hook)
        zeros = [torch.zeros(shape) for shape in SHAPES]
        sums += [grad.abs().sum().item() for _ in range(2) for grad in reduce_given(model, zeros)]
    return sums


@pytest.mark.parametrize("hook", READY_MADE, ids=str)
def test_zeros_stay_zeros(world2: World, hook: Any) -> None:
    assert world2.run(train_zeros, hook) == [[0.0] * 24] * 2


# --- ready-made hooks and the rest ----------------------------------------------------------------


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


@pytest.mark.thin(8)
@pytest.mark.parametrize("hook", READY_MADE, ids=str)
@seats((1, "zero3"), (3, "zero3"), (2, "zero2"), (3, "ddp"), (4, "hybrid"))
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
        self.weight = nn.Parameter(torch.randn(7, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).sum(1, keepdim=True) * self.scale


def scalars_after_training(strategy: str, hook: Any) -> Tensor:
    torch.manual_seed(3)
    model = Around(Scaled())
    pg = shard_as(model, strategy, wrap=Scaled)
    register_comm_hook(model, State(pg) if hook is scatters else None, hook)
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        mean_of_squares(model, random_batch(10 * step + dist.get_rank(), 4, dtype=torch.float32)).backward()
        optimizer.step()
    return model.inner.scale.to_local().detach().clone()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "hook", [scatters, *READY_MADE], ids=lambda hook: getattr(hook, "__name__", str(hook))
)
@seats((3, "zero3"), (4, "hybrid"))
def test_a_scalar_stays_the_same_on_every_rank(world: World, strategy: str, hook: Any) -> None:
    first, *others = world.run(scalars_after_training, strategy, hook)
    assert [other.item() for other in others] == [first.item()] * len(others)


def shard_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 else None


@same_as_plain(3)
def test_a_hook_reduces_what_is_sharded_on_another_dim(side: Side) -> None:
    model = built(even_tower)
    if side.is_sharded:
        pg = shard_as(model, "zero3", shard_placement_fn=shard_columns)
        register_comm_hook(model, State(pg), scatters)
    side.steps(model, adamw(model), range(2))


class Apart(nn.Module):
    """Its parameters are packed in several segments: integers between two kinds of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(8) / 3)
        self.counts = nn.Parameter(torch.arange(8), requires_grad=False)
        self.columns = nn.Parameter(torch.randn(3, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.rows + self.counts / 8) @ self.columns.t()


def apart() -> nn.Module:
    return Around(Apart())


@same_as_plain(2)
def test_a_hook_reduces_what_is_packed_apart(side: Side) -> None:
    model = built(apart)
    if side.is_sharded:
        pg = shard_as(model, "zero3", shard_placement_fn=shard_columns, wrap=Apart)
        register_comm_hook(model, State(pg), scatters)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        mean_of_squares(model, side.inputs(step)).backward()
        side.note("rows", model.inner.rows.grad)
        side.note("columns", model.inner.columns.grad)
        optimizer.step()


class EmptyLast(nn.Module):
    """Gradients are reduced from the last parameter on."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.rows + self.shift) + self.empty.sum()


def around_empty() -> nn.Module:
    return Around(EmptyLast())


@same_as_plain(1)
def test_a_hook_of_one_rank_reduces_beside_an_empty_parameter(side: Side) -> None:
    model = built(around_empty)
    if side.is_sharded:
        pg = shard_as(model, "zero3", wrap=EmptyLast)
        register_comm_hook(model, State(pg), scatters)
    model(side.inputs(0)).square().mean().backward()
    side.note("rows", model.inner.rows.grad)
    side.note("shift", model.inner.shift.grad)


# --- refused --------------------------------------------------------------------------------------


def lacks_the_gradient(state: State) -> None: ...


def wants_too_much(state: State, grad: Tensor, output: Tensor, more: int) -> None: ...


def wants_a_keyword(state: State, grad: Tensor, output: Tensor | None = None, *, more: int) -> None: ...


def wants_nothing() -> None: ...


def refused(strategy: str, state: Any, hook: Any, overrides: Any = None) -> tuple[str, bool]:
    """What the caller is told; whether a right hook is accepted after that and trains."""
    model = built(even_tower)
    pg = shard_as(model, strategy, overrides=overrides)
    try:
        register_comm_hook(model, state, hook)
        text = "accepted"
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    right = State(pg)
    register_comm_hook(model, right, either)
    mean_of_squares(model, random_batch(0, 4)).backward()
    return text, len(right.calls) == 4


def refusal_of(world: World, *args: Any, **kwargs: Any) -> str:
    (text, trains), *others = world.run(refused, *args, **kwargs)
    assert trains, f"a hook was left behind, after {text}"
    assert all(other == (text, True) for other in others)
    return text


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("strategy", "hook"),
    [
        ("zero3", sums),
        ("zero2", sums),
        ("hybrid", sums),
        ("ddp", scatters),
        ("ddp", lacks_the_gradient),
        ("zero3", wants_too_much),
        ("zero3", wants_a_keyword),
        ("zero3", wants_nothing),
    ],
)
def test_a_hook_of_another_signature_is_refused_by_the_groups_name(
    world2: World, strategy: str, hook: Any
) -> None:
    text = refusal_of(world2, strategy, None, hook)
    assert_says(text, "TypeError: register_comm_hook: ", "Tower", "grad")


@pytest.mark.parametrize(("hook", "named"), [(sums, "Tower"), (scatters, "blocks.1")])
def test_the_group_that_a_hook_does_not_fit_is_named(world2: World, hook: Any, named: str) -> None:
    text = refusal_of(world2, "zero3", None, hook, overrides={"blocks.1": "ddp"})
    assert_says(text, "TypeError", f" {named} ")


@pytest.mark.parametrize("hook", [None, 3, "mean", torch.ones(2)], ids=str)
def test_what_is_no_hook_is_refused(world2: World, hook: Any) -> None:
    text = refusal_of(world2, "zero3", None, hook)
    assert_says(text, "TypeError: register_comm_hook: ", f"hook is {hook!r}", "pass a function")


@pytest.mark.parametrize("hook", [LowPrecisionReduction, QuantizedReduction])
def test_a_class_of_hooks_is_refused(world2: World, hook: Any) -> None:
    text = refusal_of(world2, "zero3", None, hook)
    assert_says(text, "TypeError: register_comm_hook: ", hook.__name__)


@pytest.mark.parametrize("hook", [LowPrecisionReduction(torch.bfloat16), QuantizedReduction()], ids=str)
@pytest.mark.parametrize("state", [0, "state"], ids=repr)
def test_a_ready_made_hook_takes_no_state(world2: World, hook: Any, state: Any) -> None:
    text = refusal_of(world2, "ddp", state, hook)
    assert_says(text, "register_comm_hook: ", "state", type(hook).__name__, "None")


def register_twice(first_on: str, second_on: str, hook: Any) -> tuple[str, int, int]:
    model = built(even_tower)
    pg = shard_as(model, "zero3")
    first, second = State(pg), State(pg)
    register_comm_hook(model.get_submodule(first_on), first, scatters)
    with pytest.raises(RuntimeError) as caught:
        register_comm_hook(model.get_submodule(second_on), None if hook else second, hook or scatters)
    mean_of_squares(model, random_batch(0, 4)).backward()
    return str(caught.value), len(first.calls), len(second.calls)


@pytest.mark.thin(2)
@pytest.mark.parametrize("hook", [None, LowPrecisionReduction(torch.bfloat16)], ids=str)
@pytest.mark.parametrize(
    ("first_on", "second_on", "calls"),
    [("", "", 4), ("blocks.1", "blocks.1", 1), ("blocks.1", "", 1), ("", "blocks.1", 4)],
)
def test_a_second_hook_is_refused_and_the_first_stays(
    world2: World, first_on: str, second_on: str, calls: int, hook: Any
) -> None:
    for text, first, second in world2.run(register_twice, first_on, second_on, hook):
        assert_says(text, "register_comm_hook: ")
        assert first_on == "" or first_on in text
        assert (first, second) == (calls, 0)


def register_while_gradients_wait() -> tuple[str, int]:
    model = built(even_tower)
    state = State(shard_as(model, "zero3"))
    with no_sync(model):
        mean_of_squares(model, random_batch(0, 4)).backward()
    with pytest.raises(RuntimeError) as caught:
        register_comm_hook(model, state, scatters)
    mean_of_squares(model, random_batch(1, 4)).backward()
    before = len(state.calls)
    register_comm_hook(model, state, scatters)
    mean_of_squares(model, random_batch(1, 4)).backward()
    assert before == 0
    return str(caught.value), len(state.calls)


def test_no_hook_is_registered_while_gradients_wait(world2: World) -> None:
    for text, calls in world2.run(register_while_gradients_wait):
        assert_says(text, "register_comm_hook: ", "Tower", "wait")
        assert calls == 4


def register_on_what_is_not_sharded(model: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        register_comm_hook(model, None, scatters)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "told"), [(nn.Linear(2, 2), "this Linear"), (None, "model is None"), ("model", "a str")]
)
def test_a_hook_needs_a_sharded_model(world1: World, model: Any, told: str) -> None:
    (text,) = world1.run(register_on_what_is_not_sharded, model)
    assert_says(text, "register_comm_hook: ", told)


@pytest.mark.parametrize(
    ("make", "args", "kwargs", "word"),
    [
        (LowPrecisionReduction, (torch.int8,), {}, "dtype"),
        (LowPrecisionReduction, ("bfloat16",), {}, "dtype"),
        (LowPrecisionReduction, (None,), {}, "dtype"),
        (QuantizedReduction, (), {"block_size": 0}, "block_size"),
        (QuantizedReduction, (), {"block_size": -1}, "block_size"),
        (QuantizedReduction, (), {"block_size": 1.5}, "block_size"),
        (QuantizedReduction, (), {"block_size": "256"}, "block_size"),
        (QuantizedReduction, (), {"block_size": True}, "block_size"),
        (QuantizedReduction, (), {"block_size": None}, "block_size"),
        (QuantizedReduction, (), {"error_feedback": 1}, "error_feedback"),
        (QuantizedReduction, (), {"error_feedback": None}, "error_feedback"),
    ],
)
def test_values_that_a_ready_made_hook_cannot_use_are_refused_by_name(
    make: Any, args: Any, kwargs: Any, word: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make(*args, **kwargs)
    assert_says(str(caught.value), f"{make.__name__}: {word}")


def gradients_without_a_hook() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = sharded_tower()
    mean_of_squares(model, random_batch(dist.get_rank(), 4)).backward()
    return {name: full(param.grad) for name, param in model.named_parameters()}  # type: ignore[misc]


def gradients_beside_hooked_ones() -> dict[str, Tensor]:
    """A hook stays with its model: another one in the same process knows nothing of it."""
    other = sharded_tower()
    register_comm_hook(other, None, QuantizedReduction(block_size=8))
    mean_of_squares(other, random_batch(dist.get_rank(), 4)).backward()
    return gradients_without_a_hook()


def test_a_hook_stays_with_its_model(world2: World) -> None:
    for got, want in zip(
        world2.run(gradients_beside_hooked_ones), world2.run(gradients_without_a_hook), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
