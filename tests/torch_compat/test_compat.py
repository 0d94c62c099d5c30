"""The private parts of torch that torch_compat stands on, on whatever torch is installed."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from shardwise.torch_compat import autograd, c10d, dtensor, dynamo, nn_modules, tensor_impl


def test_streams_of_cuda_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_cuda_getCurrentRawStream"
    assert torch.version.cuda is None or hasattr(torch._C, name)
    monkeypatch.setattr(torch._C, name, lambda index: 100 + index, raising=False)
    number = autograd.number_of_stream(torch.device("cuda", 1))
    assert number is not None
    assert number() == 101
    assert autograd.number_of_stream(torch.device("cpu")) is None


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
        autograd.queue_end_of_backward(lambda kept=kept: seen.append(x.grad is not None))  # type: ignore[misc]

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
    assert watched[1]() is None  # this is how the root sees that a backward failed


def test_hooks_of_a_tensor_are_found() -> None:
    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    def after(tensor: torch.Tensor) -> None:
        pass

    x = torch.ones(2, requires_grad=True)
    assert not autograd.gradient_hooks(x)
    assert not autograd.post_accumulate_hooks(x)
    handle = x.register_hook(scaled)
    x.register_post_accumulate_grad_hook(after)
    gradient_hooks, post_hooks = autograd.gradient_hooks(x), autograd.post_accumulate_hooks(x)
    assert gradient_hooks is not None
    assert post_hooks is not None
    assert list(gradient_hooks.values()) == [scaled]
    assert list(post_hooks.values()) == [after]
    handle.remove()
    assert not gradient_hooks  # the same home: a handle removes for whoever looks there


# --- meshes ---------------------------------------------------------------------------------------


def plane() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@on_ranks(4)
def test_meshes_are_turned_flattened_and_traced_to_their_root() -> None:
    mesh = plane()
    turned = dtensor.concatenate_meshes([mesh["tp"], mesh["dp"]])
    flat = dtensor.flatten_mesh(mesh)
    assert (turned.mesh_dim_names, turned.mesh.tolist()) == (("tp", "dp"), [[0, 2], [1, 3]])
    assert turned.get_coordinate() == mesh.get_coordinate()[::-1]
    assert turned.get_group("tp") is mesh.get_group("tp")
    assert dtensor.concatenate_meshes([mesh["tp"]]) == mesh["tp"]
    assert (flat.ndim, flat.mesh.tolist()) == (1, [0, 1, 2, 3])
    assert sorted(dist.get_process_group_ranks(flat.get_group())) == [0, 1, 2, 3]
    assert all(dtensor.root_mesh(each) == mesh for each in (mesh["dp"], mesh, turned))


# --- parameters -----------------------------------------------------------------------------------


class NeedsMore(nn.Parameter):
    """Cannot be made from its data alone."""

    def __new__(cls, data: Tensor, requires_grad: bool = True, *, scale: float) -> "NeedsMore":
        raise AssertionError("the constructor was called")


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_of_a_subclass_is_made_without_its_constructor(requires_grad: bool) -> None:
    data = torch.ones(3)
    made = tensor_impl.as_subclass_of_parameter(NeedsMore, data, requires_grad)
    assert type(made) is NeedsMore
    assert (made.requires_grad, made.is_leaf, made.data_ptr()) == (requires_grad, True, data.data_ptr())
    holder = nn.Module()
    holder.weight = made
    assert list(holder.parameters()) == [made]


# --- process groups and modules -------------------------------------------------------------------


class Allocating:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        if isinstance(self._backend, Exception):
            raise self._backend
        return self._backend

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"


@on_ranks(1)
def test_only_a_back_end_that_says_so_can_allocate() -> None:
    assert dist.group.WORLD is not None
    cpu, meta = torch.device("cpu"), torch.device("meta")
    able: Any = Allocating(Allocating(None))
    assert [c10d.can_allocate(able, device) for device in (cpu, meta)] == [True, False]
    for backend in (RuntimeError("no back end for this device"), TypeError("written in Python"), object()):
        unable: Any = Allocating(backend)
        assert not c10d.can_allocate(unable, cpu)
    assert not c10d.can_allocate(dist.group.WORLD, cpu)  # gloo


def test_errors_of_back_ends_are_told_from_others() -> None:
    for error in (
        dist.DistBackendError("NCCL error in: ..."),
        RuntimeError("NCCL AllReduce failed: unhandled system error \nNCCL Last Error: "),  # "nccl2"
        RuntimeError("NCCL communicator was aborted after a previous error"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    ):
        assert c10d.is_communication_error(error), error
    assert not c10d.is_communication_error(
        RuntimeError("The size of tensor a (3) must match the size of b (4)")
    )
    assert not c10d.is_communication_error(ValueError("NCCL is not what the caller asked for"))


class Recording:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module._call_impl(*args, **kwargs)


def test_a_call_goes_through_what_was_put_before_it_and_hooks_run_once() -> None:
    module, hooked = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *_: hooked.append(1))
    before = module(torch.ones(2))
    through = Recording(module)
    nn_modules.call_through(module, through)
    assert torch.equal(module(torch.ones(2)), before)
    assert (through.calls, len(hooked)) == (1, 2)
    module.forward(torch.ones(2))
    assert through.calls == 1


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_module_keeps_its_compiled_call(compiled_first: bool) -> None:
    module = nn.Linear(2, 2)
    through = Recording(module)
    if compiled_first:
        module.compile(backend="eager")
    nn_modules.call_through(module, through)
    if not compiled_first:
        module.compile(backend="eager")
    module(torch.ones(2))
    assert through.calls == 0


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_what_stands_before_a_call_stays_with_the_original(twin: Any) -> None:
    module = nn.Linear(2, 2)
    through = Recording(module)
    nn_modules.call_through(module, through)
    other = twin(module)
    assert torch.equal(other(torch.ones(2)), module(torch.ones(2)))
    assert through.calls == 1


@on_ranks(1)
def test_torch_refuses_a_module_that_is_registered_as_sharded() -> None:
    module = nn.Linear(2, 2)
    nn_modules.register_api(module)
    from torch.distributed.fsdp import fully_shard

    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        fully_shard(module)
    assert "cpu" in c10d.group_devices(dist.group.WORLD)


def test_a_parameter_becomes_another_and_keeps_attributes_and_hooks() -> None:
    param = nn.Parameter(torch.empty(2, device="meta"))
    param.is_marked = True  # type: ignore[attr-defined]
    seen: list[str] = []
    handle = param.register_hook(lambda gradient: seen.append("gradient"))
    param.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    assert tensor_impl.own_attributes(param) == {"is_marked": True}
    tensor_impl.become(param, nn.Parameter(torch.ones(2)))
    assert param.is_marked  # type: ignore[attr-defined]
    param.sum().backward()
    assert seen == ["gradient", "accumulated"]
    handle.remove()
    param.sum().backward()
    assert seen == ["gradient", "accumulated", "accumulated"]
    assert param.tolist() == [1.0, 1.0]


def test_an_assertion_for_a_device_has_no_more_text_than_cuda_takes() -> None:
    tensor_impl.assert_later(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError) as raised:
        tensor_impl.assert_later(torch.tensor(False), "ä" * 300)
    assert "ä" * 127 in str(raised.value)
    assert "ä" * 128 not in str(raised.value)


def test_a_marked_function_is_not_compiled_itself_but_traced_inside_a_graph() -> None:
    seen: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def marked(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    dynamo.run_outside_graphs(marked)
    counter = CompileCounterWithBackend("eager")
    assert torch.equal(torch.compile(marked, backend=counter)(torch.ones(2)), torch.full((2,), 2.0))
    assert (seen, counter.frame_count) == ([False], 0)  # nor is what it calls

    @torch.compile(backend=counter, fullgraph=True)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return marked(x * 2) * 3

    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 9.0))
    assert (seen, counter.frame_count) == ([False, True], 1)


def test_what_shadows_a_parameter_in_a_graph_leaves_no_trace_on_the_module() -> None:
    module = torch.nn.Linear(2, 2)
    weight = module.weight

    def twice(x: torch.Tensor) -> torch.Tensor:
        dynamo.allowed_in_checkpoints(dynamo.shadow_in_graph, module, "weight", weight * 2)
        y = module(x)
        dynamo.allowed_in_checkpoints(dynamo.unshadow_in_graph, module, "weight", weight)
        return y

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(twice, x, use_reentrant=False) + twice(x)

    x = torch.ones(1, 2)
    expected = 2 * torch.nn.functional.linear(x, weight * 2, module.bias)
    torch.testing.assert_close(torch.compile(outer, backend="eager", fullgraph=True)(x), expected)
    assert module._parameters["weight"] is weight
    assert not dynamo.is_shadowed(module, "weight")


def test_a_refused_graph_says_why_or_breaks() -> None:
    def refused(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            dynamo.refuse_graph("a.b: cannot. Do something else.")
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"a\.b: cannot\. Do something else\."):
        torch.compile(refused, backend="eager", fullgraph=True)(torch.ones(2))
    assert torch.equal(torch.compile(refused, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))


@on_ranks(2)
def test_views_of_complex_dtensors_are_views() -> None:
    dtensor.keep_views_of_complex_sharded()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    are_views = []
    for shape in [(4,), (5,), (1,), (3, 2), (1, 3)]:
        sharded = distribute_tensor(torch.ones(shape, dtype=torch.complex64), mesh, [Shard(0)])
        torch.view_as_real(sharded).mul_(2)
        are_views.append(torch.equal(sharded.full_tensor(), torch.full(shape, 2 + 0j)))
    assert all(are_views)
