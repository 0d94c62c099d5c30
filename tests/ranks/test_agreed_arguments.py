"""A bad argument on one rank alone: all ranks raise, and none of them waits for the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from harness import World
from meshed import outcome
from torch import nn

from shardwise import (
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    inference,
    load_full_state_dict,
    materialize,
    statistics,
    unsharded,
)
from shardwise.init import sync_module_states
from shardwise.state import iter_full_parameters, load_full_optimizer_state_dict


def enter(context: Any) -> None:
    with context:
        pass


def everything(model: nn.Module, odd: bool) -> dict[str, Callable[[], Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    full = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}

    def pick(usual: Any, other: Any) -> Any:
        return other if odd else usual

    return {
        "rank0_only differs": lambda: full_state_dict(model, rank0_only=pick(False, True)),
        "rank0_only is bad": lambda: full_state_dict(model, rank0_only=pick(False, "no")),
        "an optimizer here only": lambda: full_state_dict(model, pick(None, optimizer)),
        "no names": lambda: list(iter_full_parameters(model, names=pick(None, []))),
        "dtype differs": lambda: list(iter_full_parameters(model, dtype=pick(None, torch.float16))),
        "src_rank differs": lambda: load_full_state_dict(model, full, src_rank=pick(0, None)),
        "strict is bad": lambda: load_full_state_dict(model, full, strict=pick(True, 3)),
        "src_rank is bad": lambda: load_full_state_dict(model, full, src_rank=pick(0, "0")),
        "src_rank of the optimizer": lambda: load_full_optimizer_state_dict(
            model, optimizer, optimizer.state_dict(), src_rank=pick(0, None)
        ),
        "init_fn here only": lambda: materialize(model, pick(None, lambda module: None)),
        "init_fn is bad": lambda: materialize(model, pick(None, 3)),
        "device is bad": lambda: materialize(model, device=pick(None, "meta")),
        "src differs": lambda: sync_module_states(model, src=pick(0, 1)),
        "with_grads differs": lambda: enter(unsharded(model, with_grads=pick(False, True))),
        "recurse is bad": lambda: enter(unsharded(model, recurse=pick(True, 1))),
        "rank0_only with writeback": lambda: enter(unsharded(model, rank0_only=pick(False, True))),
        "budget differs": lambda: enter(inference(model, budget_bytes=pick(None, 0))),
        "budget is bad": lambda: enter(inference(model, budget_bytes=pick(None, -1))),
    }


def raised() -> tuple[dict[str, str], float]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    found = {name: outcome(call) for name, call in everything(model, odd=dist.get_rank() == 1).items()}
    for call in everything(model, odd=False).values():
        call()
    model(torch.ones(2, 4)).sum().backward()
    return found, model.weight.grad.full_tensor().sum().item()


def test_arguments_are_agreed_before_anything_is_communicated(world2: World) -> None:
    (first, total), (second, _) = world2.run(raised)
    assert first == second
    assert total == 32.0
    assert_expected_inline(
        "\n".join(f"{name}: {text}" for name, text in first.items()),
        """\
rank0_only differs: ValueError: full_state_dict: ranks disagree on rank0_only: rank 0 has False, rank 1 has True. Pass the same on all ranks.
rank0_only is bad: TypeError: rank 1: full_state_dict: rank0_only is 'no', a str; pass True or False.
an optimizer here only: ValueError: full_state_dict: ranks disagree on optimizer: rank 0 has 'None', rank 1 has 'an optimizer'. Pass the same on all ranks.
no names: ValueError: iter_full_parameters: ranks disagree on names: rank 0 has None, rank 1 has []. Pass the same on all ranks.
dtype differs: ValueError: iter_full_parameters: ranks disagree on dtype: rank 0 has None, rank 1 has torch.float16. Pass the same on all ranks.
src_rank differs: ValueError: load_full_state_dict: ranks disagree on src_rank: rank 0 has 0, rank 1 has None. Pass the same on all ranks.
strict is bad: TypeError: rank 1: load_full_state_dict: strict is 3, an int; pass True or False.
src_rank is bad: TypeError: rank 1: load_full_state_dict: src_rank is '0', a str; pass a global rank, or None.
src_rank of the optimizer: ValueError: load_full_optimizer_state_dict: ranks disagree on src_rank: rank 0 has 0, rank 1 has None. Pass the same on all ranks.
init_fn here only: ValueError: materialize: ranks disagree on init_fn: rank 0 has 'None', rank 1 has 'a function'. Pass the same on all ranks.
init_fn is bad: TypeError: rank 1: materialize: init_fn is 3, an int; pass a function of a module.
device is bad: ValueError: rank 1: materialize: device is 'meta', where nothing has values. Pass 'cpu', or None.
src differs: ValueError: sync_module_states: ranks disagree on src: rank 0 has 0, rank 1 has 1. Pass the same on all ranks.
with_grads differs: ValueError: unsharded: ranks disagree on with_grads: rank 0 has False, rank 1 has True. Pass the same on all ranks.
recurse is bad: TypeError: rank 1: unsharded: recurse is 1, an int; pass True or False.
rank0_only with writeback: ValueError: rank 1: unsharded: rank0_only=True with writeback=True: the other ranks would have nothing to write back, and their shards would not follow what rank 0 changes. Pass writeback=False.
budget differs: ValueError: inference: ranks disagree on budget_bytes: rank 0 has None, rank 1 has 0. Pass the same on all ranks.
budget is bad: ValueError: rank 1: inference: budget_bytes is -1; pass a number of bytes, 0 or more, or None for no limit.""",
    )


def in_vain(name: str) -> str:
    """What is raised where rank 1 has no way to take part: it has no model, or no norm to give."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    bad = dist.get_rank() == 1
    given = None if bad else model
    calls: dict[str, Callable[[], Any]] = {
        "clip parameters": lambda: clip_grad_norm_(model.parameters(), 1.0, "two" if bad else 2.0),
        "statistics": lambda: statistics(model, depth=0, by="parameter" if bad else "module"),
        "full_state_dict": lambda: full_state_dict(given),
        "unsharded": lambda: enter(unsharded(given)),
    }
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        calls[name]()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["clip parameters", "statistics", "full_state_dict", "unsharded"])
def test_what_one_rank_cannot_agree_on_reaches_the_others(world2: World, name: str) -> None:
    world2.close()
    first, own = world2.run(in_vain, name)
    world2.close()
    assert f"because rank 1 has failed in {own.split(': ')[1]}: {own}" in first
