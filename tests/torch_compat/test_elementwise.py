"""Operations of optimizers on DTensors: as torch runs them, whatever their operands, and on local tensors where
these are placed alike."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from shardwise import fully_shard, shard_model
from shardwise.torch_compat import elementwise
from shardwise.torch_compat.dtensor import spec_of

Make = Callable[..., Tensor]
"""A DTensor of a shape, placed as the second argument says."""

SHARDED, REPLICATED = (Shard(0),), (Replicate(),)


def summands(make: Make) -> Tensor:
    return DTensor.from_local(make((4, 3)).to_local(), make((4, 3)).device_mesh, [Partial()])


ALIKE: dict[str, Callable[[Make], Any]] = {
    "by a number": lambda make: make((5, 3)).mul_(0.5).add_(2).div_(3),
    "of a scalar": lambda make: make((), REPLICATED).mul_(0.5).sqrt(),
    "more ranks than rows": lambda make: make((1, 3)).add_(1).sqrt() / 3,
    "by a plain scalar": lambda make: make((5, 3)).mul_(torch.tensor(0.5)),
    "sums": lambda make: make((5, 3)).add_(make((5, 3)), alpha=-2),
    "of two dtypes": lambda make: make((5, 3)).add_(make((5, 3)).bfloat16()),
    "along the other dim": lambda make: make((5, 3), (Shard(1),)).div_(make((5, 3), (Shard(1),))),
}
OTHERWISE: dict[str, Callable[[Make], Any]] = {
    "sharded and replicated": lambda make: make((4, 3)).mul_(make((4, 3), REPLICATED)),
    "replicated and sharded": lambda make: make((4, 3), REPLICATED).mul_(make((4, 3))),
    "along two dims": lambda make: make((4, 4)).add_(make((4, 4), (Shard(1),))),
    "a row for all": lambda make: make((4, 3)).add_(make((3,), REPLICATED)),
    "a row that one rank has": lambda make: make((4, 3)).add_(make((1, 3))),
    "a plain row": lambda make: make((4, 3)).add_(torch.ones(3)),
    "summands": lambda make: summands(make).mul_(2).full_tensor(),
    "summands and a number": lambda make: (summands(make) / 2).add_(1).full_tensor(),
    "root of summands": lambda make: summands(make).sqrt().full_tensor(),
    "whole numbers": lambda make: distribute_tensor(torch.arange(4), make((4,)).device_mesh, SHARDED) / 3,
    "every other column": lambda make: make((4, 4))[:, ::2].sqrt(),
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=False),
    "fused AdamW": lambda params: torch.optim.AdamW(params, amsgrad=True, fused=True),
    "fused Adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-3), fused=True),
    "fused SGD": lambda params: torch.optim.SGD(params, momentum=0.9, fused=True),
    "fused Adagrad": lambda params: torch.optim.Adagrad(params, fused=True),
}


def make_of_rank(shape: tuple[int, ...], placements: tuple[Placement, ...] = SHARDED) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32).reshape(shape)
    return distribute_tensor(full, mesh, placements)


def outcome(program: Callable[[Make], Any]) -> Any:
    """Value and placements of what ``program`` returns, or the type of its error."""
    try:
        made = program(make_of_rank)
    except Exception as error:
        return type(error).__name__
    if not isinstance(made, DTensor):
        return "", made.tolist()
    meta = spec_of(made).tensor_meta
    return str(made.placements), meta, made.to_local().dtype, made.to_local().tolist()


def compare(programs: dict[str, Callable[[Make], Any]]) -> list[str]:
    """The programs whose outcome differs from that of torch alone."""
    alone = {name: outcome(program) for name, program in programs.items()}
    elementwise.run_on_local_tensors()
    try:
        return [name for name, program in programs.items() if outcome(program) != alone[name]]
    finally:
        elementwise.run_as_torch()


@on_ranks(2)
def test_operands_that_are_placed_alike_never_reach_dtensor() -> None:
    reached = patch.object(elementwise, "_as_torch", side_effect=AssertionError("reached"))
    with reached, patch.object(elementwise, "_local_operands", wraps=elementwise._local_operands) as asked:
        assert compare(ALIKE) == []
    assert asked.call_count == 12  # of the operations in ALIKE


@on_ranks(2)
def test_other_operands_are_what_they_are_without_us() -> None:
    assert compare(OTHERWISE) == []


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_sharded_parameters_step_on_local_tensors(name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    model = copy.deepcopy(plain)
    shard_model(model, strategy="zero1", mesh=init_device_mesh("cpu", (2,)))
    optimizers = {each: OPTIMIZERS[name](list(each.parameters())) for each in (model, plain)}
    for step in range(3):
        for shard, full in zip(model.parameters(), plain.parameters(), strict=True):
            full.grad = full.detach().cos() + step
            shard.grad = distribute_tensor(full.grad, shard.device_mesh, shard.placements)
        with patch.object(elementwise, "_are_alike", wraps=elementwise._are_alike) as asked:
            for optimizer in optimizers.values():
                optimizer.step()
        assert asked.called
    for shard, full in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(shard.full_tensor(), full)


@on_ranks(2)
def test_only_steps_over_sharded_parameters_change_how_dtensors_compute() -> None:
    model = fully_shard(nn.Linear(3, 4), mesh=init_device_mesh("cpu", (2,)))
    other = nn.Parameter(make_of_rank((5, 3)))
    for params in ([*model.parameters()], [other]):
        for param in params:
            param.grad = torch.ones_like(param)
        with patch.object(elementwise, "_are_alike", wraps=elementwise._are_alike) as asked:
            torch.optim.AdamW(params, fused=True).step()
            make_of_rank((5, 3)).add_(make_of_rank((5, 3)))
            assert asked.call_count == (0 if params[0] is other else 8)  # four lists of two
