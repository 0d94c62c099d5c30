"""torch's elementwise optimizers step on local tensors: the numbers of plain torch, and the same state."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import pytest
import torch
from meshed import device_mesh
from on_ranks import on_ranks
from reference import full
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import fully_shard
from shardwise.buckets.optimizer_steps import ELEMENTWISE

Params = list[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    **{kind.__name__: kind for kind in ELEMENTWISE},
    **{f"{kind.__name__} over lists": lambda p, kind=kind: kind(p, foreach=True) for kind in ELEMENTWISE},
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "largest": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True, maximize=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
}


class Model(nn.Module):
    """A row fewer than ranks, rows that do not divide, a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row = nn.Parameter(torch.randn(1, 4))
        self.rows = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self) -> Tensor:
        return self.row.sum()


def both() -> tuple[Any, Any]:
    """Sharded and not; each with a parameter that is not sharded."""
    plain = Model()
    model = fully_shard(Model(), mesh=device_mesh((2,), ("data",)))
    for each in (model, plain):
        each.apart = nn.Parameter(torch.ones(2))
    return model, plain


def give_gradients(model: Any, plain: Any, step: int) -> None:
    """As if by backward; in the second step the rows have none."""
    for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
        param.grad = shard.grad = None
        if param.requires_grad and not (step == 1 and param is plain.rows):
            param.grad = param.detach().cos() + step
            is_sharded = isinstance(shard, DTensor)
            shard.grad = (
                distribute_tensor(param.grad, shard.device_mesh, shard.placements)
                if is_sharded
                else param.grad.clone()
            )


def assert_equal(model: Any, plain: Any) -> None:
    for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(shard), param)


def assert_states_equal(
    optimizer: torch.optim.Optimizer, of_plain: torch.optim.Optimizer, model: Any, plain: Any
) -> None:
    assert len(optimizer.state) == len(of_plain.state)
    for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
        if param not in of_plain.state:
            continue
        ours, theirs = optimizer.state[shard], of_plain.state[param]
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            if isinstance(value, Tensor):
                is_number = name in ("step", "eta", "mu", "mu_product") or not isinstance(shard, DTensor)
                assert type(ours[name]) is (Tensor if is_number else DTensor), name
                assert is_number or ours[name].placements == shard.placements
                assert torch.equal(full(ours[name]), value), name
            else:
                assert ours[name] == value


def assert_steps_are_alike(
    optimizers: list[Any], model: Any, plain: Any, steps: Iterable[int] = (0,), states: bool = True
) -> None:
    for step in steps:
        give_gradients(model, plain, step)
        for each in optimizers:
            each.step()
        assert_equal(model, plain)
        if states:
            assert_states_equal(*optimizers, model, plain)


class NoDTensors(TorchDispatchMode):
    """Refuses operations on DTensors."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(issubclass(kind, DTensor) for kind in types), op
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_the_numbers_are_those_of_whole_parameters_and_no_dtensor_is_asked(name: str) -> None:
    model, plain = both()
    optimizer, of_plain = (OPTIMIZERS[name](list(each.parameters())) for each in (model, plain))
    for step in range(4):
        give_gradients(model, plain, step)
        with NoDTensors():
            optimizer.step()
        of_plain.step()
        assert_equal(model, plain)
        assert_states_equal(optimizer, of_plain, model, plain)
        if step == 1:  # another state, and other hyperparameters
            for each in (optimizer, of_plain):
                each.load_state_dict(copy.deepcopy(each.state_dict()))
                each.param_groups[0]["lr"] = each.param_groups[0]["lr"] * 2


@on_ranks(2)
def test_hooks_closures_and_subclasses_see_the_optimizer_they_know() -> None:
    model, plain = both()
    seen = []

    class Doubling(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            seen.append(self)
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.add_(param.grad, alpha=-2 * group["lr"])

    def double(optimizer: Any, *_: Any) -> None:
        seen.append(optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None if param.grad is None else param.grad * 2

    def step_of(optimizer: Any, target: Any, how: str) -> None:
        if how == "hook":
            optimizer.register_step_pre_hook(double)
        optimizer.step(**({"closure": lambda: seen.append(optimizer)} if how == "closure" else {}))

    for how, kind in (("hook", torch.optim.SGD), ("closure", torch.optim.SGD), ("class", Doubling)):
        give_gradients(model, plain, 0)
        for each in (model, plain):
            optimizer = kind(each.parameters(), lr=0.1)
            step_of(optimizer, each, how)
            assert seen.pop() is optimizer
        assert_equal(model, plain)
    assert seen == []


@on_ranks(2)
def test_hooks_after_a_step_find_the_state_and_may_replace_it() -> None:
    model, plain = both()
    seen = []
    moved: dict[int, Tensor] = {}

    def keep_elsewhere(optimizer: Any, *_: Any) -> None:
        seen.append(len(optimizer.state))
        for state in optimizer.state.values():
            moved[id(state)] = state["exp_avg"] = state["exp_avg"].clone()

    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    for each in optimizers:
        each.register_step_post_hook(keep_elsewhere)
    for step in range(3):
        give_gradients(model, plain, step)
        for each in optimizers:
            each.step()
            each.zero_grad()
            assert all(state["exp_avg"] is moved[id(state)] for state in each.state.values())
        assert_states_equal(*optimizers, model, plain)
        assert seen[-2] == seen[-1] == 4
    assert_equal(model, plain)


@on_ranks(2)
def test_gradients_and_state_that_are_placed_otherwise_are_left_to_dtensor() -> None:
    model, plain = both()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step in range(3):
        give_gradients(model, plain, step)
        rows, whole = model.rows, plain.rows
        if whole.grad is not None:
            rows.grad = distribute_tensor(whole.grad, rows.device_mesh, [Replicate()])
        if step == 2:
            rows.grad = rows.grad.redistribute(placements=rows.placements)
            kept = optimizers[0].state[rows]
            kept["momentum_buffer"] = kept["momentum_buffer"].redistribute(placements=[Replicate()])
        for each in optimizers:
            each.step()
        assert_equal(model, plain)


@on_ranks(2)
def test_gradients_may_be_placed_otherwise_by_a_hook_before_the_step() -> None:
    model, plain = both()

    def replicate(*_: Any) -> None:
        model.rows.grad = model.rows.grad.redistribute(placements=[Replicate()])

    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    optimizers[0].register_step_pre_hook(replicate)
    assert_steps_are_alike(optimizers, model, plain)


def load(optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.3
    optimizer.load_state_dict(state)


def replace_state(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict, {param: dict(state) for param, state in optimizer.state.items()})


def replace_groups(optimizer: Any) -> None:
    optimizer.param_groups = [{**group, "lr": 0.3} for group in optimizer.param_groups]


def set_grad_scale(optimizer: Any) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)


@pytest.mark.parametrize("change", [load, replace_state, replace_groups, set_grad_scale])
@on_ranks(2)
def test_hooks_before_a_step_may_change_the_optimizer(change: Callable[[Any], None]) -> None:
    model, plain = both()
    is_fused = change is set_grad_scale  # only fused kernels read it
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, fused=is_fused) for each in (model, plain)]
    for each in optimizers:
        each.register_step_pre_hook(lambda optimizer, *_: change(optimizer))
    for step in range(3):
        give_gradients(model, plain, step)
        for each in optimizers:
            each.step()
        for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
            # Fused kernels round the last elements otherwise.
            torch.testing.assert_close(full(shard), param, **({} if is_fused else {"rtol": 0, "atol": 0}))
    assert len(optimizers[0].state) == len(optimizers[1].state)


@on_ranks(2)
def test_a_method_that_was_replaced_is_called_with_the_optimizer() -> None:
    model, plain = both()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    seen = []
    for each in optimizers:
        own = each._init_group
        each._init_group = lambda *args, own=own: (seen.append(own.__self__), own(*args))[1]
    assert_steps_are_alike(optimizers, model, plain, range(2))
    assert all(map(is_, seen, optimizers * 2))
    assert len(seen) == 4


@on_ranks(2)
def test_a_parameter_that_a_group_has_twice_is_stepped_twice_as_in_plain_torch() -> None:
    model, plain = both()
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        optimizers = [torch.optim.AdamW([each.rows, each.row, each.rows], lr=0.1) for each in (model, plain)]
    assert_steps_are_alike(optimizers, model, plain, steps=(0, 2), states=False)


@on_ranks(2)
def test_a_step_that_fails_leaves_the_optimizer_as_it_was() -> None:
    model, plain = both()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    groups, params = optimizer.param_groups, list(model.parameters())
    give_gradients(model, plain, 0)
    del groups[0]["eps"]
    with pytest.raises(KeyError, match="eps"):
        optimizer.step()
    groups[0]["eps"] = 1e-8
    assert optimizer.param_groups is groups
    assert all(a is b for a, b in zip(groups[0]["params"], params, strict=True))
    of_plain = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    assert_steps_are_alike([optimizer, of_plain], model, plain)
