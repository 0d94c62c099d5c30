"""Gather and reduce of a layout, by every communicator, against plain arithmetic on the full tensors.

The values are small integers, so that sums are exact in every dtype and in every order.
"""

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from harness import World
from lending import lent_buffers
from on_ranks import on_ranks
from torch import Tensor, nn

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.comm.buffers import AllGather, FlatShard, UnshardedBuffer, with_own_storage
from shardwise.comm.communicators import (
    BackendCollectives,
    Communicator,
    GlooExchange,
    SingleRank,
    make_communicator,
)
from shardwise.comm.reduction import ReduceScatter
from shardwise.comm.streams import HostStream
from shardwise.layout.slots import Layout, Slot, plan_layout
from shardwise.torch_compat import c10d

CPU = torch.device("cpu")
SHAPES: list[tuple[tuple[int, ...], torch.dtype, int]] = [  # and the dim to shard on
    ((12, 5), torch.float32, 0),  # divides by 2, 3, 4
    ((7, 3), torch.float32, 0),  # divides by none
    ((2, 2), torch.float64, 0),  # fewer rows than ranks
    ((), torch.float32, 0),
    ((5,), torch.bfloat16, 0),
    ((24,), torch.float64, 0),
    ((0, 3), torch.float32, 0),
    ((9,), torch.int32, 0),
    ((3, 12), torch.float32, 1),  # parts that do not lie in one piece
    ((3, 7, 2), torch.float64, 1),
    ((2, 3, 2), torch.float32, 2),
    ((1, 8, 3), torch.float32, 1),  # these do after all
]
EVERYTHING_DIRECT, MIXED, EVERYTHING_PACKED = 0, 24, 1 << 20

LIMITS = (EVERYTHING_DIRECT, MIXED, EVERYTHING_PACKED)
all_worlds = pytest.mark.parametrize("world", [1, 2, 3, 4], indirect=True)


class OneByOne(BackendCollectives):
    """A back end that refuses coalesced calls, as c10d's base class does."""

    def _coalesced(self, call: Any, *args: Any) -> Any:
        def refuse(*_: Any) -> None:
            raise RuntimeError("Backend xyz does not support this coalesced call")

        result = super()._coalesced(refuse, *args)
        assert not self._can_coalesce or len(args[0]) < 2
        return result


@on_ranks(2)
def test_an_error_that_does_not_say_unsupported_is_raised_as_it_is() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the link is down")

    comm = BackendCollectives(dist.group.WORLD, CPU)
    with pytest.raises(RuntimeError, match=r"^the link is down$"):
        comm._coalesced(fail, [torch.zeros(1)] * 2, [torch.zeros(1)] * 2)
    assert comm._can_coalesce


def communicators() -> list[Communicator]:
    pg = dist.group.WORLD
    if dist.get_world_size() == 1:
        return [SingleRank()]
    return [GlooExchange(pg), BackendCollectives(pg, CPU), OneByOne(pg, CPU)]


def layout_of(limit: int) -> Layout:
    return planned(SHAPES, dist.get_world_size(), limit)


def planned(shapes: list[tuple[tuple[int, ...], torch.dtype, int]], world: int, limit: int) -> Layout:
    entries = [
        Slot(shape, dtype, dtype.itemsize, dtype, 16 // dtype.itemsize, dim, world)
        for shape, dtype, dim in shapes
    ]
    is_direct = [e.chunk_bytes >= limit for e in entries]
    return plan_layout(entries, world, is_direct)


def full_values(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randint(-8, 8, shape).to(dtype) for shape, dtype, _ in SHAPES]


def my_rows(layout: Layout, values: list[Tensor]) -> list[Tensor]:
    rank = dist.get_rank()
    return [
        v if slot.is_replicated else part_of(v, slot.dim, *slot.index_range(rank))
        for slot, v in zip(layout.slots, values, strict=True)
    ]


def part_of(tensor: Tensor, dim: int, start: int, end: int) -> Tensor:
    return tensor.narrow(dim, start, end - start)


@all_worlds
@on_ranks()
def test_every_rank_all_gathers_every_parameter() -> None:
    expected = full_values(0)
    for limit, comm in product(LIMITS, communicators()):
        layout = layout_of(limit)
        shard = FlatShard(layout, dist.get_rank(), CPU)
        shard.fill(my_rows(layout, expected))
        gathered = UnshardedBuffer(layout, CPU, shard.bytes if dist.get_world_size() == 1 else None)
        gather = AllGather(comm, layout, gathered)
        for _ in range(2):  # again, into the same buffer
            gathered.free()
            gathered.allocate()
            with lent_buffers() as lent:
                gather.start(HostStream(), gather.cut(shard.bytes))()
            assert not lent.out
            for slot, value in zip(layout.slots, expected, strict=True):
                assert torch.equal(gathered.unsharded_tensor(slot), value), (type(comm), limit, slot)


@all_worlds
@pytest.mark.parametrize(("missing", "divisor"), [(None, 4.0), (0, 1.0), (4, 4.0)])
@on_ranks()
def test_every_rank_reduces_its_rows(missing: int | None, divisor: float) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    of_ranks = [full_values(seed) for seed in range(world)]
    sums = [torch.stack([values[i] for values in of_ranks]).sum(0) / divisor for i in range(len(SHAPES))]
    wanted = [dtype.is_floating_point and i != missing for i, (_, dtype, _) in enumerate(SHAPES)]
    gradients = [g if want else None for g, want in zip(of_ranks[rank], wanted, strict=True)]
    for limit, comm in product(LIMITS, communicators()):
        layout = layout_of(limit)
        expected = my_rows(layout, sums)
        output = torch.zeros(layout.shard_bytes, dtype=torch.uint8)
        reduce = ReduceScatter(comm, layout, CPU)
        place = partial(getattr, SimpleNamespace(output=output), "output")
        with lent_buffers() as lent:
            finishes = [reduce.start(HostStream(), part, gradients, place, divisor) for part in reduce.parts]
            for finish in finishes:
                finish()
        assert not lent.out
        views = FlatShard(layout, rank, CPU)
        views.bytes.copy_(output)
        for view, want, value in zip(views.views, wanted, expected, strict=True):
            if want:
                assert torch.equal(view, value.to(view.dtype)), (type(comm), limit, view, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_padding_are_packed_by_one_call(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At large worlds most shards are of a row or less, and padded. Those of another dtype are cast by the call."""
    world, shapes = 8, [(3, 5), (7,), (16, 2), (9, 3)]
    layout = planned([(shape, torch.float32, 0) for shape in shapes], world, 1 << 20)
    assert any(slot.padded_numel > slot.chunk_numel for slot in layout.slots)
    gradients = [(torch.rand(shape) + 1).to(dtype) for shape in shapes]
    sent: list[Tensor] = []

    class Sends(SingleRank):
        def reduce_scatter(self, outputs: Any, inputs: Any, divisor: float) -> Any:
            sent.extend(each.clone() for each in inputs)
            return lambda: None

    reduce = ReduceScatter(Sends(), layout, CPU)
    (part,) = reduce.parts
    monkeypatch.setattr(torch, "cat", None)
    monkeypatch.setattr(Tensor, "to", None)
    for _ in range(2):
        sums = partial(torch.zeros, layout.shard_bytes, dtype=torch.uint8)
        reduce.start(HostStream(), part, gradients, sums, 1.0)()
    for flat in sent:
        for rank, row in enumerate(flat.view(world, -1)):
            for slot, gradient in zip(layout.slots, gradients, strict=True):
                start, end = slot.index_range(rank)
                found = row[slot.shard_offset // 4 :][: slot.padded_numel]
                expected = torch.zeros(slot.padded_numel)
                expected[: gradient[start:end].numel()] = gradient[start:end].flatten()
                assert torch.equal(found, expected)


def test_only_casts_that_cuda_knows_are_left_to_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two dtypes, chunk_cat of CUDA takes bfloat16 into float32 alone."""
    layout = planned([((8, 3), torch.float32, 0), ((8,), torch.float32, 0)], 4, 1 << 20)
    cats: list[torch.dtype] = []
    monkeypatch.setattr(torch, "cat", lambda columns, **_: cats.append(columns[0].dtype))
    monkeypatch.setattr(SingleRank, "reduce_scatter", lambda *_: None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        reduce = ReduceScatter(SingleRank(), layout, CPU)
        gradients = [torch.ones(slot.shape, dtype=dtype) for slot in layout.slots]
        sums = partial(torch.zeros, layout.shard_bytes, dtype=torch.uint8)
        reduce.start(HostStream(), reduce.parts[0], gradients, sums, 1.0)
    assert cats == [torch.float16, torch.float64]


def chosen_communicators() -> list[str]:
    pg = dist.group.WORLD
    return [type(make_communicator(pg, device)).__name__ for device in (CPU, torch.device("cuda"))]


def test_gloo_on_the_host_is_served_by_direct_exchange(world1: World, world2: World) -> None:
    assert world2.run(chosen_communicators)[0] == ["GlooExchange", "BackendCollectives"]
    assert world1.run(chosen_communicators)[0] == ["SingleRank", "SingleRank"]


def calls_of_a_sum(
    monkeypatch: pytest.MonkeyPatch, divisor: float, *, force_sum: bool = False, backend: str = "nccl"
) -> list[str]:
    """What 8 ranks are asked to sum of the number 64 in each dtype, and what is done with a sum of 64."""
    told = []

    def summed(output: Tensor, source: Tensor, op: Any) -> None:
        by = f" of {source[0].item():g} times {op.factor:g}" if isinstance(op, c10d.PremultipliedSum) else ""
        name = by or f" {str(op).rsplit('.', 1)[-1].lower()} of {source[0].item():g}"
        told.append(f"{str(output.dtype).removeprefix('torch.')}:{name}")
        output.fill_(64)

    monkeypatch.setattr(c10d, "backend_name", lambda *_: backend)
    monkeypatch.setattr(c10d, "reduce_options", lambda op, is_async: op)
    pg: Any = SimpleNamespace(size=lambda: 8, **{c10d.ALL_GATHER: None, c10d.REDUCE_SCATTER: summed})
    comm = BackendCollectives(pg, CPU)
    comm.force_sum = force_sum
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    outputs = [torch.zeros(1, dtype=dtype) for dtype in dtypes]
    comm.reduce_scatter(outputs, [torch.full((8,), 64.0, dtype=dtype) for dtype in dtypes], divisor)()
    return [f"{line}, then 64 -> {output.item():g}" for line, output in zip(told, outputs, strict=True)]


def test_the_back_end_divides_as_far_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float16 are divided in two steps; bfloat16 never by a factor, which torch passes wrongly."""
    cases: list[tuple[float, dict[str, Any]]] = [
        (8.0, {}),
        (16.0, {}),  # 2 replicas of 8 shards
        (1.0, {}),
        (8.0, {"force_sum": True}),
        (8.0, {"backend": "mpi"}),
    ]
    told: list[str] = []
    for by, how in cases:
        told += [f"by {by:g} {how or 'on NCCL'}", *calls_of_a_sum(monkeypatch, by, **how)]
    assert_expected_inline(
        "\n".join(told),
        """\
by 8 on NCCL
float32: avg of 64, then 64 -> 64
bfloat16: avg of 64, then 64 -> 64
float16: of 64 times 0.25, then 64 -> 32
by 16 on NCCL
float32: of 64 times 0.0625, then 64 -> 64
bfloat16: sum of 64, then 64 -> 4
float16: of 64 times 0.25, then 64 -> 16
by 1 on NCCL
float32: sum of 64, then 64 -> 64
bfloat16: sum of 64, then 64 -> 64
float16: sum of 64, then 64 -> 64
by 8 {'force_sum': True}
float32: sum of 64, then 64 -> 8
bfloat16: sum of 64, then 64 -> 8
float16: sum of 16, then 64 -> 32
by 8 {'backend': 'mpi'}
float32: sum of 64, then 64 -> 8
bfloat16: sum of 64, then 64 -> 8
float16: sum of 16, then 64 -> 32""",
    )


def test_each_factor_is_an_operation_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's objects for two factors count as equal, and options are cached."""
    made: list[float] = []
    make = dist._make_nccl_premul_sum  # torch has it everywhere, also without NCCL
    monkeypatch.setattr(dist, "_make_nccl_premul_sum", lambda factor: (made.append(factor), make(factor))[1])
    c10d.reduce_options.cache_clear()
    options = [c10d.reduce_options(c10d.PremultipliedSum(factor), True) for factor in (0.5, 0.25, 0.5)]
    c10d.reduce_options.cache_clear()
    assert made == [0.5, 0.25]
    assert [each.reduceOp.op for each in options] == [dist.ReduceOp.PREMUL_SUM] * 3


def test_storage_of_its_own_is_made_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CUDA tensor that is not on the current device, ``__dlpack__`` refuses to tell."""

    def refuse(*_: Any, **__: Any) -> None:
        raise BufferError("Can't export tensors on a different CUDA device index.")

    monkeypatch.setattr(Tensor, "__dlpack__", refuse)
    base = torch.arange(8.0)
    own = with_own_storage(base[2:4])
    base.mul_(10)
    assert own.tolist() == [20.0, 30.0]
    assert own.untyped_storage().nbytes() == 8


@on_ranks(2)
def test_the_callers_own_messages_do_not_mix_with_an_all_gather() -> None:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    layout = planned([((4,), torch.float32, 0)], 2, 0)
    shard = FlatShard(layout, rank, CPU)
    shard.fill([torch.full((2,), float(rank))])
    gathered = UnshardedBuffer(layout, CPU)
    gather = AllGather(GlooExchange(dist.group.WORLD), layout, gathered)
    finish = gather.start(HostStream(), gather.cut(shard.bytes))
    theirs = torch.empty(2)
    work = dist.irecv(theirs, other)
    dist.send(torch.full((2,), 10.0 + rank), other)
    work.wait()
    finish()
    full = gathered.unsharded_tensor(layout.slots[0])
    assert theirs[0].item() == 11.0 - dist.get_rank()
    assert torch.equal(full, torch.tensor([0.0, 0.0, 1.0, 1.0]))


@pytest.mark.parametrize("padded_first", [True, False])
@on_ranks(2)
def test_layouts_of_equal_sizes_share_a_buffer_but_not_its_views(padded_first: bool) -> None:
    """One packs a chunk of 16 bytes and 16 bytes of padding, the other two chunks of 16 bytes."""
    padded, of_two = nn.RMSNorm(8), nn.LayerNorm(8)
    for number, param in enumerate([padded.weight, of_two.weight, of_two.bias], 1):
        nn.init.constant_(param, 10.0**number)
    model = nn.Sequential(*([padded, of_two] if padded_first else [of_two, padded]))
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    fully_shard(padded, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    fully_shard(of_two)
    fully_shard(model)
    assert (model(x) - expected).abs().max().item() == 0.0
