"""The private parts of torch that compat.py stands on, on whatever torch is installed."""

import pytest
import torch
import torch.distributed as dist
from harness import World
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.runtime import compat


def test_the_graph_task_is_numbered_inside_backward_only() -> None:
    inside = []
    x = torch.ones(2, requires_grad=True)
    (x * 2).register_hook(lambda _: None)
    y = x * 2
    y.register_hook(lambda _: inside.append(compat.current_graph_task_id()))
    assert compat.current_graph_task_id() == -1
    y.sum().backward()
    assert inside[0] >= 0
    assert compat.current_graph_task_id() == -1


def test_the_end_of_backward_comes_after_all_gradients_and_dies_with_a_failure() -> None:
    import weakref

    class Kept:
        pass

    seen: list[bool] = []
    watched: list[weakref.ref[Kept]] = []
    x = torch.ones(2, requires_grad=True)

    def queue(_: object) -> None:
        kept = Kept()
        watched.append(weakref.ref(kept))
        compat.queue_end_of_backward(lambda kept=kept: seen.append(x.grad is not None))  # type: ignore[misc]

    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(queue)
    y.sum().backward()
    assert seen == [True]
    assert watched[0]() is None

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("lost")

    y = Failing.apply(x) * 2
    y.grad_fn.register_prehook(queue)
    with pytest.raises(ArithmeticError, match="lost"):
        y.sum().backward()
    assert seen == [True]
    assert watched[1]() is None  # this is how the schedule sees that a backward failed


def test_a_set_version_is_what_autograd_compares() -> None:
    weight = nn.Parameter(torch.eye(2))
    x = torch.ones(1, 2, requires_grad=True)
    y = x @ weight.t()  # saves a view of the weight
    compat.set_versions([weight], [7])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    compat.set_versions([weight], [0])
    (x @ weight.t()).sum().backward()
    assert weight._version == 0


def test_hooks_of_a_tensor_are_found() -> None:
    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    def after(tensor: torch.Tensor) -> None:
        pass

    x = torch.ones(2, requires_grad=True)
    assert not compat.gradient_hooks(x)
    assert not compat.post_accumulate_hooks(x)
    handle = x.register_hook(scaled)
    x.register_post_accumulate_grad_hook(after)
    gradient_hooks, post_hooks = compat.gradient_hooks(x), compat.post_accumulate_hooks(x)
    assert gradient_hooks is not None
    assert post_hooks is not None
    assert list(gradient_hooks.values()) == [scaled]
    assert list(post_hooks.values()) == [after]
    handle.remove()
    assert not gradient_hooks  # the same home: a handle removes for whoever looks there


def dtensor_made_cheaply() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).view(5, 2)
    spec = compat.sharded_spec(mesh, (Shard(0),), whole.shape, whole.dtype)
    local = whole[:3].clone() if dist.get_rank() == 0 else whole[3:].clone()
    cheap = compat.make_dtensor(local, spec)
    assert type(cheap) is DTensor
    assert torch.equal(cheap.full_tensor(), whole)
    param = nn.Parameter(cheap)
    elsewhere = compat.local_tensor(param).clone()
    compat.set_local_tensor(param, elsewhere)
    with torch.no_grad():
        param.add_(1)
    assert torch.equal(elsewhere, local + 1)
    assert compat.local_tensor(param) is elsewhere
    assert (param.shape, param.stride(), param.dtype) == (whole.shape, whole.stride(), whole.dtype)


def test_a_dtensor_made_cheaply_is_a_dtensor(world2: World) -> None:
    world2.run(dtensor_made_cheaply)


def devices_and_apis() -> tuple[set[str], str]:
    module = nn.Linear(2, 2)
    compat.register_api(module)
    from torch.distributed.fsdp import fully_shard

    with pytest.raises((AssertionError, RuntimeError, ValueError)) as refused:
        fully_shard(module)
    return compat.group_devices(dist.group.WORLD), type(refused.value).__name__


def test_torch_refuses_a_module_that_is_registered_as_sharded(world1: World) -> None:
    ((devices, refusal),) = world1.run(devices_and_apis)
    assert "cpu" in devices
    assert refusal
