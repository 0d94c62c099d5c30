"""The caller's choices for a parameter group, declared only here."""

from dataclasses import dataclass, field, fields
from typing import Any

from shardwise.comm.reduction import Hook


def _of_microbatch(default: Any) -> Any:
    """A setting that must be the same on all ranks, and that may change from one microbatch to the next."""
    return field(default=default, metadata={"shared": True, "of_microbatch": True})


def _shared(default: Any) -> Any:
    """A setting that must be the same on all ranks."""
    return field(default=default, metadata={"shared": True})


@dataclass(frozen=True)
class Settings:
    """Set through ``fully_shard`` and the methods of ``FSDPModule``; replaced as a whole."""

    reshard_after_forward: bool | int | None = _shared(None)
    """None: reshard all except the root and the last block. A number n: n ranks keep the parameters together
    until backward."""
    reshard_after_backward: bool = _of_microbatch(True)
    requires_gradient_sync: bool = _of_microbatch(True)
    requires_all_reduce: bool = _of_microbatch(True)
    unshard_in_backward: bool = _shared(True)
    zeros_for_unused: bool = _shared(False)
    """Parameters without a gradient take part in the reduction with zeros."""
    may_be_unused: bool = _shared(False)
    """Some ranks may not run the group's modules."""
    averages_ignored: bool = _shared(False)
    divide_factor: float | None = _shared(None)
    max_reductions: int = 1
    separate_reduce_group: bool | None = _shared(None)
    """None: only on NCCL."""
    all_reduce_hook: Hook | None = None
    forward_prefetch: tuple[Any, ...] | None = None
    """Groups to unshard ahead, in place of the recorded order."""
    backward_prefetch: tuple[Any, ...] | None = None

    ranks_that_keep: int | None = field(init=False)
    """How many ranks keep the unsharded parameters together after forward; None: the caller set none."""
    ranks_may_differ: bool = field(init=False)
    """Whether ranks may use different parameters."""

    def __post_init__(self) -> None:
        """Derive the values that every step reads."""
        asked = self.reshard_after_forward
        keep = asked if isinstance(asked, int) and not isinstance(asked, bool) else None
        object.__setattr__(self, "ranks_that_keep", keep)
        object.__setattr__(self, "ranks_may_differ", self.zeros_for_unused or self.may_be_unused)


_METADATA = {each.name: each.metadata for each in fields(Settings)}


def is_of_microbatch(name: str) -> bool:
    """Whether the setting may change from one microbatch to the next."""
    return "of_microbatch" in _METADATA[name]


def shared_settings(settings: Settings, *, with_those_of_microbatch: bool) -> dict[str, str]:
    """The settings that must be the same on all ranks, as text by name."""
    shared = [name for name, metadata in _METADATA.items() if "shared" in metadata]
    chosen = [name for name in shared if with_those_of_microbatch or not is_of_microbatch(name)]
    return {name: str(getattr(settings, name)) for name in chosen}
