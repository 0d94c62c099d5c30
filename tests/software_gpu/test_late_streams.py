"""Streams that run late find waits that are missing: in small programs, and in the library with a wait taken away."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.comm.streams import DeviceStream
from shardwise.groups.unsharded import Unsharded
from software_gpu import training
from software_gpu.launch import run_on_gpus


def without_a_wait() -> list[float]:
    """A side stream reads what the default one has not written yet."""
    written = torch.ones(4, device="cuda") * 2
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        read = written + 1
    side.synchronize()
    return read.tolist()


def freed_too_early() -> list[float]:
    """A side stream reads memory that has been freed and written again."""
    freed = torch.full((4,), 3.0, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        read = freed + 1
    del freed
    other = torch.full((4,), 7.0, device="cuda")
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert other.tolist() == [7.0] * 4
    return read.tolist()


def test_a_missing_wait_gives_wrong_numbers() -> None:
    assert run_on_gpus(1, without_a_wait) == [[3.0] * 4]
    assert run_on_gpus(1, without_a_wait, late=1) != [[3.0] * 4]


@pytest.mark.slow
def test_memory_freed_too_early_gives_wrong_numbers() -> None:
    assert run_on_gpus(1, freed_too_early) == [[4.0] * 4]
    assert run_on_gpus(1, freed_too_early, late=1) == [[8.0] * 4]


def nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a wait."""


def free_at_once(unsharded: Any) -> None:
    """`Unsharded._free_memory` without the wait for compute."""
    unsharded._users.freed()
    with unsharded._group.streams.all_gather.allocation_scope():
        for bucket in unsharded.buckets:
            bucket.buffer.free()


# What is taken away: the class and name of a method, and what stands in its place.
MUTANTS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "compute waits for collectives": (DeviceStream, "_let_compute_wait", nothing),
    "collectives wait for compute": (DeviceStream, "wait_for_compute", nothing),
    "memory is freed after compute": (Unsharded, "_free_memory", free_at_once),
}


def found_in(mutant: str, cases: list[str]) -> list[str]:
    """Cases whose losses or weights are wrong without that wait."""
    mesh = training.join()
    where, name, replacement = MUTANTS[mutant]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, replacement)
        return [case for case in cases if not training.difference(case, mesh) <= 2e-5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "late", "expected"),
    [
        ("compute waits for collectives", 1, ["zero3", "zero2"]),
        ("collectives wait for compute", 1, ["zero3", "zero2"]),
        ("collectives wait for compute", 2, ["zero3", "zero2"]),
        ("memory is freed after compute", 2, ["zero3"]),
    ],
)
def test_a_wait_that_is_taken_away_is_found(mutant: str, late: int, expected: list[str]) -> None:
    found = run_on_gpus(2, found_in, mutant, expected, late=late)
    assert any(here == expected for here in found), found
