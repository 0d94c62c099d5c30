"""Where torch's private or version-dependent parts are touched, each with the reason.

Everything else in this library uses documented APIs. Supported: torch 2.11 to 2.15;
``tests/test_compat.py`` checks each function here on whatever is installed.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, wraps
from operator import attrgetter
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch import pyfunctorch
from torch.autograd import Variable, forward_ad
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# --- autograd -------------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The running backward's number, -1 outside of one. No public function tells whether autograd is
running; ``torch.utils.checkpoint`` relies on the same one."""


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that the running backward is at. Hooks on nodes are not told which node they are called for, and
must not hold it themselves: such a cycle is never freed."""


# torch.func has no public way to tell whether a transform runs, to step out of it, or to look into what it
# wraps. It keeps transforms on a stack, the innermost last.

_transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""True for a tensor that a transform has wrapped. It has no memory of its own."""

unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
"""What such a tensor wraps, perhaps for another transform around the first."""


def is_in_transform() -> bool:
    """True inside a transform of ``torch.func``."""
    return _transforms_are_active()


def is_in_forward_mode() -> bool:
    """True where tensors may have tangents."""
    return forward_ad._current_level >= 0


def is_in_transform_or_forward_mode() -> bool:
    """True where a tensor may be more than it seems."""
    return _transforms_are_active() or forward_ad._current_level >= 0


without_transforms: Callable[[], AbstractContextManager[Any]] = (
    pyfunctorch.temporarily_clear_interpreter_stack
)
"""Inside, no transform is active."""


@contextmanager
def in_transform_of(tensor: Tensor) -> Iterator[None]:
    """Inside, the transform that has wrapped ``tensor`` is the innermost; none is active if none has."""
    level, inner = _functorch.maybe_get_level(tensor), []
    try:
        while _transforms_are_active() and _functorch.current_level() > level:
            inner.append(pyfunctorch.pop_dynamic_layer_stack())
        yield
    finally:
        while inner:
            pyfunctorch.push_dynamic_layer_stack(inner.pop())


def tangent(tensor: Tensor) -> Tensor | None:
    """The tangent that forward-mode differentiation has given to ``tensor``, for the innermost transform.

    Transforms other than ``jvp`` cannot be asked.
    """
    if not is_in_forward_mode():
        return None
    transform = _functorch.peek_interpreter_stack()
    if transform is not None and transform.key() != _functorch.TransformType.Jvp:
        return None
    return forward_ad.unpack_dual(tensor).tangent


def is_recorded() -> bool:
    """True while ``make_fx`` (or ``torch.func.linearize``) records what is computed."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when the running backward ends. DDP stands on the same queue."""
    Variable._execution_engine.queue_callback(callback)


set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter
"""Set the version counters of some tensors, which autograd compares when a saved one is used again, to some
numbers.

The public ``torch.autograd._unsafe_preserve_version_counter`` is a context; we need the setter beneath it,
because a full parameter's version follows its shard's."""


def is_autograd_compiled() -> bool:
    """True while compiled autograd runs a backward, which has no end that ``queue_end_of_backward`` sees.

    Where it was not imported it is not running.
    """
    compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region


Hooks = dict[int, Callable[..., Any]]


gradient_hooks: Callable[[Tensor], Hooks | None] = attrgetter("_backward_hooks")
"""Where ``tensor.register_hook`` keeps its hooks; torch has no public way to list them."""

post_accumulate_hooks: Callable[[Tensor], Hooks | None] = attrgetter("_post_accumulate_grad_hooks")
"""Where ``register_post_accumulate_grad_hook`` keeps its hooks."""


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles there are over one memory; no public function counts them."""
    return torch._C._storage_Use_Count(storage._cdata)


plain_access: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, attributes of DTensors are read and set without asking whether the class wants to take part, which
DTensor does not: that takes half of the time. Described in torch's notes on extending PyTorch."""


def profiler_is_on() -> bool:
    """True while a profiler records: labels cost microseconds and are only then worth it."""
    return torch.autograd.profiler._is_profiler_enabled


def run_outside_graphs(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` leave alone the frame of ``function`` and of all that it calls.

    Where it is called from a frame that is being traced, it is traced as well.
    """
    _set_frame_action(function, inside="SKIP")


def break_graphs(function: Callable[..., Any]) -> None:
    """As ``run_outside_graphs``; a frame that is being traced is cut in two where it calls ``function``.

    As ``torch.compiler.disable`` does, by the marks that it leaves; but that puts a wrapper around the
    function, which costs 1 to 3 us a call, and imports dynamo.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "shardwise gathers, frees and reduces here"
    run_outside_graphs(function)


def skip_frame(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` pass by the frame of ``function``, as it does by torch's own, but not by what it
    calls."""
    _set_frame_action(function, inside="DEFAULT")


def _set_frame_action(function: Callable[..., Any], inside: str) -> None:
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, getattr(actions, inside))
    frames.set_code_exec_strategy(function.__code__, strategy)


# torch 2.11 cannot trace that an entry of ``module.__dict__`` goes; in graphs the full tensor then takes the
# place of the shard itself, where nobody but the graph sees it: what is traced does not happen to the module.
# But what stands there afterwards is what was put back, so that must be what had stood there.
RESTORES_ALL_IN_GRAPHS = not torch.__version__.startswith(("2.11.", "2.12."))


def shadow_in_graph(module: nn.Module, name: str, full: Tensor) -> None:
    """Let what is traced next see ``full`` as ``module.<name>``."""
    if RESTORES_ALL_IN_GRAPHS:
        module.__dict__[name] = full
    else:
        module._parameters[name] = full  # type: ignore[assignment]


def unshadow_in_graph(module: nn.Module, name: str, sharded: nn.Parameter) -> None:
    """Let what is traced next see the parameter."""
    if RESTORES_ALL_IN_GRAPHS:
        module.__dict__.pop(name)
    else:
        module._parameters[name] = sharded


def is_shadowed(module: nn.Module, name: str) -> bool:
    """True if ``module.<name>`` is not the registered parameter."""
    return name in module.__dict__


def allowed_in_checkpoints(function: Callable[..., None], *args: Any) -> None:
    """While tracing, call ``function``, which changes modules and will have changed them back.

    Inside activation checkpointing dynamo refuses all changes of objects from outside, also where nothing
    remains of them. It lets torch's own pass by this function; there is no public one.
    """
    torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function, *args)


def refuse_graph(reason: str) -> None:
    """While tracing, break the graph; with ``fullgraph=True`` an error that gives the reason."""
    torch._dynamo.graph_break(msg=reason)


def chunk_cat(tensors: list[Tensor], num_chunks: int, out: Tensor) -> None:
    """Chunk each tensor along dim 0, pad the last chunks with zeros, and put all first chunks side by side in
    the first row of ``out``, and so on. Not documented; views and a ``torch.cat`` take twice the time."""
    torch._chunk_cat(tensors, 0, num_chunks, out=out)


# --- DTensor --------------------------------------------------------------------------------------


def strided_shard(dim: int, split_factor: int) -> Placement:
    """``Shard(dim)`` of what ``split_factor`` ranks of later mesh dims had split before. Private in torch,
    but what torch's own composition of tensor parallelism and sharding rests on."""
    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement: Placement) -> bool:
    """True for what ``strided_shard`` makes; it is no ``Shard``."""
    return isinstance(placement, _StridedShard)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The mesh of all dims of ``meshes``, slices of one root, in this order.

    Public slicing (``root["dp", "tp"]``) keeps the root's order of dims, which may be the other one.
    """
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All dims of ``mesh`` as one; torch documents it, but with an underscore."""
    return mesh._flatten()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was sliced from, or itself. Nothing public tells."""
    return mesh._get_root_mesh()


def sharded_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    full: Tensor | torch.Size,
    dtype: torch.dtype,
) -> DTensorSpec:
    """A DTensorSpec for a contiguous full tensor of shape ``full``, to be made once and shared."""
    shape = torch.Size(full if isinstance(full, torch.Size) else full.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def make_dtensor(local: Tensor, spec: DTensorSpec, cls: type[DTensor] = DTensor) -> DTensor:
    """A DTensor over ``local``, 8 times cheaper than ``DTensor.from_local`` (1.9 against 15.6 us).

    Its ``__init__`` is passed over: it does nothing but import all of ``torch._dynamo``, and with it
    torch's FSDP, the first time.
    """
    return DTensor.__new__(cls, local, spec, requires_grad=False)


@cache
def keep_views_of_complex_sharded() -> None:
    """Have ``torch.view_as_real`` of any DTensor be a view, as it is of plain tensors.

    Where rows are uneven, or fewer than the ranks, torch 2.13 gathers first. Its optimizers update complex
    parameters through ``view_as_real``, so that all but weight decay goes to a copy and is lost. There is a
    public way to register how an operator shards, but it leaves out tensors with fewer rows than ranks.
    """
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

    def as_given(schema: OpSchema) -> OpStrategy:
        given: Any = schema.args_schema[0]
        specs = [strategy.output_spec for strategy in given.strategies]
        return OpStrategy(
            [
                OpSpec(
                    DTensorSpec(spec.mesh, spec.placements), input_specs=(spec,), redistribute_cost=[[0.0]]
                )
                for spec in specs
            ]
        )

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(torch.ops.aten.view_as_real.default, as_given)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """What was set on ``tensor``, but for what is in the memory of a tensor subclass."""
    inside = vars(tensor.detach())
    return {name: value for name, value in vars(tensor).items() if name not in inside}


def become(tensor: nn.Parameter, new: Tensor) -> None:
    """Give ``tensor`` the contents of ``new``, also on another device; it stays the same object.

    ``torch.utils.swap_tensors`` is public, but leaves hooks and attributes with what is swapped away, and the
    places of hooks are private.
    """
    hooks, post_hooks = gradient_hooks(tensor), post_accumulate_hooks(tensor)
    for name, value in own_attributes(tensor).items():
        vars(new).setdefault(name, value)
    torch.utils.swap_tensors(tensor, new)
    if hooks:
        tensor._backward_hooks = hooks
    if post_hooks:
        tensor._post_accumulate_grad_hooks = post_hooks  # type: ignore[attr-defined]


def as_subclass_of_parameter(cls: type, data: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter of the class ``cls`` over ``data``, without calling its constructor.

    ``nn.Parameter`` itself is made by the same function.
    """
    return torch.Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[return-value]


def step_post_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What ``register_step_post_hook`` has registered; torch has no public way to list them."""
    return list(optimizer._optimizer_step_post_hooks.values())


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``kind.step`` without the hooks that torch puts around it when the first of a class is made."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, of an optimizer, with the hooks and the profiler's label that torch puts around it.

    What torch puts there costs tens of microseconds for the label alone: it is passed by where there are no
    hooks and no profiler. ``hooked`` tells torch that nothing is left to do.
    """
    as_in_torch = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def hooked(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        has_hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if has_hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or profiler_is_on():
            return as_in_torch(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    hooked.hooked = True  # type: ignore[attr-defined]
    return hooked


def set_grad_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    """Have gradients of ``tensor``, a leaf, be cast to ``dtype`` and added up in it.

    Public since 2.10, but not yet in torch's annotations.
    """
    tensor.grad_dtype = dtype  # type: ignore[attr-defined]


local_tensor: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
"""The local tensor itself; ``to_local()`` of a Parameter makes a new view at each call."""


spec_of: Callable[[Tensor], DTensorSpec] = attrgetter("_spec")
"""Mesh, placements and whole shape of a DTensor, as one object that can be told apart by identity."""


def plain(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, and any other tensor itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def set_local_tensor(tensor: Tensor, local: Tensor) -> None:
    """Let ``tensor`` stand on ``local``, which has the same shape, dtype and device as before."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


# --- process groups -------------------------------------------------------------------------------

# torch 2.13 renamed these methods and warns on the old names, which are all that 2.11 has.
_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_REDUCE = (
    "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
)
_GATHER_MANY = (
    "all_gather_single_coalesced"
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
    else "allgather_into_tensor_coalesced"
)
_REDUCE_MANY = (
    "reduce_scatter_single_coalesced"
    if hasattr(dist.ProcessGroup, "reduce_scatter_single_coalesced")
    else "reduce_scatter_tensor_coalesced"
)


@cache
def _gather_options(is_async: bool) -> Any:
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = is_async
    return options


def all_gather(pg: dist.ProcessGroup, output: Tensor, source: Tensor, is_async: bool) -> Any:
    """One all-gather; the work handle (None if ``is_async`` is False and the back end has none)."""
    return getattr(pg, _GATHER)(output, source, _gather_options(is_async))


def all_gather_coalesced(
    pg: dist.ProcessGroup, outputs: Sequence[Tensor], sources: Sequence[Tensor], is_async: bool
) -> Any:
    """Several all-gathers as one call; there is no public function for that (a private context)."""
    return getattr(pg, _GATHER_MANY)(outputs, sources, _gather_options(is_async))


@cache
def _reduce_options(op: Any, is_async: bool) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = is_async
    return options


def reduce_scatter(pg: dist.ProcessGroup, output: Tensor, source: Tensor, op: Any, is_async: bool) -> Any:
    """One reduce-scatter."""
    return getattr(pg, _REDUCE)(output, source, _reduce_options(op, is_async))


def reduce_scatter_coalesced(
    pg: dist.ProcessGroup,
    outputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    op: Any,
    is_async: bool,
) -> Any:
    """Several reduce-scatters as one call."""
    return getattr(pg, _REDUCE_MANY)(outputs, sources, _reduce_options(op, is_async))


def backend_name(pg: dist.ProcessGroup, device: torch.device) -> str:
    """What serves ``device`` in ``pg``; ``dist.get_backend`` says "undefined" where several do."""
    try:
        return pg._get_backend(device).name().lower()
    except (RuntimeError, AttributeError, TypeError):  # a process group that is written in Python
        return str(dist.get_backend(pg)).lower()


def subgroup(
    parent: dist.ProcessGroup,
    members: Iterable[int],
    device: torch.device,
    purpose: str,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """A process group of some ranks of ``parent``, of its timeout and back end or another. Only members call.

    ``dist.new_group`` takes the name from how many groups a rank is in, so ranks that are in different
    numbers of them wait for each other for ever. Here the name says what the group is.

    No communication yet: see ``connect``.
    """
    c10d = dist.distributed_c10d
    all_ranks = dist.get_process_group_ranks(parent)
    ranks = [all_ranks[member] for member in members]
    own = ranks.index(dist.get_rank())
    name = f"shardwise_{purpose}_{parent.group_name}_{'_'.join(map(str, ranks))}"
    while name in c10d._world.pg_names.values():  # of an earlier model: made as often on all ranks
        name += "'"
    timeout = timeout_of(parent, device)
    make: Any = c10d._new_process_group_helper
    with _world_stays_whole():
        pg, _ = make(
            len(ranks),
            own,
            ranks,
            c10d.Backend(backend or backend_name(parent, device)),
            job_store(),
            name,
            timeout=timeout,
        )
    c10d._world.pg_group_ranks[pg] = {rank: index for index, rank in enumerate(ranks)}
    return pg


_BOUND_DEVICE_LOCK = Lock()  # a checkpoint in the background makes a group of its own


@contextmanager
def _world_stays_whole() -> Iterator[None]:
    """Inside, process groups are made without splitting the communicator of the whole world.

    After ``init_process_group(device_id=...)`` torch makes the communicator of a group by such a split, at
    the first collective. All ranks of the world have to take part in it, also those that are not in the group
    and do not even know of it: other stages of a pipeline, ranks without a sharded model. Torch reads whether
    to split from the device that the default group is bound to; nothing public says so.
    """
    world = dist.group.WORLD
    if world is None or getattr(world, "bound_device_id", None) is None:
        yield
        return
    with _BOUND_DEVICE_LOCK:
        device, world.bound_device_id = world.bound_device_id, None
        try:
            yield
        finally:
            world.bound_device_id = device


def connect(pg: dist.ProcessGroup, device: torch.device) -> None:
    """Have the members of ``pg`` connect now, once. Back ends such as NCCL do so at the first collective
    otherwise, which may be in the midst of other communication; there is no public way to ask for it."""
    try:
        backend = pg._get_backend(device)
    except (RuntimeError, AttributeError, TypeError):  # a process group that is written in Python
        return
    if getattr(backend, "supports_splitting", False):  # as torch asks: those that have a communicator
        backend.eager_connect_single_device(device)


def timeout_of(pg: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """How long collectives of ``pg`` may take; nothing public tells."""
    try:
        assert pg is not None
        return pg._get_backend(device).options._timeout  # type: ignore[no-any-return]
    except (RuntimeError, AttributeError, TypeError, AssertionError):
        return dist.distributed_c10d.default_pg_timeout


def job_store() -> dist.Store:
    """The key-value store of the job; no public function gives it."""
    return dist.distributed_c10d._get_default_store()


def job_store_client() -> dist.Store:
    """The same with a connection of its own, which no other thread's waiting holds up.

    Stores that cannot be cloned (in memory, in a file) have no connections.
    """
    store: Any = job_store()
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        store = store.clone()
    return store


def is_fake(pg: dist.ProcessGroup) -> bool:
    """True where a back end only pretends to communicate, as in plans for more ranks than there are."""
    return "fake" in str(dist.get_backend(pg)).lower()


_TAG_OF_NOTHING = 0x59FFFFFF


def end_waits(pg: dist.ProcessGroup) -> None:
    """Have every wait of this process in ``pg`` raise now. The process group is of no use afterwards.

    gloo's ``abort`` does not end waits (seen on 2.13), but a receive that times out closes the connections
    of its process group, upon which all waits in it raise, on both sides.
    """
    for kind in group_devices(pg):
        device = torch.device(kind)
        name = backend_name(pg, device)
        if name == "gloo":
            for peer in set(range(pg.size())) - {pg.rank()}:  # some may have closed theirs already
                with suppress(RuntimeError):
                    work = pg.recv([torch.empty(1)], peer, _TAG_OF_NOTHING)
                    work.wait(timedelta(milliseconds=1))
        elif name in ("nccl", "xccl"):  # not run here
            with suppress(RuntimeError, AttributeError):
                pg._get_backend(device).abort()


def is_timeout(error: Exception) -> bool:
    """Whether the timeout of the process group has passed: back ends say so in the text alone."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def is_communication_error(error: Exception) -> bool:
    """Whether a back end has raised it. gloo raises plain RuntimeErrors, with its file names in them."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(
        each in str(error) for each in ("gloo", "pair closure", "Operation timed out!")
    )


def ranks_of(pg: dist.ProcessGroup) -> list[int]:
    """Global ranks of the members of ``pg``."""
    return list(dist.get_process_group_ranks(pg))


def can_allocate(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the back end of ``pg`` has an allocator of its own for ``device``."""
    try:
        return bool(pg._get_backend(device).supports_tensor_alloc(device))
    except (RuntimeError, AttributeError, TypeError):
        return False


def allocate_from_group(
    pg: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor from the allocator of the back end of ``pg``; there is no public function for it."""
    return pg._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)


def symmetric_buffer(pg: dist.ProcessGroup, num_bytes: int, device: torch.device) -> Tensor:
    """A buffer of bytes that all ranks of ``pg`` see; collective. torch's module for it is still private."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, pg.group_name)
    return buffer


def group_devices(pg: dist.ProcessGroup) -> set[str]:
    """Device types for which ``pg`` has a back end; empty where it does not say (threads as ranks)."""
    return {device.type for device in pg._device_types}


# --- modules --------------------------------------------------------------------------------------


def call_through(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have ``module(...)`` run ``call``, unless ``module.compile()`` has claimed the place, or does so later.

    This is the one place in ``nn.Module.__call__`` where an instance can put itself without taking the slow
    path that hooks take. Copies and pickles of the module leave it out.
    """
    if module._compiled_call_impl is None:
        module.__dict__["_compiled_call_impl"] = call


def put_last(module: nn.Module, hook: int) -> None:
    """Have the forward hook with the id ``hook`` run after the others of ``module``.

    Torch can put a hook first (``prepend=True``), but not keep one last.
    """
    hooks = module._forward_hooks
    if len(hooks) > 1 and next(reversed(hooks)) != hook and hook in hooks:
        hooks[hook] = hooks.pop(hook)


def applied_apis(module: nn.Module) -> list[str]:
    """Which of torch's composable APIs that exclude ours were applied to ``module`` itself."""
    return [name for name in ("fully_shard", "replicate") if name in module.__dict__.get(REGISTRY_KEY, ())]


def register_api(module: nn.Module) -> None:
    """Enter this library in torch's record of composable APIs, under both names that torch asks for.

    ``fully_shard``: torch's own ``fully_shard`` and ``replicate`` refuse the module instead of sharding it
    twice. ``replicate``: torch's ``fully_shard`` of a module around this one leaves it as it is (seen on
    2.13); otherwise it takes the shards for full parameters.
    """
    for name in ("fully_shard", "replicate"):
        module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def is_managed_by_torch(module: nn.Module) -> bool:
    """True if torch's own FSDP says that it manages the parameters of ``module``."""
    return "_is_fsdp_managed_module" in module.__dict__


def mark_managed(module: nn.Module) -> None:
    """Tell dynamo and Transformers, which read these names, that parameters come and go."""
    module.__dict__["_is_fsdp_managed_module"] = True
    module.__dict__["_fsdp_use_orig_params"] = True


# --- Inductor -------------------------------------------------------------------------------------

# Steps of its programs have no public interface, but passes over them are what its configuration asks for
# (``reorder_for_compute_comm_overlap_passes``), and torch's own rest on these.


def made_by(step: Any) -> Iterable[str]:
    """Names of the buffers that a step of a program of Inductor writes."""
    return step.get_buffer_names()  # type: ignore[no-any-return]


def needed_by(step: Any) -> tuple[list[str], list[str]]:
    """Names of the buffers that must be there before it, and of those whose steps it merely has to follow,
    each in an order that all ranks have."""
    needed: dict[bool, set[str]] = {False: set(), True: set()}
    for dep in step.unmet_dependencies:
        needed[getattr(dep, "is_fake", False)].add(dep.name)
    return sorted(needed[False]), sorted(needed[True] - needed[False])


def collective_of(step: Any) -> str | None:
    """Which functional collective a step begins ("all_gather_into_tensor"), or "wait_tensor"."""
    from torch._inductor.utils import is_collective, is_wait

    if is_wait(step.node):
        return "wait_tensor"
    if not is_collective(step.node):
        return None
    name = str(step.node.op_overload).split(".")[1]
    return name.removesuffix("_out").removesuffix("_")  # all_reduce_ sums in place
