"""Streams that run late find waits that are missing: in small programs. `bench/gpu.py --only delays` leaves out ours."""

import torch

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


def small_programs() -> tuple[list[float], ...]:
    return freed_too_early(), without_a_wait(), gradients_of_a_branch(), filled_memory()


def test_late_streams_give_wrong_numbers_without_a_wait_and_keep_what_torch_promises() -> None:
    """The caller's stream waits for those of backward; what is filled is filled before it is written."""
    ((freed, read, *kept),) = run_on_gpus(1, small_programs, late=1)
    assert freed == [8.0] * 4  # and 4 before its memory was used anew
    assert read != [3.0] * 4
    assert kept == [[12.0] * 4, [0, 1, 2, 3]]
