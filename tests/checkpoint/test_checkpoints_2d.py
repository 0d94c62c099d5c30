"""Checkpoints of models on several mesh dimensions, through torch.distributed.checkpoint: any mesh loads
what any other has saved."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import fully_shard


class Pair(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def built(shape: tuple[int, int, int], seed: int, hidden: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(Pair(hidden), nn.Linear(6, 3))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    if shape[2] > 1:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(model[0], mesh["tp"], plan)
    for each in (model[0], model):
        fully_shard(each, mesh=mesh["replicate", "shard"])
    return model


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: full(param.detach()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name} {key}": full(value) for key, value in optimizer.state[param].items()}
    return found


def saved_and_loaded(
    path: str, first: tuple[int, int, int], second: tuple[int, int, int], hidden: int
) -> list[str]:
    """Names of what differs between what was saved and what another model loads."""
    model = built(first, 1, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optim}, checkpoint_id=path)

    other = built(second, 2, hidden)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    state, optim = get_state_dict(other, fresh)
    loaded = {"model": state, "optimizer": optim}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(other, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    want, got = everything(model, optimizer), everything(other, fresh)
    dist.barrier()
    return [name for name in want if not torch.equal(want[name], got[name])] + sorted(set(want) ^ set(got))


SHAPES = [(1, 2, 2), (1, 4, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2)]


@pytest.mark.thin(375)
@pytest.mark.parametrize("hidden", [8, 7], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "second",
    [shape if 2 in shape[1:] else pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES],
    ids=str,
)
def test_a_checkpoint_of_two_dimensions_is_loaded_by_any_mesh(
    world4: World, tmp_path: Path, second: tuple[int, int, int], hidden: int
) -> None:
    path = tmp_path / "checkpoint"
    assert world4.run(saved_and_loaded, str(path), SHAPES[0], second, hidden) == [[]] * 4
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize("first", SHAPES[1:], ids=str)
def test_a_checkpoint_of_any_mesh_is_loaded_by_two_dimensions(
    world4: World, tmp_path: Path, first: tuple[int, int, int]
) -> None:
    path = str(tmp_path / "checkpoint")
    assert world4.run(saved_and_loaded, path, first, SHAPES[0], 7) == [[]] * 4
