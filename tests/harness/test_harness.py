"""The harness itself: what a World returns, what it reports, and how it recovers."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from harness import WorkerError, World
from harness.world import MAX_FDS


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def sum_over_ranks(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    x = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


def process_id() -> int:
    return os.getpid()


def fail_on_rank_1_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise LookupError("no such luck")
    dist.all_reduce(torch.ones(1))


def fail_everywhere() -> None:
    print("about to fail", file=sys.stderr)
    raise LookupError("the same everywhere")


def write_to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def crash_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("about to crash", file=sys.stderr)
        ctypes.string_at(0)  # reads address 0


def wait_on_rank_0_for_a_peer_that_never_comes() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def be_done() -> None:
    os.write(1, b"stuck\n")  # in one piece, where print may write the end of line apart


def hold_the_gil_for_ever() -> None:
    os.write(1, b"stuck\n")
    ctypes.PyDLL(None).pause()


def warn() -> None:
    warnings.warn("think again", stacklevel=1)


class _FailsInDestructor:
    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        raise LookupError("nobody hears me")


def fail_in_destructor() -> None:
    _FailsInDestructor()


def dtensor() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.ones(4), mesh)


def send_what_nobody_receives() -> int:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    return os.getpid()


def leave_files_open() -> int:
    for _ in range(MAX_FDS):
        os.open(os.devnull, os.O_RDONLY)
    return os.getpid()


@pytest.mark.parametrize("world", [1, 2, 3, 4], indirect=True)
def test_results_come_in_the_order_of_ranks(world: World) -> None:
    assert world.run(rank_and_size) == [(rank, world.size) for rank in range(world.size)]


def test_ranks_take_part_in_collectives(world2: World) -> None:
    for result in world2.run(sum_over_ranks, torch.tensor([1.0, 10.0]), scale=2.0):
        assert torch.equal(result, torch.tensor([6.0, 60.0]))


def test_ranks_stay_from_one_run_to_the_next(world2: World) -> None:
    assert world2.run(process_id) == world2.run(process_id)


def test_every_task_starts_from_the_same_seed(world2: World) -> None:
    first, *others = world2.run(torch.rand, 4) + world2.run(torch.rand, 4)
    assert all(torch.equal(first, other) for other in others)


def test_tensors_outlive_the_rank_that_made_them(world2: World) -> None:
    results = world2.run(torch.full, (1000,), 7.0)
    world2.close()
    for result in results:
        assert not result.is_shared()
        assert result.add_(1).sum() == 8000


def test_an_error_is_reported_while_peers_still_wait(world2: World) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        world2.run(fail_on_rank_1_while_others_wait)
    assert time.monotonic() - started < 30  # the timeout is 60
    assert (caught.value.failed, caught.value.silent) == ([1], [0])
    report = str(caught.value)
    assert "on a world of 2: rank 1 failed, rank 0 gave no answer" in report
    first, second = report.split("--- rank 0 is still in ---")
    assert "in fail_on_rank_1_while_others_wait\n    raise LookupError" in first
    assert "LookupError: no such luck" in first
    assert "in fail_on_rank_1_while_others_wait" in second


def test_ranks_that_fail_alike_are_reported_once(world2: World) -> None:
    with pytest.raises(WorkerError, match="on a world of 2: ranks 0, 1 failed\n") as caught:
        world2.run(fail_everywhere)
    assert str(caught.value).count("LookupError: the same everywhere") == 1
    assert str(caught.value).endswith("It has written to stderr:\nabout to fail")


def test_what_earlier_tasks_wrote_to_stderr_is_not_reported(world1: World) -> None:
    world1.run(write_to_stderr, "earlier")
    with pytest.raises(WorkerError) as caught:
        world1.run(fail_everywhere)
    assert "earlier" not in str(caught.value)


def test_a_world_works_again_after_a_failure(world2: World) -> None:
    before = world2.run(process_id)
    with pytest.raises(WorkerError):
        world2.run(fail_everywhere)
    assert set(before).isdisjoint(world2.run(process_id))
    assert world2.run(sum_over_ranks, torch.ones(1), scale=1.0) == [3, 3]


def test_a_crash_is_reported_with_its_signal_and_stack(world2: World) -> None:
    with pytest.raises(WorkerError) as caught:
        world2.run(crash_on_rank_1)
    assert (caught.value.failed, caught.value.silent) == ([1], [])
    assert "the process died: signal SIGSEGV" in str(caught.value)
    assert "in crash_on_rank_1" in str(caught.value)
    assert "about to crash\n" in str(caught.value)
    assert "gloo::transport::tcp::Loop::run()" in str(caught.value)  # a thread without Python


def test_a_hang_is_reported_with_every_stack(world2: World) -> None:
    with pytest.raises(WorkerError) as caught:
        world2.run(wait_on_rank_0_for_a_peer_that_never_comes, timeout=1.5)
    assert (caught.value.failed, caught.value.silent) == ([], [0])
    report = str(caught.value)
    assert "on a world of 2: rank 0 gave no answer within" in report
    first, second = report.split("--- rank 1 has returned and is now in ---")
    assert "--- rank 0 is still in ---" in first
    assert "in wait_on_rank_0_for_a_peer_that_never_comes" in first
    assert "in serve" in second


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (warn, "UserWarning: think again"),
        (fail_in_destructor, "LookupError: nobody hears me"),
        (dtensor, "a DTensor cannot be a result"),
    ],
)
def test_what_would_pass_silently_is_an_error(world1: World, fn, text: str) -> None:
    with pytest.raises(WorkerError, match=text):
        world1.run(fn)


def test_ranks_are_replaced_before_they_run_out_of_files(world1: World) -> None:
    assert world1.run(leave_files_open) != world1.run(process_id)


def test_ranks_are_replaced_if_some_have_begun_more_collectives_than_others(world2: World) -> None:
    """The next collectives would get their messages."""
    assert set(world2.run(send_what_nobody_receives)).isdisjoint(world2.run(process_id))
    assert world2.run(sum_over_ranks, torch.ones(1), scale=1.0) == [3, 3]


@pytest.mark.processes
@pytest.mark.slow  # it starts a session of its own
@pytest.mark.parametrize("ranks", ["busy", "idle"])
def test_no_rank_outlives_a_killed_parent(ranks: str) -> None:
    code = "import harness, signal, harness.test_harness as t; world = harness.World(2); "
    code += {"busy": "world.run(t.hold_the_gil_for_ever)", "idle": "world.run(t.be_done); signal.pause()"}[
        ranks
    ]
    # tmp_path would be too long: multiprocessing puts a socket there.
    with (
        tempfile.TemporaryDirectory() as tmp,
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "TMPDIR": tmp},
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as session,
    ):
        assert session.stdout is not None
        try:
            assert [session.stdout.readline() for _ in range(2)] == [b"stuck\n", b"stuck\n"]
            session.kill()
            # The ranks have inherited this pipe: it ends when the last of them is gone.
            session.communicate(timeout=20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session.pid, signal.SIGKILL)
