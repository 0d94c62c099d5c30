"""What a caller may choose about a group: values only, no behaviour of their own.

Policies are read by attribute, never by class, so that torch's own policy objects serve as well.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation, reduction and outputs; the fields of torch's policy of this name.

    Only the defaults are supported so far: ``fully_shard`` refuses any dtype given here. Use
    ``torch.autocast`` for bfloat16 computation.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards live between uses. This base class means: on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards in host memory. Not supported so far: ``fully_shard`` refuses it."""

    pin_memory: bool = True


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
