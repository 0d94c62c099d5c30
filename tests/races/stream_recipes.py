"""Scenarios: modules that run a branch on a stream of its own, beside the rest.

Autograd runs a node, and accumulates the gradient of a leaf, on the stream that was current in forward; between two
streams it orders what is handed from node to node, and nothing else. The host's autograd knows no streams, so the
functions here enter the branch's stream and leave it, in forward and backward, and wait where autograd would.
"""

from collections.abc import Callable
from typing import Any

import torch
from models import Tower
from torch import Tensor, nn

from races.scenarios import LOW, WIDTH, Recipe, Step, mesh_of, scenario, tower, training
from races.simulation import Simulation
from shardwise import CommPolicy, fully_shard


class Branch:
    """A stream beside the computing one."""

    def __init__(self, simulation: Simulation) -> None:
        self._device = simulation.device
        self._stream = simulation.stream("branch")
        self._sum_is_done: Any = None

    def enter(self) -> None:
        self._device.current.append(self._stream)

    def leave(self) -> None:
        assert self._device.current.pop() is self._stream

    def wait_for_compute(self) -> None:
        self._stream.wait_stream(self._device.computing)

    def make_compute_wait(self) -> None:
        self._device.computing.wait_stream(self._stream)

    def record_sum(self) -> None:
        self._sum_is_done = self._device.computing.record_event()

    def wait_for_sum(self) -> None:
        self._stream.wait_event(self._sum_is_done)


class Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Branch) -> Tensor:
        ctx.branch = branch
        branch.wait_for_compute()
        branch.enter()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.branch.leave()
        ctx.branch.make_compute_wait()
        return gradients[0], None


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Branch) -> Tensor:
        ctx.branch = branch
        branch.leave()
        branch.make_compute_wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.branch.wait_for_sum()
        ctx.branch.enter()
        return gradients[0], None


class Add(torch.autograd.Function):
    """The sum of the branch and the rest, whose gradient goes to both."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor, branch: Branch) -> Tensor:
        ctx.branch = branch
        return one + other

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.branch.record_sum()
        return gradients[0], gradients[0], None


class Cross(torch.autograd.Function):
    """To the other stream by `there`, and back in backward by `back`; neither stream waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[], None], back: Callable[[], None]) -> Tensor:
        ctx.back = back
        there()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.back()
        return gradients[0], None, None


def to_compute(x: Tensor, branch: Branch) -> Any:
    """Back to the computing stream, while the branch goes on."""
    return Cross.apply(x, branch.leave, branch.enter)


def to_branch(x: Tensor, branch: Branch) -> Any:
    return Cross.apply(x, branch.enter, branch.leave)


class Pair(nn.Module):
    def __init__(self, branch: Branch, *, ends_on_branch: bool) -> None:
        super().__init__()
        self._branch, self._ends_on_branch = branch, ends_on_branch
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        branch = self._branch
        beside = Fork.apply(x, branch)
        if self._ends_on_branch:
            one = self.one(to_compute(x, branch))
            other = self.other(to_branch(beside, branch))
        else:
            other = self.other(beside)
            one = self.one(to_compute(x, branch))
            other = to_branch(other, branch)
        return Add.apply(one, Join.apply(other, branch), branch)  # type: ignore[no-any-return]


class Branching(nn.Module):
    """As a block of experts, of which one that all tokens share runs beside the others."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self._branch = branch
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.routed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shared = Join.apply(self.shared(Fork.apply(x, self._branch)), self._branch)
        return Add.apply(self.routed(x), shared, self._branch)  # type: ignore[no-any-return]


def branching(**options: Any) -> Recipe:
    def recipe(simulation: Simulation) -> Step:
        model = Tower(WIDTH, 2 * WIDTH, depth=0)
        branch = Branch(simulation)
        model.blocks = nn.ModuleList(Branching(branch) for _ in range(2))
        return training(tower(model=model, **options))

    return recipe


def routed_apart(simulation: Simulation) -> Step:
    """Other groups end while the branch runs. Sums are cast, behind the reduction."""
    model = Tower(WIDTH, 2 * WIDTH, depth=0)
    branch = Branch(simulation)
    model.blocks = nn.ModuleList(Branching(branch) for _ in range(3))
    options: dict[str, Any] = {"mesh": mesh_of(8), "mp_policy": LOW, "comm_policy": None}
    for block in model.blocks:
        fully_shard(block.routed, **options)  # type: ignore[arg-type]
    return training(tower(model=model, **options))


def paired(ends_on_branch: bool, **settings: Any) -> Recipe:
    def recipe(simulation: Simulation) -> Step:
        model = Tower(WIDTH, 2 * WIDTH, depth=0)
        branch = Branch(simulation)
        model.blocks = nn.ModuleList(Pair(branch, ends_on_branch=ends_on_branch) for _ in range(5))
        for block in model.blocks:
            fully_shard([block.one, block.other], mesh=mesh_of(8), **settings)  # type: ignore[list-item]
        return training(fully_shard(model, mesh=mesh_of(8)))

    return recipe


scenario("a group on two streams, the branch last")(paired(True))
scenario("a group on two streams, the branch first")(paired(False))
scenario("a group on two streams, resharded partly")(paired(True, reshard_after_forward=2))
scenario("a branch on a stream of its own")(branching())
scenario("a branch on a stream of its own, packed")(branching(comm_policy=None))
scenario("a branch on a stream of its own, groups beside it")(routed_apart)
scenario("a branch on a stream of its own, prefetch after")(
    branching(comm_policy=CommPolicy(packing_limit_bytes=1024, backward_prefetch="after"))
)
