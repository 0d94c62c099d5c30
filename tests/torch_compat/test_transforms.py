"""`torch.func` over sharded models: `grad`, `vjp`, `jvp`, `vmap` and what is made of them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshed import refusal
from models import built, even_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

with warnings.catch_warnings():  # torch deprecates what it uses here itself
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

Transform = Callable[[nn.Module, Tensor], Any]


def squares(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).pow(2).sum()


def one_row(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda row: model(row[None])[0]


def all_of_vjp(model: nn.Module, x: Tensor) -> Any:
    output, pull = vjp(model, x)
    return output, pull(torch.ones_like(output))[0], pull(output)[0]


def all_of_a_dual_number(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.cos(x)))))


TRANSFORMS: dict[str, Transform] = {
    "jvp": lambda model, x: jvp(model, (x,), (torch.cos(x),)),
    "vjp": all_of_vjp,
    "grad": lambda model, x: grad(squares(model))(x),
    "grad of grad": lambda model, x: grad(lambda y: grad(squares(model))(y).pow(2).sum())(x),
    "vmap": lambda model, x: vmap(model)(x),
    "gradients of rows": lambda model, x: vmap(grad(lambda row: one_row(model)(row).sum()))(x),
    "jacobians of rows": lambda model, x: [vmap(each(one_row(model)))(x) for each in (jacrev, jacfwd)],
    "hessians of rows": lambda model, x: vmap(hessian(lambda row: one_row(model)(row).sum()))(x),
    "forward over reverse": lambda model, x: jvp(grad(squares(model)), (x,), (torch.cos(x),))[1],
    "forward over forward": lambda model, x: vmap(jacfwd(jacfwd(one_row(model))))(x),
    "dual numbers": all_of_a_dual_number,
    "its own parameters": lambda model, x: grad(
        lambda y: functional_call(model, dict(model.named_parameters()), (y,)).pow(2).sum()
    )(x),
    "one block": lambda model, x: grad(squares(model.blocks[1]))(x),  # type: ignore[index, arg-type]
}


@same_as_plain(2)
@pytest.mark.parametrize("reshard", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_transforms_and_training_through_them(side: Side, reshard: bool | None) -> None:
    """What a transform comes to may be part of the loss; the first comes before anything was unsharded."""
    for name, transform in TRANSFORMS.items():
        model = built(even_tower)
        side.shard_tower(model, reshard_after_forward=reshard)
        with torch.no_grad():
            found = torch.utils._pytree.tree_leaves(transform(model, side.inputs(0)))
        for step in range(2):
            x = side.inputs(step)
            results = torch.utils._pytree.tree_leaves(transform(model, x))
            for result in (*results, *(found if step == 0 else ())):
                side.note_rows(name, result)
            loss = mean_of_squares(model, side.inputs(2))
            loss = loss + sum(result.pow(2).sum() for result in results) / len(x)
            loss.backward()
            side.note_gradients(model)
            side.assert_settled(model)
            model.zero_grad()


class Forces(nn.Module):
    """A forward that takes the gradient of a block by its input, by a transform."""

    def __init__(self) -> None:
        super().__init__()
        tower = even_tower()
        self.inlet, self.blocks, self.outlet = tower.inlet, tower.blocks, tower.outlet

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        forces = grad(lambda y: self.blocks[1](self.blocks[0](y)).pow(2).sum())(x)
        return self.outlet(self.blocks[2](torch.tanh(forces)) + x)


@same_as_plain(2)
def test_a_forward_may_hold_a_transform(side: Side) -> None:
    model = side.shard_tower(built(Forces))
    side.steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(3))


# --- failures -------------------------------------------------------------------------------------


class Unexpected(Exception):
    """Raised inside a transform."""


def failing(transform: Callable[..., Any], model: nn.Module, x: Tensor) -> None:
    def fails(y: Tensor) -> Tensor:
        model(y)
        raise Unexpected

    with pytest.raises(Unexpected):
        transform(fails, *([(x,), (x,)] if transform is jvp else [x]))


def _raise(error: Exception, _after: Any) -> None:
    raise error


@same_as_plain(2)
def test_a_failed_transform_leaves_the_model_usable(side: Side) -> None:
    model = side.shard_tower(built(even_tower))
    x = side.inputs(0)
    for transform in (vjp, jvp, lambda f, y: grad(f)(y), lambda f, y: vmap(f)(y)):
        failing(transform, model, x)
        with pytest.raises(RuntimeError, match="scalar"):
            grad(model)(x)
        side.step(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    handle = model.blocks[1].register_forward_hook(lambda *_: failing(vjp, model.blocks[0], x))
    with pytest.raises(ValueError, match="inside"):
        vmap(lambda row: _raise(ValueError("inside"), model(row[None])))(x)
    handle.remove()
    side.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), [2])


@on_ranks(2)
def test_recorded_programs_are_refused_since_their_constants_are_freed() -> None:
    side = Side(is_sharded=True)
    model = side.shard_tower(built(even_tower))
    x = side.inputs(0)
    text = refusal(linearize, model, x)
    mean_of_squares(model, x).backward()
    assert all(param.grad is not None for param in model.parameters())
    assert text == (
        "RuntimeError: Tower: make_fx, which torch.func.linearize uses, records what forward computes, with the full "
        "parameters as constants. They are freed after forward, so that the program would read memory "
        "that is gone. Use torch.func.jvp or vjp, which compute anew."
    )
