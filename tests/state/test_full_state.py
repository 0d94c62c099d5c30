"""Full state out of a sharded model and into one: what a model that is not sharded has, bit for bit."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arrangements import WAYS, Way, built
from checkpointing import KeepsExtra
from common import peak_bytes
from comparing import assert_equal, same
from expecttest import assert_expected_inline
from harness import World
from meshed import device_mesh, refusal
from on_ranks import on_ranks
from reference import mean_of_squares
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Shard

import shardwise
from shardwise import full_state_dict, fully_shard, load_full_state_dict
from shardwise.comm import full_tensors
from shardwise.state import iter_full_parameters

over_all_ways = pytest.mark.parametrize("way", WAYS, ids=str)


def plain_state(way: Way, seed: int = 0) -> dict[str, Tensor]:
    return built(way.build, seed).state_dict()


# --- out ------------------------------------------------------------------------------------------


@pytest.mark.sample(9)
@over_all_ways
@on_ranks()
def test_the_full_state_is_that_of_the_plain_model(way: Way) -> None:
    model, want = way.model(), plain_state(way)
    assert_equal(full_state_dict(model), want if dist.get_rank() == 0 else {})
    assert_equal(full_state_dict(model, rank0_only=False), want)
    parameters = dict(iter_full_parameters(model, bucket_bytes=300))
    plain = {name: param.detach() for name, param in built(way.build).named_parameters()}
    assert list(parameters) == list(plain)
    assert_equal(parameters, plain)


@pytest.mark.parametrize(
    "way", [Way(3, "columns", "odd"), Way(4, "tp", "even"), Way(3, build="tied"), Way(2, "zero2")], ids=str
)
@on_ranks()
def test_a_model_loads_the_full_state_itself(way: Way) -> None:
    """All of it, and then a part of another one."""
    model, want, other = way.model(seed=1), plain_state(way), plain_state(way, seed=2)
    model.load_state_dict(want)
    assert_equal(full_state_dict(model, rank0_only=False), want)
    part = {name: value for name, value in other.items() if name.startswith("blocks.1.")}
    model.load_state_dict(part, strict=False)
    assert_equal(full_state_dict(model, rank0_only=False), want | part)


@on_ranks(2)
def test_a_full_state_is_a_copy() -> None:
    model = Way(2, build="tied").model()
    state = full_state_dict(model, rank0_only=False)
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert_equal(state, before)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            checkpoint_wrapper(nn.Linear(4, 4)),
            torch.compile(nn.Linear(4, 3), backend="eager"),
        )

    def get_extra_state(self) -> Any:
        return {"version": 7}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


@on_ranks(2)
def test_wrappers_leave_no_trace_in_names_and_extra_state_comes_along() -> None:
    model, other = Wrapped(), Wrapped()
    fully_shard(model.one)
    fully_shard(model)
    fully_shard(other)
    state = full_state_dict(model, rank0_only=False)
    load_full_state_dict(other, state)
    tensors = ["one.weight", "one.bias", "two.weight", "two.bias"]
    assert sorted(state) == sorted([*tensors, "_extra_state"])
    assert [name for name, _ in iter_full_parameters(other)] == tensors
    assert other.version == 7
    assert_equal(full_state_dict(other, rank0_only=False), state)


@on_ranks(2)
def test_parameters_are_chosen_by_name_and_converted() -> None:
    model = Way(2, build="tied").model()
    pairs = iter_full_parameters(model, dtype=torch.bfloat16, names=["head.weight", "blocks.0.bias"])
    found = [(name, value.dtype, value.shape) for name, value in pairs]
    assert found == [("blocks.0.bias", torch.bfloat16, (6,)), ("head.weight", torch.bfloat16, (11, 6))]


@on_ranks(2)
def test_what_cannot_be_taken_out_is_refused_at_the_call() -> None:
    model = Way(2, build="tied").model()
    on_meta = Way(2, build="tied").model(device="meta")
    with shardwise.unsharded(model):
        inside = refusal(full_state_dict, model)
    assert_expected_inline(
        "\n".join(
            [
                refusal(iter_full_parameters, model, names=["nope", "head.weight"]),
                refusal(iter_full_parameters, model, bucket_bytes=0),
                refusal(iter_full_parameters, model, dtype=torch.int8),
                refusal(full_state_dict, on_meta),
                refusal(full_state_dict, {}),
                inside,
            ]
        ),
        """\
ValueError: iter_full_parameters: the model has no parameter named nope.
ValueError: iter_full_parameters: bucket_bytes is 0; pass a number of bytes above 0.
ValueError: iter_full_parameters: dtype is torch.int8; pass a floating-point dtype, or None.
RuntimeError: full_state_dict: 8 parameters are still on the meta device: embed.weight, norm.weight, norm.bias, blocks.0.weight, blocks.0.bias, blocks.1.weight, blocks.1.bias, head.weight. Nothing has given them values. Call shardwise.materialize(model), or load a checkpoint, first.
TypeError: full_state_dict: model is a dict; pass an nn.Module.
RuntimeError: Tied: full_state_dict is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first.""",
    )


# --- in -------------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[dict[str, Tensor]], tuple[Any, int | None]]] = {
    "a dict on rank 0": lambda state: (state if dist.get_rank() == 0 else None, 0),
    "a dict on the last rank": lambda state: (
        (state if dist.get_rank() == dist.get_world_size() - 1 else None),
        dist.get_world_size() - 1,
    ),
    "an iterator on rank 0": lambda state: (iter(state.items()) if dist.get_rank() == 0 else None, 0),
    "a dict on every rank": lambda state: (state, None),
    "an iterator on every rank": lambda state: (iter(state.items()), None),
}


def assert_loads(way: Way, source: str, bucket_bytes: int, device: str = "cpu") -> None:
    model = way.model(seed=1, device=device)
    if device == "meta":
        for module in model.modules():
            if "passing" in module._buffers:  # which no state has
                module._buffers["passing"] = torch.ones(3)
    given, src_rank = SOURCES[source](plain_state(way))
    shardwise.state.full_state.BUCKET_BYTES = bucket_bytes
    try:
        report = load_full_state_dict(model, given, src_rank=src_rank)
    finally:
        shardwise.state.full_state.BUCKET_BYTES = full_tensors.BUCKET_BYTES
    assert report == shardwise.state.LoadReport()
    assert_equal(full_state_dict(model, rank0_only=False), plain_state(way))


@pytest.mark.sample(9)
@over_all_ways
@on_ranks()
def test_any_way_loads_what_one_rank_has(way: Way) -> None:
    assert_loads(way, "a dict on rank 0", 200)
    assert_loads(way, "a dict on every rank", 200, "meta")


@pytest.mark.parametrize(
    ("way", "source"),
    [
        (Way(4, "hybrid", "odd"), "a dict on the last rank"),
        (Way(4, "tp"), "an iterator on rank 0"),
        (Way(3, build="tied"), "an iterator on every rank"),
    ],
    ids=str,
)
@on_ranks()
def test_it_is_loaded_from_wherever_it_is(way: Way, source: str) -> None:
    assert_loads(way, source, 64 << 20)


@pytest.mark.parametrize("way", [Way(2, "zero2"), Way(4, "hybrid")], ids=str)
@on_ranks()
def test_the_next_forward_uses_what_was_loaded(way: Way) -> None:
    """Weights are loaded between the steps; kept and prefetched ones must not be old ones."""
    model, losses = way.model(), []
    x = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for seed in (1, 2):
        loss = mean_of_squares(model, x)
        loss.backward()
        losses.append(loss.detach())
        load_full_state_dict(model, built(way.build, seed).state_dict() if dist.get_rank() == 0 else None)
    with torch.no_grad():
        losses.append(mean_of_squares(model, x))
        want = [mean_of_squares(built(way.build, seed), x) for seed in (0, 1, 2)]
    torch.testing.assert_close(losses, want, rtol=0, atol=1e-10)


# --- what does not fit ----------------------------------------------------------------------------


def broken_iterator(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from itertools.islice(state.items(), 2)
    raise OSError("the network is gone")


@on_ranks(2)
def test_what_does_not_fit_is_refused_by_name_on_all_ranks() -> None:
    way = Way(2, build="tied")
    model, good = way.model(), plain_state(way, seed=1)
    tokens = torch.tensor([1, 2, 3])
    before = full_state_dict(model, rank0_only=False)
    bad: dict[str, Any] = {
        "other names": {"encoder.weight": torch.ones(3)},
        "too many": good | {"extra": torch.ones(1)},
        "other shapes": good | {"blocks.0.weight": torch.ones(5, 6), "scale": torch.ones(2)},
        "another dtype": {name: value.float() for name, value in good.items()},
        "different ties": good | {"head.weight": good["embed.weight"] + 1},
        "no tensor": good | {"scale": 2.0},
        "not a state": 7,
    }
    told = {}
    for what, source in bad.items():
        told[what] = refusal(load_full_state_dict, model, source if dist.get_rank() == 0 else None)
        assert same(full_state_dict(model, rank0_only=False), before), what
    model(tokens)
    assert "rank 5 does not hold this model" in refusal(load_full_state_dict, model, good, src_rank=5)
    failing = broken_iterator(good) if dist.get_rank() == 0 else None
    told["a reader that fails"] = refusal(load_full_state_dict, model, failing)
    told["forward"] = refusal(model, tokens)
    load_full_state_dict(model, good if dist.get_rank() == 0 else None)
    model(tokens)
    assert_expected_inline(
        "\n".join(f"{what}: {text}" for what, text in told.items()),
        """\
other names: RuntimeError: load_full_state_dict: unexpected in the source: encoder.weight (pass strict=False to pass over them); missing in the source: scale, embed.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked, blocks.0.weight and 4 more (pass strict=False to keep what the model has).
too many: RuntimeError: load_full_state_dict: unexpected in the source: extra (pass strict=False to pass over them).
other shapes: RuntimeError: load_full_state_dict: scale has shape (2,) in the source and (1,) in the model; blocks.0.weight has shape (5, 6) in the source and (6, 6) in the model.
another dtype: RuntimeError: load_full_state_dict: dtypes differ: scale is torch.float32 in the source and torch.float64 in the model, embed.weight is torch.float32 in the source and torch.float64 in the model, norm.weight is torch.float32 in the source and torch.float64 in the model, norm.bias is torch.float32 in the source and torch.float64 in the model, norm.running_mean is torch.float32 in the source and torch.float64 in the model, norm.running_var is torch.float32 in the source and torch.float64 in the model, norm.num_batches_tracked is torch.float32 in the source and torch.int64 in the model, blocks.0.weight is torch.float32 in the source and torch.float64 in the model and 4 more (pass convert_dtype=True to convert floating-point values).
different ties: RuntimeError: rank 0: load_full_state_dict: embed.weight and head.weight are tied in the model, but differ in the source (untie them, or load into a model without the tie and copy the one that you want).
no tensor: RuntimeError: load_full_state_dict: scale is a tensor on one side only.
not a state: RuntimeError: load_full_state_dict: source is of type int on the rank it is read from; pass a dict of full tensors, an iterable of (name, tensor), or the path of safetensors files.
a reader that fails: RuntimeError: OSError: the network is gone
forward: RuntimeError: Tied: the model is only partly loaded, because an earlier load failed (OSError: the network is gone). Load a complete checkpoint before the next forward.""",
    )


@on_ranks(2)
def test_tied_names_have_one_value() -> None:
    """However they come; a model on meta is still on meta after the refusal, where all is known before."""
    way = Way(2, build="tied")
    good = plain_state(way, seed=1)
    bad = good | {"head.weight": good["embed.weight"] + 1}
    on_meta = way.model(device="meta")
    on_meta._buffers["passing"] = torch.ones(3)
    told = []
    for source, src_rank in [(bad if dist.get_rank() == 0 else None, 0), (bad, None)]:
        told.append(refusal(load_full_state_dict, on_meta, source, src_rank=src_rank))
        assert all(param.is_meta for param in on_meta.parameters())
    pairs = iter(bad.items()) if dist.get_rank() == 0 else None
    told.append(refusal(load_full_state_dict, way.model(), pairs))
    assert all("embed.weight and head.weight are tied in the model" in text for text in told)


@on_ranks(2)
def test_only_floating_point_values_are_converted() -> None:
    way = Way(2, build="odd")
    state = plain_state(way)
    state["blocks.0.counts"] = state["blocks.0.counts"].to(torch.int16)
    told = refusal(load_full_state_dict, way.model(), state, src_rank=None, convert_dtype=True)
    assert "blocks.0.counts is torch.int16 in the source and torch.int64 in the model" in told


class Unreadable(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise OSError("the disk is gone")


@on_ranks(2)
def test_what_one_rank_does_wrong_is_told_by_all() -> None:
    way = Way(2)
    model, good = way.model(), plain_state(way)
    is_first = dist.get_rank() == 0
    no_values = Way(2, "none").model(device="meta").state_dict()

    def told(first: Any, other: Any = None, src_rank: int | None = 0) -> str:
        return refusal(load_full_state_dict, model, first if is_first else other, src_rank=src_rank)

    mine = [
        told("nowhere"),
        told(good, dict(list(good.items())[1:]), src_rank=None),
        told({1: torch.ones(1)}),
        told(Unreadable(good)),
        told(good, src_rank=None),
        told(no_values),
        told((good, {})),
        told(model.state_dict()),
    ]
    theirs: list[Any] = [None, None]
    dist.all_gather_object(theirs, [text.partition(": ")[2] for text in mine])
    assert theirs[0] == theirs[1]
    assert "nowhere does not exist" in mine[0]
    assert "inlet.weight" in mine[1]
    assert "the disk is gone" in mine[3]
    assert "inlet.weight is on the meta device in the source" in mine[5]
    assert "not (name, tensor)" in mine[6]
    assert "DTensor" in mine[7]
    assert "ranks disagree on src_rank: rank 0 has 0, rank 1 has 1" in told(good, good, dist.get_rank())
    assert load_full_state_dict(model, good if is_first else 17) == shardwise.state.LoadReport()


@pytest.mark.parametrize("src_rank", [0, None])
@on_ranks(2)
def test_extra_state_may_be_a_tensor_of_any_length(src_rank: int | None) -> None:
    """As modules of Transformer Engine have it."""
    model, source = fully_shard(KeepsExtra(torch.arange(2))), KeepsExtra(torch.arange(5)).state_dict()
    given = source if src_rank is None or dist.get_rank() == 0 else None
    load_full_state_dict(model, given, src_rank=src_rank)
    assert len(model.state) == 5


@on_ranks(2)
def test_a_lenient_load_reports_what_it_passed_over() -> None:
    model = Way(2, build="tied").model()
    before = full_state_dict(model, rank0_only=False)
    state = {"embed.weight": torch.zeros(11, 6), "other": torch.ones(2)}
    source = state if dist.get_rank() == 0 else None
    report = load_full_state_dict(model, source, strict=False, convert_dtype=True)
    after = full_state_dict(model, rank0_only=False)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["embed.weight", "head.weight"]
    assert report.unexpected == ("other",)
    assert report.converted == ("embed.weight",)
    assert "head.weight" not in report.missing  # it is the embedding
    assert "norm.running_mean" in report.missing
    assert len(report.missing) == 10


@on_ranks(2)
def test_nothing_is_left_without_values() -> None:
    way = Way(2, build="tied")
    lenient = refusal(load_full_state_dict, way.model(device="meta"), {}, src_rank=None, strict=False)
    lost = refusal(load_full_state_dict, way.model(device="meta"), plain_state(way), src_rank=None)
    assert_expected_inline(
        "\n".join([lenient, lost]),
        """\
RuntimeError: load_full_state_dict: missing in the source, and without values in the model: scale, embed.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked, blocks.0.weight and 4 more (call shardwise.materialize(model) first, for initial values).
RuntimeError: load_full_state_dict: passing is on the meta device, without values, and will not be loaded (no state dict contains buffers with persistent=False). Call shardwise.materialize(model) first.""",
    )


@on_ranks(2)
def test_a_backward_after_a_load_is_refused_as_in_plain_pytorch() -> None:
    """The weights are large enough to go straight into the shards, which nothing but we can count."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    state = {name: value + 1 for name, value in model.state_dict().items()}
    for layer in (*model, model):
        fully_shard(layer)
    loss = model(torch.ones(2, 256)).sum()
    load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    expected = "2.weight, 2.bias: changed in place between the forward that used it and this backward"
    assert expected in refusal(loss.backward)


# --- memory ---------------------------------------------------------------------------------------

WIDTH, DEPTH = 256, 8
LAYER = WIDTH * WIDTH * 4


def deep(shape: tuple[int, ...], dim: int = 0) -> nn.Module:
    mesh = device_mesh(shape, tuple(f"memory {i}" for i in range(len(shape))))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    for layer in model:
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    return fully_shard(model, mesh=mesh)


def peaks(shape: tuple[int, ...], dim: int = 0) -> dict[str, float]:
    """In units of a layer's full weight."""
    model, bucket = deep(shape, dim), 2 * LAYER
    state = full_state_dict(model, rank0_only=False)
    source = state if dist.get_rank() == 0 else None

    def walk() -> None:
        pairs = iter_full_parameters(model, bucket_bytes=bucket)
        while next(pairs, None) is not None:  # a loop variable would hold on to the last one
            pass

    shardwise.state.full_state.BUCKET_BYTES = full_tensors.BUCKET_BYTES = bucket
    try:
        return {
            "iterating": peak_bytes(walk) / LAYER,
            "out": peak_bytes(lambda: full_state_dict(model)) / LAYER,
            "in": peak_bytes(lambda: load_full_state_dict(model, source)) / LAYER,
            "rows": peak_bytes(lambda: load_full_state_dict(model, state, src_rank=None)) / LAYER,
        }
    finally:
        shardwise.state.full_state.BUCKET_BYTES = full_tensors.BUCKET_BYTES = 64 << 20


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("shape", "dim"), [((4,), 0), ((2, 2), 0), ((4,), 1)], ids=["sharded", "hybrid", "columns"]
)
def test_memory_is_one_bucket(world4: World, shape: tuple[int, ...], dim: int) -> None:
    first, *others = world4.run(peaks, shape, dim)
    for peak in (first, *others):
        assert 1 <= peak["iterating"] <= 2.1  # the bucket is two layers
        assert peak["rows"] < 0.1
        # Along one axis, rows go straight to where they belong.
        assert peak["in"] < 0.1 if (shape, dim) == ((4,), 0) else 1 <= peak["in"] <= 2.1
    assert DEPTH <= first["out"] <= DEPTH + 2.6  # what is returned, a bucket, and what is sent of it
    for peak in others:
        assert peak["out"] < 1


@pytest.mark.parametrize("src_rank", [0, None])
@on_ranks(2)
def test_a_source_with_two_values_for_one_name_is_refused(src_rank: int | None) -> None:
    model = fully_shard(nn.Linear(2, 1))
    twice = {"weight": torch.ones(1, 2), "bias": torch.ones(1), "_orig_mod.weight": torch.zeros(1, 2)}
    given = twice if src_rank is None or dist.get_rank() == 0 else None
    text = refusal(load_full_state_dict, model, given, src_rank=src_rank)
    assert "has 'weight' and '_orig_mod.weight', which are both weight without the prefixes" in text
