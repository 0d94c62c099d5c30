"""One program, run twice: plainly in the parent process, and sharded on every rank of a world.

    @same_as_plain(2, 3)                         # on worlds of two and of three ranks
    @pytest.mark.parametrize("steps", [1, 4])
    def test_it(side, steps):
        model = side.shard_tower(built(even_tower))
        side.steps(model, adamw(model), range(steps))

A scenario does what a user's script does; `side.shard` is the only call that differs between the two
runs. What it notes (losses, gradients, parameters, outputs), or returns by name, must agree on every rank
with the plain run on the global batch. After every step of a sharded run `side.assert_settled` looks for
what a step may not leave behind: unsharded groups, full gradients, shadows over the sharded parameters.

Tests that share a scenario call `assert_same(world2, scenario, *args)`. Scenarios travel by name: they are
functions of modules.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from comparing import assert_equal
from harness import World
from models import random_batch
from reference import mean_of_squares
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise import fully_shard
from shardwise.comm import buffers
from shardwise.engine.module_state import sharded_module_states
from shardwise.observe import memory_snapshot

BATCH_SIZE = 12  # divisible by 1, 2, 3 and 4 ranks

Loss = Callable[[nn.Module, Tensor], Tensor]


class Side:
    """Where a scenario runs, and what it noted there."""

    def __init__(self, is_sharded: bool) -> None:
        self.is_sharded = is_sharded
        self.rank = dist.get_rank() if is_sharded else 0
        self.world = dist.get_world_size() if is_sharded else 1
        self.notes: dict[str, tuple[str, Any]] = {}

    # --- acting -----------------------------------------------------------------------------------

    def shard(self, *modules: Any, **options: Any) -> Any:
        """Shard each of `modules` in turn; the last one comes back."""
        for module in modules:
            if self.is_sharded:
                fully_shard(module, **options)
        return modules[-1]

    def shard_tower(self, model: nn.Module, **options: Any) -> nn.Module:
        return self.shard(*model.blocks, model, **options)

    def sync(self, model: nn.Module, requires_gradient_sync: bool) -> None:
        if self.is_sharded:
            model.set_requires_gradient_sync(requires_gradient_sync)

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows of a global batch."""
        share = len(batch) // self.world
        return batch[self.rank * share : (self.rank + 1) * share].clone()

    def inputs(self, step: int, width: int = 8) -> Tensor:
        return self.part(random_batch(step, BATCH_SIZE, width))

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        loss_of: Loss = mean_of_squares,
        width: int = 8,
    ) -> None:
        """An ordinary training step, noted and checked for leftovers."""
        optimizer.zero_grad()
        loss = loss_of(model, self.inputs(step, width))
        loss.backward()
        self.note_mean("loss", loss)
        self.note_gradients(model)
        optimizer.step()
        self.assert_settled(model)

    def steps(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: Iterable[int],
        loss_of: Loss = mean_of_squares,
        width: int = 8,
    ) -> None:
        """Ordinary training steps; the parameters are noted after the last."""
        for step in steps:
            self.step(model, optimizer, step, loss_of, width)
        self.note_parameters(model)

    # --- noting -----------------------------------------------------------------------------------
    # Ranks send their pieces as they are, and the parent puts them together: no collectives, which
    # would be slow, and might hide that a rank is out of step.

    def note(self, name: str, value: Any) -> None:
        """Something that is the same on every rank, or a sharded tensor."""
        kind = "same"
        if isinstance(value, DTensor):
            if value.placements == (Shard(0),):
                kind, value = "rows", value.to_local()
            else:
                value = value.full_tensor()
        self._note(kind, name, value)

    def note_mean(self, name: str, value: Tensor) -> None:
        """Something of which each rank has its part's mean."""
        self._note("mean", name, value)

    def note_rows(self, name: str, rows: Tensor | None) -> None:
        """Rows that belong to this rank's rows of the batch."""
        self._note("rows", name, rows)

    def note_gradients(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.note(f"gradient of {name}", param.grad)

    def note_parameters(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.note(name, param)

    def _note(self, kind: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.notes[f"{len(self.notes) + 1}: {name}"] = (kind, value)

    # --- checking ---------------------------------------------------------------------------------

    def assert_settled(self, model: nn.Module) -> None:
        """Nothing is unsharded, on its way, unreduced or shadowed."""
        if not self.is_sharded:
            return
        for module in model.modules():
            for name in module._parameters:
                assert name not in module.__dict__, f"{name} of {type(module).__name__} is still shadowed"
        module_states = sharded_module_states(model)
        for found in memory_snapshot(model).groups if module_states else ():
            assert found.state == "sharded", f"'{found.name}' is still {found.state}"
            assert found.gradient_state == "empty", (
                f"gradients of '{found.name}' are still {found.gradient_state}"
            )
            held = found.full_gradient_bytes
            assert held == 0, f"'{found.name}' holds {held} bytes of full gradients"
        for group in [module_state.group for module_state in module_states]:
            for bucket in group.unsharded.buckets if self.world > 1 else ():
                left = 0 if bucket.buffer.keeps_memory else bucket.buffer._storage.nbytes()
                assert left == 0, f"'{group.name}' holds {left} bytes of full parameters"
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor), f"{name} is no DTensor"


Scenario = Callable[..., Any]


def same_as_plain(*worlds: int, atol: float = 1e-10, timeout: float = 60.0) -> Callable[[Scenario], Scenario]:
    """Make a scenario a test: run plainly here and sharded on each of `worlds`, it notes the same.

    Its parameters but the first are those of the test. Without `worlds`, a mark of the test gives `world`.
    """
    fixture = f"world{worlds[0]}" if len(worlds) == 1 else "world"

    def decorate(scenario: Scenario) -> Scenario:
        @functools.wraps(scenario)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            world = arguments.pop(fixture)
            assert_same(world, test, *[arguments[name] for name in names], atol=atol, timeout=timeout)

        _, *names = inspect.signature(scenario).parameters
        asked = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (fixture, *names)]
        test.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        if len(worlds) > 1:
            pytest.mark.parametrize("world", worlds, indirect=True)(test)
        return test

    return decorate


def run_sharded(scenario: Scenario, args: tuple[Any, ...]) -> dict[str, Any]:
    """Runs on every rank of a world."""
    # Models of these tests are small: have their buffers emptied as those of large ones are.
    with mock.patch.object(buffers, "KEPT_ON_HOST_BYTES", 0):
        return notes_of(scenario, Side(is_sharded=True), args)


def notes_of(scenario: Scenario, side: Side, args: tuple[Any, ...]) -> dict[str, Any]:
    returned = inspect.unwrap(scenario)(side, *args)
    if isinstance(returned, dict):
        for name, value in returned.items():
            side.note(name, value)
    return side.notes


def assert_same(
    world: World, scenario: Scenario, *args: Any, atol: float = 1e-10, timeout: float = 60.0
) -> None:
    """Run `scenario(side, *args)` plainly here and sharded on `world`; all notes must agree."""
    with one_thread():
        plain = notes_of(scenario, Side(is_sharded=False), args)
    assert plain, "the scenario has noted nothing"
    ranks = world.run(run_sharded, scenario, args, timeout=timeout)
    for name, (_, want) in plain.items():
        assert all(name in notes for notes in ranks), f"no rank has noted {name}"
        kinds, values = zip(*[notes[name] for notes in ranks], strict=True)
        assert len(set(kinds)) == 1, f"{name}: {kinds}"
        assert_equal(_together(kinds[0], list(values), name), want, name, atol)
    assert all(len(notes) == len(plain) for notes in ranks)


@contextmanager
def one_thread() -> Iterator[None]:
    """As the ranks compute: some kernels add up in an order that depends on the threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _together(kind: str, values: list[Any], name: str) -> Any:
    """One value out of those of all ranks."""
    first, *others = values
    are_tensors = {isinstance(value, Tensor) for value in values}
    assert len(are_tensors) == 1, f"{name}: the ranks disagree: {values}"
    if not isinstance(first, Tensor):
        assert all(other == first for other in others), f"{name}: the ranks disagree: {values}"
        return first
    if kind == "rows":
        return torch.cat(values)
    if kind == "mean":
        return torch.stack(values).mean(0)
    for other in others:
        assert torch.equal(first, other), f"{name}: the ranks disagree: {values}"
    return first
