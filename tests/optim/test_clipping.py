"""Norms of gradients and clipping, over whatever meshes the gradients lie on.

Models are compared with `torch.nn.utils.clip_grad_norm_` on the unsharded model and the global batch, in
float64 to 1e-10. Where placements are the point, parameters and gradients are put there by hand (`Given`).
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import alike, assert_all_same, assert_as_plain
from expecttest import assert_expected_inline
from harness import World
from meshed import Layout, layout_inputs, outcome, refusal
from models import WIDTH, Block, built, even_tower, shard_tower, uneven_tower
from on_ranks import on_ranks
from reference import full, mean_of_squares
from tensor_parallel import SIZES, Mlp, Run, loss_of, made, split_mlps
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import clip_grad_norm_, fully_shard
from shardwise.optim.norms import PassedAlong
from shardwise.torch_compat import dtensor

INF = math.inf
KINDS: list[Any] = [0.5, 1, 2.0, 3.5, INF, "inf"]


def noted(params: Any, kinds: list[Any], is_sharded: bool, limit: float = 0.05) -> dict[str, Any]:
    """The same gradients clipped by every kind of norm."""
    params = list(params)
    clip = clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
    before = [dtensor.plain(param.grad).clone() for param in params]
    placements = [getattr(param.grad, "placements", None) for param in params]
    notes: dict[str, Any] = {}
    for kind in kinds:
        for param, gradient in zip(params, before, strict=True):
            dtensor.plain(param.grad).copy_(gradient)
        norm = notes[f"norm {kind}"] = clip(params, limit, norm_type=kind)
        assert type(norm) is Tensor
        assert norm.shape == ()
        if kind in (2, INF):
            notes |= {f"gradient {index} by {kind}": full(p.grad) for index, p in enumerate(params)}
    assert [getattr(param.grad, "placements", None) for param in params] == placements
    return notes


# --- sharded models -------------------------------------------------------------------------------

BOTH = ("replicate", "shard")
LINES = {size: Layout((size,), ("shard",), ("shard",)) for size in (1, 2, 3, 4)}
SQUARE = Layout((2, 2))
COPIES = Layout((4,), ("replicate",), ("replicate",))
TALL = Layout((4, 1))  # hybrid without anything to shard over


def tower(layout: Layout | None, build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    model = built(build)
    if layout is not None:
        if layout.names == ("replicate",):
            options["dp_mesh_dims"] = shardwise.DataParallelMeshDims(replicate="replicate")
        shard_tower(model, mesh=layout.mesh(), **options)
    return model


TWO_D = Layout((2, 2), ("dp", "tp"), ("dp",))
TP_FIRST = Layout((2, 2), ("tp", "dp"), ("dp",))
THREE_D = Layout((2, 1, 2), ("replicate", "shard", "tp"), BOTH)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = Mlp(WIDTH, 10, WIDTH)
        self.wide, self.hybrid = Block(WIDTH, 13), Block(WIDTH, 13)
        self.copied = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Parameter(torch.randn(WIDTH))
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hybrid(self.wide(x + self.split(x)))
        return self.outlet(torch.tanh(self.copied(x)) * self.plain)


def everything(layout: Layout | None) -> nn.Module:
    model = built(Everything)
    if layout is None:
        return model
    split_mlps_of(model, layout.mesh()["tp"])
    fully_shard(model.split, mesh=layout.data_mesh())
    fully_shard(model.wide, mesh=LINES[4].mesh())
    fully_shard(model.hybrid, mesh=SQUARE.mesh())
    copies = shardwise.DataParallelMeshDims(replicate="replicate")
    fully_shard(model.copied, mesh=COPIES.mesh(), dp_mesh_dims=copies)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fully_shard(model, mesh=layout.data_mesh(), ignored_params={model.plain})
    model.set_reduce_ignored_params(True)
    return model


def split_mlps_of(model: nn.Module, mesh: Any) -> None:
    """As in test_tensor_parallel, of this model's only MLP."""
    stack = nn.Module()
    stack.blocks, stack.head = [], model.split
    split_mlps(stack, mesh)  # type: ignore[arg-type]


def model_on(layout: Layout | None, build: Callable[[], nn.Module] | Run, **options: Any) -> Any:
    """A model with the gradients of a backward."""
    if isinstance(build, Run):
        model = made(layout, build)
        loss_of(model, layout_inputs(layout, 0, build.sizes[0])).backward()
        return model
    model = everything(layout) if build is Everything else tower(layout, build, **options)
    width = model.inlet.in_features if hasattr(model, "inlet") else WIDTH
    mean_of_squares(model, layout_inputs(layout, 0, width)).backward()
    return model


def clipped(layout: Layout | None, build: Any, **options: Any) -> dict[str, Any]:
    model = model_on(layout, build, **options)
    return noted(model.parameters(), KINDS, layout is not None)


UNEVEN = SIZES["uneven"]


@pytest.mark.parametrize(
    ("layout", "build"),
    [
        (LINES[1], even_tower),
        (LINES[3], uneven_tower),
        (SQUARE, uneven_tower),
        (COPIES, uneven_tower),
        (THREE_D, Run(plan="mlps", sizes=UNEVEN)),
        (TWO_D, Run(plan="everything", sizes=UNEVEN)),
        (TP_FIRST, Run(plan="sequences", sizes=UNEVEN)),
    ],
    ids=lambda value: str(value) if isinstance(value, (Layout, Run)) else None,
)
def test_gradients_are_clipped_as_plain_ones(
    layout: Layout, build: Any, request: pytest.FixtureRequest
) -> None:
    """Sharded ones, replicas, which count once, and those of tensor parallelism."""
    assert_as_plain(request.getfixturevalue(f"world{layout.size}"), clipped, layout, build)


def test_gradients_kept_on_the_host_are_clipped(world2: World) -> None:
    offload = shardwise.CPUOffloadPolicy(pin_memory=False)
    ranks = world2.run(clipped, LINES[2], uneven_tower, offload_policy=offload)
    assert_all_same(ranks, clipped(None, uneven_tower))


def test_one_model_may_lie_on_all_kinds_of_meshes(world4: World) -> None:
    assert_as_plain(world4, clipped, TWO_D, Everything)


# --- gradients put there by hand --------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A parameter with a gradient of random numbers, on a mesh or (layout None) plain. Travels by pickle.

    ``of_gradient``: where the gradient is placed otherwise than the parameter.
    """

    shape: tuple[int, ...]
    layout: Layout | None = None
    placements: tuple[Placement, ...] = ()
    dtype: torch.dtype = torch.float64
    of_gradient: tuple[Placement, ...] = ()

    def placed(self, value: Tensor) -> Tensor:
        if self.layout is None:
            return value
        return distribute_tensor(value, self.layout.mesh(), self.placements, src_data_rank=None)


def params_of(givens: list[Given], is_sharded: bool = True) -> list[nn.Parameter]:
    params = []
    for seed, given in enumerate(givens):
        generator = torch.Generator().manual_seed(seed)
        gradient = torch.randn(given.shape, generator=generator, dtype=torch.float64).to(given.dtype)
        place = given.placed if is_sharded else Tensor.clone
        param = nn.Parameter(place(torch.zeros_like(gradient)))
        param.grad = place(gradient)
        if is_sharded and given.of_gradient == (Partial(),):
            term = gradient * (0.25 if dist.get_rank() else 0.75)  # of two ranks
            param.grad = DTensor.from_local(term, param.device_mesh, given.of_gradient)
        elif is_sharded and given.of_gradient:
            param.grad = param.grad.redistribute(placements=given.of_gradient)
        params.append(param)
    return params


def clipped_given(givens: list[Given], kinds: list[Any], is_sharded: bool = True) -> dict[str, Any]:
    return noted(params_of(givens, is_sharded), kinds, is_sharded)


def assert_clipped_as_plain(world: World, givens: list[Given], kinds: list[Any] = KINDS) -> None:
    assert_all_same(world.run(clipped_given, givens, kinds), clipped_given(givens, kinds, is_sharded=False))


ROWS = (Shard(0),)


@pytest.mark.parametrize("world", [2, 3, 4], indirect=True)
def test_shards_may_be_empty(world: World) -> None:
    """Ranks without rows have no largest number; all ranks still finish, with the same norm."""
    line = LINES[world.size]
    assert_clipped_as_plain(world, [Given((rows, 2), line, ROWS) for rows in (1, 2, 3)])
    for found in world.run(clipped_given, [Given((0, 4), line, ROWS)], KINDS):
        assert all(norm == 0 for name, norm in found.items() if name.startswith("norm"))


MIXED = [
    Given((5, 3), LINES[4], ROWS),
    Given((3, 5), SQUARE, (Replicate(), Shard(1))),
    Given((6, 2), SQUARE, (Shard(0), Shard(0))),
    Given((), SQUARE, (Replicate(), Replicate())),
    Given((4, 4), TWO_D, (Shard(1), Replicate())),
    Given((7,)),
    Given((1, 9), TP_FIRST, (Shard(1), Shard(0))),
    Given((2,)),
]


def test_placements_on_any_meshes_go_together(world4: World) -> None:
    assert_clipped_as_plain(world4, MIXED)


def test_dtypes_go_together(world2: World) -> None:
    """To the rounding of bfloat16: torch computes its norms in that."""
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    givens = [Given((40, 5), LINES[2], ROWS, dtype) for dtype in dtypes] + [Given((9,), dtype=torch.bfloat16)]
    expected = clipped_given(givens, [2.0], is_sharded=False)
    ranks = world2.run(clipped_given, givens, [2.0])
    assert ranks[0]["norm 2.0"].dtype == torch.float32
    assert_all_same([{k: v.float() for k, v in found.items()} for found in ranks],
                    {k: v.float() for k, v in expected.items()}, atol=1e-3, rtol=4e-3)  # fmt: skip
    (wide, *_) = world2.run(clipped_given, [*givens, Given((3,), LINES[2], ROWS)], [2.0])
    assert wide["norm 2.0"].dtype == torch.float64


def own_beside_shared(kind: float, is_slice: bool) -> tuple[Tensor, Tensor]:
    """Ranks that no mesh connects hold different things under one parameter: a slice, or a plain one of each rank."""
    (param,) = params_of([Given((6,), LINES[4], ROWS)])
    own, value = torch.zeros(3, dtype=torch.float64), own_value(dist.get_rank(), is_slice)
    gradient = torch.full_like(own, value)
    if is_slice:
        mesh = TWO_D.mesh()["dp"]
        own, gradient = (distribute_tensor(each, mesh, ROWS, src_data_rank=None) for each in (own, gradient))
    other = nn.Parameter(own)
    other.grad = gradient
    return clip_grad_norm_([param, other], 1.0, kind), dtensor.plain(other.grad)


def own_value(rank: int, is_slice: bool) -> float:
    return 1.0 + rank % 2 if is_slice else 0.5 * (1 + rank)


@pytest.mark.parametrize("is_slice", [True, False])
@pytest.mark.parametrize("kind", [1.0, INF])
def test_where_gradients_differ_by_rank_the_largest_counts(
    world4: World, kind: float, is_slice: bool
) -> None:
    (param,) = params_of([Given((6,))])
    expected = torch.linalg.vector_norm(torch.cat([param.grad, torch.full((3,), 2.0)]), kind)
    for rank, (norm, gradient) in enumerate(world4.run(own_beside_shared, kind, is_slice)):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        value = own_value(rank, is_slice) / (expected.item() + 1e-6)
        assert gradient.tolist() == pytest.approx([value] * len(gradient))


@pytest.mark.parametrize(
    ("placements", "of_gradient"),
    [
        ((Replicate(),), (Partial(),)),  # each rank holds a term of the sum
        (ROWS, (Replicate(),)),  # as autograd leaves it where the loss used the sharded parameter itself
    ],
    ids=["not_summed_yet", "replicated"],
)
def test_gradients_placed_otherwise_than_their_parameters_are_measured_as_the_whole(
    world2: World, placements: tuple[Placement, ...], of_gradient: tuple[Placement, ...]
) -> None:
    otherwise = Given((5, 3), LINES[2], placements, of_gradient=of_gradient)
    assert_clipped_as_plain(world2, [otherwise, Given((3,), LINES[2], ROWS)])


def lacking(kind: float) -> tuple[Tensor, list[Any]]:
    row, column = divmod(dist.get_rank(), 2)
    over_rows, over_columns = (Shard(0), Replicate()), (Replicate(), Shard(0))
    givens = [Given((4,), SQUARE, over_rows), Given((4, 4), SQUARE, over_columns), Given((2,)), Given((1,))]
    params = params_of(givens)
    for index in ([0] if row == 0 else []) + ([1] if column == 1 else []) + [2 + column]:
        params[index].grad = None
    norm = clip_grad_norm_(params, 0.1, kind)
    return norm, [None if param.grad is None else dtensor.plain(param.grad) for param in params]


@pytest.mark.parametrize("kind", [2.0, INF])
def test_ranks_may_lack_different_gradients(world4: World, kind: float) -> None:
    a, b, c, d = (param.grad for param in params_of([Given((4,)), Given((4, 4)), Given((2,)), Given((1,))]))
    largest = max(torch.linalg.vector_norm(plain, kind) for plain in (c, d))
    expected = torch.linalg.vector_norm(torch.cat([a[2:], b[:2].flatten(), largest[None]]), kind)
    factor = 0.1 / (expected + 1e-6)
    here = [[None, b[:2], None, d], [None, None, c, None], [a[2:], b[:2], None, d], [a[2:], None, c, None]]
    for (norm, gradients), wanted in zip(world4.run(lacking, kind), here, strict=True):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for gradient, want in zip(gradients, wanted, strict=True):
            if want is None or gradient is None:
                assert gradient is want
            else:
                torch.testing.assert_close(gradient, want * factor, rtol=1e-12, atol=0)


@on_ranks(3)
def test_a_rank_without_any_gradient_takes_part() -> None:
    (whole,), (param,) = params_of([Given((6,))]), params_of([Given((6,), LINES[3], ROWS)])
    if dist.get_rank() < 2:
        param.grad = None
    torch.testing.assert_close(clip_grad_norm_([param], 0.1), whole.grad[4:].norm(), rtol=1e-12, atol=0)


# --- lists that differ by rank --------------------------------------------------------------------


@on_ranks(2)
def test_a_kind_that_one_rank_lacks_is_refused_on_all_ranks() -> None:
    params = params_of([Given((5, 3), LINES[2], ROWS), PLAIN])
    text = refusal(clip_grad_norm_, params[: 1 + dist.get_rank()], 1.0)
    assert "different parameters: plain parameters or some on other meshes (not on rank 0). All" in text


def refused_lists(layout: Layout, chosen: list[list[int]], is_named: bool) -> tuple[str, bool]:
    """Each rank passes those of ``chosen``, by the coordinate along the last mesh dimension."""
    if is_named:
        params = list(model_on(layout, even_tower).parameters())
    else:
        params = params_of([Given((rows, 2), layout, ROWS) for rows in (1, 2, 3)])
    before = [full(param.grad) for param in params]
    own = chosen[layout.mesh().get_coordinate()[-1]]
    text = refusal(clip_grad_norm_, [params[index] for index in own], 1e-3)
    return text, all(torch.equal(full(p.grad), b) for p, b in zip(params, before, strict=True))


def test_lists_that_differ_by_rank_are_refused_on_all_ranks(world2: World) -> None:
    first = alike(world2.run(refused_lists, LINES[2], [[0, 1, 2], [2, 0]], True))
    assert_expected_inline(
        first[0],
        """ValueError: clip_grad_norm_: ranks have passed different parameters: inlet.bias (not on rank 1). All ranks get the same result, so they must pass the same parameters, such as model.parameters(); a parameter without .grad counts as zeros.""",
    )
    assert first[1]  # nothing was scaled
    for text, is_untouched in world2.run(refused_lists, LINES[2], [[0, 1], [0, 2]], False):
        assert is_untouched
        assert_expected_inline(
            text,
            """ValueError: clip_grad_norm_: ranks have passed different parameters: one of shape (2, 2) (not on rank 1), one of shape (3, 2) (not on rank 0). All ranks get the same result, so they must pass the same parameters, such as model.parameters(); a parameter without .grad counts as zeros.""",
        )


def test_replicas_hear_of_a_shard_that_differs(world4: World) -> None:
    """Every rank of both replicas: the ranks of each have an all-reduce of their own."""
    for text, is_untouched in world4.run(refused_lists, SQUARE, [[1, 2], [0, 1, 2]], True):
        assert is_untouched
        assert text.startswith(
            "ValueError: clip_grad_norm_: ranks have passed different parameters: inlet.weight"
        )


def compared_where_reading_waits(steps: list[list[list[str]]]) -> list[str]:
    """What ranks are told that pass ``steps[step][rank]``, if their gradients are on a device."""
    rank, pg = dist.get_rank(), LINES[2].mesh().get_group()
    told = []
    for step in steps:
        passed = PassedAlong("clip", pg, step[rank], is_on_host=False)
        numbers = torch.zeros(2, dtype=torch.float64)
        numbers[rank] = passed.number
        dist.all_reduce(numbers, group=pg)
        try:
            passed.compare(numbers)
            told.append("" if numbers.gt(0).all() else "not read")
        except ValueError as error:
            told.append(str(error))
    return told


def test_where_reading_waits_ranks_read_only_what_is_new_to_them(world2: World) -> None:
    same = [["a", "b"], ["b", "a"]]
    first, second = world2.run(
        compared_where_reading_waits, [same, same, [["a", "b"], ["a"]], [["c"], ["d"]]]
    )
    assert first[:3] == ["", "not read", "not read"]
    assert second[:2] == ["", "not read"]
    assert "different parameters: this rank 1 (a), rank 0 others." in second[2]
    assert first[3] == second[3]
    assert "different parameters: c (not on rank 1), d (not on rank 0)." in first[3]


def clipped_by_stage() -> Tensor:
    own = dist.get_rank() % 2
    stages = nn.ModuleList(nn.Linear(4, 4 + index) for index in range(2)).double()
    fully_shard(stages[own], mesh=TWO_D.mesh()["dp"])
    stages[own](torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    return clip_grad_norm_(stages[own], 0.1)


def test_lists_of_ranks_that_no_mesh_connects_may_differ(world4: World) -> None:
    norms = world4.run(clipped_by_stage)
    assert norms[:2] == norms[2:]
    assert norms[0] != norms[1]


# --- what comes back ------------------------------------------------------------------------------


def norms_in_float32(kinds: list[Any]) -> list[Tensor]:
    sharded = [Given((n, 7), LINES[3], ROWS, torch.float32) for n in (10, 3, 200, 1)]
    plain = Given((5,), None, (), torch.float32)
    return [clip_grad_norm_(params_of([*sharded, plain]), 0.1, kind) for kind in kinds]


def test_the_norm_has_the_same_bits_on_every_rank(world3: World) -> None:
    first, *others = world3.run(norms_in_float32, [0.5, 1, 2, 3.5, 40, INF])
    for other in others:
        assert [norm.view(torch.int32).item() for norm in other] == [
            norm.view(torch.int32).item() for norm in first
        ]


def norms_by_order(orders: list[list[int]]) -> tuple[list[float], list[Any]]:
    params = params_of(MIXED)
    with Wire() as wire:
        norm = clip_grad_norm_([params[index] for index in orders[dist.get_rank()]], 0.1)
    return norm.item(), wire.calls


def test_the_order_of_parameters_may_differ_by_rank(world4: World) -> None:
    straight = list(range(len(MIXED)))
    orders = [straight, straight[::-1], straight[3:] + straight[:3], straight[1::2] + straight[::2]]
    (norm, calls), *others = world4.run(norms_by_order, orders)
    assert norm == pytest.approx(clipped_given(MIXED, [2], is_sharded=False)["norm 2"].item(), rel=1e-12)
    for other_norm, other_calls in others:
        assert other_norm == pytest.approx(norm, rel=1e-15)
        assert other_calls == calls


@on_ranks(2)
def test_it_may_differ_where_equal_meshes_have_different_process_groups() -> None:
    """A collective on one rank's choice of group would meet none on the other's."""
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]  # type: ignore[arg-type]
    assert meshes[0] == meshes[1]
    model = nn.ModuleList(fully_shard(built(nn.Linear, 4, 3), mesh=mesh) for mesh in meshes)
    for each in model:
        each(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    params = list(model.parameters())
    want = torch.nn.utils.get_total_norm([full(param.grad) for param in params])
    norm = clip_grad_norm_(params[:: 1 - 2 * dist.get_rank()], 0.1)
    torch.testing.assert_close(norm, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("limit", [100.0, 1.5, 0.0, INF])
@on_ranks(2)
def test_only_what_is_above_the_limit_is_scaled(limit: float) -> None:
    params = params_of([Given((5, 3), LINES[2], ROWS), Given((2,))])
    before = [dtensor.plain(param.grad).clone() for param in params]
    norm = clip_grad_norm_(params, limit)
    assert norm > 1.5
    assert clip_grad_norm_(params, INF).item() == pytest.approx(min(norm.item(), limit), rel=1e-6)
    is_same = all(torch.equal(dtensor.plain(p.grad), b) for p, b in zip(params, before, strict=True))
    assert is_same is (limit >= 100.0)


# --- the wire -------------------------------------------------------------------------------------


class Wire(TorchDispatchMode):
    """Records each collective: its name, and how many numbers it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.calls.append((func._schema.name.split("::")[1], sum(t.numel() for t in tensors)))
        return func(*args, **(kwargs or {}))


PLAIN = Given((3,))
WIRES: dict[str, tuple[Any, list[int]]] = {
    # Numbers of each all-reduce: one for each kind of placement that it concerns and one more, in fours, of each rank.
    "sharded": ((LINES[4], uneven_tower), [16]),
    "hybrid": ((SQUARE, uneven_tower), [8]),
    "replicated": ((COPIES, uneven_tower), []),
    "hybrid_of_one_shard": ((TALL, uneven_tower), []),
    "mlps": ((TWO_D, Run(plan="mlps")), [8, 8]),  # biases of `down` are on both, but sharded over dp
    "all_on_both": ((TWO_D, Run(plan="everything")), [8, 8]),
    "plain_beside_sharded": ([PLAIN, Given((4,), LINES[4], ROWS), PLAIN], [16]),
    "plain_beside_replicated": ([PLAIN, Given((4,), COPIES, (Replicate(),))], [16]),
    "two_meshes": ([Given((4,), LINES[4], ROWS), Given((4,), SQUARE, (Shard(0),) * 2)], [16, 8, 8]),
}


@on_ranks(4)
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WIRES)
def test_there_is_one_small_all_reduce_for_each_dimension_that_matters(name: str) -> None:
    what, numels = WIRES[name]
    given = params_of(what) if isinstance(what, list) else model_on(*what)
    with Wire() as wire:
        clip_grad_norm_(given, 0.1)
    assert sorted(wire.calls) == sorted(("allreduce_", numel) for numel in numels)


# --- accuracy -------------------------------------------------------------------------------------


def norms_of(value: Tensor, kinds: list[Any]) -> list[float]:
    size = dist.get_world_size()
    param = nn.Parameter(torch.zeros_like(value))
    param = nn.Parameter(distribute_tensor(param.data, LINES[size].mesh(), ROWS, src_data_rank=None))
    param.grad = distribute_tensor(value, LINES[size].mesh(), ROWS, src_data_rank=None)
    return [clip_grad_norm_(param, INF, kind).item() for kind in kinds]


@on_ranks(2)
def test_gradients_of_low_precision_have_precise_norms() -> None:
    value = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = value.double().norm().item()
    param = nn.Parameter(torch.zeros_like(value))
    param.grad = value
    assert abs(nn.utils.clip_grad_norm_(param, INF).item() / exact - 1) > 1e-4  # torch's is bfloat16 itself
    assert norms_of(value, [2]) == pytest.approx([exact], rel=1e-6)


@on_ranks(1)
def test_many_numbers_in_float32_have_precise_norms() -> None:
    value = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0))
    exact = [torch.linalg.vector_norm(value.double(), kind).item() for kind in (1, 2)]
    assert norms_of(value, [1, 2]) == pytest.approx(exact, rel=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_powers_that_leave_the_range_of_numbers_do_no_harm(scale: float) -> None:
    value = torch.tensor([1.0, 2.0, 0.0, 3.0, 3.0]) * scale
    expected = [(sum(n**kind for n in (1, 2, 3, 3))) ** (1 / kind) * scale for kind in (3.5, 50, 500)]
    assert norms_of(value, [3.5, 50, 500]) == pytest.approx(expected, rel=1e-6)


# --- what is not finite ---------------------------------------------------------------------------


def infected(rank: int, names: list[str], value: float, **how: Any) -> tuple[str, bool]:
    model = model_on(LINES[2], even_tower)
    if dist.get_rank() == rank:
        for name in names:
            dtensor.local_tensor(model.get_parameter(name).grad)[0] = value
    before = [dtensor.plain(param.grad).clone().nan_to_num() for param in model.parameters()]
    norms: list[Tensor] = []
    text = outcome(lambda: norms.append(clip_grad_norm_(model, 1.0, **how)))
    after = [dtensor.plain(param.grad).nan_to_num() for param in model.parameters()]
    return repr(norms[0]) if norms else text, all(map(torch.equal, after, before))


BAD = ["inlet.bias", *(f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("norm", "up", "down"))]


def test_a_norm_that_is_not_finite_is_refused_on_all_ranks(world2: World) -> None:
    (clean, is_unchanged), (infectious, is_unchanged_too) = world2.run(
        infected, 1, BAD, math.nan, error_if_nonfinite=True
    )
    assert is_unchanged
    assert is_unchanged_too
    assert_expected_inline(
        clean,
        """RuntimeError: clip_grad_norm_: the norm of the gradients (norm_type=2.0) is nan; scaling by it would leave zeros and NaN. No gradient on this rank is infinite or NaN: other ranks name theirs, or the norm overflows. All ranks raise this, and gradients are as they were: skip the step, or pass error_if_nonfinite=False to scale all the same.""",
    )
    assert_expected_inline(
        infectious,
        """RuntimeError: clip_grad_norm_: the norm of the gradients (norm_type=2.0) is nan; scaling by it would leave zeros and NaN. On this rank it comes from inlet.bias, blocks.0.norm.weight, blocks.0.up.weight, blocks.0.down.weight and 3 more. All ranks raise this, and gradients are as they were: skip the step, or pass error_if_nonfinite=False to scale all the same.""",
    )


@pytest.mark.parametrize(
    ("kind", "value"), [(0.5, math.nan), (1, INF), (2, math.nan), (50, math.nan), (INF, math.nan)]
)
def test_what_is_not_finite_reaches_the_norm_of_all_ranks(world2: World, kind: float, value: float) -> None:
    """gloo's maximum keeps or loses a NaN by its place."""
    for rank in (0, 1):
        for norm, _ in world2.run(infected, rank, BAD[:1], value, norm_type=kind):
            assert norm == f"tensor({value}, dtype=torch.float64)"


@on_ranks(1)
def test_parameters_of_a_list_are_named_as_well_as_can_be() -> None:
    params = params_of([Given((4,), LINES[1], ROWS), PLAIN])
    params[1].grad[0] = INF
    text = refusal(clip_grad_norm_, params, 1.0, error_if_nonfinite=True)
    assert "On this rank it comes from parameter 1." in text
    model = model_on(LINES[1], even_tower)  # named by their shards
    dtensor.local_tensor(model.blocks[1].up.weight.grad)[0] = INF
    text = refusal(clip_grad_norm_, model.parameters(), 1.0, error_if_nonfinite=True)
    assert "On this rank it comes from blocks.1.up.weight." in text


# --- what is refused, and what is not ---------------------------------------------------------------


@on_ranks(2)
def test_a_gradient_off_the_mesh_of_its_parameter_is_refused() -> None:
    (param,) = params_of([Given((4, 2), LINES[2], ROWS)])
    (other,) = params_of([Given((4, 2), Layout((1, 2)), (Replicate(), Shard(0)))])
    for gradient, what in (
        (torch.zeros(4, 2, dtype=torch.float64), "a plain tensor"),
        (other.grad, "on DeviceMesh"),
    ):
        param.grad = gradient
        text = refusal(clip_grad_norm_, param, 1.0)
        assert text.startswith(f"RuntimeError: clip_grad_norm_: parameter 0: .grad is {what}")


@on_ranks(1)
def test_parameters_from_before_fully_shard_are_refused() -> None:
    model = even_tower()
    params = list(model.parameters())
    shard_tower(model, mesh=LINES[1].mesh())
    assert "inlet.weight: this is the" in refusal(clip_grad_norm_, params, 1.0)


PARAM = nn.Parameter(torch.zeros(2))
WRONG: list[tuple[tuple[Any, ...], str]] = [
    ((3, 1.0), "TypeError: clip_grad_norm_: expected a module, a parameter or an iterable of parameters"),
    (([PARAM, "x"], 1.0), "TypeError: clip_grad_norm_: at [1] of the iterable is 'x', a str"),
    (([PARAM], "1"), "TypeError: clip_grad_norm_: max_norm is '1', a str"),
    (([PARAM], True), "TypeError: clip_grad_norm_: max_norm is True"),
    (([PARAM], -1.0), "ValueError: clip_grad_norm_: max_norm is -1.0"),
    (([PARAM], torch.tensor(math.nan)), "ValueError: clip_grad_norm_: max_norm is nan"),
    (([PARAM], 1.0, 0), "ValueError: clip_grad_norm_: norm_type is 0"),
    (([PARAM], 1.0, math.nan), "ValueError: clip_grad_norm_: norm_type is nan"),
    (([PARAM], 1.0, "fro"), "ValueError: clip_grad_norm_: norm_type is 'fro'"),
    (([PARAM], 1.0, True), "ValueError: clip_grad_norm_: norm_type is True"),
    (([PARAM], 1.0, 2.0, False, 1), "TypeError: clip_grad_norm_: foreach is 1"),
]


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    for args, text in WRONG:
        assert refusal(clip_grad_norm_, *args).startswith(text)


def with_gradients(*values: float | None) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(1)) for _ in values]
    for param, value in zip(params, values, strict=True):
        param.grad = None if value is None else torch.tensor([value])
    return params


def test_whatever_holds_parameters_is_taken() -> None:
    """A tensor, iterables, those that can be read once, repeated parameters, ones without gradients."""
    a, b, lacks = with_gradients(3.0, 4.0, None)
    assert clip_grad_norm_(a, INF) == 3
    assert clip_grad_norm_([a, b, a, lacks, b], INF) == 5
    assert clip_grad_norm_((param for param in (a, b)), torch.tensor([2.5]), norm_type="2") == 5
    assert a.grad.item() == pytest.approx(1.5)
    assert b.grad.item() == pytest.approx(2.0)
    for nothing in ([], (), iter([]), [lacks], nn.Identity(), nn.Linear(1, 1).requires_grad_(False)):
        norm = clip_grad_norm_(nothing, 1.0, error_if_nonfinite=True)
        assert torch.equal(norm, torch.tensor(0.0))
        assert norm.dtype == torch.float32
    infinite = with_gradients(INF, 1.0)
    assert clip_grad_norm_(infinite, INF) == INF
    assert [param.grad.item() for param in infinite] == [INF, 1.0]


def embedded(is_sharded: bool, kind: Any) -> dict[str, Any]:
    embed = built(nn.Embedding, 9, 4, sparse=is_sharded)
    embed(torch.tensor([1, 5, 1, 1])).pow(2).sum().backward()
    (other,) = params_of([Given((5, 3), LINES[2], ROWS)], is_sharded)
    clip = clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
    norm = clip([embed.weight, other], 0.5, kind)
    gradient = embed.weight.grad
    assert gradient.is_sparse == is_sharded
    return {"norm": norm, "embed": gradient.to_dense(), "other": full(other.grad)}


@pytest.mark.parametrize("kind", [1, 2.0, INF])
def test_sparse_gradients_are_clipped_as_dense_ones(world2: World, kind: Any) -> None:
    assert_all_same(world2.run(embedded, True, kind), embedded(False, kind))
