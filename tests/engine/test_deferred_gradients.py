"""While gradients wait to be reduced, ``.grad`` stands for them: reads raise, nothing steps, clearing is noticed."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from meshed import refusal
from models import built, even_tower, random_batch
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from scenario import Side, same_as_plain
from torch import Tensor, nn

import shardwise
from shardwise.optim import FlatOptimizer


def waiting(has_grad: bool = False) -> Any:
    model = Side(is_sharded=True).shard_tower(built(even_tower))
    if has_grad:
        mean_of_squares(model, random_batch(9, 4)).backward()
    with shardwise.no_sync(model):
        mean_of_squares(model, random_batch(0, 4)).backward()
    return model


# --- reads and writes -----------------------------------------------------------------------------

USES: dict[str, Callable[[Tensor], Any]] = {
    "sum": Tensor.sum,
    "norm": Tensor.norm,
    "clone": Tensor.clone,
    "to_local": lambda g: g.to_local().sum(),
    "full_tensor": lambda g: g.full_tensor(),
    "add to another": lambda g: torch.ones_like(g.to_local()).add_(g),
    "mul_": lambda g: g.mul_(0),
    "data.mul_": lambda g: g.data.mul_(0.5),
    "to_local.mul_": lambda g: g.to_local().mul_(0.5),
    "to_local.zero_": lambda g: g.to_local().zero_(),
    "copy_": lambda g: g.copy_(torch.zeros_like(g)),
    "foreach": lambda g: torch._foreach_mul_([g], 0.5),
}


@pytest.mark.parametrize(("world", "has_grad"), [(1, False), (2, False), (2, True)], indirect=["world"])
@on_ranks()
def test_reads_and_writes_are_refused_by_name(has_grad: bool) -> None:
    model = waiting(has_grad)
    told = {name: refusal(use, model.blocks[1].up.weight.grad) for name, use in USES.items()}
    told["clip"] = refusal(nn.utils.clip_grad_norm_, [model.blocks[1].up.weight], 1.0)
    local = torch.no_grad()(lambda: model.blocks[1].up.weight.grad.to_local())()
    told["without grad mode"] = refusal(local.sum)
    told["repr"] = repr(local)
    assert_expected_inline(told.pop("repr"), """<unreduced gradient of blocks.1.up.weight>""")
    assert len(set(told.values())) == 1, told
    assert_expected_inline(
        told["sum"],
        """RuntimeError: blocks.1.up.weight: gradients of backward passes without synchronisation (no_sync, set_requires_gradient_sync(False), set_requires_all_reduce(False)) wait to be reduced; .grad does not contain them yet. Run the last backward with synchronisation before .grad is read or changed, gradients are clipped or an optimizer steps; or call zero_grad().""",
    )


@same_as_plain(2)
@pytest.mark.parametrize("has_grad", [False, True])
def test_zeroing_the_local_tensor_clears_what_waits(side: Side, has_grad: bool) -> None:
    model = side.shard_tower(built(even_tower))
    if has_grad:
        mean_of_squares(model, side.inputs(9)).backward()
    side.sync(model, False)
    mean_of_squares(model, side.inputs(0)).backward()
    for param in model.parameters():
        gradient: Any = param.grad
        (gradient._local_tensor if side.is_sharded else gradient).zero_()
        side.note("zeroed", param.grad)
    side.sync(model, True)
    mean_of_squares(model, side.inputs(1)).backward()
    side.note_gradients(model)


@same_as_plain(1, 2)
def test_penalties_on_the_shards_add_up(side: Side) -> None:
    """Autograd adds to ``.grad`` itself what a loss has computed from the shards."""
    model = side.shard_tower(built(even_tower))
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(3):
            with shardwise.no_sync(model) if side.is_sharded and microbatch < 2 else nullcontext():
                whole = [p.full_tensor() if side.is_sharded else p for p in model.parameters()]
                penalty = torch.stack([each.pow(2).sum() for each in whole]).sum()
                (mean_of_squares(model, side.inputs(3 * step + microbatch)) + penalty).backward()
        side.note_gradients(model)
        optimizer.step()
    side.note_parameters(model)


@same_as_plain(1, 2, atol=1e-06)
def test_gradients_that_wait_survive_a_conversion(side: Side) -> None:
    model = side.shard_tower(built(even_tower).float())
    model(side.inputs(0).float()).square().mean().backward()
    side.sync(model, False)
    model(side.inputs(1).float()).square().mean().backward()
    model.double()
    side.sync(model, True)
    model(side.inputs(2)).square().mean().backward()
    side.note_gradients(model)


# --- steps ----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "for": lambda params: torch.optim.AdamW(params, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "flat": lambda params: FlatOptimizer(torch.optim.AdamW(params)),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize("how", OPTIMIZERS)
@on_ranks(2)
def test_a_step_is_refused_by_name_before_it_changes_anything(how: str, has_closure: bool) -> None:
    """Only the last block defers, so that others have gradients with which a step could begin."""
    model = Side(is_sharded=True).shard_tower(built(even_tower))
    optimizer = OPTIMIZERS[how](model.parameters())
    with shardwise.no_sync(model.blocks[2]):
        mean_of_squares(model, random_batch(0, 4)).backward()
    before = [param.detach().clone() for param in model.parameters()]
    told = refusal(optimizer.step, *([lambda: None] if has_closure else []))
    same = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(before, model.parameters(), strict=True)
    )
    states = len(optimizer.state)
    mean_of_squares(model, random_batch(1, 4)).backward()
    optimizer.step()
    assert told.startswith("RuntimeError: blocks.2.norm.weight: gradients of backward passes without")
    assert (same, states) == (True, 0)


@same_as_plain(2)
def test_a_closure_may_run_the_last_backward(side: Side) -> None:
    model = side.shard_tower(built(even_tower))
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        side.sync(model, False)
        mean_of_squares(model, side.inputs(2 * step)).backward()
        side.sync(model, True)

        def last(step: int = step) -> Tensor:
            loss = mean_of_squares(model, side.inputs(2 * step + 1))
            loss.backward()
            return loss

        optimizer.step(last)
    side.note_parameters(model)
