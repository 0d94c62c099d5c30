"""Weights that travel in a form of their own: the protocol of tensor subclasses.

A subclass says what of its shard is gathered (`fsdp_pre_all_gather`) and makes the full weight out of what
came (`fsdp_post_all_gather`), into the same memory from the second time on. The three here are what
quantisation libraries have: bytes with a scale for each row, a float32 weight that travels in low precision,
and one that wants to know all about its surroundings.

Rows divide by the number of ranks, or do not; what arrives has the rows of the whole weight, no padding.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from comparing import alike
from harness import World
from models import WIDTH, random_batch, shard_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from refusals import assert_says
from scenario import Side, assert_same, same_as_plain
from tensor_subclasses import Journal, KnowsAll, RowScaled, Stack, TravelsLow, Wrapper, same_memory
from torch import Tensor, nn

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.comm import buffers


def stack(side: Side, kind: type[Wrapper], rows: int) -> nn.Module:
    torch.manual_seed(1)
    return Stack(kind, rows, side.is_sharded)


def plain_of(value: Any) -> Any:
    if hasattr(value, "to_local"):
        local = value.to_local()
        if isinstance(local, Wrapper):
            return local.values()
    return value


def note_all(side: Side, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if name.endswith("0.weight"):
            side.note_rows(name, plain_of(param).detach())
        else:
            side.note(name, param)


def train(side: Side, kind: type[Wrapper], rows: int, reshard: bool) -> None:
    Journal.entries.clear()
    model = stack(side, kind, rows)
    side.shard_tower(model, reshard_after_forward=reshard)
    train_steps(side, model)
    if side.is_sharded and kind is not KnowsAll:
        check_journal(side, rows)


def train_steps(side: Side, model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for microbatch in range(2):
            side.sync(model, microbatch == 1)
            loss = mean_of_squares(model, side.inputs(2 * step + microbatch))
            loss.backward()
            side.note_mean("loss", loss)
        side.note_gradients(model)
        optimizer.step()
        note_all(side, model)
    with torch.no_grad():
        side.note_rows("evaluation", model(side.inputs(9)))


def check_journal(side: Side, rows: int) -> None:
    pre, post = Journal.of("pre"), Journal.of("post")
    chunk = -(-rows // side.world)
    mine = max(0, min(chunk, rows - side.rank * chunk))
    assert pre
    assert post
    assert {(entry["size"], entry["ndim"]) for entry in pre} == {(side.world, 1)}
    assert {entry["rows"] for entry in pre} <= {mine, chunk}, "the shard comes as it is, or padded"
    assert all(set(entry["rows"]) == {rows} for entry in post), "what arrives has the rows of the whole"
    assert [entry["again"] for entry in post].count(False) == 2, "each weight is made once"


class UnflattensFromThree(TravelsLow):
    """As in torch's own tests of the protocol; torch calls it with four."""

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], size: Any, stride: Any) -> Any:  # type: ignore[override]
        return cls(*(tensors[name] for name in cls.inner))


@pytest.mark.parametrize(
    ("world", "rows", "reshard", "kind"),
    [
        (2, 5, True, RowScaled),
        (4, 8, False, RowScaled),
        (2, 5, False, TravelsLow),
        (4, 5, True, TravelsLow),
        (1, 8, True, KnowsAll),
        (2, 5, True, KnowsAll),
        (4, 5, True, UnflattensFromThree),
    ],
    indirect=["world"],
)
def test_weights_that_all_gather_themselves_are_trained(
    world: World, rows: int, reshard: bool, kind: type[Wrapper]
) -> None:
    assert_same(world, train, kind, rows, reshard)


@on_ranks(2)
@pytest.mark.parametrize("rows", [8, 5], ids=["even", "uneven"])
def test_the_long_protocol_is_told_size_module_and_policy(rows: int) -> None:
    Journal.entries.clear()
    torch.manual_seed(1)
    model: Any = Stack(KnowsAll, rows, True)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    shard_tower(model, mp_policy=policy)
    mean_of_squares(model, random_batch(0, 4).float()).backward()
    grad, chunk = model.blocks[0][0].weight.grad.to_local(), -(-rows // 2)
    before = Journal.of("pre")
    assert {entry["outer"] for entry in before} == {((rows, WIDTH), (WIDTH, 1))}
    assert {entry["module"] for entry in before} == {("Layer", "layer 0"), ("Layer", "layer 1")}
    assert {entry["policy"] for entry in before} == {(torch.float32, torch.float64)}
    assert {entry["dtype"] for entry in Journal.of("post")} == {torch.float32}
    assert grad.dtype == torch.float64
    assert grad.shape == ((chunk, rows - chunk)[dist.get_rank()], WIDTH)


@on_ranks(2)
@pytest.mark.parametrize("kind", [RowScaled, TravelsLow])
def test_what_was_all_gathered_for_a_special_weight_is_freed(kind: type[Wrapper]) -> None:
    """The all-gathered tensors inside of the full weights have memory in forward, and none after backward."""
    torch.manual_seed(1)
    model: Any = Stack(kind, 512, True)
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.extend(module.weight.parts)
        assert all(part.untyped_storage().nbytes() > 0 for part in module.weight.parts)

    for block in model.blocks:
        block[0].register_forward_pre_hook(look)
    shard_tower(model, reshard_after_forward=True)
    with mock.patch.object(buffers, "KEPT_ON_HOST_BYTES", 0):  # small buffers may be kept otherwise
        for step in range(2):
            mean_of_squares(model, random_batch(step, 4)).backward()
    assert seen
    assert all(part.untyped_storage().nbytes() == 0 for part in seen)


# --- a state dict, a copy and a change of dtype ---------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize(("kind", "rows"), [(RowScaled, 5), (TravelsLow, 8)])
def test_special_weights_go_through_a_state_dict(side: Side, kind: type[Wrapper], rows: int) -> None:
    model = side.shard_tower(stack(side, kind, rows))
    torch.manual_seed(2)
    other = side.shard_tower(Stack(kind, rows, side.is_sharded))
    other.load_state_dict(model.state_dict())
    note_all(side, other)
    with torch.no_grad():
        side.note_rows("output", other(side.inputs(0)))


# --- half a protocol ------------------------------------------------------------------------------


class OnlyPre(Wrapper):
    inner = ("_data",)

    def values(self) -> Tensor:  # type: ignore[override]
        return self._data

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data,), None


class OnlyPost(OnlyPre):
    fsdp_pre_all_gather = None  # type: ignore[assignment]

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None


def refusal_of(kind: type[Wrapper]) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    value = kind.of(torch.ones(4, 4)) if issubclass(kind, RowScaled) else kind(torch.ones(4, 4))
    model[1].weight = nn.Parameter(value, requires_grad=not issubclass(kind, RowScaled))
    before = dict(model.named_parameters())
    with pytest.raises((TypeError, ValueError)) as caught:
        fully_shard(model)
    assert type(model) is nn.Sequential
    assert all(param is before[name] for name, param in model.named_parameters())
    return str(caught.value)


# --- a protocol that comes late -------------------------------------------------------------------


class GetsItLater(TravelsLow):
    fsdp_pre_all_gather = fsdp_post_all_gather = None  # type: ignore[assignment]


@same_as_plain(1, 2, 4)
def test_a_class_may_get_its_protocol_until_the_first_forward(side: Side) -> None:
    with mock.patch.multiple(GetsItLater, fsdp_pre_all_gather=None, fsdp_post_all_gather=None):
        model = stack(side, GetsItLater, 5)
        side.shard_tower(model)
        if side.is_sharded:
            with pytest.raises(NotImplementedError, match="before the first forward") as caught:
                model(side.inputs(0))
            assert "blocks.0.0.weight holds a GetsItLater, a tensor subclass" in str(caught.value)
        GetsItLater.fsdp_pre_all_gather = TravelsLow.fsdp_pre_all_gather  # type: ignore[method-assign]
        GetsItLater.fsdp_post_all_gather = TravelsLow.fsdp_post_all_gather  # type: ignore[method-assign]
        train_steps(side, model)


class Refusing(RowScaled):
    """Some operations mean something else to a quantised class, or cannot be done."""

    refused: Any = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is cls.refused:
            raise AssertionError("blocks do not fit")
        return super().__torch_dispatch__(func, types, args, kwargs)


class QuantisesAnewWhenCloned(Refusing):
    refused = torch.ops.aten.clone.default


class CannotBeCut(Refusing):
    refused = torch.ops.aten.split.Tensor


class IsCutElsewhere(RowScaled):
    """NF4Tensor leaves out rows, or returns itself, where rows do not divide by the ranks."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor:
            return [args[0].detach()]
        return super().__torch_dispatch__(func, types, args, kwargs)


@on_ranks(2)
def test_shards_have_the_very_bytes_of_a_quantised_weight() -> None:
    """torchao's NF4Tensor quantises anew when it is cloned, with other blocks."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    whole = QuantisesAnewWhenCloned.of(torch.arange(1.0, 25.0).view(6, 4))
    model[0].weight = nn.Parameter(whole, requires_grad=False)
    fully_shard(model)
    local: Any = model[0].weight.to_local()
    rank = dist.get_rank()
    assert not same_memory(local._bytes, whole._bytes)
    assert torch.equal(local._bytes, whole._bytes[3 * rank : 3 * rank + 3])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OnlyPre, "fsdp_pre_all_gather"),
        (OnlyPost, "fsdp_pre_all_gather"),
        (CannotBeCut, "2 chunks along dim 0 of shape (4, 4): blocks do not fit"),
        (IsCutElsewhere, "2 chunks along dim 0 of shape (4, 4): it gave the shapes [(4, 4)]"),
    ],
)
def test_half_a_protocol_and_what_cannot_be_cut_are_refused_with_the_parameter(
    world2: World, kind: type[Wrapper], words: str
) -> None:
    assert_says(alike(world2.run(refusal_of, kind)), "1.weight", kind.__name__, words)


@on_ranks(2)
@pytest.mark.parametrize("gathered", [(), ([1, 2],)], ids=["nothing", "no_tensor"])
def test_what_cannot_be_all_gathered_is_an_error_with_the_parameter(gathered: Any) -> None:
    class Strange(TravelsLow):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return gathered, None

    torch.manual_seed(1)
    model: Any = Stack(Strange, 8, True)
    shard_tower(model)
    with pytest.raises((TypeError, ValueError)) as caught:
        model(random_batch(0, 4))
    assert_says(str(caught.value), "0.weight", "fsdp_pre_all_gather")
