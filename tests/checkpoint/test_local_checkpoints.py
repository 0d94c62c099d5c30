"""Checkpoints in folders of the hosts' own: two hosts of two ranks, each of which may lose its folder."""

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from checkpointing import train_tower
from comparing import assert_all_same
from expecttest import assert_expected_inline
from harness import World
from meshed import parameters_of, refusal
from models import Tower, built, shard_tower
from reference import adamw
from torch import nn

from shardwise import load_checkpoint, resume, save_checkpoint
from shardwise.checkpoint import hosts

Weights = dict[str, Any]


def tower() -> nn.Module:
    """One block: a save takes longer the more tensors there are, and here there are many saves."""
    return built(Tower, width=7, hidden=13, depth=1)


def sharded() -> nn.Module:
    return shard_tower(tower())


def folder_of(base: str, exchanged: bool = False) -> str:
    """The own folder of a rank's host: ranks 0 and 1 are on one host, 2 and 3 on the other."""
    return f"{base}/host-{(dist.get_rank() // 2) ^ exchanged}/run"


def job(base: str, last_step: int, exchanged: bool = False, **save: Any) -> tuple[int, Weights]:
    """A job that resumes, trains until `last_step`, and saves every step; `exchanged`: on the other hosts."""
    model = sharded()
    optimizer, folder = adamw(model), folder_of(base, exchanged)
    loaded = resume(f"{base}/shared", model, optimizer, local=folder)
    for step in range(loaded.step, last_step):
        train_tower(model, optimizer, range(step, step + 1))
        shared = {"step": step + 1}
        path = f"{folder}/step-{step + 1}"
        pending = save_checkpoint(path, model, optimizer, shared=shared, keep=2, local=True, **save)
    pending.wait()
    return loaded.step, parameters_of(model)


@cache
def plain(num_steps: int) -> Weights:
    """The weights of one process that was never interrupted."""
    model = tower()
    train_tower(model, adamw(model), range(num_steps))
    return parameters_of(model)


def assert_resumed(results: list[tuple[int, Weights]], first_step: int, last_step: int) -> None:
    assert [step for step, _ in results] == [first_step] * len(results)
    assert_all_same([weights for _, weights in results], plain(last_step))


def test_a_job_resumes_after_hosts_have_lost_their_folders_on_others_and_in_other_numbers(
    world4: World, world3: World, tmp_path: Path
) -> None:
    world4.run(job, str(tmp_path), 2, asynchronous=True)
    shutil.rmtree(tmp_path / "host-1")
    assert_resumed(world4.run(job, str(tmp_path), 3), 2, 3)
    shutil.rmtree(tmp_path / "host-0")  # the host that was lost has copies again
    assert_resumed(world4.run(job, str(tmp_path), 4, exchanged=True), 3, 4)
    assert_resumed(world3.run(job, str(tmp_path), 5), 4, 5)


def data_files(folder: Path) -> set[str]:
    return {each.name for each in folder.glob("__*")}


def test_a_host_has_its_own_files_and_those_of_the_host_before_it(world4: World, tmp_path: Path) -> None:
    """With one rank on each of three hosts, and two on the first: see `in_threes`."""
    world4.run(save_on_three_hosts, str(tmp_path))
    of_rank = [f"__{rank}_0.distcp" for rank in range(4)]
    assert data_files(tmp_path / "0" / "step-1") == {of_rank[0], of_rank[1], of_rank[3]}
    assert data_files(tmp_path / "1" / "step-1") == {of_rank[2], of_rank[0], of_rank[1]}
    assert data_files(tmp_path / "2" / "step-1") == {of_rank[3], of_rank[2]}


def save_on_three_hosts(base: str) -> None:
    model = sharded()
    save_checkpoint(f"{base}/{max(0, dist.get_rank() - 1)}/step-1", model, keep=1, local=True)


# --- what is not complete -------------------------------------------------------------------------


def test_what_no_host_has_completely_is_passed_by(world4: World, tmp_path: Path) -> None:
    """A part of step-2 is lost, then all steps of both hosts: the shared folder has step 1."""
    world4.run(job, str(tmp_path), 2)
    (tmp_path / "host-0/run/step-2/__1_0.distcp").unlink()
    (tmp_path / "host-1/run/step-2/__1_0.distcp").write_bytes(b"cut off")
    assert_resumed(world4.run(job, str(tmp_path), 2), 1, 2)
    world4.run(save_shared, str(tmp_path))
    assert world4.run(job, str(tmp_path), 3)[0][0] == 2  # newer than that of the shared folder
    shutil.rmtree(tmp_path / "host-0")
    shutil.rmtree(tmp_path / "host-1")
    assert world4.run(job, str(tmp_path), 2)[0][0] == 1


def save_shared(base: str) -> None:
    model = sharded()
    save_checkpoint(f"{base}/shared/step-1", model, adamw(model), shared={"step": 1})


def test_two_saves_of_one_step_are_not_mixed(world4: World, tmp_path: Path) -> None:
    """Host 0 has step 2 of one job, and host 1 that of another, each without the other host's files."""
    world4.run(job, str(tmp_path / "one"), 2)
    world4.run(job, str(tmp_path / "other"), 2)
    (tmp_path / "run").mkdir()
    for host, source, others in (("host-0", "one", (2, 3)), ("host-1", "other", (0, 1))):
        shutil.copytree(tmp_path / source / host, tmp_path / "both" / host)
        for rank in others:
            (tmp_path / "both" / host / f"run/step-2/__{rank}_0.distcp").unlink()
    assert_resumed(world4.run(job, str(tmp_path / "both"), 2), 1, 2)


def test_what_a_crash_has_left_aside_is_found(world4: World, tmp_path: Path) -> None:
    """Host 0 died while it replaced step-2, which host 1 has lost."""
    world4.run(job, str(tmp_path), 2)
    token = f"{hosts.folders.this_host()}-1-1-abcdef"
    run = tmp_path / "host-0/run"
    (run / "step-2").rename(run / f".step-2.{token}.previous")
    shutil.rmtree(tmp_path / "host-1")
    assert_resumed(world4.run(job, str(tmp_path), 3), 2, 3)


def test_a_file_that_is_cut_off_is_read_from_the_other_host(world4: World, tmp_path: Path) -> None:
    world4.run(job, str(tmp_path), 2)
    (tmp_path / "host-0/run/step-2/__0_0.distcp").write_bytes(b"cut off")
    assert_resumed(world4.run(job, str(tmp_path), 3), 2, 3)


def test_what_a_save_that_died_has_left_is_removed_before_the_next(world4: World, tmp_path: Path) -> None:
    """On both hosts: memory is small. The process that wrote it has ended."""
    world4.run(job, str(tmp_path), 1)
    left = [
        tmp_path / f"host-{host}/run/.step-2.{hosts.folders.this_host()}-1-1-abcdef.partial"
        for host in (0, 1)
    ]
    for each in left:
        each.mkdir()
        (each / "__0_0.distcp").write_bytes(b"half")
        (each / ".__1_0.distcp.part").write_bytes(b"half")
    for error, _ in world4.run(saves_where_a_host_cannot_write, str(tmp_path), ".part", False):
        assert "No space left" in error
    assert not any(each.exists() for each in left)


def loads(base: str, name: str) -> str:
    model = sharded()
    return refusal(load_checkpoint, f"{folder_of(base)}/{name}", model, local=True).replace(base, "BASE")


def test_what_cannot_be_loaded_is_named_alike_on_all_ranks(world4: World, tmp_path: Path) -> None:
    world4.run(job, str(tmp_path), 1)
    for host in ("host-0", "host-1"):
        (tmp_path / host / "run/step-1/__2_0.distcp").unlink()
    lost, absent = (world4.run(loads, str(tmp_path), name) for name in ("step-1", "step-2"))
    assert len({*lost}) == len({*absent}) == 1
    assert_expected_inline(
        lost[0],
        """FileNotFoundError: step-1: hosts that had __2_0.distcp are lost. Load an older checkpoint, or one on a shared file system; resume(folder, ..., local=...) finds the newest.""",
    )
    assert_expected_inline(
        absent[0],
        """FileNotFoundError: step-2: no host has it. Load an older checkpoint, or one on a shared file system; resume(folder, ..., local=...) finds the newest.""",
    )


def test_a_local_checkpoint_needs_keep(tmp_path: Path) -> None:
    text = refusal(save_checkpoint, tmp_path / "step-1", nn.Linear(2, 2), local=True)
    assert_expected_inline(
        text,
        """ValueError: save_checkpoint: local=True needs keep, such as keep=2: memory and disks of hosts are small.""",
    )


# --- failures -------------------------------------------------------------------------------------


def saves_where_a_host_cannot_write(base: str, failing: str, again: bool = True) -> tuple[str, bool]:
    """The error of a rank, and whether what failed is there; ``again``: save once more, which works."""
    model = sharded()
    path = f"{folder_of(base)}/step-"
    real = hosts.sync

    def fail(place: Path) -> None:
        if dist.get_rank() == 2 and failing in place.name:
            raise OSError(28, "No space left on device")
        real(place)

    with mock.patch.object(hosts, "sync", fail):
        error = refusal(lambda: save_checkpoint(path + "1", model, keep=2, local=True).wait())
    if again:
        save_checkpoint(path + "2", model, keep=2, local=True)
    return error.replace(base, "BASE"), Path(path + "1").exists()


@pytest.mark.parametrize("failing", [".part", ".digests"])
def test_a_host_without_space_fails_the_save_on_all(world4: World, tmp_path: Path, failing: str) -> None:
    errors = world4.run(saves_where_a_host_cannot_write, str(tmp_path), failing)
    assert len({*errors}) == 1
    text, is_there = errors[0]
    assert not is_there
    assert "rank 2 could not write" in text
    assert "No space left on device" in text
    names = {each.name for each in (tmp_path / "host-1/run").iterdir()}
    assert names == {"step-2"}


# --- processes that die ---------------------------------------------------------------------------


def count_calls(act: Any, at: int | None) -> list[int]:
    """Count the calls of functions of `checkpoint/` in all threads; `act` at the one with number `at`."""
    count = [0]

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "shardwise/checkpoint" in frame.f_code.co_filename:
            count[0] += 1
            if count[0] == at:
                act()

    threading.setprofile(seen)
    sys.setprofile(seen)
    return count


def process(rank: int, port: int, base: str, last_step: int, moment: int | None, results: Any) -> None:
    """One rank; at `moment`, rank 2 kills all ranks of its host."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    pids: list[Any] = [None] * 4
    dist.all_gather_object(pids, os.getpid())

    def kill_host() -> None:
        for pid in (pids[3], pids[2]):
            os.kill(pid, signal.SIGKILL)

    count = count_calls(kill_host, moment) if rank == 2 else [0]
    step, weights = job(base, last_step, asynchronous=True)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    results.put((rank, step, count[0], {name: each.numpy() for name, each in weights.items()}))
    dist.destroy_process_group()


def launch(base: Path, last_step: int, moment: int | None) -> dict[int, tuple[int, int, Weights]]:
    """What the ranks return, all of which are killed when some have died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardwise", __name__])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    results = context.Queue()
    ranks = [
        context.Process(target=process, args=(rank, port, str(base), last_step, moment, results))
        for rank in range(4)
    ]
    for each in ranks:
        each.start()
    found = {}
    if moment is None:
        found = {rank: rest for rank, *rest in (results.get(timeout=100) for _ in ranks)}
    else:
        ranks[2].join(100)
        for each in ranks:
            each.kill()
    for each in ranks:
        each.join()
    return found


LAST_STEP = 3


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Weights]:
    """How many calls a job makes, and its weights."""
    _, num_calls, weights = launch(tmp_path_factory.mktemp("base"), LAST_STEP, None)[2]
    return num_calls, weights


def assert_survives(tmp_path: Path, moment: int, uninterrupted: tuple[int, Weights]) -> None:
    launch(tmp_path, LAST_STEP, moment)
    complete = [
        {int(each.name.split("-")[1]) for each in (tmp_path / f"host-{host}/run").glob("step-*")}
        for host in (0, 1)
    ]
    shutil.rmtree(
        tmp_path / f"host-{moment % 2}", ignore_errors=True
    )  # of either host, whose processes died or not
    for step, _, weights in launch(tmp_path, LAST_STEP, None).values():
        assert step >= max(complete[0] & complete[1], default=0)
        for name, want in uninterrupted[1].items():
            assert (weights[name] == want).all(), (moment, name)


@pytest.mark.processes
def test_a_host_that_dies_costs_at_most_a_step(tmp_path: Path, uninterrupted: tuple[int, Weights]) -> None:
    assert_survives(tmp_path, int(0.6 * uninterrupted[0]), uninterrupted)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("tenth", range(10))
def test_a_host_may_die_at_any_moment(tmp_path: Path, tenth: int, uninterrupted: tuple[int, Weights]) -> None:
    for number in range(10):
        moment = 1 + (10 * tenth + number) * (uninterrupted[0] - 1) // 100
        assert_survives(tmp_path / str(number), moment, uninterrupted)
