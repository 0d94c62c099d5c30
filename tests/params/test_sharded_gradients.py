"""Sharded gradients: nobody who kept one sees it change, and all of a bucket are one flat tensor."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshed import refusal
from models import built, even_tower, random_batch, shard_tower, uneven_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise import clip_grad_norm_, fully_shard
from shardwise.optim import FlatOptimizer


def sharded(make: Callable[[], nn.Module] = even_tower, **options: Any) -> tuple[nn.Module, nn.Module]:
    plain = built(make, seed=7)
    model = copy.deepcopy(plain)
    shard_tower(model, **options)
    return plain, model


def backward(model: nn.Module, step: int, width: int = 8) -> None:
    mean_of_squares(model, random_batch(step, 4, width)).backward()


def gradients(model: nn.Module) -> list[DTensor]:
    return [param.grad for param in model.parameters()]


def assert_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(own.grad.full_tensor(), expected.grad, rtol=0, atol=1e-12)


@on_ranks(2)
def test_a_sparse_gradient_is_refused_where_it_is_to_be_reduced() -> None:
    model = nn.Sequential(built(nn.Embedding, 9, 4, sparse=True), built(nn.Linear, 4, 1))
    fully_shard(model)
    message = refusal(lambda: model(torch.arange(3)).sum().backward())
    assert message.startswith("RuntimeError: 0.weight: its gradient has layout torch.sparse_coo")
    model[0].sparse = False
    model.zero_grad()
    model(torch.arange(3)).sum().backward()
    assert model[0].weight.grad.full_tensor().count_nonzero() == 12


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "the gradient": lambda g: g,
    "its local tensor": lambda g: g.to_local(),
    "the local tensor itself": torch.no_grad()(lambda g: g.to_local()),
    "a view of it": lambda g: g.to_local()[:1],
    "detached": lambda g: g.detach(),
    "its data": lambda g: g.data,
    "an array": lambda g: g.to_local().numpy(),
    "its storage": lambda g: g.to_local().untyped_storage(),
}


def numbers_of(kept: Any) -> list[float]:
    if isinstance(kept, DTensor):
        kept = kept.to_local()
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.tensor([], dtype=torch.float64).set_(kept)
    return torch.as_tensor(kept).flatten().tolist()


@on_ranks(1, 2)
@pytest.mark.thin(2)
@pytest.mark.parametrize("what", KEPT)
def test_what_was_kept_of_a_gradient_stays_as_it_was(what: str) -> None:
    """Whether gradients are cleared before forward or before backward."""
    plain, model = sharded()
    backward(model, 0)
    kept = [KEPT[what](gradient) for gradient in gradients(model)]
    then = list(map(numbers_of, kept))
    for step in range(1, 5):
        for each in (plain, model):
            if step % 2:
                each.zero_grad()
            loss = mean_of_squares(each, random_batch(step, 4))
            each.zero_grad()
            loss.backward()
        assert_equal_gradients(model, plain)
        assert list(map(numbers_of, kept)) == then


def mark(gradient: Tensor) -> None:
    gradient.mark = True  # type: ignore[attr-defined]


MARKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], bool]]] = {
    "an attribute": (mark, lambda g: hasattr(g, "mark")),
    "requires_grad": (lambda g: g.requires_grad_(), lambda g: g.requires_grad),
    "a hook": (lambda g: g.requires_grad_().register_hook(mark), lambda g: bool(g._backward_hooks)),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("what", MARKS)
def test_what_was_noted_on_a_gradient_is_not_on_the_next(what: str) -> None:
    _, model = sharded()
    put, is_there = MARKS[what]
    seen = []
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        seen.append(is_there(model.outlet.weight.grad))
        put(model.outlet.weight.grad)
    assert seen == [False, False, False]


@on_ranks(2)
def test_memory_that_a_hook_has_kept_stays_as_it_was() -> None:
    torch.manual_seed(7)
    model = fully_shard(
        nn.Linear(8, 8).double(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    )
    kept = []
    model.set_all_reduce_hook(lambda part: kept.append(part.untyped_storage()))
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        if step == 0:
            then = kept[0].tolist()
    assert kept[0].tolist() == then


@on_ranks(1, 2)
@pytest.mark.thin(2)
@pytest.mark.parametrize(("make", "width", "keeps_zeros"), [(even_tower, 8, False), (uneven_tower, 7, True)])
def test_backwards_without_clearing_add_up(
    make: Callable[[], nn.Module], width: int, keeps_zeros: bool
) -> None:
    plain, model = sharded(make)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad(set_to_none=not keeps_zeros)
            backward(each, 2 * step, width)
        first = list(map(id, gradients(model)))
        for each in (plain, model):
            backward(each, 2 * step + 1, width)
        assert_equal_gradients(model, plain)
        assert first == list(map(id, gradients(model)))


@on_ranks(1, 2)
@pytest.mark.thin(2)
@pytest.mark.parametrize("what", ["another", "none"])
def test_gradients_that_were_replaced_are_clipped_and_added_to(what: str) -> None:
    plain, model = sharded()
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            backward(each, step)
            for param in (each.blocks[1].up.weight, each.blocks[1].norm.bias):
                param.grad = 2 * param.grad if what == "another" else None
        if what == "another":
            assert_clipped_alike(model, plain)
        for each in (plain, model):
            backward(each, step + 1)
        assert_equal_gradients(model, plain)


def assert_clipped_alike(model: nn.Module, plain: nn.Module) -> None:
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(clip_grad_norm_(model, 0.01), expected, rtol=0, atol=1e-12)


@on_ranks(1, 2)
@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["blocks.1.up.weight", "outlet.bias"])
def test_what_was_frozen_after_forward_gets_no_gradient(name: str) -> None:
    plain, model = sharded()
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            loss = mean_of_squares(each, random_batch(step, 4))
            each.get_parameter(name).requires_grad_(step == 2)
            loss.backward()
        assert_equal_gradients(model, plain)


@on_ranks(1, 2)
@pytest.mark.parametrize("width", [32, 512])
def test_small_and_large_gradients_are_one_tensor_and_freed_once_they_are_cleared(width: int) -> None:
    model = fully_shard(nn.Linear(width, width, bias=False).double())
    model(random_batch(0, 4, width)).pow(2).sum().backward()
    (bucket,) = model._shardwise_state.group.buckets
    assert bucket.sharded_gradients.flat_gradient() is not None
    norm = model.weight.grad.full_tensor().norm()
    assert norm > 0.5
    torch.testing.assert_close(clip_grad_norm_(model, 0.5), norm, rtol=0, atol=1e-10)
    assert model.weight.grad.full_tensor().norm().item() == pytest.approx(0.5, abs=1e-5)
    model.zero_grad()
    model(random_batch(0, 4, width)).pow(
        2
    ).sum().backward()  # threads of gloo may still hold what was gathered
    refs = [weakref.ref(model.weight.grad), weakref.ref(model.weight.grad._local_tensor)]
    model.zero_grad()
    assert [ref() for ref in refs] == [None, None]


@on_ranks(1, 2)
def test_gradients_are_right_after_a_backward_that_failed() -> None:
    plain, model = sharded()

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    backward(model, 0)
    model.zero_grad()
    handle = model.blocks[0].up.weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        backward(model, 1)
    handle.remove()
    for step in range(2, 4):
        for each in (plain, model):
            each.zero_grad()
            backward(each, step)
        assert_equal_gradients(model, plain)


@on_ranks(1, 2)
@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["blocks.0.norm.weight", "blocks.0.up.bias"])
def test_gradients_that_were_given_other_memory_count_with_that(name: str) -> None:
    plain, model = sharded()
    optimizers = [
        torch.optim.SGD(plain.parameters(), 0.1),
        FlatOptimizer(torch.optim.SGD(model.parameters(), 0.1)),
    ]
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            backward(each, step)
            gradient = each.get_parameter(name).grad
            local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            local.data = 3 * local
        assert_clipped_alike(model, plain)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            backward(each, step + 1)
            optimizer.step()
        assert_equal_gradients(model, plain)
        for own, param in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.full_tensor(), param, rtol=0, atol=1e-12)


class OnTwoMeshes(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        value = torch.arange(16.0, dtype=torch.float64).view(4, 4)
        self.a = nn.Parameter(distribute_tensor(value, mesh["a"], [Shard(0)]))
        self.b = nn.Parameter(distribute_tensor(3 * value, mesh["b"], [Shard(0)]))

    def forward(self) -> Tensor:
        return self.a.to_local().pow(2).sum() + self.b.to_local().pow(2).sum()


@on_ranks(4)
def test_parameters_on_several_meshes_are_measured_on_their_own() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    model = fully_shard(OnTwoMeshes(mesh), mesh=mesh["dp"])
    model().backward()
    fulls = [gradient.full_tensor().flatten() for gradient in gradients(model)]
    norm = torch.cat(fulls).norm().item()
    assert clip_grad_norm_(model, 1.0).item() == pytest.approx(norm, abs=1e-9)


class Reticent(nn.Sequential):
    """Says itself which parameters it has."""

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return [(name, p) for name, p in super().named_parameters(*args, **options) if "0" in name]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_module_says_itself_which_parameters_are_clipped() -> None:
    """Also a scripted one."""
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    for model in (Reticent(nn.Linear(4, 4), nn.Linear(4, 4)), scripted):
        model(torch.ones(2, 4)).sum().backward()
        gradients = torch.cat([param.grad.flatten() for _, param in model.named_parameters()])
        assert clip_grad_norm_(model, 100.0).item() == pytest.approx(gradients.norm().item())


@on_ranks(2, timeout=30)
def test_a_model_may_die_while_it_is_unsharded() -> None:
    _, model = sharded()
    if dist.get_rank() == 0:
        model.unshard(async_op=True)
        del model
        gc.collect()
    dist.barrier()  # the other rank sends when nobody waits any more
    if dist.get_rank() == 1:
        model.unshard(async_op=True)
        del model
        gc.collect()
    plain, model = sharded()
    for each in (plain, model):
        backward(each, 0)
    assert_equal_gradients(model, plain)


@on_ranks(1, 2)
@pytest.mark.parametrize("last", ["forward", "backward"])
def test_a_model_that_nobody_has_any_more_dies(last: str) -> None:
    """And its blocks, while an optimizer over their shards is there."""
    _, model = sharded()
    optimizer = FlatOptimizer(torch.optim.AdamW(model.parameters()))
    for step in range(3):
        backward(model, step)
        optimizer.step()
    if last == "forward":
        mean_of_squares(model, random_batch(3, 4))
    refs = [weakref.ref(module) for module in (model, *model.blocks)]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4
