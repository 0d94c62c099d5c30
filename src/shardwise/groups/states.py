"""What the caller has chosen for a parameter group, its states, and the allowed steps between them.

Choices are declared only here. A step that is not in a table is a bug.
"""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NoReturn, TypeVar

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


# --- states ---------------------------------------------------------------------------------------


class UnshardState(Enum):
    """Where the unsharded parameters are."""

    SHARDED = "sharded"  # only the shard is in memory
    UNSHARDING = "unsharding"  # their memory is allocated, and an all-gather is filling it
    UNSHARDED = "unsharded"  # they are in memory; modules see them in place of the shards, unless hidden
    PARTLY = "partly unsharded"  # a few ranks keep them together until backward, or the next microbatch
    SUMMONED = "summoned"  # unsharded() has registered full parameters in place of the shards

    __hash__ = object.__hash__  # Enum's is a Python function, and every step looks up these tables


class GradientState(Enum):
    """Where the unsharded gradients are."""

    EMPTY = "empty"  # none; only .grad of the shards
    PENDING = "pending"  # those of the running backward, perhaps not all of them
    DEFERRED = "deferred"  # those of earlier backwards, unreduced or not yet all-reduced, on request
    REDUCING = "reducing"  # unsharded gradients until they are summed, and the sums

    __hash__ = object.__hash__


# Global names: an attribute of an Enum takes 0.2 us in Python 3.11, at a dozen places of every step.
SHARDED, UNSHARDING, UNSHARDED, PARTLY, SUMMONED = UnshardState
EMPTY, PENDING, DEFERRED, REDUCING = GradientState

UNSHARD_STATES: dict[tuple[UnshardState, str], UnshardState] = {
    (SHARDED, "unshard"): UNSHARDING,
    (UNSHARDING, "wait"): UNSHARDED,
    (UNSHARDED, "reshard"): SHARDED,
    (UNSHARDED, "keep_part"): PARTLY,
    (PARTLY, "unshard"): UNSHARDING,
    (PARTLY, "reshard"): SHARDED,
    (SHARDED, "summon"): SUMMONED,
    (SUMMONED, "end_summon"): SHARDED,
}

GRADIENT_STATES: dict[tuple[GradientState, str], GradientState] = {
    (EMPTY, "accumulate"): PENDING,
    (DEFERRED, "accumulate"): PENDING,
    (PENDING, "defer"): DEFERRED,
    (PENDING, "reduce"): REDUCING,
    (DEFERRED, "reduce"): REDUCING,
    (REDUCING, "finish"): EMPTY,
    (REDUCING, "defer"): DEFERRED,
    (EMPTY, "join"): REDUCING,  # with zeros, as other ranks may have gradients
    (PENDING, "drop"): EMPTY,
    (DEFERRED, "drop"): EMPTY,
    (REDUCING, "drop"): EMPTY,
}

_S = TypeVar("_S", bound=Enum)


def refuse_step(table: dict[tuple[_S, str], _S], state: _S, event: str, name: str) -> NoReturn:
    """Refuse ``event``, which ``table`` does not allow for the group ``name`` in ``state``."""
    allowed = [f"{e}()" for s, e in table if s is state]
    raise RuntimeError(
        f"{name}: cannot {event}() while {state.value}; from here only {' or '.join(allowed)} "
        "is possible. Did a hook call into the group out of turn?"
    )
