"""The parts of a day on a GPU: what each shows, how long it takes, and where it lives.

A part is a function of `Options` that yields items: a name, and what to run for it. The item returns its
findings, a row or several; it fails by raising, and raises `Skipped` where the machine lacks what it needs.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Item = tuple[str, Callable[[], Row | list[Row]]]


@dataclass(frozen=True)
class Options:
    """Where a part runs, whether at full size or as small as it can be, and where its pictures go."""

    device: str = "cuda"
    is_tiny: bool = False
    folder: Path = Path()


class Skipped(Exception):
    """The machine lacks what an item needs; the text says what."""


@dataclass(frozen=True)
class Part:
    """One subject. Minutes are estimates for an H200; the limits end what hangs."""

    name: str
    shows: str
    minutes: float
    limit_minutes: float
    item_limit_s: float
    where: str
    columns: tuple[str, ...] = ()

    def items(self, options: Options) -> Iterator[Item]:
        module, _, function = self.where.partition(":")
        return getattr(importlib.import_module(f"gpu_parts.{module}"), function)(options)


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("probes", "what this torch, CUDA and NCCL do that the library relies on", 1, 3, 60,
             "probes:items", ("found",)),
        Part("delays", "a world of clones: no delay of a stream changes a bit; close to plain training",
             1, 7, 60, "correctness:items_in_clones", ("off_by", "noticed")),
        Part("threads", "ranks as threads, with their streams: true results of 2 and 4 ranks", 2, 7, 120,
             "correctness:items_in_threads", ("ranks", "off_by")),
        Part("nccl", "NCCL itself: back ends, coalesced calls, averages, communicators; 1, 2 and 4 ranks",
             3, 5, 100, "nccl:items", ("found",)),
        Part("ranks", "a rank that fails, devices in other orders, coalesced against packed all-gathers",
             3, 5, 100, "ranks:items", ("released_s", "chunk_kib", "coalesced_ms", "packed_ms", "ratio",
                                        "packing_limit_kib", "found")),
        Part("steady", "no waits of the host in ten steps; memory reserved against allocated", 2, 4, 100,
             "steady:items", ("allocated_mb", "reserved_mb", "reserved_to_allocated", "found")),
        Part("speed", "steps beside the peer's: GPU, host, launches, waits, memory", 2, 9, 240,
             "speed:items"),
        Part("overlap", "what is left of a wire's time, against the peer", 1, 5, 150,
             "speed:items_of_overlap"),
        Part("compiled", "a CUDA graph of a step; reduce-overhead a block; Inductor over the whole model",
             1, 6, 200, "compiled:items", ("step_ms", "eager_ms", "ratio", "off_by", "found")),
        Part("tools", "compute-sanitizer over a step; a picture of memory", 2, 5, 200, "tools:items",
             ("found",)),
    )
}  # fmt: skip
