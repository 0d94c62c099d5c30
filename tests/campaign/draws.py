"""What may be drawn: hypothesis strategies of plain values. Values shrink to the first of a choice.

    STEP = record({
        "zero": choice("none", "zeros", "keep"),
        "micro": many(MICRO, least=1, most=2),
    })

Nothing here knows what the values mean.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Draw = dict[str, Any]
Draws = SearchStrategy[Draw]


def choice(*values: Any) -> SearchStrategy[Any]:
    """One of some values, the simplest first; one that stands there several times is drawn more often."""
    return st.sampled_from(values)


def rarely(times: int) -> SearchStrategy[bool]:
    return choice(*(False,) * (times - 1), True)


def record(entries: Mapping[str, SearchStrategy[Any]]) -> Draws:
    return st.fixed_dictionaries(dict(entries))


def one_of(kinds: Mapping[str, Draws], weights: Mapping[str, int]) -> Draws:
    """A record of one of several kinds, which its entry "kind" names."""
    weighted = [kind for kind in kinds for _ in range(weights.get(kind, 1))]
    return st.sampled_from(weighted).flatmap(
        lambda kind: kinds[kind].map(lambda drawn: {"kind": kind, **drawn})
    )


def many(of: SearchStrategy[Any], least: int, most: int) -> SearchStrategy[list[Any]]:
    return st.lists(of, min_size=least, max_size=most)


def with_one_again(lists: SearchStrategy[list[Any]]) -> SearchStrategy[list[Any]]:
    """A list of which one item is there twice, in some draws."""
    again = st.none() | st.integers(0, 3)
    return st.builds(lambda drawn, n: drawn if n is None else [*drawn, drawn[n % len(drawn)]], lists, again)


def some(*values: Any, most: int) -> SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), max_size=most, unique=True)


def tree(leaves: tuple[str, ...], containers: tuple[str, ...], levels: int = 2) -> Draws:
    """A node with a kind, and children where the kind is one of ``containers``, of which there are so many levels."""
    leaf = record({"kind": choice(*leaves)})
    if levels == 0:
        return leaf
    children = many(tree(leaves, containers, levels - 1), least=1, most=2)
    return leaf | record({"kind": choice(*containers), "children": children})


def completed(draws: Draws, **given: Any) -> Draw:
    simplest = find(  # tried first
        draws, lambda _: True, settings=settings(max_examples=1, phases=(Phase.generate,), database=None)
    )
    assert given.keys() <= simplest.keys()
    return simplest | given
