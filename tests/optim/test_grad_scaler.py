"""Loss scaling with sharded gradients: what one rank alone can see must count on every rank.

An infinity in one row of a weight lies in the shard of a single rank. If the other ranks took the step that
this one skips, parameters and scales would drift apart without a word. So every run is compared with
unsharded training on the global batch, in float64 to 1e-10: which steps were skipped, the scales, and the
parameters after each step, by torch's own scaler. Scales are powers of two and change no digit.

torch's scaler looks for infinities as the first gradient is placed, which is right only where all of them are
placed alike; shardwise.GradScaler is right for any mixture.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_all_same, assert_as_plain
from harness import World
from meshed import Layout, layout_inputs, parameters_of, seat, whole
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwise
from shardwise import CPUOffloadPolicy, DataParallelMeshDims, fully_shard

ROWS = 6  # of every weight; fewer shards than that on any mesh below, and not even for four
SCALE = 2.0**10
HUGE = 1e308  # finite, but not once it is scaled


class Branch(nn.Module):
    """Row k of the weight has a gradient proportional to ``factors[k]``, no other row has."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.linear = nn.Linear(8, rows, bias=False)
        self.factors = [1.0] * rows

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) - 1).square() @ x.new_tensor(self.factors)


class Branches(nn.Module):
    """The sum of its children, which no gradient links: an infinity stays where it came up."""

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for child in self.children_:
            total = total + child(x)
        return total


def options_for(kind: str, layout: Layout) -> dict[str, Any]:
    """Arguments of ``fully_shard`` on the ranks of ``layout``, a mesh (replicate, shard)."""
    flat = Layout((layout.size,), ("flat",), ("flat",))
    return {
        "hybrid": lambda: {"mesh": layout.mesh()},
        "sharded": lambda: {"mesh": flat.mesh()},
        "offloaded": lambda: {"mesh": flat.mesh(), "offload_policy": CPUOffloadPolicy()},
        "replicated": lambda: {"mesh": flat.mesh(), "dp_mesh_dims": DataParallelMeshDims(replicate="flat")},
        "shard_alone": lambda: {
            "mesh": layout.mesh(),
            "dp_mesh_dims": DataParallelMeshDims(shard=("replicate", "shard")),
        },
    }[kind]()


def built(*kinds: Callable[[], nn.Module]) -> Branches:
    torch.manual_seed(7)
    return Branches(*kinds).double()


def sharded(model: Branches, kinds: list[str], layout: Layout) -> Branches:
    """Each child as its kind says; one that is ``ignored`` stays as it is, averaged by the root."""
    ignored = set()
    for child, kind in zip(model.children_, kinds, strict=True):
        if kind == "ignored":
            ignored |= set(child.parameters())
        else:
            fully_shard(child, **options_for(kind, layout))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ignored_params contains trainable parameters")
        fully_shard(model, ignored_params=ignored or None)
    if ignored:
        model.set_reduce_ignored_params(True)
    return model


Overflow = tuple[str, int, int] | None
"""("row", child, row): a row overflows on every rank, hence in a single shard. ("rank", child, rank): all of
a child's gradient overflows on one rank. None: nothing does."""


def scaler_for(layout: Layout | None) -> torch.amp.GradScaler:
    return (torch.amp if layout is None else shardwise).GradScaler("cpu", init_scale=SCALE, growth_interval=2)


def training(
    layout: Layout | None,
    kinds: list[str],
    overflow: Overflow,
    make: str = "SGD",
    **options: Any,
) -> dict[str, Any]:
    """Four steps, of which the second overflows; the scale doubles after two good ones."""
    model = built(*(Branch for _ in kinds))
    if layout is not None:
        sharded(model, kinds, layout)
    optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.05, **options)
    return trained(layout, model, [optimizer], overflow)


def trained(
    layout: Layout | None,
    model: Branches,
    optimizers: list[torch.optim.Optimizer],
    overflow: Overflow,
) -> dict[str, Any]:
    scaler = scaler_for(layout)
    notes: dict[str, Any] = {}
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, layout_inputs(layout, step), overflow if step == 1 else None, seat(layout)[0])
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        notes[f"scale after step {step}"] = scaler.get_scale()
        notes |= {f"{name} after step {step}": value for name, value in parameters_of(model).items()}
    return notes


def loss_of(model: Branches, x: Tensor, overflow: Overflow, rank: int) -> Tensor:
    if overflow is None:
        return model(x).mean()
    how, index, where = overflow
    child = model.children_[index]
    assert isinstance(child, Branch)
    if how == "row":
        child.factors[where] = HUGE
    elif rank == where or where < 0:
        child.factors = [HUGE] * len(child.factors)
    loss = model(x).mean()
    child.factors = [1.0] * len(child.factors)
    return loss


def in_plain(overflow: Overflow) -> Overflow:
    """The plain run is rank 0 of 1: it overflows there, whatever the rank."""
    return overflow if overflow is None or overflow[0] == "row" else (*overflow[:2], -1)


SQUARE = Layout((2, 2))
OVERFLOWS: list[Overflow] = [None, ("row", 0, 0), ("row", 0, ROWS - 1), ("row", 1, 2), ("rank", 1, 1)]

KINDS = {
    "zero3": ["sharded", "sharded"],
    "ddp": ["replicated", "replicated"],
    "hybrid": ["hybrid", "hybrid"],
    "offloaded": ["offloaded", "sharded"],
    "sharded_then_hybrid": ["sharded", "hybrid"],
    "hybrid_then_sharded": ["hybrid", "sharded"],
    "sharded_then_replicated": ["sharded", "replicated"],
    "replicated_then_sharded": ["replicated", "sharded"],
    "hybrid_then_sharded_over_both": ["hybrid", "shard_alone"],
    "ignored_then_sharded": ["ignored", "sharded"],
    "sharded_then_ignored": ["sharded", "ignored"],
    "ignored_then_hybrid": ["ignored", "hybrid"],
}


FLAT = {ranks: Layout((1, ranks)) for ranks in (1, 2, 3)}
CASES: list[tuple[Layout, str, str, dict[str, Any]]] = [
    *((SQUARE, name, "SGD", {}) for name in KINDS),
    *((layout, name, "SGD", {}) for layout in FLAT.values() for name in ("zero3", "replicated_then_sharded")),
    (FLAT[2], "zero3", "Adam", {"foreach": True}),
    (FLAT[2], "zero3", "AdamW", {"foreach": False}),
    (FLAT[2], "zero3", "Adam", {"fused": True}),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("layout", "name", "make", "options"), CASES, ids=str)
def test_what_overflows_on_one_rank_is_skipped_on_all(
    layout: Layout, name: str, make: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """For any kinds of sharding, numbers of ranks, and implementations of Adam."""
    world, kinds = request.getfixturevalue(f"world{layout.size}"), KINDS[name]
    for overflow in OVERFLOWS if layout is SQUARE else OVERFLOWS[:3]:
        expected = training(None, kinds, in_plain(overflow), make, **options)
        scales = [expected[f"scale after step {step}"] for step in range(4)]
        assert scales == [SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE] or overflow
        assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE] or not overflow
        assert_all_same(world.run(training, layout, kinds, overflow, make, **options), expected)


# --- tensor parallelism ---------------------------------------------------------------------------

TENSOR_PARALLEL = Layout((2, 2), ("dp", "tp"), ("dp",))


class Split(Branch):
    def __init__(self) -> None:
        super().__init__(8)


def tensor_parallel(layout: Layout | None, order: list[type[Branch]], overflow: Overflow) -> dict[str, Any]:
    """Plain parameters lie on the data-parallel mesh alone, the split ones on both dimensions."""
    model = built(*order)
    if layout is not None:
        # Gathered outputs: every rank computes the same loss from all of them.
        style = ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())
        parallelize_module(model.children_[order.index(Split)], layout.mesh()["tp"], {"linear": style})
        for child in (*model.children_, model):
            fully_shard(child, mesh=layout.mesh()["dp"])
    return trained(layout, model, [torch.optim.SGD(model.parameters(), lr=0.05)], overflow)


@pytest.mark.parametrize("order", [[Split, Branch], [Branch, Split]], ids=["split_first", "plain_first"])
def test_parameters_split_by_tensor_parallelism_are_skipped_by_all(
    world4: World, order: list[type[Branch]]
) -> None:
    for overflow in [None, *(("row", order.index(Split), row) for row in (0, 7))]:
        assert_as_plain(world4, tensor_parallel, TENSOR_PARALLEL, order, overflow)


# --- as scripts use it ----------------------------------------------------------------------------


def two_optimizers(layout: Layout | None, overflow: Overflow) -> dict[str, Any]:
    """One scaler for two optimizers: the one whose gradients are finite takes its step."""
    model = built(Branch, Branch)
    if layout is not None:
        sharded(model, ["sharded", "hybrid"], layout)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(child.parameters(), lr=0.05) for child in model.children_
    ]
    return trained(layout, model, optimizers, overflow)


@pytest.mark.parametrize("child", [0, 1])
def test_of_two_optimizers_only_the_one_that_overflowed_is_skipped(world4: World, child: int) -> None:
    for row in (0, ROWS - 1):
        overflow = ("row", child, row)
        expected = two_optimizers(None, overflow)
        before, after = (
            expected[f"children_.{1 - child}.linear.weight after step {step}"] for step in (0, 1)
        )
        assert not torch.equal(before, after)
        assert_all_same(world4.run(two_optimizers, SQUARE, overflow), expected)


def clipped_and_accumulated(layout: Layout | None, overflow: Overflow) -> dict[str, Any]:
    """Two microbatches, the first without synchronisation; unscaled, then clipped, then a step."""
    model = built(Branch, Branch)
    if layout is not None:
        sharded(model, ["sharded", "sharded"], layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = scaler_for(layout)
    notes: dict[str, Any] = {}
    for step in range(3):
        optimizer.zero_grad()
        for microbatch in range(2):
            if layout is not None:
                model.set_requires_gradient_sync(microbatch == 1)
            has_overflow = (step, microbatch) == (1, 0)
            inputs = layout_inputs(layout, 10 * step + microbatch)
            loss = loss_of(model, inputs, overflow if has_overflow else None, seat(layout)[0])
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        notes[f"norm at step {step}"] = norm if norm.isfinite() else "not finite"
        scaler.step(optimizer)
        scaler.update()
        notes[f"scale after step {step}"] = scaler.get_scale()
        notes |= {f"{name} after step {step}": value for name, value in parameters_of(model).items()}
    return notes


def test_an_overflow_of_an_unsynchronised_microbatch_is_seen_at_the_end(world2: World) -> None:
    for overflow in [None, ("row", 0, 0), ("row", 1, ROWS - 1), ("rank", 0, 1)]:
        expected = clipped_and_accumulated(None, in_plain(overflow))
        assert (expected["norm at step 1"] == "not finite") is (overflow is not None)
        assert_all_same(world2.run(clipped_and_accumulated, Layout((1, 2)), overflow), expected)


@on_ranks(4)
@pytest.mark.parametrize("rank", [None, 0, 3])
def test_an_overflow_of_what_no_other_rank_has_is_seen_by_all(rank: int | None) -> None:
    """A plain parameter beside the sharded ones, whose gradient is each rank's own business."""
    model = sharded(Branches(Branch, Branch), ["sharded", "ignored"], SQUARE)
    model.set_reduce_ignored_params(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = scaler_for(SQUARE)
    scales, shards, own = [], [], []
    for step in range(3):
        optimizer.zero_grad()
        x = layout_inputs(SQUARE, step).float()
        overflows = step == 1 and rank == SQUARE.seat()[0]
        scaler.scale(loss_of(model, x, ("rank", 1, -1) if overflows else None, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        shards.append(whole(model.children_[0].linear.weight))  # type: ignore[arg-type]
        own.append(model.children_[1].linear.weight.detach().clone())  # type: ignore[union-attr, operator]
    assert scales == ([SCALE, 2 * SCALE, 2 * SCALE] if rank is None else [SCALE, SCALE / 2, SCALE / 2])
    assert torch.equal(shards[0], shards[1]) is (rank is not None)
    assert torch.equal(own[0], own[1]) is (rank is not None)
    assert not torch.equal(shards[1], shards[2])


@on_ranks(2)
def test_float16_gradients_are_refused_in_torchs_words() -> None:
    model = fully_shard(nn.Linear(8, 8).half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    scaler = shardwise.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients.$"):
        scaler.unscale_(optimizer)
