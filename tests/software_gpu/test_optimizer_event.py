"""While the optimizer runs on a side stream, behind which all-gathers wait by its event, others use the shards too."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import full
from torch import Tensor, nn

from shardwise import fully_shard
from shardwise.checkpoint import load_checkpoint, save_checkpoint
from shardwise.state import EMA, full_state_dict, iter_full_parameters
from software_gpu.launch import run_on_gpus
from software_gpu.training import join

LR, WIDTH, TOLERANCE = 3.0, 32, 1e-9
Values = dict[str, Tensor]


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()


def sharded_model() -> Any:
    model: Any = plain_model().cuda()
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def batch() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def weights_after_a_step() -> Values:
    model = plain_model()
    loss_of(model, batch()).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return {name: param.detach() for name, param in model.named_parameters()}


def trained(model: nn.Module, lr: float, steps: int) -> list[float]:
    """The losses of these steps."""
    x = batch().to(next(model.parameters()).device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def step_beside(model: Any, x: Tensor, optimizer: torch.optim.Optimizer, side: Any) -> Tensor:
    """The loss of a step whose optimizer runs on ``side``, for which nothing waits but by the event."""
    loss = loss_of(model, x)
    loss.backward()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    model.set_post_optim_event(side.record_event())
    optimizer.zero_grad()
    return loss.detach()


def loss_with(weights: Values) -> Values:
    return {
        "loss": loss_of(lambda x: torch.func.functional_call(plain_model(), weights, x), batch()).detach()
    }  # type: ignore[arg-type]


def full_values(model: nn.Module) -> Values:
    return {name: full(param.detach()) for name, param in model.named_parameters()}


class Sharded:
    """After a step whose optimizer has not run yet, on ``side``."""

    def __init__(self) -> None:
        self.model = sharded_model()
        self.x, self.side = batch().cuda(), torch.cuda.Stream()
        self.ema = EMA(self.model, decay=0.5)
        self.other = {
            name: torch.full_like(value, 0.01).cuda() for name, value in plain_model().state_dict().items()
        }
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        torch.cuda.synchronize()
        step_beside(self.model, self.x, optimizer, self.side)

    def loss(self) -> Values:
        with torch.no_grad():
            return {"loss": loss_of(self.model, self.x)}

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.side)


def forward(run: Sharded, _: Path) -> Values:
    return run.loss()


def full_state(run: Sharded, _: Path) -> Values:
    return full_state_dict(run.model, cpu=False, rank0_only=False)


def one_by_one(run: Sharded, _: Path) -> Values:
    return {name: value.clone() for name, value in iter_full_parameters(run.model)}


def copied(run: Sharded, _: Path) -> Values:
    return full_values(copy.deepcopy(run.model))


def saved(run: Sharded, folder: Path) -> Values:
    save_checkpoint(folder, run.model)
    run.model.load_state_dict(run.other)
    load_checkpoint(folder, run.model)
    return full_values(run.model)


def averaged(run: Sharded, _: Path) -> Values:
    run.ema.update()
    with run.ema.swap():
        return full_values(run.model)


def averages_run(run: Sharded, _: Path) -> Values:
    run.ema.update()
    with run.ema.swap():
        return run.loss()


def loaded(run: Sharded, _: Path) -> Values:
    run.join()
    run.model.load_state_dict(run.other)
    return run.loss()


def halved(run: Sharded, _: Path) -> Values:
    run.join()
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(0.5)
    return run.loss()


def expected() -> dict[Callable[[Sharded, Path], Values], Values]:
    new, before = (
        weights_after_a_step(),
        {name: param.detach() for name, param in plain_model().named_parameters()},
    )
    average = {name: (new[name] + before[name]) / 2 for name in new}
    half = {name: value / 2 for name, value in new.items()}
    other = {name: torch.full_like(value, 0.01) for name, value in new.items()}
    return {
        forward: loss_with(new),
        full_state: new,
        one_by_one: new,
        copied: new,
        saved: new,
        averaged: average,
        averages_run: loss_with(average),
        loaded: loss_with(other),
        halved: loss_with(half),
    }


def wrong_ones(folder: Path) -> list[str]:
    """What others got that is not of the weights that plain torch has."""
    found = []
    for act, values in expected().items():
        got = act(Sharded(), folder / act.__name__)
        torch.cuda.synchronize()
        for name, value in values.items():
            off = (got[name].cpu() - value).abs().max().item()
            if not off <= TOLERANCE:
                found.append(f"{act.__name__}: {name} is off by {off:.1e}")
                break
    return found


# --- a first unshard on a side stream -------------------------------------------------------------------


def losses_after_an_early_unshard() -> list[float]:
    model = sharded_model()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for block in model:
            block.unshard(async_op=True)
    return trained(model, LR, 2)


# --- an iteration as a CUDA graph -----------------------------------------------------------------------

GRAPH_LR = 0.5


def losses_with_a_graph() -> list[float]:
    """Two iterations, then a graph with events is captured and launched twice, then two more without it."""
    model = sharded_model()
    x, side, warm = batch().cuda(), torch.cuda.Stream(), torch.cuda.Stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=GRAPH_LR)

    def step() -> Tensor:
        loss = step_beside(model, x, optimizer, side)
        torch.cuda.current_stream().wait_stream(side)
        return loss

    losses = []
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(2):
            losses.append(step().clone())
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
        losses.append(captured.clone())
    for _ in range(2):
        losses.append(step().clone())
    return [loss.item() for loss in losses]


# --- all in the same processes, which take seconds to start ----------------------------------------------


def run_all(folder: Path) -> tuple[list[str], list[float], list[float]]:
    join()
    return wrong_ones(folder), losses_after_an_early_unshard(), losses_with_a_graph()


@pytest.fixture(scope="module", params=[1, *(pytest.param(late, marks=pytest.mark.slow) for late in (2, 4))])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_on_gpus(2, run_all, tmp_path_factory.mktemp("saved"), late=request.param)


def test_all_wait_for_the_optimizer_and_forward_for_later_changes(found: list[Any]) -> None:
    assert [wrong for wrong, _, _ in found] == [[]] * 2


def test_the_first_unshard_may_be_on_a_side_stream(found: list[Any]) -> None:
    for _, losses, _ in found:
        assert losses == pytest.approx(trained(plain_model(), LR, 2), rel=1e-9)


def test_an_event_from_the_other_side_of_a_capture_is_not_waited_for(found: list[Any]) -> None:
    for _, _, losses in found:
        assert losses == pytest.approx(trained(plain_model(), GRAPH_LR, 6), rel=1e-9)
