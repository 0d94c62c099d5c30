"""The states of a parameter group, and the allowed steps between them. Any other step is a bug."""

from enum import Enum
from typing import NoReturn, TypeVar


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
