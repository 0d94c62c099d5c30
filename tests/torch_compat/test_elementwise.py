"""Operations of optimizers on DTensors: as torch runs them, whatever their operands, and on local tensors where
these are placed alike."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from shardwise import fully_shard
from shardwise.torch_compat import optimizers
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
    optimizers.run_on_local_tensors()
    try:
        return [name for name, program in programs.items() if outcome(program) != alone[name]]
    finally:
        optimizers.run_as_torch()


@on_ranks(2)
def test_operands_that_are_placed_alike_never_reach_dtensor() -> None:
    reached = patch.object(optimizers, "_as_torch", side_effect=AssertionError("reached"))
    with reached, patch.object(optimizers, "_local_operands", wraps=optimizers._local_operands) as asked:
        assert compare(ALIKE) == []
    assert asked.call_count == 12  # of the operations in ALIKE


@on_ranks(2)
def test_other_operands_are_what_they_are_without_us() -> None:
    assert compare(OTHERWISE) == []


class Decaying(torch.optim.SGD):
    """One that is not known to be elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.5).add_(param.grad)


@on_ranks(2)
def test_only_steps_over_sharded_parameters_change_how_dtensors_compute() -> None:
    model = fully_shard(nn.Linear(3, 4), mesh=init_device_mesh("cpu", (2,)))
    other = nn.Parameter(make_of_rank((5, 3)))
    for params in ([*model.parameters()], [other]):
        for param in params:
            param.grad = torch.ones_like(param)
        before = [param.full_tensor().detach() for param in params]
        with patch.object(optimizers, "are_alike", wraps=optimizers.are_alike) as asked:
            Decaying(params).step()
            make_of_rank((5, 3)).add_(make_of_rank((5, 3)))
            assert asked.call_count == (0 if params[0] is other else 6)  # operands
        for param, old in zip(params, before, strict=True):
            assert torch.equal(param.full_tensor(), old * 0.5 + 1)
