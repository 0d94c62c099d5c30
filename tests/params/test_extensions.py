"""Weights that travel in a form of their own: the protocol of tensor subclasses.

A subclass says what of its shard is gathered (`fsdp_pre_all_gather`) and makes the full weight out of what
came (`fsdp_post_all_gather`), into the same memory from the second time on. The three here are what
quantisation libraries have: bytes with a scale for each row, a float32 weight that travels in low precision,
and one that wants to know all about its surroundings.

Rows divide by the number of ranks, or do not; what arrives has the rows of the whole weight, no padding.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness import World
from models import WIDTH, random_batch
from reference import mean_of_squares
from scenario import Side, assert_same
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.comm import buffers

any_world = pytest.mark.parametrize("world", [1, 2, 4], indirect=True)
any_rows = pytest.mark.parametrize(
    "rows", [8, 5], ids=["even", "uneven"]
)  # 5 rows leave the last of 4 ranks none
any_reshard = pytest.mark.parametrize("reshard", [True, False])

aten = torch.ops.aten

# What sharding, copying and loading a weight call; everything else sees the weight's values.
KEEPS_CLASS = {
    aten.detach.default,
    aten.clone.default,
    aten.alias.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.narrow.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
}


class Journal:
    """What the protocol's methods were called with, on this rank."""

    entries: list[dict[str, Any]] = []  # noqa: RUF012 (one a process, emptied by each test)

    @classmethod
    def note(cls, **entry: Any) -> None:
        cls.entries.append(entry)

    @classmethod
    def of(cls, what: str) -> list[dict[str, Any]]:
        return [entry for entry in cls.entries if entry["what"] == what]


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


class Wrapper(torch.Tensor):
    """A tensor with others inside. Subclasses name them in `inner` and say what the values are."""

    inner: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls: Any, *tensors: Tensor, dtype: torch.dtype = torch.float64) -> Any:
        first = tensors[0]
        self = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=dtype, device=first.device
        )
        for name, tensor in zip(cls.inner, tensors, strict=True):
            setattr(self, name, tensor)
        return self

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.inner)

    def values(self) -> Tensor:  # type: ignore[override]
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.inner), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Any:
        return cls(*(tensors[name] for name in cls.inner), dtype=dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KEEPS_CLASS and isinstance(args[0], cls):
            return args[0].keeping_class(func, args, kwargs)
        if func is aten.copy_.default:  # a plain tensor takes the values
            return func(args[0], args[1].values(), *args[2:], **kwargs)
        is_in_place = func._schema.name.endswith("_")
        args, kwargs = tree_map_only(Wrapper, lambda t: t.values(), (args, kwargs))
        out = func(*args, **kwargs)
        return NotImplemented if is_in_place and out is None else out

    def keeping_class(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
        outs = []
        for index, name in enumerate(self.inner):
            part = getattr(self, name)
            others = tree_map_only(Wrapper, lambda t, i=index: t.parts[i], args[1:])
            outs.append(func(part, *self.for_part(func, part, others), **kwargs))
        if func in (aten.copy_.default, aten.zero_.default, aten.fill_.Scalar):
            return self
        if isinstance(outs[0], (list, tuple)):
            return [type(self)(*parts, dtype=self.dtype) for parts in zip(*outs, strict=True)]
        return type(self)(*outs, dtype=self.dtype)

    def for_part(self, func: Any, part: Tensor, args: Any) -> Any:
        """The arguments, where parts have other columns than the whole."""
        width = part.shape[1]
        if func in (aten.view.default, aten.new_empty.default, aten.new_zeros.default):
            return ([args[0][0], width], *args[1:])
        if func is aten.as_strided.default:
            return (
                [args[0][0], width],
                [width, 1],
                *(offset // self.shape[1] * width for offset in args[2:3]),
            )
        return args


class RowScaled(Wrapper):
    """Bytes, and a scale for each row: frozen. Its short protocol gathers both."""

    inner = ("_bytes", "_scale")

    @classmethod
    def of(cls, weight: Tensor) -> "RowScaled":
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def values(self) -> Tensor:  # type: ignore[override]
        return self._bytes.to(self._scale.dtype) * self._scale

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        Journal.note(what="pre", size=mesh.size(), ndim=mesh.ndim, rows=len(self._bytes))
        return (self._bytes, self._scale), {"rows here": len(self._bytes)}

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        codes, scale = all_gather_outputs
        assert metadata == {"rows here": len(self._bytes)}, "metadata comes back as it was given"
        assert codes.dtype is torch.int8
        assert scale.dtype is self._scale.dtype
        Journal.note(what="post", rows=(len(codes), len(scale)), again=out is not None)
        if out is not None:
            assert isinstance(out, RowScaled)
            assert same_memory(out._bytes, codes), "gathered into other memory than the first time"
            assert same_memory(out._scale, scale)
            return None
        return RowScaled(codes, scale), (codes, scale)


class Rounded(Wrapper):
    """The full weight of the next two: low precision, used as if it were the original dtype."""

    inner = ("_low",)

    def values(self) -> Tensor:  # type: ignore[override]
        return self._low.to(self.dtype)


class TravelsLow(Wrapper):
    """Trained in full precision, gathered in a lower one, as float8 weights are."""

    inner = ("_master",)
    low = torch.bfloat16

    def values(self) -> Tensor:  # type: ignore[override]
        return self._master

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # Optimizers update in place: the result of theirs is the weight itself.
        return args[0] if func._schema.name.endswith("_") and isinstance(args[0], cls) else result

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        Journal.note(what="pre", size=mesh.size(), ndim=mesh.ndim, rows=len(self._master))
        return (self._master.to(self.low),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (low,) = all_gather_outputs
        assert low.dtype is self.low
        assert metadata is None
        Journal.note(what="post", rows=(len(low),), again=out is not None, dtype=param_dtype)
        if out is not None:
            assert isinstance(out, Rounded)
            assert same_memory(out._low, low), "gathered into other memory than the first time"
            return None
        return Rounded(low, dtype=self.dtype), (low,)


class KnowsAll(TravelsLow):
    """The long protocol: the whole weight's size, the module, the policy."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        Journal.note(
            what="pre",
            size=mesh.size(),
            ndim=mesh.ndim,
            rows=len(self._master),
            outer=(tuple(outer_size), tuple(outer_stride)),
            module=(type(module).__name__, module.tag),
            policy=(mp_policy.param_dtype, mp_policy.reduce_dtype),
        )
        low = self.low if mp_policy.param_dtype is None else mp_policy.param_dtype
        return (self._master.to(low),), (tuple(outer_size), low)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (low,) = all_gather_outputs
        size, dtype = metadata
        assert low.shape == size
        assert low.dtype is dtype
        Journal.note(what="post", rows=(len(low),), again=out is not None, dtype=param_dtype)
        if out is not None:
            assert same_memory(out._low if isinstance(out, Rounded) else out, low)
            return None
        if dtype is param_dtype:  # computed with as it is
            return low, (low,)
        return Rounded(low, dtype=self.dtype), (low,)


class _RoundAsTravelling(torch.autograd.Function):
    """Plain PyTorch's version of what TravelsLow does: the gradient passes as if nothing were rounded."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.to(torch.bfloat16).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class Layer(nn.Module):
    """A linear layer whose weight is one of the subclasses, or on the plain side what stands for it."""

    def __init__(self, kind: type[Wrapper], rows: int, is_sharded: bool, tag: str) -> None:
        super().__init__()
        dense = torch.randn(rows, WIDTH, dtype=torch.float64) / 3
        self.tag = tag
        self.rounds = kind is not RowScaled and not is_sharded
        if kind is RowScaled:
            quantised = RowScaled.of(dense)
            weight = quantised if is_sharded else quantised.values()
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.weight = nn.Parameter(kind(dense) if is_sharded else dense)
        self.bias = nn.Parameter(torch.zeros(rows, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        weight = _RoundAsTravelling.apply(self.weight) if self.rounds else self.weight
        return F.linear(x, weight, self.bias)


class Stack(nn.Module):
    """Blocks with a special weight each, beside plain parameters."""

    def __init__(self, kind: type[Wrapper], rows: int, is_sharded: bool) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 1).double()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Layer(kind, rows, is_sharded, f"layer {i}"), nn.Tanh(), nn.Linear(rows, WIDTH).double()
            )
            for i in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outlet(x)


def stack(side: Side, kind: type[Wrapper], rows: int) -> nn.Module:
    torch.manual_seed(1)
    return Stack(kind, rows, side.is_sharded)


def plain_of(value: Any) -> Any:
    """The values of a special weight, sharded or not."""
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
    if side.is_sharded and kind is not KnowsAll:
        check_journal(side, rows)


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


@any_reshard
@any_rows
@any_world
def test_frozen_bytes_and_scales_are_gathered_together(world: World, rows: int, reshard: bool) -> None:
    assert_same(world, train, RowScaled, rows, reshard)


@any_reshard
@any_rows
@any_world
def test_a_weight_that_travels_in_low_precision_is_trained_in_full(
    world: World, rows: int, reshard: bool
) -> None:
    assert_same(world, train, TravelsLow, rows, reshard)


@any_reshard
@any_rows
@any_world
def test_a_weight_that_knows_its_surroundings_is_trained(world: World, rows: int, reshard: bool) -> None:
    assert_same(world, train, KnowsAll, rows, reshard)


def what_it_knows(rows: int) -> tuple[list[Any], list[Any], str]:
    Journal.entries.clear()
    torch.manual_seed(1)
    model: Any = Stack(KnowsAll, rows, True)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    mean_of_squares(model, random_batch(0, 4).float()).backward()
    grad = model.blocks[0][0].weight.grad.to_local()
    facts = [(e["outer"], e["module"], e["policy"]) for e in Journal.of("pre")]
    return facts, [e["dtype"] for e in Journal.of("post")], f"{grad.dtype} {tuple(grad.shape)}"


@any_rows
def test_the_long_protocol_is_told_size_module_and_policy(world2: World, rows: int) -> None:
    for rank, (facts, dtypes, grad) in enumerate(world2.run(what_it_knows, rows)):
        policy = (torch.float32, torch.float64)
        assert {fact[0] for fact in facts} == {((rows, WIDTH), (WIDTH, 1))}
        assert {fact[1] for fact in facts} == {("Layer", "layer 0"), ("Layer", "layer 1")}
        assert {fact[2] for fact in facts} == {policy}
        assert set(dtypes) == {torch.float32}
        chunk = -(-rows // 2)
        assert grad == f"torch.float64 ({(chunk, rows - chunk)[rank]}, {WIDTH})"


def memory_between_passes(kind: type[Wrapper], rows: int) -> tuple[list[int], int]:
    """Bytes of the gathered tensors inside of the full weights, in forward and after backward."""
    Journal.entries.clear()
    torch.manual_seed(1)
    model: Any = Stack(kind, rows, True)
    seen: list[Tensor] = []
    sizes: list[int] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.extend(module.weight.parts)
        sizes.extend(part.untyped_storage().nbytes() for part in module.weight.parts)

    for block in model.blocks:
        block[0].register_forward_pre_hook(look)
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    for step in range(2):
        mean_of_squares(model, random_batch(step, 4)).backward()
    return sizes, sum(part.untyped_storage().nbytes() for part in seen)


@pytest.mark.parametrize("kind", [RowScaled, TravelsLow])
def test_what_was_gathered_for_a_special_weight_is_freed(world2: World, kind: type[Wrapper]) -> None:
    with_memory = world2.run(memory_between_passes_as_if_large, kind, 512)
    for sizes, left in with_memory:
        assert all(size > 0 for size in sizes)
        assert left == 0


def memory_between_passes_as_if_large(kind: type[Wrapper], rows: int) -> tuple[list[int], int]:
    with mock.patch.object(buffers, "KEPT_ON_HOST_BYTES", 0):  # small buffers may be kept otherwise
        return memory_between_passes(kind, rows)


# --- a state dict, a copy and a change of dtype ---------------------------------------------------


def loaded(side: Side, kind: type[Wrapper], rows: int) -> None:
    """A sharded state dict of special weights goes into another model."""
    model = side.shard_tower(stack(side, kind, rows))
    torch.manual_seed(2)
    other = side.shard_tower(Stack(kind, rows, side.is_sharded))
    other.load_state_dict(model.state_dict())
    note_all(side, other)
    with torch.no_grad():
        side.note_rows("output", other(side.inputs(0)))


@any_rows
@pytest.mark.parametrize("kind", [RowScaled, TravelsLow])
def test_special_weights_go_through_a_state_dict(world2: World, kind: type[Wrapper], rows: int) -> None:
    assert_same(world2, loaded, kind, rows)


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


class WrongArguments(OnlyPost):
    def fsdp_pre_all_gather(self, mesh: Any, something: Any) -> Any:  # type: ignore[override]
        return (self._data,), None


def refusal_of(kind: type[Wrapper]) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(kind(torch.ones(4, 4)))
    before = dict(model.named_parameters())
    with pytest.raises((TypeError, ValueError)) as caught:
        fully_shard(model)
    assert type(model) is nn.Sequential
    assert all(param is before[name] for name, param in model.named_parameters())
    return str(caught.value)


@pytest.mark.parametrize("kind", [OnlyPre, OnlyPost, WrongArguments])
def test_half_a_protocol_is_refused_with_the_parameter(world2: World, kind: type[Wrapper]) -> None:
    for text in world2.run(refusal_of, kind):
        for word in ("1.weight", kind.__name__, "fsdp_pre_all_gather"):
            assert word in text


def gather_nothing(self: Any, mesh: Any) -> Any:
    return (), None


def gather_no_tensor(self: Any, mesh: Any) -> Any:
    return ([1, 2],), None


def gather_no_tuple(self: Any, mesh: Any) -> Any:
    return self._master


def error_of_gathering(gather: Callable[..., Any]) -> str:
    torch.manual_seed(1)
    model: Any = Stack(type("Strange", (TravelsLow,), {"fsdp_pre_all_gather": gather}), 8, True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises((TypeError, ValueError)) as caught:
        model(random_batch(0, 4))
    return str(caught.value)


@pytest.mark.parametrize("gather", [gather_nothing, gather_no_tensor, gather_no_tuple])
def test_what_cannot_be_gathered_is_an_error_with_the_parameter(world2: World, gather: Any) -> None:
    for text in world2.run(error_of_gathering, gather):
        for word in ("0.weight", "fsdp_pre_all_gather"):
            assert word in text
