"""Ranks that disagree on what to communicate: the error says who waited for what.

A process group with a timeout of two seconds plays the one of half an hour.
"""

import datetime
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from meshed import outcome
from models import shard_tower
from on_ranks import on_ranks
from test_failures import Forks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import fully_shard, no_sync

ROOT = Path(__file__).parents[2]


def impatient_mesh() -> DeviceMesh:
    pg: Any = dist.new_group(timeout=datetime.timedelta(seconds=2))
    return DeviceMesh.from_group(pg, "cpu")


@on_ranks(2)
def test_ranks_that_accumulate_different_numbers_of_microbatches_are_told_so() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4), mesh=impatient_mesh())
    count = [3, 2][dist.get_rank()]

    def accumulate() -> None:
        for microbatch in range(count):
            with nullcontext() if microbatch == count - 1 else no_sync(model):
                model(torch.ones(2, 4)).sum().backward()

    text = outcome(accumulate)
    assert re.search(
        r"rank 0 waiting for the \S+ of 'Linear' \(step \d+, \w+\); rank 1 waiting for the reduction of "
        r"'Linear' \(step \d+, backward\)",
        text,
    )
    assert "numbers of microbatches or steps that differ by rank" in text


SAVED_BY_ONE = """
import torch
import torch.distributed as dist
from torch import nn
from shardwise import fully_shard, save_checkpoint

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 0:
    save_checkpoint("step-1", model)
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_a_rank_that_saves_alone_is_told_that_the_other_has_come_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVED_BY_ONE)
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 train.py".split()
    paths = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    (line,) = [each for each in done.stderr.splitlines() if "CommunicationError: " in each]
    assert_expected_inline(
        line[line.index("CommunicationError: ") :],
        """CommunicationError: save_checkpoint failed (after step 1), because rank 1 has come to the end of its program, after step 1. Usual cause: numbers of microbatches or steps that differ by rank, or a call that all ranks have to make, such as save_checkpoint, and some do not. Run as many everywhere, and make such calls on all ranks.""",
    )


@on_ranks(2)
def test_a_rank_with_more_microbatches_is_told_who_has_stopped() -> None:
    torch.manual_seed(0)
    model = shard_tower(Forks(), mesh=impatient_mesh())

    def train() -> None:
        for _ in range([2, 1][dist.get_rank()]):
            model(torch.ones(2, 4), 0).sum().backward()

    text = outcome(train)
    expected = (
        r"rank 0 waiting for the all-gather of 'blocks.0' \(step \d+, forward\); rank 1 in no call of "
        r"shardwise. .* Usual cause: numbers of microbatches or steps that differ by rank"
    )
    assert re.search(expected if dist.get_rank() == 0 else "^accepted$", text), text
