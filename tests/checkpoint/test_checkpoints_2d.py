"""Checkpoints of models on several mesh dimensions, through torch.distributed.checkpoint: any mesh loads
what any other has saved."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointing import Pair, everything
from comparing import assert_equal
from meshed import device_mesh
from on_ranks import on_ranks
from reference import adamw
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import fully_shard


def built(shape: tuple[int, int, int], seed: int, hidden: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(Pair(6, hidden), nn.Linear(6, 3))
    mesh = device_mesh(shape, ("replicate", "shard", "tp"))
    if shape[2] > 1:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(model[0], mesh["tp"], plan)
    for each in (model[0], model):
        fully_shard(each, mesh=mesh["replicate", "shard"])
    return model, adamw(model)


BOTH = (1, 2, 2)
SHAPES = [BOTH, (1, 4, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2)]


@pytest.mark.parametrize(
    ("first", "second", "hidden"),
    [
        (BOTH, (2, 2, 1), 8),
        ((2, 1, 2), BOTH, 7),  # shards of different sizes
        *(
            pytest.param(*pair, hidden, marks=pytest.mark.slow)
            for shape in SHAPES
            for pair in ((BOTH, shape), (shape, BOTH))
            for hidden in (7, 8)
        ),
    ],
    ids=str,
)
@on_ranks(4)
def test_a_checkpoint_of_any_mesh_is_loaded_by_any_other(
    tmp_path: Path, first: tuple[int, int, int], second: tuple[int, int, int], hidden: int
) -> None:
    path = str(tmp_path / "checkpoint")
    model, optimizer = built(first, 1, hidden)
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optim}, checkpoint_id=path)

    other, fresh = built(second, 2, hidden)
    state, optim = get_state_dict(other, fresh)
    loaded = {"model": state, "optimizer": optim}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(other, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert_equal(everything(other, fresh), everything(model, optimizer))
