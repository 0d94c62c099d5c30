"""The order in which ranks launch collectives.

All members of a communicator must launch its collectives in one order, or they wait for each other for ever. And of
two communicators that share two ranks, both ranks must launch in the same order: a collective holds part of the device
until all its ranks are there, so that those of one communicator may keep those of the other from starting.
So between any two ranks, whatever they route where, all launches on communicators of both are compared as one list.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from races.collectives import Launch


def first_disagreement(launches: Mapping[int, Sequence[Launch]]) -> str | None:
    """The first place where two ranks, which `launches` are by, differ; None if there is none."""
    for one, other in combinations(launches, 2):
        sides = [_of_both(launches[rank], one, other) for rank in (one, other)]
        if len(sides[0]) != len(sides[1]):
            short, long = sorted(sides, key=len)
            counts = f"ranks {one} and {other} launch {len(sides[0])} and {len(sides[1])} collectives"
            return f"{counts}; the first that one of them lacks:\n{_told(one if long is sides[0] else other, long[len(short)])}"
        for index, (left, right) in enumerate(zip(*sides, strict=True)):
            if _what(left) != _what(right):
                return "\n".join(
                    [
                        f"launch {index} of ranks {one} and {other} differs:",
                        _told(one, left),
                        _told(other, right),
                    ]
                )
    return None


def _of_both(launches: Sequence[Launch], one: int, other: int) -> list[Launch]:
    return [launch for launch in launches if one in launch.members and other in launch.members]


def _what(launch: Launch) -> tuple[object, ...]:
    return launch.communicator, launch.members, launch.kind, launch.num_bytes


def _told(rank: int, launch: Launch) -> str:
    where = [f"      {line}" for line in launch.lines]
    what = f"{launch.kind} of {launch.num_bytes} bytes on '{launch.communicator}'"
    return "\n".join([f"  rank {rank}: {what}", *where])
