"""What a caller may choose about a group: values only, no behaviour of their own.

Policies are read by attribute, never by class, so that torch's own policy objects serve as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.tensor import Shard

__all__ = [
    "CPUOffloadPolicy",
    "CommPolicy",
    "DataParallelMeshDims",
    "LowPrecisionReduction",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "QuantizedGather",
    "QuantizedReduction",
    "ShardPlacementResult",
]

ParamDtypeOverride = Callable[[nn.Parameter], torch.dtype | None]
FullPrecision = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module, nn.Parameter], bool]


class MixedPrecisionPolicyLike(Protocol):
    """What serves as a policy of mixed precision: this library's or torch's."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def output_dtype(self) -> torch.dtype | None: ...
    @property
    def cast_forward_inputs(self) -> bool: ...


class CPUOffloadPolicyLike(Protocol):
    """What serves as a policy of CPU offload: this library's or torch's."""

    @property
    def pin_memory(self) -> bool: ...


class DataParallelMeshDimsLike(Protocol):
    """What names the data-parallel dimensions of a mesh: this library's class or torch's."""

    @property
    def shard(self) -> str | tuple[str, ...] | None: ...
    @property
    def replicate(self) -> str | tuple[str, ...] | None: ...


class ShardPlacementResultLike(Protocol):
    """What ``shard_placement_fn`` may return beside a ``Shard``: this library's class or torch's."""

    @property
    def placement(self) -> Shard | None: ...
    @property
    def mesh_info(self) -> Any: ...


ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResultLike | None]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation, reduction and outputs. The first four fields are those of torch's policy.

    Shards, and with them the optimizer, keep the parameters' own dtype.

    Args:
        param_dtype: dtype of the full parameters, hence of the gather and of the computation. None: the
            parameters' own.
        reduce_dtype: dtype in which gradients are summed over ranks. None: that of the full gradients.
        output_dtype: floating-point outputs of forward are cast to it. None: left as they are.
        cast_forward_inputs: cast floating-point inputs of forward to ``param_dtype``.
        param_dtype_override_fn: a function of a parameter that returns the parameter's own dtype to compute
            with it in that, and None or ``param_dtype`` otherwise. Asked once a parameter, by
            ``fully_shard``; it must answer alike on all ranks. Gradients are reduced as without it, inputs
            are cast as without it.
        accumulate_dtype: dtype in which full gradients add up, within a backward and over microbatches
            without synchronisation. None: ``reduce_dtype``, or the dtype of the full parameter. Costs
            full gradients of this dtype while they wait.
        buffer_dtype: ``fully_shard`` casts floating-point buffers to it. None: left as they are.
        keep_low_precision_grads: leave ``.grad`` of the shards in ``reduce_dtype`` instead of casting it
            to the parameter's dtype. The optimizer must be able to mix the two.
        full_precision: what stays in its own dtype inside the same group: a module class or a tuple of
            them, or a predicate ``(name, module, parameter) -> bool``, ``module`` the one that the
            parameter is registered in. Modules of a class given have their floating-point inputs cast to
            their parameters' dtype and their outputs back; with a predicate, the module's own code has
            to handle the mixture.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: ParamDtypeOverride | None = field(default=None, kw_only=True)
    accumulate_dtype: torch.dtype | None = field(default=None, kw_only=True)
    buffer_dtype: torch.dtype | None = field(default=None, kw_only=True)
    keep_low_precision_grads: bool = field(default=False, kw_only=True)
    full_precision: FullPrecision | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards live between uses. This base class means: on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, their gradients and so the optimizer's state and work in host memory.

    One copy a group brings the shards to the device before a gather, and one takes the reduced gradients
    back; both run beside the computation.

    Args:
        pin_memory: pin the host memory of shards and gradients, without which copies hold up the
            computation. Other processes cannot use pinned memory. Without effect on a CPU mesh.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dimensions of a mesh of all dimensions are data-parallel.

    Args:
        shard: name of the dimension to shard over, or a tuple of names, which are flattened into one. The
            first flattening makes process groups, for which torch needs all ranks of the root mesh: where
            some of them shard nothing, let all flatten it before (``mesh[names]._flatten()``).
        replicate: name or names of the dimensions to replicate over; with ``shard=None`` this is pure data
            parallelism.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what names nothing."""
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: set shard, replicate or both; neither names a dimension.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names in ``shard``; none where it is None."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names in ``replicate``; none where it is None."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` may return: which dim to shard a parameter on, and over which mesh.

    Args:
        placement: ``Shard(dim)``; None means ``Shard(0)``.
        mesh_info: the mesh, as ``fully_shard`` takes it; or an object with an attribute ``mesh``, as
            torch's ``FSDPMeshInfo``. None means that of the call.
    """

    placement: Shard | None
    mesh_info: Any = None


@dataclass(frozen=True)
class QuantizedGather:
    """Parameters travel as int8, with a float32 scale for each block of numbers.

    A quarter of the bytes of float32, half of those of bfloat16. All ranks compute with the same rounded
    weights, off by at most half a scale (the largest magnitude in the block / 127); the shards, which the
    optimizer updates, stay exact. Parameters of fewer than two dims travel as they are. Full parameters that
    are kept between passes (strategy zero1) are gathered anew in each.

    Args:
        block_size: numbers in a block. Smaller is more accurate: 4 bytes of scale each.
    """

    block_size: int = 256

    def __post_init__(self) -> None:
        """Refuse what is not a size."""
        _check_count("QuantizedGather", "block_size", self.block_size, 1)


@dataclass(frozen=True)
class LowPrecisionReduction:
    """Gradients are cast to ``dtype``, summed over ranks in it, and cast back.

    For :func:`shardwise.strategies.register_comm_hook`.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``: half of the bytes of float32. Gradients above 65504
            become infinite in float16: scale the loss (``torch.amp.GradScaler``).
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Refuse other dtypes."""
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"LowPrecisionReduction: dtype is {self.dtype}; pass torch.bfloat16 or torch.float16. For "
                "others there is MixedPrecisionPolicy(reduce_dtype=...)."
            )


@dataclass(frozen=True)
class QuantizedReduction:
    """Gradients travel as int8 with a scale a block, and are summed in float32.

    For :func:`shardwise.strategies.register_comm_hook`.

    A quarter of the bytes of float32. Rounding is at most half a scale a rank (the largest magnitude in the
    block / 127). A block with an infinity or NaN comes out as NaN. Gradients of parameters of fewer than two
    dims travel as they are.

    Args:
        block_size: numbers in a block.
        error_feedback: add to each gradient what rounding has left out of the one before, so that errors
            do not add up over steps. Costs a bfloat16 copy of the full gradients on each rank.
    """

    block_size: int = 256
    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what is not a size or a choice."""
        _check_count("QuantizedReduction", "block_size", self.block_size, 1)
        if not isinstance(self.error_feedback, bool):
            raise TypeError(
                f"QuantizedReduction: error_feedback is {self.error_feedback!r}; pass True or False."
            )


@dataclass(frozen=True, kw_only=True)
class CommPolicy:
    """How a group's parameters travel, and when.

    Args:
        packing_limit_bytes: a parameter whose shard (one rank's part) is smaller than this shares
            one packed collective with the other small ones of its group, at the price of a copy;
            a larger one has a collective of its own, straight into its place, without a copy.
            None takes the default of the back end.
        prefetch: how many groups are gathered ahead of the one in use, in forward and in backward. At
            most ``prefetch + 1`` groups are gathered at once, beside those that the caller asked to keep.
        backward_prefetch: when backward begins the gathers ahead. "before": before it computes the gradients
            of the group in use, which overlaps them most. "after": when those gradients are complete and are
            being reduced, and the group in use is freed; takes less memory, and needs a group whose
            parameters are all trainable and of which no part is recomputed by a nested backward (reentrant
            checkpointing), which its first backward shows: other groups are freed later. None: not at all.
        max_gathers: the most groups that may be gathered ahead or on their way at once, whatever else asks
            for more, ``set_modules_to_forward_prefetch`` too. None: as many as are asked for.
        quantized_gather: send parameters in fewer bytes; see :class:`shardwise.policies.QuantizedGather`.
            None: as they are.
        part_bytes: large gradients of a group are reduced, and freed, as soon as they are there, in parts of
            at least so many bytes of full gradients and at least a quarter of the group's. 0: in quarters,
            whatever their size. None takes the default of the back end, which spares small groups the
            additional collectives. Where all parameters are packed, they leave together.
    """

    packing_limit_bytes: int | None = None
    prefetch: int = 1
    backward_prefetch: Literal["before", "after"] | None = "before"
    max_gathers: int | None = None
    quantized_gather: QuantizedGather | None = None
    part_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a size, a count or a choice."""
        if self.packing_limit_bytes is not None:
            _check_count("CommPolicy", "packing_limit_bytes", self.packing_limit_bytes, 0)
        if self.part_bytes is not None:
            _check_count("CommPolicy", "part_bytes", self.part_bytes, 0)
        _check_count("CommPolicy", "prefetch", self.prefetch, 0)
        if self.max_gathers is not None:
            _check_count("CommPolicy", "max_gathers", self.max_gathers, 1)
        if self.backward_prefetch not in ("before", "after", None):
            raise ValueError(
                f'CommPolicy: backward_prefetch is {self.backward_prefetch!r}; pass "before", "after" or '
                "None."
            )
        if not isinstance(self.quantized_gather, (QuantizedGather, type(None))):
            raise TypeError(
                f"CommPolicy: quantized_gather is {self.quantized_gather!r}; pass a "
                "shardwise.policies.QuantizedGather or None."
            )


_MEANINGS = {
    "packing_limit_bytes": "it is a size in bytes, 0 or more, or None for the default of the back end",
    "part_bytes": "it is a size in bytes, 0 or more, or None for the default of the back end",
    "prefetch": "it counts groups, 0 (none) or more",
    "max_gathers": "it counts groups, 1 or more, or None for no limit",
    "block_size": "it counts numbers, 1 or more",
}


def _check_count(owner: str, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} is {value!r}, a {type(value).__name__}; pass an int.")
    if value < least:
        raise ValueError(f"{owner}: {name} is {value}; {_MEANINGS[name]}.")
