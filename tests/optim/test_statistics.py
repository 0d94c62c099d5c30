"""Statistics of whole tensors, compared with what plain PyTorch finds for the full tensors in one process."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from comparing import alike, assert_as_plain
from expecttest import assert_expected_inline
from failure_models import Tied
from harness import World
from meshed import Layout, layout_inputs, refusal
from models import built, even_tower, shard_tower, uneven_tower
from on_ranks import on_ranks
from reference import full, mean_of_squares
from tensor_parallel import Run, loss_of
from test_clipping import (
    COPIES,
    INF,
    KINDS,
    LINES,
    MIXED,
    ROWS,
    SQUARE,
    THREE_D,
    TP_FIRST,
    TWO_D,
    UNEVEN,
    Everything,
    Given,
    Wire,
    model_on,
    params_of,
    tower,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import CPUOffloadPolicy, clip_grad_norm_, fully_shard, global_norm, materialize, statistics

Found = dict[str, dict[str, Any]]
EDGES = [-INF, -0.3, -0.1, 0.0, 0.1, 0.3]


def plainly(parts: Mapping[str, list[Tensor]], edges: list[float] | None = None) -> Found:
    found = {}
    for name, tensors in parts.items():
        values = torch.cat([tensor.double().flatten() for tensor in tensors])
        counts = None if edges is None else tuple(numpy.histogram(values.numpy(), edges)[0].tolist())
        found[name] = {
            "numel": len(values),
            "mean": values.mean().item(),
            "std": values.std().item() if len(values) > 1 else math.nan,
            "min": values.min().item() if len(values) else math.nan,
            "max": values.max().item() if len(values) else math.nan,
            "norm": values.norm().item(),
            "num_nonfinite": int((~values.isfinite()).sum()),
            "histogram": counts,
        }
    return found


def plainly_of_model(model: nn.Module, of: str, by: str) -> Found:
    def value(param: Tensor) -> Tensor:
        if of == "parameters":
            return param.detach()
        return torch.zeros_like(param) if param.grad is None else param.grad

    if by == "parameter":
        return plainly({name: [value(param)] for name, param in model.named_parameters()}, EDGES)
    inside = {name: list(module.parameters()) for name, module in model.named_modules()}
    return plainly({name: [*map(value, params)] for name, params in inside.items() if params}, EDGES)


def found(*args: Any, **options: Any) -> Found:
    return {name: asdict(each) for name, each in statistics(*args, **options).items()}


def assert_found(ranks: Any, expected: Found, rel: float = 1e-11) -> None:
    """The same on all ranks, bit for bit (NaN is not equal to itself), and what plain PyTorch finds."""
    first, *others = map(repr, ranks)
    assert others == [first] * len(others)
    assert list(ranks[0]) == list(expected)
    for name, want in expected.items():
        got = ranks[0][name]
        assert got.keys() == want.keys()
        for what, value in want.items():
            is_exact = what in ("numel", "num_nonfinite", "histogram")
            assert got[what] == (value if is_exact else pytest.approx(value, rel, 1e-13, True)), (name, what)


# --- models ---------------------------------------------------------------------------------------

ABOUT = [(of, by) for of in ("parameters", "gradients") for by in ("parameter", "module")]


def found_in_model(*args: Any, **options: Any) -> Found:
    model = model_on(*args, **options)
    return {
        f"{of} {by} {name}": each
        for of, by in ABOUT
        for name, each in found(model, of=of, by=by, histogram=EDGES).items()
    }


def expected_in_model(build: Any) -> Found:
    model = model_on(None, build)
    return {
        f"{of} {by} {name}": each
        for of, by in ABOUT
        for name, each in plainly_of_model(model, of, by).items()
    }


@pytest.mark.parametrize(
    ("layout", "build"),
    [
        (LINES[1], uneven_tower),
        (LINES[4], uneven_tower),
        (SQUARE, Tied),
        (COPIES, even_tower),
        (TWO_D, Everything),
        (THREE_D, Run(plan="everything", sizes=UNEVEN)),
        (TP_FIRST, Run(plan="sequences", sizes=UNEVEN)),
    ],
    ids=lambda value: str(value) if isinstance(value, (Layout, Run)) else None,
)
def test_statistics_are_those_of_the_plain_model(
    layout: Layout, build: Any, request: pytest.FixtureRequest
) -> None:
    world = request.getfixturevalue(f"world{layout.size}")
    assert_found(world.run(found_in_model, layout, build), expected_in_model(build), rel=1e-9)


def test_shards_in_host_memory_are_measured(world2: World) -> None:
    offload = CPUOffloadPolicy(pin_memory=False)
    ranks = world2.run(found_in_model, LINES[2], uneven_tower, offload_policy=offload)
    assert_found(ranks, expected_in_model(uneven_tower))


@on_ranks(2)
def test_the_norm_of_the_model_is_that_of_clipping() -> None:
    model = model_on(LINES[2], uneven_tower)
    by_module = statistics(model, of="gradients", by="module")
    assert by_module[""].norm == pytest.approx(clip_grad_norm_(model, INF).item(), rel=1e-14)
    assert by_module[""].rms == pytest.approx(by_module[""].norm / by_module[""].numel ** 0.5)


def test_modules_may_be_limited_in_depth() -> None:
    model = even_tower()
    every = list(statistics(model, by="module"))
    for depth in (0, 1, 2, 9):
        wanted = [name for name in every if not name or name.count(".") < depth]
        assert list(statistics(model, by="module", depth=depth)) == wanted
    assert list(statistics(model, by="module", depth=1)) == ["", "inlet", "blocks", "outlet"]


# --- tensors --------------------------------------------------------------------------------------


def values_of(givens: list[Given], is_sharded: bool = True) -> dict[str, Tensor]:
    """The random gradients of test_clipping, as tensors of their own."""
    return {f"{index}.x": param.grad for index, param in enumerate(params_of(givens, is_sharded))}


def found_in_given(givens: list[Given], **options: Any) -> Found:
    return found(values_of(givens), **options)


LOW = [Given((40, 5), LINES[4], ROWS, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
SMALL = [Given((rows, 2), LINES[4], ROWS) for rows in (0, 1, 2, 3, 5)]


@pytest.mark.parametrize("givens", [MIXED, LOW, SMALL], ids=["meshes", "dtypes", "empty_shards"])
def test_tensors_of_all_kinds_go_together(world4: World, givens: list[Given]) -> None:
    """On any meshes, in any dtype, with empty shards; a tensor without elements has no mean."""
    plain = {name: [value] for name, value in values_of(givens, is_sharded=False).items()}
    assert_found(world4.run(found_in_given, givens, histogram=EDGES), plainly(plain, EDGES))
    together = {
        "": [each for (each,) in plain.values()],
        **{name[:-2]: value for name, value in plain.items()},
    }
    assert_found(world4.run(found_in_given, givens, by="module"), plainly(together))


@on_ranks(2)
def test_the_order_of_tensors_may_differ_by_rank() -> None:
    values = values_of([Given((rows, 3), LINES[2], ROWS) for rows in (4, 5, 6)])
    plain = {name: [full(value)] for name, value in values.items()}
    step = 1 - 2 * dist.get_rank()
    assert_found([found(dict(list(values.items())[::step]))], dict(list(plainly(plain).items())[::step]))


@on_ranks(2)
def test_sums_that_are_not_summed_yet_are_measured_as_the_whole() -> None:
    values = values_of([Given((5, 3), LINES[2], (Replicate(),), of_gradient=(Partial(),))])
    assert values["0.x"].placements == (Partial(),)
    assert_found([found(values)], plainly({"0.x": [full(values["0.x"])]}))


def test_large_tensors_are_measured_piece_by_piece() -> None:
    value = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).mul(1e-3).add(1e3)
    assert value.numel() > 2**17
    assert_found([found({"x": value, "t": value.mT, "i": value.int()})],
                 plainly({"x": [value], "t": [value], "i": [value.int()]}))  # fmt: skip


@on_ranks(3)
def test_a_deviation_far_below_the_mean_is_not_lost() -> None:
    """The squares of these numbers agree in all digits of float64."""
    value = torch.arange(12, dtype=torch.float64).reshape(6, 2) + 1e9
    sharded = distribute_tensor(value, LINES[3].mesh(), ROWS, src_data_rank=None)
    assert statistics({"x": sharded})["x"].std == pytest.approx(value.std().item(), rel=1e-12)


BAD = [math.nan, INF, -INF]


@pytest.mark.parametrize("bad", [BAD, BAD[1:2], BAD[2:], BAD[1:]], ids=str)
@on_ranks(2)
def test_what_is_not_finite_is_counted_and_not_hidden(bad: list[float]) -> None:
    value = torch.arange(8, dtype=torch.float64)
    value[: len(bad)] = torch.tensor(bad)
    expected = plainly({"x": [value]})
    finite = value[~value.isnan()]
    expected["x"]["histogram"] = tuple(numpy.histogram(finite.numpy(), EDGES)[0].tolist())
    assert expected["x"]["num_nonfinite"] == len(bad)
    sharded = distribute_tensor(value, LINES[2].mesh(), ROWS, src_data_rank=None)
    assert_found([found({"x": sharded}, histogram=EDGES)], expected)


@pytest.mark.parametrize("edges", [[0, 1, 2], (-INF, 0, INF), torch.tensor([0.0, 3.0])], ids=str)
def test_histograms_are_those_of_numpy(edges: Any) -> None:
    value = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 2.5, 3.0])
    expected = tuple(numpy.histogram(value.numpy(), edges)[0].tolist())
    assert statistics({"x": value}, histogram=edges)["x"].histogram == expected


def test_sparse_gradients_count_their_zeros() -> None:
    embed = built(nn.Embedding, 9, 4, sparse=True)
    embed(torch.tensor([1, 5, 1, 1])).pow(2).sum().backward()
    dense = embed.weight.grad.to_dense()
    assert_found([found(embed, of="gradients")], plainly({"weight": [dense]}))


# --- what a rank lacks ----------------------------------------------------------------------------


@on_ranks(2)
def test_missing_gradients_count_as_zeros() -> None:
    """All lack the first; rank 0 the second, rank 1 the third, which is plain, and all the fourth, frozen."""
    givens = [
        Given((5, 3), LINES[2], ROWS),
        Given((5, 3), LINES[2], ROWS),
        Given((4,)),
        Given((3,), LINES[2], ROWS),
    ]
    params = params_of(givens)
    for index in (0, 3, 1 + dist.get_rank()):
        params[index].grad = None
    params[3].requires_grad_(False)
    _, second, third = (param.grad for param in params_of([Given((5, 3))] * 2 + [Given((4,))]))
    second[:3] = 0
    expected = plainly({"0": [torch.zeros(5, 3)], "1": [second], "2": [third]}, EDGES)
    tensors = {f"{index}": param for index, param in enumerate(params)}
    assert_found([found(tensors, of="gradients", histogram=EDGES)], expected)


@on_ranks(4)
def test_where_tensors_differ_by_rank_those_of_the_largest_norm_count() -> None:
    rank = dist.get_rank()
    (param,) = params_of([Given((6,), LINES[4], ROWS)])
    own = torch.tensor([1.0, -2.0]) * (1, 3, 0, 2)[rank]
    here_only = torch.zeros(2 if rank == 2 else 0)
    tensors = {"shared": param.grad, "own": own, "here": here_only}
    expected = {"shared": [full(param.grad)], "own": [torch.tensor([3.0, -6.0])], "here": [torch.zeros(2)]}
    assert_found([found(tensors)], plainly(expected))


def stages() -> nn.ModuleList:
    return built(lambda: nn.ModuleList(nn.Linear(4, 4 + index) for index in range(2)))


def found_in_stages(by: str, same_names: bool) -> Any:
    mesh = TWO_D.mesh()
    own = mesh.get_local_rank("tp")
    stage = fully_shard(stages()[own], mesh=mesh["dp"])
    stage(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    names = {f"{'' if same_names else own}.{name}": param for name, param in stage.named_parameters()}
    group = mesh.get_group("tp")
    if same_names:
        return refusal(statistics, names, group=group)
    return found(names, of="gradients", by=by, group=group)


def test_stages_of_a_pipeline_are_one_model(world4: World) -> None:
    model = stages()
    for stage in model:
        stage(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    for by in ("parameter", "module"):
        expected = plainly_of_model(model, "gradients", by)
        for each in expected.values():
            each["histogram"] = None
        assert_found(world4.run(found_in_stages, by, False), expected)
    assert_expected_inline(
        alike(world4.run(found_in_stages, "module", True)),
        """ValueError: statistics: several ranks of group have a tensor named .weight, .bias. Each of them must hold different parameters, as pipeline stages do: pass mappings whose names begin with the stage.""",
    )


# --- the wire -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "build", "count"),
    [(LINES[4], uneven_tower, 1), (SQUARE, Tied, 1), (COPIES, Tied, 0), (TWO_D, Run(plan="everything"), 2)],
    ids=["sharded", "hybrid", "replicated", "two_dimensions"],
)
@on_ranks(4)
def test_one_all_reduce_goes_over_each_set_of_ranks_that_shares_tensors(
    layout: Layout, build: Any, count: int
) -> None:
    model = model_on(layout, build)
    for of, by in ABOUT:
        with Wire() as wire:
            statistics(model, of=of, by=by)
        assert wire.calls == [("allreduce_", layout.shape[-1] * (2**12 + 1))] * count


@on_ranks(2)
def test_many_tensors_travel_in_a_second_one() -> None:
    tensors = values_of([Given((3,), LINES[2], ROWS) for _ in range(600)])
    plain = {name: [full(tensor)] for name, tensor in tensors.items()}
    with Wire() as wire:
        together = found(tensors)
    assert_found([together], plainly(plain))
    assert [name for name, _ in wire.calls] == ["allreduce_"] * 2
    assert wire.calls[1][1] == 2 * (600 * 7 - 2**12)


# --- the norm of tensors --------------------------------------------------------------------------


def global_norms(givens: list[Given], is_sharded: bool = True) -> list[float]:
    tensors = values_of(givens, is_sharded).values()
    norm = global_norm if is_sharded else nn.utils.get_total_norm
    return [float(norm(list(tensors), kind)) for kind in KINDS]


PENDING = Given((5, 3), LINES[2], (Replicate(),), of_gradient=(Partial(),))


@pytest.mark.parametrize("givens", [MIXED, [PENDING, Given((3,), LINES[2], ROWS)]], ids=["mixed", "partial"])
def test_the_global_norm_is_that_of_torch(givens: list[Given], request: pytest.FixtureRequest) -> None:
    world = request.getfixturevalue("world4" if givens is MIXED else "world2")
    assert alike(world.run(global_norms, givens)) == pytest.approx(global_norms(givens, False), rel=1e-12)


@on_ranks(2)
def test_the_global_norm_takes_parameters_differences_and_one_tensor() -> None:
    model = tower(LINES[2], uneven_tower)
    before = [param.detach().clone() for param in model.parameters()]
    assert global_norm(p - b for p, b in zip(model.parameters(), before, strict=True)) == 0
    assert global_norm(before[0]) == pytest.approx(full(before[0]).norm().item())
    assert global_norm([before[0], before[0]]) == global_norm(before[0])
    norm = global_norm(param.bfloat16() for param in model.parameters())
    assert (type(norm), norm.dtype, norm.shape) == (Tensor, torch.float32, ())
    assert global_norm([]) == 0


# --- what is refused ------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_that_pass_different_things_are_told() -> None:
    tensors = values_of([Given((rows, 2), LINES[2], ROWS) for rows in range(1, 41)])
    given = dict(list(tensors.items())[: 40 - 5 * dist.get_rank()])
    edges = [0, 1] if dist.get_rank() else None
    told = [refusal(statistics, given), refusal(statistics, tensors, histogram=edges)]
    own = {"all": tensors["0.x"], f"of {dist.get_rank()}": torch.ones(2)}
    told += [refusal(statistics, own), refusal(global_norm, given.values())]
    assert_expected_inline(
        "\n".join(told),
        """\
ValueError: statistics: ranks have passed different parameters: 35.x (not on rank 1), 36.x (not on rank 1), 37.x (not on rank 1), 38.x (not on rank 1) and 1 more. All ranks get the same result, so they must pass the same parameters, such as model.parameters(); a parameter without .grad counts as zeros.
ValueError: statistics: ranks have passed different parameters: of='parameters', histogram=None (not on rank 1), of='parameters', histogram=[0.0, 1.0] (not on rank 0). All ranks get the same result, so they must pass the same parameters, such as model.parameters(); a parameter without .grad counts as zeros.
ValueError: statistics: ranks have passed different parameters: of 0 (not on rank 1), of 1 (not on rank 0). All ranks get the same result, so they must pass the same parameters, such as model.parameters(); a parameter without .grad counts as zeros.
ValueError: global_norm: ranks have passed different parameters: one of shape (36, 2) (not on rank 1), one of shape (37, 2) (not on rank 1), one of shape (38, 2) (not on rank 1), one of shape (39, 2) (not on rank 1) and 1 more. All ranks get the same result, so they must pass the same parameters, such as model.parameters(); a parameter without .grad counts as zeros.""",
    )


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@on_ranks(4)
def test_gradients_that_wait_to_be_reduced_are_refused(setter: str) -> None:
    model = tower(SQUARE, even_tower)
    getattr(model, setter)(False)
    mean_of_squares(model, layout_inputs(SQUARE, 0)).backward()
    gradients = [param.grad for param in model.parameters()]
    for text in (
        refusal(statistics, model, of="gradients"),
        refusal(global_norm, gradients),
        refusal(clip_grad_norm_, model, 1.0),
        refusal(clip_grad_norm_, model.parameters(), 1.0),
    ):
        assert text.startswith("RuntimeError: inlet.weight: gradients of backward passes without sync")
    text = refusal(clip_grad_norm_, model.outlet.bias, 1.0)  # of which half of the ranks have no element
    assert text.startswith("RuntimeError: outlet.bias: gradients of backward passes without sync")
    model.zero_grad(set_to_none=False)  # nothing waits any more
    assert clip_grad_norm_(model, 1.0) == 0


@on_ranks(1)
def test_what_has_no_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = even_tower()
    shard_tower(model, mesh=LINES[1].mesh())
    for of in ("parameters", "gradients"):
        text = refusal(statistics, model, of=of)
        assert text.startswith("ValueError: statistics: inlet.weight is on the meta device")
    text = refusal(global_norm, model.parameters())
    assert text.startswith("ValueError: global_norm: inlet.weight is on the meta device")
    materialize(model)
    assert statistics(model, by="module")[""].num_nonfinite == 0


LINEAR = nn.Linear(1, 1)
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ([LINEAR.weight], {}, "TypeError: statistics: model_or_tensors is a list; pass a module or a mapping"),
    ({1: LINEAR.weight}, {}, "TypeError: statistics: a name in model_or_tensors is 1, an int; pass a str."),
    ({"w": 1}, {}, "TypeError: statistics: model_or_tensors['w'] is 1, an int; pass a tensor."),
    ({"w": torch.ones(2).cfloat()}, {}, "ValueError: statistics: w is complex"),
    (LINEAR, {"of": "grads"}, "ValueError: statistics: of is 'grads', a str; pass 'parameters' or 'gradients'."),
    (LINEAR, {"by": "modules"}, "ValueError: statistics: by is 'modules', a str; pass 'parameter' or 'module'."),
    (LINEAR, {"depth": 1}, "ValueError: statistics: depth is 1"),
    (LINEAR, {"depth": -1, "by": "module"}, "ValueError: statistics: depth is -1"),
    (LINEAR, {"depth": "1", "by": "module"}, "TypeError: statistics: depth is '1'"),
    (LINEAR, {"histogram": 10}, "ValueError: statistics: histogram is 10, an int; pass the edges"),
    (LINEAR, {"histogram": [1, 0]}, "ValueError: statistics: histogram is a list; pass the edges"),
    (LINEAR, {"group": 3}, "TypeError: statistics: group is 3, an int; pass a process group, or None."),
]  # fmt: skip
NO_TENSORS = (
    "TypeError: global_norm: expected a tensor or an iterable of tensors, such as model.parameters(), got "
)


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    for given, options, text in WRONG:
        assert refusal(statistics, given, **options).startswith(text)
    assert refusal(global_norm, LINEAR) == NO_TENSORS + "a Linear."
    assert refusal(global_norm, 3) == NO_TENSORS + "3, an int."
    told = refusal(global_norm, [LINEAR.weight.grad])
    assert told.startswith("TypeError: global_norm: at [0] of the iterable is None, where a tensor is")
    assert refusal(global_norm, [], "fro").startswith("ValueError: global_norm: norm_type is 'fro'")


def test_nothing_has_no_statistics() -> None:
    assert statistics(nn.Identity()) == statistics({}) == {}
    assert statistics(nn.Linear(1, 1).requires_grad_(False), of="gradients", by="module") == {}


# --- what DTensors say ------------------------------------------------------------------------------


@on_ranks(2)
def test_figures_of_a_sharded_parameter_are_those_of_a_part() -> None:
    """As the table of docs/guides/look-inside.md has it."""
    value = torch.arange(24, dtype=torch.float64).reshape(6, 4)
    param = nn.Parameter(distribute_tensor(value, LINES[2].mesh(), ROWS, src_data_rank=None))
    part = value.chunk(2)[dist.get_rank()]
    assert param.numel() == 24
    for name in ("norm", "sum", "max", "mean"):
        with torch.no_grad():
            figure = getattr(param, name)()
        assert figure.item() == pytest.approx(getattr(part, name)().item())
        assert figure.full_tensor().item() == pytest.approx(getattr(value, name)().item())
    uneven = nn.Parameter(distribute_tensor(value[:5], LINES[2].mesh(), ROWS, src_data_rank=None))
    for tensor, name in ((param, "std"), (uneven, "std"), (uneven, "mean")):
        with CommDebugMode() as sent, torch.no_grad():
            figure = getattr(tensor, name)()
        assert figure.item() == pytest.approx(getattr(value[: len(tensor)], name)().item())
        assert list(map(str, sent.get_comm_counts())) == ["c10d_functional.all_gather_into_tensor"]


# --- penalties ------------------------------------------------------------------------------------


def penalised(layout: Layout | None, build: Any, is_sum: bool) -> dict[str, Any]:
    """The gradients of a loss with a penalty, as docs/guides/look-inside.md writes it, after two backwards."""
    model = model_on(layout, build)
    width, loss = (build.sizes[0], loss_of) if isinstance(build, Run) else (7, mean_of_squares)
    if is_sum:
        local = [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]
        penalty = sum(param.square().sum() for param in local)
    else:
        norms = [param.norm() for param in model.parameters()]
        penalty = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    (loss(model, layout_inputs(layout, 1, width)) + 0.1 * penalty).backward()
    return {name: full(param.grad) for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "build", "is_sum"),
    [
        (TWO_D, Run(plan="everything", sizes=UNEVEN), True),
        (SQUARE, uneven_tower, False),
    ],
    ids=["sum", "norm"],
)
def test_a_penalty_on_sharded_parameters_counts_once(
    layout: Layout, build: Any, is_sum: bool, request: pytest.FixtureRequest
) -> None:
    assert_as_plain(request.getfixturevalue(f"world{layout.size}"), penalised, layout, build, is_sum)
