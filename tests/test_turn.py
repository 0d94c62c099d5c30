"""Where forward turns into backward: what both of them use there is gathered once."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from harness import World
from models import WIDTH, random_batch
from reference import full
from torch import Tensor, nn

from shardwise import fully_shard


class Path(nn.Module):
    """Runs its blocks in the order that is asked for, and as often."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.outlet = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, order: Sequence[int] = (0, 1, 2)) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.outlet(x)


def path(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Path().double()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model)


def step(model: nn.Module, *order: int) -> None:
    model(random_batch(dist.get_rank(), 4), order).pow(2).mean().backward()


def gathers_of(model: Any, *order: int) -> str:
    """What a step gathers before backward, and in it."""
    gathered: list[str] = []

    def note(event: str, name: str) -> None:
        if event == "gather":
            gathered.append(name.removeprefix("blocks."))

    model._shardwise_member.schedule.observe(note)
    loss = model(random_batch(dist.get_rank(), 4), order).pow(2).mean()
    gathered.append("|")
    loss.backward()
    model._shardwise_member.schedule.observe(None)
    return " ".join(gathered)


def gathers_of_steps(*orders: Sequence[int], **options: Any) -> list[str]:
    model = path(**options)
    return [gathers_of(model, *order) for order in orders]


IN_ORDER = (0, 1, 2)


def test_the_group_that_backward_begins_with_is_gathered_once_from_the_second_step_on(world2: World) -> None:
    for steps in world2.run(gathers_of_steps, IN_ORDER, IN_ORDER, IN_ORDER):
        assert_expected_inline(
            "\n".join(steps),
            """\
Path 0 1 2 | 2 1 0
Path 0 1 2 | 1 0
Path 0 1 2 | 1 0""",
        )


def test_it_stays_that_group_and_costs_no_gather_where_steps_go_otherwise(world2: World) -> None:
    for steps in world2.run(gathers_of_steps, IN_ORDER, IN_ORDER, (2, 1, 0), (2, 1, 0), (0, 1), IN_ORDER):
        assert_expected_inline(
            "\n".join(steps),
            """\
Path 0 1 2 | 2 1 0
Path 0 1 2 | 1 0
Path 0 2 1 | 0 1
Path 2 1 0 | 0 1
Path 2 0 1 | 1 0
Path 0 1 2 | 1 0""",
        )


def test_what_runs_twice_is_freed_in_between(world2: World) -> None:
    for steps in world2.run(gathers_of_steps, (2, 0, 1, 2), (2, 0, 1, 2)):
        assert steps[1] == "Path 2 0 1 2 | 2 1 0 2"


def test_what_is_to_be_freed_is(world2: World) -> None:
    for steps in world2.run(gathers_of_steps, IN_ORDER, IN_ORDER, reshard_after_forward=True):
        assert steps[1] == "Path 0 1 2 | 2 1 0"


def last_events_of_a_forward(change: Callable[[Any], Any]) -> list[str]:
    """What a forward does with the last block, after ``change`` of a model that has made a step."""
    model = path()
    step(model, *IN_ORDER)
    change(model)
    events: list[str] = []
    model._shardwise_member.schedule.observe(lambda event, name: events.append(f"{event} {name}"))
    model(random_batch(0, 4))
    return events[-2:]


def frees_last_block(model: Any) -> None:
    model.blocks[2].requires_grad_(False).set_unshard_in_backward(False)


def freezes_blocks(model: Any) -> None:
    model.blocks.requires_grad_(False)  # no gradient flows back from the outlet


@pytest.mark.parametrize("change", [frees_last_block, freezes_blocks])
def test_what_backward_does_without_is_freed(world2: World, change: Callable[[Any], Any]) -> None:
    assert world2.run(last_events_of_a_forward, change) == [["forward blocks.2", "free blocks.2"]] * 2


CROSSED = ((0, 1), (1, 0))


def crossed_gradients(steps: int) -> tuple[dict[str, Tensor | None], list[str]]:
    """Ranks run the blocks in different orders, which they may where all are gathered before."""
    model = path()
    blocks = list(model.blocks)[:2]
    model.set_modules_to_forward_prefetch(blocks)
    model.set_modules_to_backward_prefetch(blocks[::-1])
    for each in blocks:
        each.set_modules_to_forward_prefetch([])
        each.set_modules_to_backward_prefetch([])
    gathers = []
    for _ in range(steps):
        model.zero_grad()
        gathers.append(gathers_of(model, *CROSSED[dist.get_rank()]))
    return {name: full(param.grad) for name, param in model.named_parameters()}, gathers


def plain_gradients() -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = Path().double()
    for rank, order in enumerate(CROSSED):
        (model(random_batch(rank, 4), order).pow(2).mean() / 2).backward()
    return {name: full(param.grad) for name, param in model.named_parameters()}


def test_ranks_that_end_differently_keep_nothing_but_the_roots(world2: World) -> None:
    expected = plain_gradients()
    for actual, gathers in world2.run(crossed_gradients, 3):
        assert gathers == ["Path 0 1 | 1 0"] * 3
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def comparisons() -> list[int]:
    """How many reductions of a maximum each forward begins with."""
    model = path()
    counted: list[int] = []
    plain = dist.all_reduce

    def count(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        counted[-1] += op == dist.ReduceOp.MAX
        return plain(tensor, op, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", count):
        for index in range(5):
            counted.append(0)
            with torch.set_grad_enabled(index != 1):  # an evaluation in between says nothing
                loss = model(random_batch(0, 4)).pow(2).mean()
            if index != 1:
                loss.backward()
    return counted


class Fails(Exception):
    pass


def gathers_after_a_failure() -> list[str]:
    """The first forward ends before it has come to the last block."""
    model = path()

    def fail(*_: Any) -> None:
        raise Fails

    hook = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(Fails):
        model(random_batch(0, 4))
    hook.remove()
    return [gathers_of(model, *IN_ORDER) for _ in range(3)]


def test_a_forward_that_failed_is_not_what_is_compared(world2: World) -> None:
    first, second, third = "Path 0 1 2 | 2 1 0", "Path 0 1 2 | 1 0", "Path 0 1 2 | 1 0"
    assert world2.run(gathers_after_a_failure) == [[first, second, third]] * 2


def changes_in_last_block() -> list[str]:
    """An edit inside forward of the block that is kept is refused by that forward, as of those that are freed."""
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
    return [gathers_of(model, *IN_ORDER) for _ in range(2)]


def test_an_edit_of_what_is_kept_is_refused_where_it_happens(world2: World) -> None:
    assert world2.run(changes_in_last_block) == [["Path 0 1 2 | 1 0"] * 2] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_compare_once(request: pytest.FixtureRequest, world: int) -> None:
    run = request.getfixturevalue(f"world{world}").run
    assert run(comparisons) == [[0, 0, int(world > 1), 0, 0]] * world
