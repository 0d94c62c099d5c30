"""`python -m shardwise doctor`: what it finds where all is well, and where something is not."""

import argparse
import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from shardwise import doctor
from shardwise.__main__ import main
from shardwise.commands import doctor as command
from shardwise.doctor import judge, judge_devices, table

VERSIONS = {"python": "3.11.9", "torch": "2.13.0", "shardwise": "0.1.0"}
AROUND: dict[str, Any] = {
    "versions": VERSIONS,
    "environment": {"NCCL_DEBUG": "WARN", "HOME": "/home/ada", "NCCL_SOCKET_IFNAME": "eth0"},
    "host": "node0",
    "clock": time.time,
}


def steady(text: str) -> str:
    text = re.sub(r"/\S*/(\w+)", r"/\1", text)
    text = re.sub(r"\d+(\.\d+)? (us|ms|GB/s|GB|s)\b", r"N \2", text)
    return "\n".join(re.sub(r"  +", "  ", line) for line in text.splitlines())


def wrong(text: str) -> str:
    return "\n".join(line for line in steady(text).splitlines() if line.startswith(("wrong", "slow ")))


def examined(*options: str, defects: dict[int, dict[str, Any]] | None = None) -> tuple[int, str]:
    """The exit status and the output of the command on this rank, with something else around some ranks."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    printed = io.StringIO()
    around = AROUND | (defects or {}).get(dist.get_rank(), {})
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(doctor, "versions", side_effect=lambda: dict(around["versions"])),
        mock.patch.object(doctor, "os", SimpleNamespace(**vars(os) | {"environ": around["environment"]})),
        mock.patch.object(doctor, "time", SimpleNamespace(**vars(time) | {"time": around["clock"]})),
        mock.patch("platform.node", return_value=around["host"]),
    ):
        words = [option.format(rank=dist.get_rank()) for option in options]
        status = command.run(parser.parse_args(["--timeout", "12", "--device", "cpu", *words]))
    return status, printed.getvalue()


def test_two_ranks_where_all_is_well(world2: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (status, text), *others = world2.run(examined, "--folder", str(folder))
    assert others == [(0, "")]
    assert status == 0
    assert_expected_inline(
        steady(text),
        """\
verdict  what  found
ok  ranks  2 on one machine (node0)
ok  versions  python 3.11.9, torch 2.13.0, shardwise 0.1.0
ok  environment  NCCL_DEBUG=WARN
ok  clocks  at most N ms from that of rank 0
ok  folder /run  shared by all ranks; write, fsync and rename work; N GB free
ok  devices  cpu on all ranks
ok  mesh  shard 2, over gloo
ok  shard: all-gather  2 ranks, N us; N GB/s at 1 MiB, N GB/s at 32 MiB
ok  shard: reduce-scatter  2 ranks, N us; N GB/s at 1 MiB, N GB/s at 32 MiB
ok  shard: all-reduce  2 ranks, N us; N GB/s at 1 MiB, N GB/s at 32 MiB

10 ok, 0 slow, 0 wrong""",
    )
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_each_dimension_of_a_mesh_is_measured(world4: Any) -> None:
    (status, text), *others = world4.run(examined, "--mesh", "2x2", "--names", "replicate,shard")
    assert others == [(0, "")] * 3
    assert status == 0
    assert [line.split("  ")[1] for line in steady(text).splitlines() if "GB/s" in line] == [
        f"{dimension}: {kind}"
        for dimension in ("replicate", "shard")
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    ]
    assert "mesh  replicate 2 x shard 2, over gloo" in steady(text)


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_wrong(world2: Any, tmp_path: Path) -> None:
    for name in ("host0", "host1"):
        (tmp_path / name).mkdir()
    (status, text), (other, _) = world2.run(examined, "--folder", str(tmp_path) + "/host{rank}")
    assert (status, other) == (1, 1)
    assert_expected_inline(
        wrong(text),
        """\
wrong  folder /host0  rank 0 does not see what rank 1 wrote: it is not shared. Mount one file system there on all machines.
wrong  folder /host0  rank 1 does not see what rank 0 wrote: it is not shared. Mount one file system there on all machines.""",
    )


def test_a_folder_that_is_not_there_is_made_as_a_save_makes_it(world2: Any, tmp_path: Path) -> None:
    (status, text), (other, _) = world2.run(examined, "--folder", str(tmp_path / "runs" / "first"))
    assert (status, other) == (0, 0), text
    assert "shared by all ranks; write, fsync and rename work" in text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_wrong(world2: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    (status, text), (other, _) = world2.run(examined, "--folder", str(tmp_path / "runs" / "first"))
    assert (status, other) == (1, 1)
    assert_expected_inline(
        wrong(text), """wrong  folder /first  rank 0 cannot make it, as a save would: Not a directory."""
    )


def fast_clock() -> float:
    return time.time() + 90.0


def test_what_is_otherwise_on_one_rank_is_wrong(world2: Any, tmp_path: Path) -> None:
    """A folder that only rank 0 has, a clock that is off, other versions, another environment."""
    other = {
        "clock": fast_clock,
        "versions": {**VERSIONS, "torch": "2.12.1"},
        "environment": {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_ALGO": "Ring"},
    }
    folder = str(tmp_path) + "/host{rank}"
    (status, text), (other_status, _) = world2.run(examined, "--folder", folder, defects={1: other})
    assert (status, other_status) == (1, 1)
    assert "that of rank 1 is 90.0 s ahead of that of rank 0" in text
    assert_expected_inline(
        wrong(text),
        """\
wrong  versions  torch is 2.13.0 on rank 0, 2.12.1 on rank 1. Install the same everywhere.
wrong  environment  NCCL_DEBUG is WARN on rank 0, nothing on rank 1. Export the same on all machines.
wrong  environment  NCCL_ALGO is nothing on rank 0, Ring on rank 1. Export the same on all machines.
wrong  clocks  that of rank 1 is N s ahead of that of rank 0. Logs and traces of ranks cannot be compared. Start NTP (chrony) on that machine.
wrong  folder /host0  rank 1 cannot save there: it is not there, as it is on rank 0. Mount one file system there on all machines.""",
    )


def test_a_check_that_fails_on_one_rank_is_told_and_the_last(world2: Any) -> None:
    (status, text), (other, _) = world2.run(examined, defects={1: {"versions": None}})
    assert (status, other) == (1, 1)
    assert_expected_inline(
        steady(text),
        """\
verdict  what  found
ok  ranks  2 on one machine (node0)
wrong  versions  rank 1: TypeError: 'NoneType' object is not iterable

1 ok, 0 slow, 1 wrong""",
    )


def hosts_are_told(*options: str) -> str:
    return examined(*options, defects={rank: {"host": f"node{rank // 2}"} for rank in range(4)})[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--mesh", "2x3"), "ranks 0-3: --mesh holds 6 ranks, and the job has 4."),
        (("--mesh", "4x1", "--names", "shard"), "the mesh has 2 dimensions. Give as many different --names."),
    ],
)
def test_a_mesh_that_does_not_fit_is_wrong(world4: Any, options: tuple[str, ...], text: str) -> None:
    told, *_ = world4.run(hosts_are_told, *options)
    assert text in told
    assert "4 on 2 machines, 2 on each" in told


def test_a_mesh_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--mesh", "4xtwo"]) == 2
    assert "argument --mesh: invalid sizes value: '4xtwo'" in capsys.readouterr().err


def facts(*seconds: float, is_right: bool = True) -> list[dict[str, Any]]:
    return [
        {"ranks": ranks, "seconds": [1e-4, 1e-3, each], "is_right": is_right}
        for ranks, each in zip(([0, 2], [1, 3], [0, 2], [1, 3]), seconds, strict=True)
    ]


def test_wrong_sums_and_slow_links_are_told() -> None:
    found = [
        *judge("shard: all-reduce", facts(0.1, 0.1, 0.1, 0.1)),
        *judge("shard: all-gather", facts(0.1, 0.5, 0.1, 0.5)),
        *judge("shard: all-gather", facts(0.1, 0.1, 0.1, 0.1, is_right=False)),
    ]
    assert_expected_inline(
        table(found),
        """\
verdict  what               found
ok       shard: all-reduce  2 ranks, 100 us; 1.05 GB/s at 1 MiB, 0.34 GB/s at 32 MiB
slow     shard: all-gather  ranks 1, 3 take 5.0 times as long as most (100 us; 0.52 GB/s at 1 MiB, 0.03 GB/s at 32 MiB). Look at the links of their machines.
wrong    shard: all-gather  ranks 0-3 received wrong numbers. Memory, driver or network are broken there; train on other machines.

1 ok, 1 slow, 1 wrong""",
    )


def test_devices_that_are_taken_shared_or_unlike_are_told() -> None:
    device = {"name": "H200", "place": "node0 cuda:0", "uuid": "a"}
    device |= {"free": 139e9, "total": 140e9, "unreachable": []}
    other = {"name": "H100", "place": "node0 cuda:0", "uuid": "b"}  # of another process, which sees one
    other |= {"free": 20e9, "total": 80e9, "unreachable": [1]}
    assert_expected_inline(
        table([*judge_devices([device]), *judge_devices([device, other, device])]),
        """\
verdict  what     found
ok       devices  1 x H200, at least 139 GB free
wrong    devices  60 of 80 GB are taken on rank 1 (node0 cuda:0). End what else runs there.
slow     devices  that of rank 1 cannot access devices [1] of its machine directly. Copies between them pass through the host.
wrong    devices  ranks 0, 2 use the same one (node0 cuda:0). Start one process for each.
slow     devices  H100, H200: all wait for the slowest.

1 ok, 2 slow, 2 wrong""",
    )


SCRIPT = """
import os, sys, time
from shardwise.__main__ import main
from shardwise import doctor

def broken(pg, numel, device):
    if pg.rank() == 1:
        {defect}
    return doctor._all_gather(pg, numel, device)

doctor._COLLECTIVES["reduce-scatter"] = broken
sys.exit(main(["doctor", "--device", "cpu", "--timeout", "{timeout}"]))
"""


def started(tmp_path: Path, ranks: Iterable[int], defect: str = "pass", timeout: float = 20) -> list[str]:
    """What these of two ranks print that are processes of their own, and what they return, in a line."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    script = tmp_path / "doctor.py"
    script.write_text(SCRIPT.format(defect=defect, timeout=timeout))
    around = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    jobs = [
        subprocess.Popen(
            [sys.executable, script],
            env=around | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]
    try:
        printed = [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [f"{wrong(text)} -> {job.returncode}" for text, job in zip(printed, jobs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "timeout", "told", "other"),
    [
        (
            "raise RuntimeError('the driver\\n is old')",
            20,
            "wrong  shard: reduce-scatter  rank 1: RuntimeError: the driver is old -> 1",
            " -> 1",
        ),
        (
            "time.sleep(1000)",
            4,
            "wrong  shard: reduce-scatter  ranks 0, 1: shard: reduce-scatter did not end within N s. Either a rank does",
            " -> 1",
        ),
        ("os._exit(7)", 4, "wrong  shard: reduce-scatter  rank ", " -> 7"),
    ],
    ids=[
        "a rank that fails while others communicate",
        "a collective that does not end",
        "a process that ends",
    ],
)
def test_what_breaks_a_measurement_is_told(
    tmp_path: Path, defect: str, timeout: float, told: str, other: str
) -> None:
    first, second = started(tmp_path, range(2), defect, timeout)
    assert first.startswith(told)
    assert (first[-5:], second) == (" -> 1", other)
