"""The choices a caller makes for a parameter group: plain values, without behaviour.

The library reads policies by attribute, never by class, so torch's policy objects work as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardwise.arguments import check_flags, check_number, check_type

__all__ = [
    "CPUOffloadPolicy",
    "CommPolicy",
    "DataParallelMeshDims",
    "LowPrecisionReduction",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "QuantizedAllGather",
    "QuantizedReduction",
    "ShardPlacementResult",
]

_ELEMENTS = "a number of elements, 1 or more"

ParamDtypeOverride = Callable[[nn.Parameter], torch.dtype | None]
FullPrecision = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module, nn.Parameter], bool]


class MixedPrecisionPolicyLike(Protocol):
    """A mixed-precision policy: this library's or torch's."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def output_dtype(self) -> torch.dtype | None: ...
    @property
    def cast_forward_inputs(self) -> bool: ...


class CPUOffloadPolicyLike(Protocol):
    """A CPU offload policy: this library's or torch's."""

    @property
    def pin_memory(self) -> bool: ...


class DataParallelMeshDimsLike(Protocol):
    """The data-parallel dimensions of a mesh, by name: this library's class or torch's."""

    @property
    def shard(self) -> str | tuple[str, ...] | None: ...
    @property
    def replicate(self) -> str | tuple[str, ...] | None: ...


class ShardPlacementResultLike(Protocol):
    """A result of ``shard_placement_fn`` other than a ``Shard``: this library's class or torch's."""

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
        param_dtype: dtype of the full parameters, and so of the all-gather and the computation. None
            (default): the parameters' own.
        reduce_dtype: dtype in which gradients are summed over the ranks. None (default): that of the full
            gradients.
        output_dtype: dtype of floating-point outputs of forward. None (default) leaves them as they are.
        cast_forward_inputs: True (default) casts floating-point inputs of forward to ``param_dtype``.
        param_dtype_override_fn: a function of a parameter, called once for each by ``fully_shard``. It
            returns the parameter's own dtype to compute with it in that dtype, and None or ``param_dtype``
            otherwise, and must return the same on all ranks. It changes neither the dtype in which gradients
            are reduced nor how inputs are cast.
        accumulate_dtype: dtype in which full gradients accumulate, and are stored, within a backward and over
            microbatches without synchronisation. None (default): ``reduce_dtype``, or else the dtype of the
            full parameter.
        buffer_dtype: dtype to which ``fully_shard`` casts floating-point buffers. None (default) leaves them.
        keep_low_precision_grads: True leaves ``.grad`` of the shards in ``reduce_dtype``, and the optimizer
            must accept that. False (default) casts it to the parameter's dtype.
        full_precision: parameters that stay in their own dtype, though in the same group. Either a module
            class or a tuple of classes: floating-point inputs of such modules are cast to the dtype of
            their parameters, and their outputs are cast back. Or a predicate ``(name, module, parameter) ->
            bool``, where ``module`` is the one that registers the parameter and must handle the mixed
            dtypes itself. A tied parameter stays in its dtype if any of its places in this call is chosen.

    Raises:
        TypeError: from ``fully_shard``: a field is not of the type above.
        ValueError: from ``fully_shard``: a dtype is not floating-point, or has fewer than 16 bits; or
            ``param_dtype_override_fn`` returned a dtype that is neither of the two.

    Example::

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=policy)
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
    """Where shards are stored. This base class is the default, and keeps them on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards and gradients in host memory, where the optimizer then has its state and steps.

    Each group costs one copy of its shards to the device before every all-gather, and one copy of its
    reduced gradients back; both overlap with the computation.

    Args:
        pin_memory: True (default) pins the host memory of shards and gradients, which other processes then
            cannot use. False makes the computation wait for the copies. Changes nothing on a CPU mesh. Each
            group has two pinned buffers, for its shards and its gradients. Torch rounds each up to a power of
            two, which needs up to twice the memory. From torch 2.13 on
            ``PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1`` limits the rounding to small buffers.

    Raises:
        TypeError: from ``fully_shard``: ``pin_memory`` is not a bool.

    Example::

        fully_shard(model, offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel dimensions of a mesh that has others as well.

    Args:
        shard: the name of the dimension to shard over, or a tuple of names, which are flattened into one
            dimension. The first flattening creates process groups, which is collective over the root mesh:
            if some of its ranks shard nothing, have all of them call ``mesh[names]._flatten()`` first. None
            (default) shards over none: plain data parallelism.
        replicate: the name, or names, of the dimensions to replicate over. None (default) for none.

    Raises:
        ValueError: both are None.

    Example::

        mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
        dims = DataParallelMeshDims(shard="shard", replicate="replicate")
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: set shard, replicate or both; neither names a dimension.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names in ``shard``; an empty tuple if it is None."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names in ``replicate``; an empty tuple if it is None."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of ``shard_placement_fn``: which dim to shard a parameter on, and over which mesh.

    Args:
        placement: ``Shard(dim)``; None means ``Shard(0)``.
        mesh_info: a mesh that ``fully_shard`` accepts, or an object with an attribute ``mesh``, such as
            torch's ``FSDPMeshInfo``. None (default): the mesh of the call.

    Example::

        def experts_on_their_mesh(param):
            return ShardPlacementResult(Shard(0), expert_mesh) if param in experts else None

        fully_shard(model, mesh=mesh, shard_placement_fn=experts_on_their_mesh)
    """

    placement: Shard | None
    mesh_info: Any = None


@dataclass(frozen=True)
class QuantizedAllGather:
    """All-gather parameters as int8, with a float32 scale for each block of elements.

    Sends a quarter of the bytes of float32, half of those of bfloat16. All ranks compute with the same
    rounded weights, off by at most half a scale (the largest magnitude in the block / 127); the shards, which
    the optimizer updates, stay exact. Parameters of fewer than two dims are sent unchanged. Full parameters
    that are kept between passes (strategy zero1) are all-gathered again in each.

    Args:
        block_size: elements in a block (default 256). Smaller blocks are more accurate, and each costs a
            scale of 4 bytes.

    Raises:
        TypeError: ``block_size`` is not an int.
        ValueError: ``block_size`` is below 1.

    Example::

        fully_shard(model, comm_policy=CommPolicy(quantized_all_gather=QuantizedAllGather()))
    """

    block_size: int = 256

    def __post_init__(self) -> None:
        check_number("QuantizedAllGather", "block_size", self.block_size, _ELEMENTS, above=0)


@dataclass(frozen=True)
class LowPrecisionReduction:
    """Cast gradients to ``dtype``, sum them over the ranks in it, and cast back.

    For :func:`shardwise.strategies.register_comm_hook`.

    Sends half of the bytes of float32.

    Args:
        dtype: ``torch.bfloat16`` (default) or ``torch.float16``, in which gradients above 65504 become
            infinite: scale the loss (``torch.amp.GradScaler``).

    Raises:
        ValueError: ``dtype`` is neither.

    Example::

        register_comm_hook(model, None, LowPrecisionReduction(torch.bfloat16))
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"LowPrecisionReduction: dtype is {self.dtype}; pass torch.bfloat16 or torch.float16. For "
                "others there is MixedPrecisionPolicy(reduce_dtype=...)."
            )


@dataclass(frozen=True)
class QuantizedReduction:
    """Send gradients as int8 with a scale for each block, and sum in float32.

    For :func:`shardwise.strategies.register_comm_hook`.

    Sends a quarter of the bytes of float32. Rounding adds at most half a scale (the largest magnitude in the
    block / 127) for each rank. A block with an infinity or NaN becomes NaN. Gradients of parameters of
    fewer than two dims are sent unchanged.

    Args:
        block_size: elements in a block (default 256).
        error_feedback: True (default) adds the rounding error of each gradient to the next one, so that
            errors do not accumulate over steps. An error larger than the next gradient is dropped, as left
            over from a spike. Costs a bfloat16 copy of the full gradients on each rank.

    Raises:
        TypeError: ``block_size`` is not an int, or ``error_feedback`` is not a bool.
        ValueError: ``block_size`` is below 1.

    Example::

        register_comm_hook(model, None, QuantizedReduction(block_size=128))
    """

    block_size: int = 256
    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_number("QuantizedReduction", "block_size", self.block_size, _ELEMENTS, above=0)
        check_flags("QuantizedReduction", error_feedback=self.error_feedback)


@dataclass(frozen=True, kw_only=True)
class CommPolicy:
    """How and when the parameters and gradients of a group are communicated.

    Args:
        packing_limit_bytes: a parameter whose shard on one rank is smaller than this shares one packed
            collective with the other small ones of its group, at the cost of a copy. A larger one has its own
            collective, directly into its place, without a copy. None (default): the default of the back end,
            256 KiB on NCCL; a quarter of that for parameters above 16 MiB, whose copy would need much memory,
            and for at most the 64 largest parameters of a group.
        prefetch: how many groups are unsharded ahead of the one in use, in forward and in backward (default
            1). At most ``prefetch + 1`` groups are unsharded at once, besides those that the caller keeps.
            With 0, and in the first forward, an all-gather waits for the computation before it, whose memory
            is freed first.
        backward_prefetch: when backward prefetches. "before" (default): before it computes the gradients of
            the group in use, for the most overlap. "after": when these gradients are complete and being
            reduced, and the group in use is resharded, for less memory. "after" reshards later if some
            parameters of a group are frozen, or a nested backward (reentrant checkpointing) recomputes parts
            of it; the group's first backward detects this. None: never.
        max_prefetched: the largest number of prefetched groups at once, which overrides every other setting,
            ``set_modules_to_forward_prefetch`` included. None (default): no limit.
        quantized_all_gather: all-gather parameters in fewer bytes; see :class:`QuantizedAllGather`. None
            (default): unchanged.
        part_bytes: large gradients of a group are reduced, and freed, before the others are complete, in
            parts of at least this many bytes of full gradients and at least a quarter of the group's; a
            smaller group is reduced whole. 0: in quarters of any size. None (default): 128 MiB on devices,
            where a part takes the host long, 16 MiB over gloo and 4 MiB over other back ends on the host, and
            at least 256 KiB for each rank except over gloo. Packed parameters are always reduced together.

    Raises:
        TypeError: a size or count is not an int, or ``quantized_all_gather`` is not a
            :class:`QuantizedAllGather`.
        ValueError: a size or ``prefetch`` is below 0, ``max_prefetched`` is below 1, or ``backward_prefetch``
            is none of the three.

    Example::

        policy = CommPolicy(prefetch=2, backward_prefetch="after")
        fully_shard(model, comm_policy=policy)
    """

    packing_limit_bytes: int | None = None
    prefetch: int = 1
    backward_prefetch: Literal["before", "after"] | None = "before"
    max_prefetched: int | None = None
    quantized_all_gather: QuantizedAllGather | None = None
    part_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("packing_limit_bytes", "part_bytes"):
            value = getattr(self, name)
            if value is not None:
                wanted = "a number of bytes, 0 or more, or None for the default of the back end"
                check_number("CommPolicy", name, value, wanted, above=-1)
        check_number("CommPolicy", "prefetch", self.prefetch, "a number of groups, 0 or more", above=-1)
        if self.max_prefetched is not None:
            wanted = "a number of groups, 1 or more, or None for no limit"
            check_number("CommPolicy", "max_prefetched", self.max_prefetched, wanted, above=0)
        if self.backward_prefetch not in ("before", "after", None):
            raise ValueError(
                f'CommPolicy: backward_prefetch is {self.backward_prefetch!r}; pass "before", "after" or '
                "None."
            )
        wanted = "a shardwise.policies.QuantizedAllGather or None"
        kinds = QuantizedAllGather, type(None)
        check_type("CommPolicy", "quantized_all_gather", self.quantized_all_gather, wanted, *kinds)
