"""Folders of checkpoints: two jobs in one, what crashes leave in them, and who may read them."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpointing import OWN, inside, needs_own_disks, on_own_disk, refused_to_save, saved_step, value_at
from comparing import alike
from expecttest import assert_expected_inline
from harness import World
from meshed import refusal
from torch import nn

from shardwise import latest_checkpoint, load_checkpoint
from shardwise.checkpoint import folders
from shardwise.checkpoint import load as load_module
from shardwise.checkpoint.save import write
from shardwise.ranks.agreement import RankGroup


@pytest.mark.parametrize("name", ["step-1.partial", "step-1.previous", "partial", "a.b.removed"])
def test_any_name_that_is_saved_is_loaded(tmp_path: Path, name: str) -> None:
    for value in (1.0, 2.0):
        saved_step(tmp_path / name, value)
        assert value_at(tmp_path / name) == value
    assert inside(tmp_path) == [name]


# --- two jobs -------------------------------------------------------------------------------------


def another_job_saves(path: Path, value: float) -> None:
    """A whole save of somebody else, as it happens in the midst of ours."""
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    state = {"model": dict(model.state_dict()), "shared": {"value": value}}
    write(RankGroup(None), path, state, keep=None, is_staged=False)


def test_a_job_that_saves_where_another_one_does_is_told(tmp_path: Path) -> None:
    path, real = tmp_path / "step-1", folders._set_aside

    def with_another(save: Any) -> None:
        real(save)
        with mock.patch.object(folders, "_set_aside", real):
            another_job_saves(path, 3.0)

    with mock.patch.object(folders, "_set_aside", with_another):
        text = refusal(saved_step, path, 2.0)
    assert_expected_inline(
        text.replace(str(tmp_path), "RUN"),
        """FileExistsError: RUN/step-1: another job has saved to this path meanwhile, so this save could not be moved there. The checkpoint there is that of the other job. Give each job its own path.""",
    )
    assert value_at(path) == 3.0
    assert inside(tmp_path) == ["step-1"]


def test_the_checkpoint_before_comes_back_where_the_new_one_cannot_be_moved(tmp_path: Path) -> None:
    path, real = tmp_path / "step-1", Path.rename
    saved_step(path)

    def rename(place: Path, target: Path) -> Path:
        if place.name.endswith(".partial"):
            raise OSError("the disk is away")
        return real(place, target)

    with mock.patch.object(Path, "rename", rename):
        assert "the disk is away" in refusal(saved_step, path, 2.0)
    assert inside(tmp_path) == ["step-1"]
    assert value_at(path) == 1.0


REPLACED = "was replaced or removed by another job while it was read. Load it again"


@pytest.mark.parametrize("moment", ["opened", "read_objects", "check_records"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_load_is_of_one_save_though_another_job_saves_there(
    tmp_path: Path, moment: str, verify: bool
) -> None:
    path, model = tmp_path / "last", nn.Linear(2, 2)
    another_job_saves(path, 1.0)
    real, others = getattr(load_module, moment), []

    def before_another(*args: Any) -> Any:
        result = real(*args)
        if not others:
            others.append(True)
            another_job_saves(path, 3.0)
        return result

    with mock.patch.object(load_module, moment, before_another), open_files_stay_the_same():
        if moment == "opened":  # its files are known, but not open
            before = model.weight.clone()
            text = refusal(load_checkpoint, path, model, verify=verify)
            assert text.startswith(f"FileNotFoundError: {path} {REPLACED}")
            assert torch.equal(model.weight, before)
        else:
            assert load_checkpoint(path, model, verify=verify).shared["value"] == 1.0
            assert model.weight.unique().tolist() == [1.0]
    assert others
    assert value_at(path) == 3.0


@contextmanager
def open_files_stay_the_same() -> Iterator[None]:
    handles = Path("/proc/self/fd")
    before = inside(handles) if handles.exists() else None
    yield
    assert before is None or inside(handles) == before


def test_more_files_than_are_kept_open(world2: World, tmp_path: Path) -> None:
    path, model = tmp_path / "last", nn.Linear(2, 2)
    world2.run(saved_step, path)
    with mock.patch.object(folders, "_MOST_OPEN", 1):
        load_checkpoint(path, model)
    assert model.weight.unique().tolist() == [1.0]


# --- what crashes leave behind --------------------------------------------------------------------


@pytest.fixture(scope="module")
def dead_token() -> str:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as processes:
        return processes.submit(folders.new_token).result()


def left_behind(directory: Path, name: str, token: str | None, kind: str, *files: str) -> str:
    folder = directory / (f".{name}.{token}.{kind}" if token else f".{name}.{kind}")
    folder.mkdir()
    for each in files or ("__0_0.distcp", "__1_0.distcp"):
        (folder / each).write_bytes(b"half")
    return folder.name


def test_remains_of_dead_saves_are_removed_and_nothing_else(tmp_path: Path, dead_token: str) -> None:
    own = folders.new_token()
    of_another_host = "0badc0de" + own[8:]
    for kind in ("partial", "removed", "previous"):
        left_behind(tmp_path, "step-1", dead_token, kind)
    # Of steps that are never saved again, a day old: of another host, and from before there were tokens.
    for token in (of_another_host, None):
        folder = tmp_path / left_behind(tmp_path, "step-2", token, "partial")
        for each in [*folder.iterdir(), folder]:
            os.utime(each, (time.time() - 2 * folders.ABANDONED_S,) * 2)
    stays = [
        left_behind(tmp_path, "step-4", of_another_host, "partial"),  # new: it may still go on
        left_behind(tmp_path, "step-5", dead_token, "partial", "thesis.tex"),  # not only ours
        left_behind(tmp_path, "step-6", dead_token, "previous", ".metadata"),  # a checkpoint, of a crash
        left_behind(tmp_path, "step-7", own, "partial"),  # of a save in this process
    ]
    with folders.running(own):
        saved_step(tmp_path / "step-10")
    assert inside(tmp_path) == sorted([*stays, "step-10"])
    saved_step(tmp_path / "step-11")
    assert inside(tmp_path) == sorted([*stays[:-1], "step-10", "step-11"])


def test_remains_of_an_interrupted_removal_are_no_checkpoints_and_are_removed(
    tmp_path: Path, dead_token: str
) -> None:
    for step in (1, 2, 3):
        saved_step(tmp_path / f"step-{step}")
    with (
        mock.patch("shutil.rmtree", side_effect=OSError("the disk is away")),
        pytest.raises(OSError, match=r"step-4 is saved, but what it replaces could not be removed.*away"),
    ):
        saved_step(tmp_path / "step-4", keep=1)
    assert any(name.endswith(".removed") for name in inside(tmp_path))
    assert refusal(load_checkpoint, tmp_path / "step-3", nn.Linear(2, 2)).startswith("FileNotFoundError")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-4"
    # What another's crash has set aside is a checkpoint as any other, and too old.
    (tmp_path / "step-1").rename(tmp_path / f".step-1.{dead_token}.previous")
    saved_step(tmp_path / "step-5", 5.0, keep=1)
    assert inside(tmp_path) == ["step-5"]
    assert value_at(tmp_path / "step-5") == 5.0


def test_a_checkpoint_that_a_crash_set_aside_is_found(tmp_path: Path, dead_token: str) -> None:
    saved_step(tmp_path / "step-1", 7.0)
    (tmp_path / "step-1").rename(tmp_path / f".step-1.{dead_token}.previous")
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert value_at(latest) == value_at(tmp_path / "step-1") == 7.0
    saved_step(tmp_path / "step-2", 8.0)
    assert value_at(tmp_path / "step-1") == 7.0
    saved_step(tmp_path / "step-1", 9.0)
    assert value_at(tmp_path / "step-1") == 9.0
    assert inside(tmp_path) == ["step-1", "step-2"]


# --- disks of hosts -------------------------------------------------------------------------------


@needs_own_disks
def test_a_failed_save_to_disks_of_hosts_leaves_nothing(world2: World, tmp_path: Path) -> None:
    told = alike(world2.run(on_own_disk, str(tmp_path), refused_to_save, OWN / "a/b/step-1"))
    assert "__1_0.distcp is missing" in told
    assert "on a file system that all of them share" in told
    assert not any(each.is_file() for each in tmp_path.rglob("*"))


# --- permissions ----------------------------------------------------------------------------------


@contextmanager
def as_nobody() -> Iterator[None]:
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "."])
@pytest.mark.parametrize("verify", [True, False])
def test_what_may_not_be_read_is_not_called_damaged(name: str, verify: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "step-1"
        saved_step(path)
        Path(place).chmod(0o755)
        (path / name).chmod(0)
        model = nn.Linear(2, 2)
        before = model.weight.clone()
        try:
            with as_nobody():
                text = refusal(load_checkpoint, path, model, verify=verify)
                with pytest.raises(PermissionError):
                    load_checkpoint(path, model, verify=verify)
        finally:
            (path / name).chmod(0o755)
    assert text.startswith("PermissionError: ")
    assert f"{path / '.metadata' if name == '.' else path / name} may not be read by user " in text
    assert "damaged" not in text
    assert torch.equal(model.weight, before)
