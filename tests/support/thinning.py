"""Which of many parametrised cases always run; the others are slow, and a tenth of them runs in CI.

    @pytest.mark.thin(5)     of a cross product (several parametrize marks, or `pairs`) about every fifth case, such
                             that every value of every axis has its turn and as many pairs of values as there is
                             room for: at 2 x 3 x 2 with thin(5) three cases run, in which all seven values are
    @pytest.mark.sample(3)   of a list of cases of one kind (seeds, ways to shard) every third. Each test begins at
                             another one, so that tests over one list run different cases

Both choose the same cases in every run, whatever else is collected. Cases that are marked slow stay so.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any
from zlib import crc32

import pytest

Case = Sequence[Hashable]  # a value of each axis


def values_of(case: Case) -> set[Hashable]:
    return set(enumerate(case))


def pairs_of(case: Case) -> set[Hashable]:
    """All pairs of values of two axes that it brings together."""
    return set(combinations(enumerate(case), 2))


def covering(cases: Sequence[Case], num_cases: int) -> list[int]:
    """Indices of ``num_cases`` cases, or of more where they are needed for every value to have its turn.

    Each is the one with the most values that have not been there before, and among those the one with the most
    new pairs.
    """
    chosen: list[int] = []
    values = set().union(*map(values_of, cases))
    pairs = set().union(*map(pairs_of, cases))
    while values or len(chosen) < min(num_cases, len(cases)):
        rest = (index for index in range(len(cases)) if index not in chosen)
        best = max(rest, key=lambda i: (len(values & values_of(cases[i])), len(pairs & pairs_of(cases[i]))))
        chosen.append(best)
        values -= values_of(cases[best])
        pairs -= pairs_of(cases[best])
    return sorted(chosen)


def sampled(name: str, num_cases: int, every: int) -> list[int]:
    """Every ``every``-th case, from one on that the test's name tells."""
    return list(range(crc32(name.encode()) % min(every, num_cases), num_cases, every))


def pairs(
    names: tuple[str, str], left: Mapping[str, Any], right: Mapping[str, Any], every: int = 3
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` over all pairs, of which about each ``every``-th is not marked slow."""
    cells = list(product(left, right))
    chosen = covering(cells, -(-len(cells) // every))
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(left[x], right[y], id=f"{x}-{y}", marks=() if i in chosen else pytest.mark.slow)
            for i, (x, y) in enumerate(cells)
        ],
    )


def named(values: Any) -> dict[str, Any]:
    """By the text of each."""
    return {str(value): value for value in values}


# --- marks on what pytest has collected -----------------------------------------------------------


def thin_out(items: Sequence[pytest.Item]) -> dict[str, tuple[list[Case], list[int]]]:
    """Mark as slow what ``thin`` and ``sample`` leave out.

    Returns, for the test of this: by test that is thinned, its cases and the indices of those that always run.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    thinned = {}
    for name, functions in tests.items():
        thin, sample = (functions[0].get_closest_marker(mark) for mark in ("thin", "sample"))
        if thin is not None:
            cases = [_case_of(each) for each in functions]
            if len(cases[0]) < 2:
                raise pytest.UsageError(
                    f"{name}: thin() is for cross products, and this is a list. If its cases are of one kind, "
                    "take sample(); else mark those slow that need not always run."
                )
            chosen = covering(cases, -(-len(cases) // thin.args[0]))
            thinned[name] = cases, chosen
        elif sample is not None:
            chosen = sampled(functions[0].originalname, len(functions), sample.args[0])
            if sample.args[0] > 1 and 3 < len(functions) < 2 * sample.args[0]:
                raise pytest.UsageError(
                    f"{name}: of {len(functions)} cases sample({sample.args[0]}) leaves one."
                )
        else:
            continue
        for index in set(range(len(functions))) - set(chosen):
            functions[index].add_marker(pytest.mark.slow)
    return thinned


def _case_of(function: pytest.Function) -> Case:
    """What stands for its value of each parametrize mark: the same objects come again from case to case."""
    params = function.callspec.params
    axes = [mark.args[0] for mark in function.iter_markers("parametrize")]
    names = [axis.replace(",", " ").split() if isinstance(axis, str) else axis for axis in axes]
    return [tuple(id(params[name]) for name in axis) for axis in names]


def part_of(items: Sequence[pytest.Item], part: str) -> list[pytest.Item]:
    """The slow ones among ``items`` that are in a part such as "3/10": the third of ten, as alike as they can be."""
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--slow-part: {part!r} is not a part such as 3/10")
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    return slow[int(number) - 1 :: int(count)]
