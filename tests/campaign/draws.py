"""What may be drawn: spaces of plain values, each of which draws, completes, simplifies and tells a value.

    STEP = Record({
        "zero": Choice("none", "zeros", "keep"),           the simplest first
        "micro": Many(Record({...}), counts=(1, 1, 2)),     a list, of which one must be left
    })
    STEP.draw(chance)                {"zero": "keep", "micro": [...]}
    STEP.completed({})               what is left out has the simplest value
    STEP.simpler(value)              all values with one thing less, or one thing simpler
    STEP.told(value)                 without what is simplest: what `completed` makes `value` of

Nothing here knows what the values mean.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

Draw = dict[str, Any]


def is_same(left: Any, right: Any) -> bool:
    """Equal, and of one type: 1 is not True."""
    return repr(left) == repr(right)


class Space:
    """Values that may be drawn for one thing."""

    def draw(self, chance: random.Random) -> Any:
        raise NotImplementedError

    def simplest(self) -> Any:
        raise NotImplementedError

    def completed(self, value: Any) -> Any:
        return value

    def simpler(self, value: Any) -> Iterator[Any]:
        raise NotImplementedError

    def told(self, value: Any) -> Any:
        return value


class Choice(Space):
    """One of some values, the simplest first; one that stands there several times is drawn more often."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def draw(self, chance: random.Random) -> Any:
        return chance.choice(self.values)

    def simplest(self) -> Any:
        return self.values[0]

    def simpler(self, value: Any) -> Iterator[Any]:
        for simple in {repr(each): each for each in self.values}.values():
            if is_same(simple, value):
                return
            yield simple


def rarely(times: int) -> Choice:
    """True once in so many draws."""
    return Choice(*(False,) * (times - 1), True)


class Record(Space):
    """A dict. Shrinking goes through its entries in their order."""

    def __init__(self, entries: Mapping[str, Space]) -> None:
        self.entries = entries

    def draw(self, chance: random.Random) -> Draw:
        return {name: space.draw(chance) for name, space in self.entries.items()}

    def simplest(self) -> Draw:
        return {name: space.simplest() for name, space in self.entries.items()}

    def completed(self, value: Draw) -> Draw:
        assert value.keys() <= self.entries.keys(), f"{value} has other entries than {list(self.entries)}"
        given = {name: self.entries[name].completed(each) for name, each in value.items()}
        return {**self.simplest(), **given}

    def simpler(self, value: Draw) -> Iterator[Draw]:
        for name, space in self.entries.items():
            for each in space.simpler(value[name]):
                yield {**value, name: each}

    def told(self, value: Draw) -> Draw:
        return {
            name: space.told(value[name])
            for name, space in self.entries.items()
            if not is_same(value[name], space.simplest())
        }


class OneOf(Space):
    """A record of one of several kinds, which its entry "kind" names."""

    def __init__(self, kinds: Mapping[str, Record], weights: Mapping[str, int]) -> None:
        self.kinds = kinds
        self.weights = [weights.get(kind, 1) for kind in kinds]

    def draw(self, chance: random.Random) -> Draw:
        (kind,) = chance.choices(list(self.kinds), self.weights)
        return {"kind": kind, **self.kinds[kind].draw(chance)}

    def simplest(self) -> Draw:
        return self.completed({"kind": next(iter(self.kinds))})

    def completed(self, value: Draw) -> Draw:
        return {"kind": value["kind"], **self.kinds[value["kind"]].completed(_without_kind(value))}

    def simpler(self, value: Draw) -> Iterator[Draw]:
        for each in self.kinds[value["kind"]].simpler(_without_kind(value)):
            yield {"kind": value["kind"], **each}

    def told(self, value: Draw) -> Draw:
        return {"kind": value["kind"], **self.kinds[value["kind"]].told(_without_kind(value))}


def _without_kind(value: Draw) -> Draw:
    return {name: each for name, each in value.items() if name != "kind"}


class Many(Space):
    """A list, as long as one of ``counts``; it is not made shorter than ``least``."""

    def __init__(self, of: Space, counts: tuple[int, ...], least: int = 1) -> None:
        self.of, self.counts, self.least = of, counts, least

    def draw(self, chance: random.Random) -> list[Any]:
        return [self.of.draw(chance) for _ in range(chance.choice(self.counts))]

    def simplest(self) -> list[Any]:
        return [self.of.simplest() for _ in range(self.least)]

    def completed(self, value: list[Any]) -> list[Any]:
        return [self.of.completed(each) for each in value]

    def simpler(self, value: list[Any]) -> Iterator[list[Any]]:
        if len(value) > self.least:
            yield from without_one(value)
        for index, each in enumerate(value):
            for simple in self.of.simpler(each):
                yield [*value[:index], simple, *value[index + 1 :]]

    def told(self, value: list[Any]) -> list[Any]:
        return [self.of.told(each) for each in value]


class Repeating(Many):
    """A list of which one item is there twice, in some draws."""

    def draw(self, chance: random.Random) -> list[Any]:
        drawn = super().draw(chance)
        return [*drawn, chance.choice(drawn)] if chance.random() < 0.4 else drawn


class Some(Space):
    """A list of different values, as long as one of ``counts``."""

    def __init__(self, *values: Any, counts: tuple[int, ...]) -> None:
        self.values, self.counts = values, counts

    def draw(self, chance: random.Random) -> list[Any]:
        return chance.sample(self.values, chance.choice(self.counts))

    def simplest(self) -> list[Any]:
        return []

    def simpler(self, value: list[Any]) -> Iterator[list[Any]]:
        yield from without_one(value)


class Tree(Space):
    """A node with a kind, and children where the kind is one of ``containers``; two levels of these at most."""

    CHANCES = (0.6, 0.3)  # of being a container, by depth

    def __init__(self, leaves: tuple[str, ...], containers: tuple[str, ...]) -> None:
        self.leaves, self.containers = leaves, containers

    def draw(self, chance: random.Random, depth: int = 0) -> Draw:
        if depth < len(self.CHANCES) and chance.random() < self.CHANCES[depth]:
            children = [self.draw(chance, depth + 1) for _ in range(chance.randint(1, 2))]
            return {"kind": chance.choice(self.containers), "children": children}
        return {"kind": chance.choice(self.leaves)}

    def simplest(self) -> Draw:
        return {"kind": self.leaves[0]}

    def simpler(self, value: Draw) -> Iterator[Draw]:
        children = value.get("children", [])
        yield from children
        if len(children) > 1:
            for fewer in without_one(children):
                yield {**value, "children": fewer}
        for index, child in enumerate(children):
            for changed in self.simpler(child):
                yield {**value, "children": [*children[:index], changed, *children[index + 1 :]]}
        simplest = (self.containers if children else self.leaves)[0]
        if value["kind"] != simplest:
            yield {**value, "kind": simplest}


def without_one(items: list[Any]) -> Iterator[list[Any]]:
    """All lists that lack one of the items."""
    for index in range(len(items)):
        yield items[:index] + items[index + 1 :]
