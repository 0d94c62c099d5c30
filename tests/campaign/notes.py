"""What a run has noted, and whether ranks have noted what plain PyTorch has.

A note is a name, a value, and how the values of ranks make the plain one:

    same    each rank has it
    mean    the mean of the ranks is it
    first   rank 0 has it
    some    those ranks have it that have anything
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Notes = list[tuple[str, str, Any]]
Mismatch = Callable[[Tensor, Tensor], str | None]


def close(atol: float, rtol: float) -> Mismatch:
    """Tells what is wrong with a tensor that is not as near as that."""

    def mismatch(got: Tensor, want: Tensor) -> str | None:
        try:
            torch.testing.assert_close(got, want, atol=atol, rtol=rtol, equal_nan=False)
        except AssertionError as error:
            return str(error)
        return None

    return mismatch


def difference(plain: Notes, ranks: Sequence[Notes], mismatch: Mismatch) -> str | None:
    """The first note of any rank that is not as the plain one; None where all are."""
    for number, (name, kind, want) in enumerate(plain):
        found = [notes[number] for notes in ranks if number < len(notes)]
        if len(found) < len(ranks) or any(entry[:2] != (name, kind) for entry in found):
            return f"where {name} was to be noted: {[entry[:2] for entry in found]}"
        values = [entry[2] for entry in found]
        if kind == "first":
            values = values[:1]
        if kind == "some":
            values = [value for value in values if value is not None]
        if not isinstance(want, Tensor):
            if not all(_is_equal(value, want) for value in values):
                return f"{name}: {values} where {want} is expected"
            continue
        if not all(isinstance(value, Tensor) for value in values):
            return f"{name}: {values} where a tensor is expected"
        if kind == "mean":
            values = [torch.stack(values).mean(0)]
        for rank, value in enumerate(values):
            if (wrong := mismatch(value, want)) is not None:
                return f"{name} on rank {rank}: {wrong}"
    return None if all(len(notes) == len(plain) for notes in ranks) else "ranks have noted more"


def _is_equal(value: Any, want: Any) -> bool:
    if isinstance(want, float) and isinstance(value, float):
        return value == want or abs(value - want) < 1e-12
    return type(value) is type(want) and value == want
