"""Where forward turns into backward: what both of them use there is unsharded once."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from events import events_of
from expecttest import assert_expected_inline
from failure_models import Failure
from harness import World
from meshed import refusal
from models import WIDTH, built, random_batch, shard_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from towers import assert_close, gradients

from shardwise import fully_shard, inference, register_fsdp_forward_method
from shardwise.observe import memory_snapshot


class Path(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.outlet = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, order: Sequence[int] = (0, 1, 2)) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.outlet(x)


def path(**options: Any) -> Any:
    model = built(Path, seed=0)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model)


def step(model: nn.Module, *order: int) -> None:
    model(random_batch(dist.get_rank(), 4), order).pow(2).mean().backward()


def unsharded(events: list[str]) -> list[str]:
    return [event.removeprefix("unshard ") for event in events if event.startswith("unshard ")]


def unshards_of(model: Any, *order: int) -> str:
    events = events_of(model)
    loss = model(random_batch(dist.get_rank(), 4), order).pow(2).mean()
    events.append("unshard |")
    loss.backward()
    return " ".join(name.removeprefix("blocks.") for name in unsharded(events))


IN_ORDER = (0, 1, 2)


@on_ranks(2)
def test_the_block_that_backward_begins_with_is_unsharded_once() -> None:
    """It is the last of the tree, in whatever order they run, and kept in between if it runs twice."""
    model = path()
    orders = (IN_ORDER, IN_ORDER, (2, 1, 0), (2, 1, 0), (0, 1), IN_ORDER)
    assert_expected_inline(
        "\n".join(unshards_of(model, *order) for order in orders),
        """\
Path 0 1 2 | 1 0
Path 0 1 2 | 1 0
Path 0 2 1 | 0 1
Path 2 1 0 | 0 1
Path 2 0 1 | 1 0
Path 0 1 2 | 1 0""",
    )
    assert unshards_of(path(), 2, 0, 1, 2) == "Path 2 0 1 | 1 0 2"


@on_ranks(2)
def test_what_is_to_be_freed_is() -> None:
    model = path(reshard_after_forward=True)
    assert [unshards_of(model, *IN_ORDER) for _ in range(2)][1] == "Path 0 1 2 | 2 1 0"


def frees_last_block(model: Any) -> None:
    model.blocks[2].requires_grad_(False).set_unshard_in_backward(False)


def freezes_blocks(model: Any) -> None:
    model.blocks.requires_grad_(False)  # no gradient flows back from the outlet


@pytest.mark.parametrize("change", [frees_last_block, freezes_blocks])
@on_ranks(2)
def test_what_backward_does_without_is_freed(change: Callable[[Any], Any]) -> None:
    model = path()
    step(model, *IN_ORDER)
    change(model)
    events = events_of(model)
    model(random_batch(0, 4))
    assert events[-2:] == ["forward blocks.2", "free blocks.2"]


CROSSED = ((1, 2), (2, 1))


@on_ranks(2)
def test_lists_of_the_callers_are_unsharded_as_they_are() -> None:
    """Ranks run the blocks in different orders, which they may where all are unsharded before."""
    plain, model = built(Path, seed=0), path()
    for rank, order in enumerate(CROSSED):
        (plain(random_batch(rank, 4), order).pow(2).mean() / 2).backward()
    blocks = list(model.blocks)[1:]
    model.set_modules_to_forward_prefetch(blocks)
    model.set_modules_to_backward_prefetch(blocks[::-1])
    for each in blocks:
        each.set_modules_to_forward_prefetch([])
        each.set_modules_to_backward_prefetch([])
    unshards = []
    for _ in range(3):
        model.zero_grad()
        unshards.append(unshards_of(model, *CROSSED[dist.get_rank()]))
    assert unshards == ["Path 1 2 | 2 1"] * 3
    assert_close(gradients(model), gradients(plain))


def trained_where_one_rank_needs_no_gradients() -> list[str]:
    """Blocks are frozen; from the third step on, the input of rank 1 wants no gradient."""
    model = path()
    blocks = list(model.blocks)
    model.blocks.requires_grad_(False)
    model.set_modules_to_backward_prefetch(blocks[::-1])
    for each in blocks:
        each.set_modules_to_backward_prefetch([])
    events = events_of(model)
    for index in range(4):
        events.clear()
        inputs = random_batch(0, 4).requires_grad_(index < 2 or dist.get_rank() == 0)
        model(inputs).pow(2).mean().backward()
    return unsharded(events)


def test_they_are_what_ranks_have_in_common_whose_gradients_flow_differently(world2: World) -> None:
    one, other = world2.run(trained_where_one_rank_needs_no_gradients)
    assert one == other


@on_ranks(2)
def test_an_edit_of_what_is_kept_is_refused_where_it_happens() -> None:
    """Refused by the forward that makes it, as an edit of a block that is freed."""
    model = path()
    step(model, *IN_ORDER)
    last = model.blocks[2]

    def edit(*_: Any) -> None:
        with torch.no_grad():
            last.weight.mul_(0.5)

    hook = last.register_forward_pre_hook(edit)
    with pytest.raises(RuntimeError, match=r"blocks\.2\.weight: changed in place"):
        model(random_batch(0, 4))
    hook.remove()
    assert [unshards_of(model, *IN_ORDER) for _ in range(2)] == ["Path 0 1 2 | 1 0"] * 2


@pytest.mark.parametrize("meanwhile", ["nothing", "sharding around", "another forward"])
@on_ranks(2)
def test_an_edit_between_forward_and_backward_is_refused_by_name(meanwhile: str) -> None:
    """Also where a module around the model is sharded, and where another forward has left it out."""
    model = path()
    step(model, *IN_ORDER)
    loss = model(random_batch(0, 4)).pow(2).mean()
    if meanwhile == "sharding around":
        fully_shard(nn.Sequential(model, nn.Linear(WIDTH, WIDTH)))
    with torch.no_grad():
        if meanwhile == "another forward":
            model(random_batch(1, 4), (0,))  # without the block that was kept
        model.blocks[2].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"blocks\.2\.weight: changed in place between"):
        loss.backward()


@on_ranks(2)
def test_modules_around_it_see_shards() -> None:
    model = path()
    seen: list[bool] = []
    model.outlet.register_forward_pre_hook(
        lambda *_: seen.append(isinstance(model.blocks[2].weight, DTensor))
    )
    for _ in range(3):
        step(model, *IN_ORDER)
    assert seen == [True] * 3


def sharded_layers(make: Any = nn.Sequential) -> Any:
    torch.manual_seed(0)
    model = make(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()
    for each in model:
        fully_shard(each)
    return fully_shard(model)


@on_ranks(2)
def test_ranks_of_which_one_has_failed_go_on_together() -> None:
    """One rank's forward fails behind the last block."""
    model = sharded_layers()
    mean_of_squares(model, random_batch(0, 4)).backward()
    mean_of_squares(model, random_batch(0, 4)).backward()

    def fail(*_: Any) -> None:
        if dist.get_rank() == 0:
            raise Failure

    hook = model.register_forward_hook(fail)
    with suppress(Failure):
        model(random_batch(0, 4))
    hook.remove()
    events = events_of(model)
    mean_of_squares(model, random_batch(0, 4)).backward()
    unshards = unsharded(events)
    assert [name for name in unshards if name != "Sequential"] == ["0", "1", "2", "1", "0"]


@on_ranks(2)
def test_another_forward_unshards_it_anew() -> None:
    model = path()
    step(model, *IN_ORDER)
    loss = model(random_batch(0, 4)).pow(2).mean()
    events = events_of(model)
    with torch.no_grad():
        model(random_batch(1, 4))
    loss.backward()
    unshards = unsharded(events)
    assert " ".join(name.removeprefix("blocks.") for name in unshards) == "0 1 2 Path 2 1 0"


class Measured(nn.Sequential):
    def measure(self, x: Tensor) -> Tensor:
        return x.abs().mean()


@on_ranks(2)
def test_a_forward_of_one_rank_that_unshards_nothing_frees_nothing() -> None:
    """Between forward and backward one rank runs it without blocks."""
    model = sharded_layers(Measured)
    model.set_modules_to_forward_prefetch([])
    register_fsdp_forward_method(model, "measure")
    mean_of_squares(model, random_batch(0, 4)).backward()
    loss = mean_of_squares(model, random_batch(0, 4))
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.measure(random_batch(0, 4))
    events = events_of(model)
    loss.backward()
    unshards = unsharded(events)
    assert [name for name in unshards if name != "Measured"] == ["1", "0"]


@on_ranks(2)
def test_modules_of_one_group_are_kept_together() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    fully_shard(model[0])
    fully_shard(model[1])
    fully_shard([model[2], model[3]])
    fully_shard(model)
    mean_of_squares(model, random_batch(0, 4)).backward()
    events = events_of(model)
    mean_of_squares(model, random_batch(0, 4)).backward()
    assert unsharded(events) == ["Sequential", "0", "1", "2, 3", "1", "0"]


@on_ranks(2)
def test_inference_keeps_nothing_for_a_backward() -> None:
    model = path()
    step(model, *IN_ORDER)
    with inference(model, budget_bytes=0), torch.enable_grad():
        model(random_batch(0, 4))
        assert [group.name for group in memory_snapshot(model).groups if group.state == "unsharded"] == [
            "Path"
        ]


@on_ranks(2)
def test_what_the_caller_unshards_meanwhile_is_the_callers() -> None:
    """No forward came between: it is in memory already, and stays there for the next."""
    model = path()
    step(model, *IN_ORDER)
    model(random_batch(0, 4))
    events = events_of(model)
    model.blocks[2].unshard()
    model(random_batch(0, 4))
    assert unsharded(events) == ["blocks.0", "blocks.1"]


@on_ranks(2)
def test_a_group_that_may_be_unused_needs_one_around_it() -> None:
    model = built(Path, seed=0)
    fully_shard(model.blocks[2])
    model.blocks[2].set_may_be_unused()
    message = refusal(model, random_batch(0, 4))
    assert message.startswith("RuntimeError: Linear: set_may_be_unused() was called on it, but no sharded")
    fully_shard(model)
    model(random_batch(0, 4)).sum().backward()


@on_ranks(2)
def test_groups_inside_that_may_be_unused_are_freed() -> None:
    model = built(Path, seed=0)
    model.blocks[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    fully_shard(model.blocks[2][1])
    shard_tower(model)
    model.blocks[2][1].set_may_be_unused()
    step(model, *IN_ORDER)
    events = events_of(model)
    loss = model(random_batch(0, 4)).pow(2).mean()
    in_forward = [event for event in events if "blocks.2" in event]
    loss.backward()
    assert_expected_inline(
        "\n".join(in_forward),
        """\
unshard blocks.2
unshard blocks.2.1
forward blocks.2
forward blocks.2.1
free blocks.2.1""",
    )
