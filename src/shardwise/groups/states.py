"""The states of a parameter group, and which step leads from one to another. Anything else is a bug."""

from enum import Enum
from typing import TypeVar


class UnshardState(Enum):
    """Where the unsharded parameters are."""

    SHARDED = "sharded"  # only the shard is in memory
    GATHERING = "gathering"  # their memory is allocated and being filled
    UNSHARDED = "unsharded"  # modules see them in place of the shards
    PARTLY = "partly unsharded"  # a few ranks keep them together, for backward
    SUMMONED = "summoned"  # they stand in place of the shards, for the caller: unsharded()

    __hash__ = object.__hash__  # Enum's own is a Python function, and tables are looked up at every step


class GradientState(Enum):
    """Where the unsharded gradients are."""

    EMPTY = "empty"  # nothing but .grad of the shards
    PENDING = "pending"  # those of the running backward, perhaps not all
    DEFERRED = "deferred"  # those of earlier backwards, left unreduced, in part or at all, on request
    REDUCING = "reducing"  # those, and the reduced ones, in flight

    __hash__ = object.__hash__


# By these names, since an attribute of an Enum takes Python 3.11 0.2 us, at a dozen places of every step.
SHARDED, GATHERING, UNSHARDED, PARTLY, SUMMONED = UnshardState
EMPTY, PENDING, DEFERRED, REDUCING = GradientState

UNSHARD_STATES: dict[tuple[UnshardState, str], UnshardState] = {
    (SHARDED, "unshard"): GATHERING,
    (GATHERING, "wait"): UNSHARDED,
    (UNSHARDED, "reshard"): SHARDED,
    (UNSHARDED, "keep_part"): PARTLY,
    (PARTLY, "unshard"): GATHERING,
    (PARTLY, "reshard"): SHARDED,
    (SHARDED, "summon"): SUMMONED,
    (SUMMONED, "end_summon"): SHARDED,
}

GRADIENT_STATES: dict[tuple[GradientState, str], GradientState] = {
    (EMPTY, "accumulate"): PENDING,
    (PENDING, "accumulate"): PENDING,
    (DEFERRED, "accumulate"): PENDING,
    (PENDING, "defer"): DEFERRED,
    (PENDING, "reduce"): REDUCING,
    (DEFERRED, "reduce"): REDUCING,
    (REDUCING, "finish"): EMPTY,
    (REDUCING, "defer"): DEFERRED,
    (EMPTY, "join"): REDUCING,  # with zeros, where other ranks may have more
    (PENDING, "drop"): EMPTY,
    (DEFERRED, "drop"): EMPTY,
    (REDUCING, "drop"): EMPTY,
}

_S = TypeVar("_S", bound=Enum)


def next_state(table: dict[tuple[_S, str], _S], state: _S, event: str, name: str) -> _S:
    """The state of group ``name`` after ``event``."""
    try:
        return table[state, event]
    except KeyError:
        allowed = [f"{e}()" for s, e in table if s is state]
        raise RuntimeError(
            f"{name}: cannot {event}() while {state.value}; from here only {' or '.join(allowed)} "
            "is possible. Did a hook call into the group out of turn?"
        ) from None
