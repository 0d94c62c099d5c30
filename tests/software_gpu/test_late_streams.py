"""Streams that run late find waits that are missing: in small programs, and in the library with a wait left out."""

from pathlib import Path

import pytest
import torch
from races.device import Site
from races.scenarios import SCENARIOS

from software_gpu import late_recipes, late_table
from software_gpu.late_recipes import Case
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


def gradients_of_a_branch() -> list[float]:
    """Of a weight that is used on a side stream, read on the caller's stream after backward."""
    x, weight = torch.full((2, 2), 3.0, device="cuda"), torch.ones(2, 2, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        branch = x @ weight
    torch.cuda.current_stream().wait_stream(side)
    branch.sum().backward()
    assert weight.grad is not None
    doubled = weight.grad * 2
    torch.cuda.current_stream().synchronize()
    return doubled.flatten().tolist()


def filled_memory() -> list[int]:
    """What an operation that does not run late has written into memory that torch fills as it allocates it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return torch.ones(4, device="cuda").nonzero().flatten().tolist()


def all_three() -> tuple[list[float], list[float], list[int]]:
    return without_a_wait(), gradients_of_a_branch(), filled_memory()


def test_late_streams_give_wrong_numbers_without_a_wait_and_keep_what_torch_promises() -> None:
    """The caller's stream waits for those of backward; what is filled is filled before it is written."""
    right, *promised = [3.0] * 4, [12.0] * 4, [0, 1, 2, 3]
    assert run_on_gpus(1, all_three) == [(right, *promised)]
    ((read, *kept),) = run_on_gpus(1, all_three, late=1)
    assert read != right
    assert kept == promised


@pytest.mark.slow
def test_memory_freed_too_early_gives_wrong_numbers() -> None:
    assert run_on_gpus(1, freed_too_early) == [[4.0] * 4]
    assert run_on_gpus(1, freed_too_early, late=1) == [[8.0] * 4]


def wrong(world: int, late: int, cases: list[Case], folder: Path) -> list[str]:
    """For each case what is wrong on some rank under a schedule; nothing if values are those of work done at once."""
    names = list(dict.fromkeys(scenario for scenario, _ in cases))
    unwritten = run_on_gpus(world, late_recipes.references, names, folder, timeout_s=400)
    assert unwritten == [[]] * world, "memory is read that nobody has written"
    ranks = run_on_gpus(world, late_recipes.differences, cases, folder, late=late, timeout_s=400)
    return [next(filter(None, case), "") for case in zip(*ranks, strict=True)]


def told(case: Case) -> str:
    return f"{case[1]} in '{case[0]}'"


def check_found(world: int, late: int, cases: list[Case], folder: Path) -> None:
    """In one of three runs: what is wrong hangs on when the host's threads run as well."""
    missed = cases
    for _ in range(3):
        found = wrong(world, late, missed, folder)
        assert "NOT ASKED FOR" not in found, f"renamed? {dict(zip(map(told, missed), found, strict=True))}"
        missed = [case for case, what in zip(missed, found, strict=True) if not what]
        if not missed:
            return
    raise AssertionError("\n".join(map(told, missed)))


def test_waits_that_are_left_out_are_found(tmp_path: Path) -> None:
    """Some of the most telling, beside a run without any."""
    cases: list[Case] = [
        ("direct", None),
        ("custom collectives", Site("wait_stream", ("Unsharded._free_buffers", "Unsharded._free"))),
        ("checkpointing", Site("wait_stream", ("Reduction.send", "Gradients._send"))),
        ("direct", "gradients are dropped before their reduction was waited for"),
    ]
    assert set(cases[1:]) <= set(late_table.mutants()), "renamed?"
    unchanged, *mutants = wrong(2, 2, cases, tmp_path)
    assert unchanged == ""
    assert all(mutants), mutants


@pytest.mark.slow
@pytest.mark.parametrize(("world", "late"), [(2, 1), (2, 2), (2, 3), (4, 1), (4, 2)])
def test_each_wait_that_is_left_out_is_found_by_its_schedule(world: int, late: int, tmp_path: Path) -> None:
    check_found(world, late, late_table.found_by(late, world), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 2, 3, 4, 10, 11])
@pytest.mark.parametrize("world", [2, 4])
def test_every_scenario_gives_late_what_it_gives_at_once(world: int, late: int, tmp_path: Path) -> None:
    cases: list[Case] = [(name, None) for name in SCENARIOS if late_table.world_of(name) == world]
    assert [
        told(case) for case, what in zip(cases, wrong(world, late, cases, tmp_path), strict=True) if what
    ] == []
