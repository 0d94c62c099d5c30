"""What a caller may choose about a group: values only, no behaviour of their own.

Policies are read by attribute, never by class, so that torch's own policy objects serve as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

FullPrecision = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module, nn.Parameter], bool]


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
        shard: name of the dimension to shard over, or a tuple of names, which are flattened into one.
        replicate: name or names of the dimensions to replicate over; with ``shard=None`` this is pure data
            parallelism.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what names nothing."""
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: set shard, replicate or both; neither names a dimension.")


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
class CommPolicy:
    """How a group's parameters travel.

    Args:
        packing_limit_bytes: a parameter whose shard (one rank's part) is smaller than this shares
            one packed collective with the other small ones of its group, at the price of a copy;
            a larger one has a collective of its own, straight into its place, without a copy.
            None takes the default of the back end.
        prefetch: how many groups are gathered ahead of the one in use. At most ``prefetch + 1``
            groups are gathered at once, beside those that the caller asked to keep.
    """

    packing_limit_bytes: int | None = None
    prefetch: int = 1

    def __post_init__(self) -> None:
        """Refuse what is not a size or a count."""
        for name in ("packing_limit_bytes", "prefetch"):
            value = getattr(self, name)
            is_default = value is None and name == "packing_limit_bytes"
            if not is_default and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"CommPolicy: {name} is {value!r}, a {type(value).__name__}; pass an int.")
        if self.packing_limit_bytes is not None and self.packing_limit_bytes < 0:
            raise ValueError(
                f"CommPolicy: packing_limit_bytes is {self.packing_limit_bytes}; it is a size in "
                "bytes, 0 or more, or None for the default of the back end."
            )
        if self.prefetch < 0:
            raise ValueError(f"CommPolicy: prefetch is {self.prefetch}; it counts groups, 0 (none) or more.")
