"""Weights of tensor subclasses that say themselves what of them is all-gathered, and what that makes.

What quantisation libraries have: bytes with a scale for each row, a float32 weight that travels in low precision,
and one that wants to know all about its surroundings.
"""

from typing import Any

import torch
import torch.nn.functional as F
from models import WIDTH
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

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
        returns_itself = func._schema.name.endswith("_") and func._schema.returns  # _foreach_add_ does not
        args, kwargs = tree_map_only(Wrapper, lambda t: t.values(), (args, kwargs))
        out = func(*args, **kwargs)
        return NotImplemented if returns_itself and out is None else out

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
    """Bytes, and a scale for each row: frozen. Its short protocol unshards both."""

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
            assert same_memory(out._bytes, codes), "unsharded into other memory than the first time"
            assert same_memory(out._scale, scale)
            return None
        return RowScaled(codes, scale), (codes, scale)


class Rounded(Wrapper):
    """The full weight of the next two: low precision, used as if it were the original dtype."""

    inner = ("_low",)

    def values(self) -> Tensor:  # type: ignore[override]
        return self._low.to(self.dtype)


class TravelsLow(Wrapper):
    """Trained in full precision, unsharded in a lower one, as float8 weights are."""

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
            assert same_memory(out._low, low), "unsharded into other memory than the first time"
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
