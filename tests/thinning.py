"""Of all pairs of two lists some always run, so that every entry takes part; the others are a longer campaign."""

from collections.abc import Mapping
from typing import Any

import pytest


def pairs(
    names: tuple[str, str], left: Mapping[str, Any], right: Mapping[str, Any], every: int = 3
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over all pairs, of which each `every`-th diagonal is not marked slow."""
    cells = [
        pytest.param(a, b, id=f"{x}-{y}", marks=() if (i - j) % every == 0 else pytest.mark.slow)
        for i, (x, a) in enumerate(left.items())
        for j, (y, b) in enumerate(right.items())
    ]
    return pytest.mark.parametrize(names, cells)


def named(values: Any) -> dict[str, Any]:
    """By the text of each."""
    return {str(value): value for value in values}
