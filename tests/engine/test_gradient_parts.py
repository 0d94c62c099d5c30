"""Large gradients are reduced as soon as they are there, in one order on all ranks, and the numbers stay right."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_equal
from failure_models import Chain
from models import built, shard_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise import CommPolicy, MixedPrecisionPolicy, fully_shard
from shardwise.comm.communicators import SingleRank
from shardwise.comm.reduction import GradientPart, ReduceScatter
from shardwise.engine.reduction_queue import ReductionQueue
from shardwise.groups.gradients import Gradients, PartQueue
from shardwise.layout.slots import Slot, plan_layout

IN_PARTS = CommPolicy(packing_limit_bytes=0, part_bytes=0)


def planned(sizes: list[int], least: int, packed: int = 0) -> list[GradientPart]:
    """The parts of parameters of so many numbers, the last ``packed`` of which are packed."""
    entries = [Slot((size,), torch.float32, 4, "alike", 4) for size in sizes]
    is_direct = [index < len(sizes) - packed for index in range(len(sizes))]
    return ReduceScatter(SingleRank(), plan_layout(entries, 2, is_direct), torch.device("cpu"), least).parts


@pytest.mark.parametrize(
    ("sizes", "least", "packed", "expected"),
    [
        ([8, 8, 8, 8], 0, 0, [(3,), (2,), (1,), (0,)]),
        ([3, 1, 4, 4], 0, 0, [(3,), (2,), (1, 0)]),  # at least a quarter each
        ([8, 8, 8, 8], 64, 0, [(3, 2), (1, 0)]),
        ([8, 8, 8, 8], 1 << 20, 0, [(3, 2, 1, 0)]),
        ([8, 8, 1, 1], 0, 2, [(1,), (0,), (2, 3)]),  # packed ones come with the last
        ([1, 1], 0, 2, [(0, 1)]),
    ],
)
def test_parts_are_large_enough_and_the_last_registered_come_first(
    sizes: list[int], least: int, packed: int, expected: list[tuple[int, ...]]
) -> None:
    assert [part.indices for part in planned(sizes, least, packed)] == expected


def orders_of(arrivals: list[int], trainable: list[int] | None = None) -> list[str]:
    parts = planned([8, 8, 8, 8], 0)
    queue = PartQueue([(0, parts)], range(4) if trainable is None else trainable)
    log = []
    for index in arrivals:
        may_send = queue.arrive(index)
        taken = [d.indices for d in queue.take_ready()]
        assert bool(taken) == may_send
        log.append(f"{index}: {taken}")
    log.append(f"rest: {[d.indices for d in queue.take_rest()]}")
    assert queue.sent == {0, 1, 2, 3}
    return log


def test_gradients_are_sent_in_the_order_of_the_parts_however_they_come() -> None:
    assert orders_of([3, 2, 1, 0]) == ["3: [(3,)]", "2: [(2,)]", "1: [(1,)]", "0: [(0,)]", "rest: []"]
    assert orders_of([2, 3, 0]) == ["2: []", "3: [(3,), (2,)]", "0: []", "rest: [(1,), (0,)]"]
    assert orders_of([0, 1]) == ["0: []", "1: []", "rest: [(3,), (2,), (1,), (0,)]"]


def test_frozen_parameters_are_not_waited_for() -> None:
    assert orders_of([2], trainable=[2, 0]) == ["2: [(3,), (2,), (1,)]", "rest: [(0,)]"]


def test_a_round_begins_with_what_is_there() -> None:
    queue = PartQueue([(0, planned([8, 8], 0))], range(2))
    assert queue.arrive(1)
    assert len(list(queue.take_ready())) == 1
    queue.begin([1])
    assert not queue.sent
    assert queue.arrive(0)
    assert [d.indices for d in queue.take_ready()] == [(1,), (0,)]


# --- training -------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Four layers, computed in the order of ``order``; their gradients come the other way round."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = x + getattr(self, name)(x).tanh()
        return x


class Model(nn.Module):
    def __init__(self, order: str = "abcd") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide(order) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Again(nn.Module):
    """Uses one layer in two checkpointed parts, whose backwards are nested: its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        x = checkpoint(self.c, x, use_reentrant=True)
        x = x + self.b(x).tanh()
        return checkpoint(self.c, x, use_reentrant=True)


def in_parts(side: Side, make: Callable[[], nn.Module] = Model, **options: Any) -> Any:
    return side.shard_tower(built(make), comm_policy=IN_PARTS, **options)


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "make", "mesh"),
    [
        (2, Model, None),
        (3, partial(Model, "dcba"), None),
        (2, partial(Model, "cadb"), None),
        (2, partial(Model, "abca"), None),
        (3, partial(Model, "ab"), None),
        (1, partial(Model, "cadb"), None),
        (1, partial(Chain, Again, Again), None),
        (3, partial(Chain, Again, Again), None),
        (4, Model, (2, 2)),
    ],
    indirect=["world"],
)
def test_training_equals_plain_training_in_any_order(
    side: Side, make: Callable[[], nn.Module], mesh: tuple[int, ...] | None
) -> None:
    options = {"mesh": init_device_mesh("cpu", mesh)} if mesh and side.is_sharded else {}
    model = in_parts(side, make, **options)
    side.steps(model, adamw(model), range(2))


@pytest.mark.parametrize(
    ("order", "sent"),
    [("abcd", [2, 3, 4, 5, 6, 7]), ("dcba", []), ("ab", [])],
    ids=["as registered", "reversed", "unused"],
)
@on_ranks(2)
def test_most_are_sent_before_the_last_one_comes(order: str, sent: list[int]) -> None:
    """Weights are 0, 2, 4, 6 and biases 1, 3, 5, 7 of each block."""
    model = Model(order)
    shard_tower(model, comm_policy=IN_PARTS)
    told = []
    reduce = Gradients.reduce

    def tell(gradients: Gradients) -> Any:
        queue = gradients.part_queue
        told.append(f"{gradients._shards.name} {sorted(queue.sent) if queue else 'all together'}")
        return reduce(gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "reduce", tell)
        model(torch.randn(2, 8)).sum().backward()
    blocks = [line for line in told if line.startswith("blocks")]
    assert blocks == [f"blocks.{i} {sent}" for i in (2, 1, 0)]


# --- how many are in flight --------------------------------------------------------------------------


class Quarters(nn.Module):
    """Three blocks of four equal parts, and perhaps an embedding that is larger than a block."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 16)
        layers = [nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))) for _ in range(3)]
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embedding(x))


@pytest.mark.parametrize(
    ("rows", "computes_in"),
    [(8, torch.float32), (512, torch.bfloat16)],
    ids=["small root", "large root in bfloat16"],
)
@on_ranks(2)
def test_as_many_parts_are_in_flight_whatever_the_dtypes_and_the_root(
    computes_in: torch.dtype, rows: int
) -> None:
    """Of four quarters, each of which takes one and a half times its bytes to reduce here, two."""
    precision = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32)
    model = Quarters(rows)
    shard_tower(model, comm_policy=IN_PARTS, mp_policy=precision)
    most = [0]
    limit = ReductionQueue._limit

    def counted(queue: ReductionQueue, *args: Any) -> None:
        limit(queue, *args)
        most.append(queue.num_parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReductionQueue, "_limit", counted)
        model(torch.zeros(2, dtype=torch.long)).sum().backward()
    assert max(most) == 2


# --- several backwards ----------------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize("where", ["b", "d"])
def test_synchronisation_may_be_switched_off_in_the_midst(side: Side, where: str) -> None:
    model = in_parts(side)
    if side.is_sharded:
        model(side.inputs(9)).sum().backward()
        model.zero_grad()

    def switch(*_: Any) -> None:
        side.sync(model.blocks[1], False)

    handle = getattr(model.blocks[1], where).register_full_backward_hook(switch)
    mean_of_squares(model, side.inputs(0)).backward()
    handle.remove()
    side.sync(model.blocks[1], True)
    mean_of_squares(model, side.inputs(1)).backward()
    side.note_gradients(model)


@same_as_plain(2)
def test_a_failed_backward_leaves_nothing_under_way(side: Side) -> None:
    model = in_parts(side)

    def fail(*_: Any) -> None:
        raise ArithmeticError("not this one")

    if side.is_sharded:
        handle = model.blocks[1].b.register_full_backward_hook(fail)
        with pytest.raises(ArithmeticError):
            mean_of_squares(model, side.inputs(5)).backward()
        handle.remove()
        model.zero_grad()
    mean_of_squares(model, side.inputs(0)).backward()
    side.note_gradients(model)


class Unentered(nn.Module):
    """One of its parts is never called, and is a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("policy", [None, IN_PARTS], ids=["together", "in parts"])
@on_ranks(2)
def test_a_group_that_never_ran_gets_zeros_where_they_are_asked_for(policy: CommPolicy | None) -> None:
    model = Unentered()
    fully_shard(model.spare, comm_policy=policy)
    fully_shard(model, comm_policy=policy)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    model(torch.ones(2, 8)).sum().backward()
    found = [None if p.grad is None else p.grad.full_tensor() for p in model.spare.parameters()]  # type: ignore[attr-defined]
    assert_equal(found, [torch.zeros(8, 8), torch.zeros(8)] * 2)
