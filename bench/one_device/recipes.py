"""Training programs: one for each way to shard, reduce, keep and step.

A recipe is a function of a `Side` (side.py), and trains there. All compute in float64, except those that are
about other dtypes.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import custom_comms
import models
import tensor_parallel
import torch
import torch.distributed as dist
from tensor_subclasses import Stack, TravelsLow, Wrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import shardwise
from one_device.side import STEPS, WIDTH, Side, building, loss_of, train
from shardwise import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from shardwise.policies import (
    LowPrecisionReduction,
    QuantizedAllGather,
    QuantizedReduction,
    ShardPlacementResult,
)
from shardwise.strategies import register_comm_hook


def tower(depth: int = 3) -> nn.Module:
    return models.Tower(WIDTH, 2 * WIDTH, depth)


# --- how parameters are sharded, unsharded and kept -----------------------------------------------


def sharded(side: Side, microbatches: int = 1, dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """Each block and the whole, with ``options`` of fully_shard."""
    model = side.shard(side.build(tower, dtype), **options)
    train(side, model, microbatches=microbatches, dtype=dtype)


def uneven(side: Side) -> None:
    model = side.build(partial(models.Tower, WIDTH, hidden=45))
    train(side, side.shard(model))


DIRECT = CommPolicy(packing_limit_bytes=1, part_bytes=0)
"""Every tensor has collectives of its own, and gradients leave in parts."""


def hybrid_mesh(side: Side) -> Any:
    return side.mesh((2, side.world // 2), "replicate", "shard") if side.is_sharded else None


def hybrid(side: Side, **options: Any) -> None:
    sharded(side, mesh=hybrid_mesh(side), comm_policy=DIRECT, **options)


def no_all_reduce(side: Side) -> None:
    """Sums over replicas wait for the last of three microbatches."""
    model = side.shard(side.build(tower), hybrid_mesh(side))
    side.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    for step in range(STEPS):
        for micro in range(3):
            if side.is_sharded:
                model.set_requires_all_reduce(micro == 2)
            loss = loss_of(model, side.inputs(10 * micro + step)) / 3
            loss.backward()
            side.losses.append(loss.detach())
        with building:
            optimizer.step()
        optimizer.zero_grad()


def tensor_parallel_mlps(side: Side) -> None:
    model = side.build(partial(tensor_parallel.Stack, WIDTH, 2 * WIDTH))
    mesh = None
    if side.is_sharded:
        whole = side.mesh((side.world // 2, 2), "shard", "tp")
        tensor_parallel.split_mlps(model, whole["tp"])
        mesh = whole["shard"]
        if not side.sees_all:
            side.index, side.count = side.rank // 2, side.world // 2
    train(side, side.shard(model, mesh))


class MixtureBlock(nn.Module):
    """Each part of the rows has its expert; a rank holds one of two, and its rows are all for that one."""

    def __init__(self, experts: tuple[int, ...]) -> None:
        super().__init__()
        both = {str(number): models.Block(WIDTH, 2 * WIDTH) for number in (0, 1)}
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleDict({name: both[name] for name in map(str, experts)})

    def forward(self, x: Tensor) -> Tensor:
        parts = self.norm(x).chunk(len(self.experts))
        return x + torch.cat([expert(p) for expert, p in zip(self.experts.values(), parts, strict=True)])


def experts(side: Side) -> None:
    """Experts are sharded over half of the ranks, which hold them; the rest over all."""
    mesh = None
    options: dict[str, Any] = {}
    own = side.experts
    if side.is_sharded:
        halves = side.mesh((2, side.world // 2), "expert", "shard")
        mesh = side.mesh()
        own = (side.rank // (side.world // 2),)
    model = side.build(partial(_mixture, own))
    theirs = {param for name, param in model.named_parameters() if ".experts." in name}
    if side.is_sharded:

        def place(param: nn.Parameter) -> ShardPlacementResult | None:
            return ShardPlacementResult(Shard(0), halves["shard"]) if param in theirs else None

        options["shard_placement_fn"] = place
    elif side.scale_experts != 1:
        # Ranks average the gradients of experts over the ranks that hold them, not over all.
        for param in theirs:
            param.register_hook(lambda gradient: gradient * side.scale_experts)
    train(side, side.shard(model, mesh, **options))


def _mixture(numbers: tuple[int, ...]) -> nn.Module:
    mixture = tower(depth=0)
    mixture.blocks = nn.ModuleList(MixtureBlock(numbers) for _ in range(2))
    return mixture


def kept_after_backward(side: Side) -> None:
    model = side.shard(side.build(tower), comm_policy=DIRECT)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    train(side, model, microbatches=2)


def by_strategy(strategy: str, side: Side) -> None:
    model = side.build(tower)
    if side.is_sharded:
        mesh = hybrid_mesh(side) if strategy.startswith("hybrid") else side.mesh()
        shardwise.shard_model(model, strategy=strategy, mesh=mesh)
    train(side, model)


def extensions(side: Side) -> None:
    """Weights that define what of them is all-gathered: bfloat16 of a master in float64."""
    side.width = models.WIDTH
    make = partial(Stack, TravelsLow, 16, side.is_sharded)
    train(side, side.shard(side.build(make, dtype=None)))


def checkpointing(side: Side) -> None:
    model = side.build(tower)
    for block in model.blocks:
        block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    train(side, side.shard(model, comm_policy=DIRECT))


# --- dtypes, and what travels ---------------------------------------------------------------------


MIXED = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _average(state: Any, gradient: Tensor, output: Tensor) -> None:
    dist.all_to_all_single(state[gradient.dtype, gradient.numel()], gradient)
    pieces = state[gradient.dtype, gradient.numel()].view(dist.get_world_size(), -1)
    output.copy_(pieces.mean(0))


class _Buffers(dict[Any, Tensor]):
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __missing__(self, key: tuple[torch.dtype, int]) -> Tensor:
        self[key] = torch.zeros(key[1], dtype=key[0], device=self.device)
        return self[key]


def comm_hook(side: Side) -> None:
    model = side.shard(side.build(tower))
    if side.is_sharded:
        register_comm_hook(model, _Buffers(side.device), _average)
    train(side, model)


def by_hook(hook: Any, side: Side) -> None:
    model = side.shard(side.build(tower))
    if side.is_sharded:
        register_comm_hook(model, None, hook)
    train(side, model)


def custom(side: Side) -> None:
    model = side.shard(side.build(tower))
    comms = custom_comms.Comms(model, returns_work=side.device.type == "cpu") if side.is_sharded else None
    train(side, model)
    if comms is not None:
        comms.check(side.world)


def separate_communicator(side: Side) -> None:
    model = side.shard(side.build(tower), comm_policy=DIRECT)
    if side.is_sharded:
        model.set_separate_reduce_scatter_group(True)
    train(side, model)


# --- what happens between and beside steps --------------------------------------------------------


def evaluation(side: Side) -> None:
    model = side.shard(side.build(tower))

    def evaluate(step: int) -> None:
        with torch.no_grad():
            side.outputs.append(model(side.inputs(100)).mean())

    train(side, model, between=evaluate)


def inference(side: Side) -> None:
    model = side.shard(side.build(tower))

    def generate(step: int) -> None:
        with shardwise.inference(model) if side.is_sharded else nullcontext(), torch.no_grad():
            for _ in range(2):
                side.outputs.append(model(side.inputs(100)).mean())

    train(side, model, between=generate)


def summon(side: Side) -> None:
    model = side.shard(side.build(tower))

    def edit(step: int) -> None:
        with shardwise.unsharded(model) if side.is_sharded else nullcontext(), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.75)

    train(side, model, between=edit)


def in_backward(side: Side) -> None:
    """Each gradient is used as soon as it is there, and dropped."""
    model = side.shard(side.build(tower))
    side.begin(model)

    def update(param: Tensor) -> None:
        side.lanes.enter("optimizer")
        with torch.no_grad():
            _local(param).add_(_local(param.grad), alpha=-0.002)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        loss = loss_of(model, side.inputs(step))
        loss.backward()
        side.losses.append(loss.detach())


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def side_stream(side: Side) -> None:
    """The optimizer has a stream of its own, and the next forward waits for its event alone."""
    model = side.shard(side.build(tower), comm_policy=DIRECT)
    own = torch.cuda.Stream() if side.device.type == "cuda" else None

    def step(optimizer: Any) -> None:
        if own is None:
            with building:
                optimizer.step()
            return
        current = torch.cuda.current_stream()
        own.wait_stream(current)
        with torch.cuda.stream(own), building:
            optimizer.step()
        if side.is_sharded:
            model.set_post_optim_event(own.record_event())
        else:
            current.wait_stream(own)

    train(side, model, step_optimizer=step)
    if own is not None:
        torch.cuda.synchronize()


class Branching(nn.Module):
    """Runs a branch on a stream of its own, beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.routed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._stream: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self.routed(x) + self.shared(x)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            shared = self.shared(x)
        routed = self.routed(x)
        current.wait_stream(self._stream)
        return routed + shared


def branches(side: Side) -> None:
    """Gradients of one group are made on two streams."""

    def branching() -> nn.Module:
        model = tower()
        model.blocks = nn.ModuleList(Branching() for _ in range(3))
        return model

    train(side, side.shard(side.build(branching)))


# --- all of them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A program, and how far it may be from plain training: ``tolerance`` is absolute, on numbers around 1.

    ``in_clones``: clones can be compared with plain training.
    """

    act: Callable[[Side], None]
    tolerance: float = 1e-9
    in_clones: bool = True


SINGLE, LOW, ROUNDED = 1e-4, 0.1, 0.05
"""Tolerances of float32, of bfloat16, and of eight bits."""

__all__ = ["RECIPES", "Recipe", "Wrapper"]

QUANTIZED = CommPolicy(quantized_all_gather=QuantizedAllGather(block_size=16))

RECIPES: dict[str, Recipe] = {
    "full": Recipe(sharded),
    "uneven": Recipe(uneven),
    "direct": Recipe(partial(sharded, comm_policy=DIRECT)),
    "hybrid": Recipe(hybrid),
    "no all-reduce": Recipe(no_all_reduce),
    "tensor parallel": Recipe(tensor_parallel_mlps),
    "experts": Recipe(experts),
    "kept by few": Recipe(
        partial(sharded, reshard_after_forward=2, comm_policy=DIRECT)
    ),  # pairs of ranks, until backward
    "kept": Recipe(partial(sharded, reshard_after_forward=False)),
    "kept after backward": Recipe(kept_after_backward),
    "prefetch 2": Recipe(partial(sharded, comm_policy=CommPolicy(prefetch=2, packing_limit_bytes=1))),
    "prefetch after": Recipe(partial(sharded, comm_policy=CommPolicy(backward_prefetch="after"))),
    **{
        strategy: Recipe(partial(by_strategy, strategy))
        for strategy in ("ddp", "zero1", "zero2", "zero3", "hybrid_zero2")
    },
    "extensions": Recipe(extensions, LOW, in_clones=False),
    "checkpointing": Recipe(checkpointing),
    "mixed": Recipe(partial(sharded, mp_policy=MIXED, comm_policy=DIRECT), SINGLE),
    "bf16": Recipe(partial(sharded, dtype=torch.float32, mp_policy=BF16), LOW),
    "bf16 hybrid": Recipe(
        partial(hybrid, dtype=torch.float32, mp_policy=MixedPrecisionPolicy(torch.bfloat16)), LOW
    ),
    "comm hook": Recipe(comm_hook),
    "low-precision reduction": Recipe(partial(by_hook, LowPrecisionReduction()), LOW),
    "quantized reduction": Recipe(partial(by_hook, QuantizedReduction(block_size=16)), ROUNDED),
    "quantized all-gather": Recipe(partial(sharded, comm_policy=QUANTIZED), ROUNDED),
    "custom collectives": Recipe(custom),
    "separate communicator": Recipe(separate_communicator),
    "accumulation": Recipe(partial(sharded, comm_policy=DIRECT, microbatches=2)),
    "evaluation": Recipe(evaluation),
    "inference": Recipe(inference),
    "summon": Recipe(summon),
    "optimizer in backward": Recipe(in_backward),
    "optimizer on a side stream": Recipe(side_stream),
    "offload": Recipe(partial(sharded, offload_policy=CPUOffloadPolicy(), comm_policy=DIRECT)),
    "offload mixed": Recipe(
        partial(sharded, offload_policy=CPUOffloadPolicy(), mp_policy=MIXED, microbatches=2), SINGLE
    ),
    "branches on a side stream": Recipe(branches),
}
