"""`python -m shardwise doctor`: what it finds where all is well, and where something is not."""

import argparse
import contextlib
import io
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from shardwise.commands import doctor
from shardwise.doctor.job import Surroundings

AROUND = Surroundings(
    versions={"python": "3.11.9", "torch": "2.13.0", "shardwise": "0.1.0"},
    environment={"NCCL_DEBUG": "WARN", "HOME": "/home/ada", "NCCL_SOCKET_IFNAME": "eth0"},
    host="node0",
)


def examined(*options: str, defects: dict[int, dict[str, Any]] | None = None) -> tuple[int, str]:
    """The exit status and the output of the command on this rank, with something else around some ranks."""
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    printed = io.StringIO()
    around = replace(AROUND, **(defects or {}).get(dist.get_rank(), {}))
    with contextlib.redirect_stdout(printed):
        status = doctor.run(parser.parse_args(["--timeout", "20", *options]), around)
    return status, printed.getvalue()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_job_where_all_is_well(request: pytest.FixtureRequest, size: int) -> None:
    (status, text), *others = request.getfixturevalue(f"world{size}").run(examined)
    assert others == [(0, "")] * (size - 1)
    assert status == 0
    assert_expected_inline(
        text,
        """\
verdict  what         found
ok       versions     python 3.11.9, torch 2.13.0, shardwise 0.1.0
ok       environment  NCCL_DEBUG=WARN

2 ok, 0 slow, 0 wrong
""",
    )


def test_another_version_on_one_rank_is_wrong(world2: Any) -> None:
    other = {"versions": {**AROUND.versions, "torch": "2.12.1"}}
    (status, text), (other_status, _) = world2.run(examined, defects={1: other})
    assert (status, other_status) == (1, 1)
    assert "wrong    versions     torch is 2.13.0 on rank 0, 2.12.1 on rank 1. Install the same" in text


def test_another_environment_on_one_rank_is_wrong(world2: Any) -> None:
    other = {"environment": {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_ALGO": "Ring"}}
    (status, text), _ = world2.run(examined, defects={1: other})
    assert status == 1
    assert_expected_inline(
        "\n".join(line for line in text.splitlines() if line.startswith("wrong")),
        """\
wrong    environment  NCCL_DEBUG is WARN on rank 0, nothing on rank 1. Export the same on all machines.
wrong    environment  NCCL_ALGO is nothing on rank 0, Ring on rank 1. Export the same on all machines.""",
    )
