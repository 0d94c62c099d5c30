"""What a caller writes for a world, an amount of memory, a precision, a batch: read and checked."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.dry_run.step import Call, fakes_of
from shardwise.policies import MixedPrecisionPolicy
from shardwise.setup.validation import check_precision
from shardwise.strategies.meshes import STRATEGIES
from shardwise.torch_compat import pytree

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
}


def memory_in_bytes(memory: int | str | None) -> int | None:
    """An amount of memory: a number of bytes, or a text such as "80GB" (80 * 10^9) or "80GiB" (80 * 2^30)."""
    if memory is None:
        return None
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        raise TypeError(
            f'estimate: memory is a {type(memory).__name__}; pass a number of bytes or a text such as "80GB".'
        )
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(memory))
    if found is None or found[2].lower() not in _UNITS or float(found[1]) <= 0:
        raise ValueError(
            f"estimate: memory '{memory}' is no amount of memory. Pass a number above 0 and a unit: 80GB is "
            "80 * 10^9 bytes, 80GiB is 80 * 2^30."
        )
    return int(float(found[1]) * _UNITS[found[2].lower()])


def world_sizes(world: int | tuple[int, int] | str) -> tuple[int, ...]:
    """A number of ranks, or hosts and ranks on each: 64, (8, 8) or "8x8"."""
    sizes: Any = world
    if isinstance(world, str):
        parts = world.lower().split("x")
        sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)
    elif isinstance(world, int) and not isinstance(world, bool):
        sizes = (world,)
    is_well = isinstance(sizes, tuple) and len(sizes) in (1, 2)
    if not is_well or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(
            f"estimate: world is {world!r}; pass a number of ranks, 64, or hosts and ranks on each, (8, 8) "
            'or "8x8", all above 0.'
        )
    return sizes


def strategies_for(strategy: Any, sizes: tuple[int, ...]) -> list[str]:
    """The strategies to estimate: the one that is named, or all that the world has a mesh for."""
    if strategy is None:
        return [name for name, each in STRATEGIES.items() if len(each.roles) == 1 or len(sizes) == 2]
    names = [strategy] if isinstance(strategy, str) else list(strategy)
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(
                f"estimate: there is no strategy '{name}'. Pass one of {', '.join(STRATEGIES)}, or "
                "None for all."
            )
        if len(STRATEGIES[name].roles) > len(sizes):
            raise ValueError(
                f"estimate: strategy '{name}' shards over the ranks of a host and replicates over hosts, and "
                f"world={sizes[0]} does not say how many there are. Pass both, world=(hosts, "
                f"ranks_per_host), such as ({max(1, sizes[0] // 8)}, {min(8, sizes[0])})."
            )
    return names


def mesh_shape(strategy: str, sizes: tuple[int, ...]) -> dict[str, int]:
    """The sizes of the mesh dimensions of a strategy, by their names."""
    roles = STRATEGIES[strategy].roles
    if len(roles) == 2:
        return dict(zip(roles, sizes, strict=True))
    return {roles[0]: torch.Size(sizes).numel()}


def precision_of(mp_policy: Any) -> Any:
    """A policy, or one by the name of the dtype to compute in: "bf16" reduces in float32."""
    if not isinstance(mp_policy, str):
        check_precision(mp_policy)
        return mp_policy
    if mp_policy.lower() not in ("bf16", "fp16", "fp32"):
        raise ValueError(
            f"estimate: there is no precision '{mp_policy}'. Pass bf16, fp16, fp32 (what the model has), or "
            "a MixedPrecisionPolicy."
        )
    if mp_policy.lower() == "fp32":
        return None
    return MixedPrecisionPolicy(param_dtype=_DTYPES[mp_policy.lower()], reduce_dtype=torch.float32)


# --- the batch ------------------------------------------------------------------------------------


def call_on(batch: Any, loss: Callable[[Any], Tensor] | None) -> Callable[[], Call] | None:
    """How to run a model's forward on fake tensors like ``batch``; None for None."""
    if batch is None:
        return None
    sample = _from_text(batch) if isinstance(batch, str) else batch

    def make() -> Call:
        fakes = fakes_of(sample)

        def call(model: nn.Module) -> Tensor:
            try:
                if isinstance(fakes, Mapping):
                    output = model(**fakes)
                else:
                    output = model(*(fakes if isinstance(fakes, (tuple, list)) else (fakes,)))
                return loss_of(output) if loss is None else loss(output)
            except Exception as error:
                raise ValueError(
                    f"estimate: the {type(model).__mro__[1].__name__} does not take the batch of "
                    f"{_describe(sample)}. Its forward, run on tensors without contents, raised "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                ) from error

        return call

    return make


def loss_of(output: Any) -> Tensor:
    """What is called ``loss`` in an output, a scalar, or the sum of all that has a gradient."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    losses = [tensor.sum() for tensor in tensors if tensor.requires_grad]
    if not losses:
        raise ValueError("none of its outputs has a gradient")
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _from_text(text: str) -> tuple[Tensor, ...]:
    """Tensors from their shapes: "8x4096" is one of int64; "8x4096:bf16,8" are two."""
    made = []
    for each in text.split(","):
        shape, _, dtype = each.strip().partition(":")
        sizes = shape.lower().split("x")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes) or (dtype and dtype not in _DTYPES):
            raise ValueError(
                f"estimate: batch '{text}' is not understood. Pass the shape of each input, separated by "
                f"commas, such as 8x4096 (int64) or 8x3x224x224:bf16; dtypes are {', '.join(_DTYPES)}."
            )
        made.append(torch.empty([int(s) for s in sizes], dtype=_DTYPES[dtype or "int64"], device="meta"))
    return tuple(made)


def _describe(sample: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors) or "nothing"
