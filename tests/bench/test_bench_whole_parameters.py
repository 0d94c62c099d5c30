"""The classes that bench/whole_parameters.py steps train on ranks as in one process, and go on on others."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import World
from torch import Tensor, nn
from whole_parameters import Shampoo, Spread, _row

from shardwise import fully_shard, load_checkpoint, save_checkpoint
from shardwise.optim import WholeParameters

BATCH = 12  # on 1, 3 and 4 ranks alike
OPTIONS: dict[str, dict[str, Any]] = {
    "Shampoo here": {"lr": 0.05, "period": 2},
    "SOAP": {"lr": 0.05, "precondition_frequency": 2},
    "Shampoo": {"lr": 0.05, "preconditioning_compute_steps": 2},
}


def optimizer_class(name: str) -> Any:
    if name == "Shampoo here":
        return Shampoo
    return getattr(pytest.importorskip("pytorch_optimizer"), name)


def network() -> nn.Module:
    """Rows that 3 and 4 do not divide, more matrices than ranks, and gradients of full rank."""
    torch.manual_seed(1)
    layers = [layer for _ in range(5) for layer in (nn.Linear(7, 7), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step % 2)  # two batches, in turns
    inputs = torch.randn(BATCH, 7, generator=generator, dtype=torch.float64)
    return inputs, inputs.sin().cumsum(1)


def losses_of(model: nn.Module, optimizer: Any, steps: range, parts: int, rank: int | None) -> list[float]:
    """Mean losses over a part of the batches; without a rank over all parts, one after the other."""
    found = []
    for step in steps:
        inputs, targets = (each.chunk(parts) for each in batch(step))
        mine = range(parts) if rank is None else [rank]
        losses = [(model(inputs[part]) - targets[part]).pow(2).mean() / len(mine) for part in mine]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(loss.item() for loss in losses))
    return found


def plain_losses(name: str, before: int, after: int) -> list[float]:
    """One process, and nothing of shardwise.

    Gradients are summed in the order of 4 ranks and then of 3: SOAP enlarges rounding, to 2e-7 of the losses
    here and to 1 % where gradients have not full rank, as any vectors may be the eigenvectors of 0 then.
    """
    model = network()
    optimizer = optimizer_class(name)(model.parameters(), **OPTIONS[name])
    first = losses_of(model, optimizer, range(before), 4, None)
    return first + losses_of(model, optimizer, range(before, before + after), 3, None)


def sharded_losses(
    name: str, steps: range, path: str, *, goes_on: bool = False, with_state: bool = True
) -> tuple[list[float], int]:
    """The losses, and how many parameters this rank owns; begins from ``path`` or leaves a checkpoint there."""
    model = network()
    fully_shard(model)
    optimizer = WholeParameters(optimizer_class(name), model.parameters(), **OPTIONS[name])
    if goes_on:
        load_checkpoint(path, model, optimizer if with_state else None)
    found = losses_of(model, optimizer, steps, dist.get_world_size(), dist.get_rank())
    losses = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(losses)
    if not goes_on:
        save_checkpoint(path, model, optimizer)
    return (losses / dist.get_world_size()).tolist(), sum(map(optimizer.owns, model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_of_four_ranks_goes_on_on_three_as_in_one_process(
    world3: World, world4: World, tmp_path: Path, name: str
) -> None:
    """Losses are those of the class in one process, before and after; roots fall due on both sides."""
    expected = plain_losses(name, 11, 9)
    assert expected[-2] < 0.95 * expected[0]  # of one batch
    path = str(tmp_path / "checkpoint")
    before = world4.run(sharded_losses, name, range(11), path)
    after = world3.run(sharded_losses, name, range(11, 20), path, goes_on=True)
    for losses, _ in before:
        assert losses == pytest.approx(expected[:11], rel=1e-11)
    for losses, _ in after:
        assert losses == pytest.approx(expected[11:], rel=1e-11)
    num_params = len(list(network().parameters()))
    for owned in ([count for _, count in before], [count for _, count in after]):
        assert sum(owned) == num_params
        assert max(owned) < num_params
    for losses, _ in world3.run(
        sharded_losses, name, range(11, 20), path, goes_on=True, with_state=False
    ):  # so the state matters
        assert losses != pytest.approx(expected[11:], rel=1e-3)


def test_shampoo_preconditions_by_the_fourth_roots_of_both_sums() -> None:
    """Against the matrix powers of the paper, in float64."""
    gradients = [batch(step)[0][:4, :5] for step in range(2)]
    param = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    optimizer = Shampoo([param], lr=1.0, eps=1e-2)
    left, right = (1e-2 * torch.eye(size, dtype=torch.float64) for size in (4, 5))
    expected = torch.zeros_like(param)
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
        left, right = left + gradient @ gradient.T, right + gradient.T @ gradient
        roots = [_inverse_fourth_root(each) for each in (left, right)]
        expected -= roots[0] @ gradient @ roots[1]
    torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-9)


def _inverse_fourth_root(matrix: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix)
    return u @ torch.diag(s**-0.25) @ vh


def test_rounds_with_roots_and_the_first_are_not_among_the_usual_ones() -> None:
    times = {"replicated": numpy.array([99.0, 10, 20, 50]), "ours": numpy.array([1.0, 5, 10, 10])}
    row = _row("SOAP", "ours", times, {"replicated": 8.0, "ours": 2.0}, has_roots=True)
    assert Spread(**row["step_to_replicated"]).median == 0.5
    assert (row["roots_to_replicated"], row["state_to_replicated"]) == (0.2, 0.25)
