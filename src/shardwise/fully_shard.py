"""``fully_shard``: validate, plan the parameter group, shard, mix in the class, install the hooks.

Everything that can fail happens before the first module is touched, so an error leaves the model as it was.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.arguments import check_flags, check_type
from shardwise.buckets.optimizer_steps import install_step_hooks
from shardwise.compile import traced
from shardwise.engine.module_state import ModuleState, drive, set_module_state, sharded_module_states
from shardwise.engine.root import Root
from shardwise.fsdp_module import ShardedModule
from shardwise.groups.group import ParameterGroup
from shardwise.groups.managed_modules import Owner, owner_of, set_owner
from shardwise.layout.fqns import joined, listed
from shardwise.layout.mesh import resolve_mesh
from shardwise.layout.precision import Casts, PrecisionRule, cast_around, precision_of
from shardwise.params.initial_values import broadcast_initial_values, record_initial_values
from shardwise.policies import (
    CommPolicy,
    CPUOffloadPolicyLike,
    DataParallelMeshDimsLike,
    MixedPrecisionPolicy,
    MixedPrecisionPolicyLike,
    OffloadPolicy,
    ShardPlacementFn,
)
from shardwise.setup.discovery import (
    Found,
    Meshes,
    leave_ties,
    make_buckets,
    make_param,
    modules_to_manage,
    names_below,
    resolve_ties,
)
from shardwise.setup.hooks import explain_calls, install_hooks
from shardwise.setup.sharded_class import original_class, sharded_class
from shardwise.setup.validation import (
    check_ignored,
    check_modules,
    check_offload,
    check_precision,
    check_reshard,
    class_name,
    storage_of,
)
from shardwise.torch_compat import nn_modules
from shardwise.tracing.trace import StepCapture, step_to_trace


class _Options(TypedDict, total=False):
    """The options of ``fully_shard``, which returns as many modules as it is given."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: ShardPlacementFn | None
    mp_policy: MixedPrecisionPolicyLike | None
    offload_policy: OffloadPolicy | CPUOffloadPolicyLike | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDimsLike | None
    comm_policy: CommPolicy | None
    sync_module_states: bool
    check_equal_weights: bool


_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


@overload
def fully_shard(module: nn.Module, **options: Unpack[_Options]) -> ShardedModule: ...


@overload
def fully_shard(module: list[_ModuleT], **options: Unpack[_Options]) -> list[ShardedModule]: ...


def fully_shard(
    module: nn.Module | list[_ModuleT],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicyLike | None = MixedPrecisionPolicy(),  # noqa: B008 (immutable)
    offload_policy: OffloadPolicy | CPUOffloadPolicyLike | None = OffloadPolicy(),  # noqa: B008 (immutable)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDimsLike | None = None,
    comm_policy: CommPolicy | None = None,
    sync_module_states: bool = False,
    check_equal_weights: bool = True,
) -> Any:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    Every parameter that no sharded module inside ``module`` has taken becomes an ``nn.Parameter`` that
    holds a ``DTensor``, sharded on dim 0 in chunks of ``ceil(rows / world size)`` rows; the last ranks may
    have fewer rows, or none. A scalar is replicated. The parameters of one call form one parameter group:
    they are unsharded together before forward and before backward and resharded after each, and their
    gradients are averaged over the ranks and reduce-scattered together. Call it bottom-up: on the blocks
    first, then on the model.

    A parameter that is already a DTensor, from tensor or expert parallelism, becomes one on the joint mesh;
    in forward, modules see it as it was. If a parameter is tied to one of a module inside ``module`` that was
    sharded before, it moves to the group of this call.

    The call itself does not communicate, except with ``sync_module_states``. Afterwards each rank stores 1 /
    world size of every parameter. Since each rank keeps its own rows, all ranks must start from equal
    weights; parameters on the meta device are not compared. After an error the model is unchanged.

    Forward hooks on ``module`` see full parameters, including hooks registered later; hooks registered with
    ``prepend=True`` run before ours and see shards. Hooks on a sharded parameter run when its reduced
    gradient has arrived. If the loss also uses the sharded parameter itself (a penalty on
    ``model.parameters()``), autograd adds that gradient separately: hooks of
    ``register_post_accumulate_grad_hook`` then run twice in one backward, and ``.grad`` is complete the
    second time.

    Outside of forward, ``model.parameters()`` are shards, and torch refuses to compute with them and plain
    tensors together ("got mixed torch.Tensor and DTensor"). Convert a penalty to a plain tensor before you
    add it, keep an average in clones of the shards, and call ``full_tensor()`` where you need the full
    weight::

        loss = loss + 0.1 * sum(p.pow(2).sum().full_tensor() for p in model.parameters())
        average = [p.detach().clone() for p in model.parameters()]  # later: a.lerp_(p.detach(), 0.1)
        product = model.head.weight.full_tensor() @ x  # collective, as the penalty is
        with unsharded(model), torch.no_grad():
            model.head.weight.copy_(value)

    In the first forward with gradients, and after the plan has changed (frozen weights, settings), the ranks
    compare their plans: names, shapes, dtypes, groups, meshes, policies. If these differ, every rank raises
    an error that names the first difference.

    Args:
        module: an ``nn.Module`` with a forward, or a list of such modules, which then form one group.
        mesh: a ``DeviceMesh`` of one dimension, to shard over, or of two: parameters are replicated over
            the first and sharded over the second. None (default): all ranks of the default process group,
            on the accelerator if there is one; after ``init_process_group("gloo")``, on the CPU.
        reshard_after_forward: True reshards after forward and unshards again for backward: least memory, one
            more all-gather. False keeps the full parameters until backward. None (default) reshards, except
            where backward probably begins: in the outermost sharded module, and in the last one inside it, in
            the order of ``modules()``. (The latter is resharded too if the caller chooses what backward
            prefetches, and in a graph of the whole model.) A number n, a divisor of the number of ranks
            sharded over: n neighbouring ranks keep the parameters together, and unshard again among
            themselves (1 is the same as False, all of them the same as True).
        shard_placement_fn: called with each parameter; returns the ``Shard(dim)`` to use for it, a
            :class:`shardwise.policies.ShardPlacementResult` to choose its mesh as well, or None for
            ``Shard(0)``. Sharding on another dim than 0 costs a copy of the parameter in every all-gather and
            reduce-scatter.
        mp_policy: dtypes of computation and reduction; see :class:`MixedPrecisionPolicy`. By default, and
            with None, everything runs in the parameters' own dtypes.
        offload_policy: :class:`CPUOffloadPolicy` keeps the shards in host memory. By default they are on the
            device of the mesh.
        ignored_params: parameters to leave as they are (default none). They are not moved to the device, and
            their gradients are not reduced, except after ``set_reduce_ignored_params(True)``.
        dp_mesh_dims: which dimensions of ``mesh`` to shard and to replicate over, if ``mesh`` has others as
            well. Parameters may be DTensors on all of ``mesh``, replicated on these dimensions.
        comm_policy: how and when parameters are communicated; see :class:`CommPolicy`. None (default): its
            defaults.
        sync_module_states: True gives all ranks the parameters and buffers of the first rank of the mesh, for
            weights that were loaded or drawn there only. The other ranks may have theirs on the meta device.
            Collective: sends every byte once along each mesh dimension. Ignored parameters stay as they are.
        check_equal_weights: True (default) records a checksum of every parameter before it is sharded. The
            first forward with gradients compares them, and raises an error if ranks sharded different values
            and nothing has replaced these since. False saves this time, about that of copying the model once;
            use it for large models that are known to be equal. Replicas are then not compared either.

    Returns:
        ``module`` itself. Its class is now a subclass of its former class and of
        :class:`FSDPModule`.

    Raises:
        TypeError: an argument is of the wrong type, or a module's class cannot be extended.
        ValueError: a module cannot be sharded as asked: it has no forward, is already sharded, is sharded
            after a module around it, or the mesh, a dtype or a placement does not fit; or ``SHARDWISE_TRACE``
            names no step.
        RuntimeError: there is no process group, or a tied parameter belongs to a group that has run.
        NotImplementedError: a parameter is of a kind that is not supported.

    Example::

        mesh = init_device_mesh("cuda", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    modules = check_modules(module)
    check_precision(mp_policy)
    is_offloaded = check_offload(offload_policy)
    ignored = check_ignored(ignored_params)
    check_type("fully_shard", "comm_policy", comm_policy, "a CommPolicy or None", CommPolicy, type(None))
    check_flags("fully_shard", sync_module_states=sync_module_states, check_equal_weights=check_equal_weights)
    wanted = "a function of a parameter"
    check_type("fully_shard", "shard_placement_fn", shard_placement_fn, wanted, Callable, type(None))
    meshes = Meshes(resolve_mesh(mesh, dp_mesh_dims))
    reshards = check_reshard(reshard_after_forward, meshes.default)
    traced_step = step_to_trace()
    managed_modules = modules_to_manage(modules)
    found = Found(modules, managed_modules, names_below(modules), ignored)
    rule = PrecisionRule(mp_policy, modules, managed_modules)
    make = partial(make_param, meshes, shard_placement_fn, rule, modules)
    params = [make(param, sites) for param, sites in found.params.items()]
    moves = resolve_ties(modules, found, meshes.default)
    own_policies = [rule.policy_for(move.places(found.names), move.param.sharded) for move in moves]
    classes = [sharded_class(type(m)) for m in modules]
    policy = comm_policy or CommPolicy()
    storage = storage_of(offload_policy if is_offloaded else None, meshes.default.device)
    buckets = make_buckets(params, meshes, policy, storage, mp_policy)
    name = class_name(modules[0])  # when a module around is sharded, _build_tree replaces it with the FQN
    group = ParameterGroup(name, modules, managed_modules, buckets, meshes.default, policy, Casts(mp_policy))
    group.configure(reshard_after_forward=reshards)
    group.ignored = [p for p in found.ignored if p.is_floating_point() or p.is_complex()]
    for param in params:
        param.compares = check_equal_weights
    if sync_module_states:
        broadcast_initial_values(params, _buffers_of(managed_modules, found.names), meshes.default)
    shards = group.make_shards()
    record_initial_values(group.shards.params, shards)
    if any(param.requires_grad for param in group.ignored):  # here, since a warning may be an error
        warnings.warn(_message_about_ignored(group, found), stacklevel=2)
    moved = _moved_buffers(managed_modules, meshes.default.device, getattr(mp_policy, "buffer_dtype", None))

    _mix_in(modules, classes)
    _use_buffers(managed_modules, moved)
    group.install(shards)
    for move, own_policy in zip(moves, own_policies, strict=True):
        move.apply(
            group,
            partial(precision_of, policy=own_policy),
            lambda param: make_buckets([param], meshes, policy, storage, mp_policy)[0],
        )
        move.param.rename(found.names)
    leave_ties(group, found.ties, moves)
    if mp_policy is not None and mp_policy.param_dtype:
        for kept in rule.full_precision_modules:
            cast_around(kept)
    root = _attach_to_modules(group, modules, found.names)
    if traced_step is not None:
        root.add(StepCapture(root, traced_step))
    return module


def _attach_to_modules(group: ParameterGroup, modules: list[nn.Module], names: dict[nn.Module, str]) -> Root:
    """Attach the group to its modules, register hooks, and join the trees of sharded modules inside; return
    the root of all of them."""
    module_state = ModuleState(group, Root(group.device), traced)
    for module in modules:
        set_module_state(module, module_state)
        nn_modules.register_api(module)
    for module in group.managed_modules:
        set_owner(module, Owner(group, names[module] or group.name))
        nn_modules.mark_managed(module)
    install_hooks(module_state)
    install_step_hooks()  # from now on: state may be loaded, for which torch steps, before the first forward
    explain_calls(group)
    _build_tree(modules, module_state)
    return module_state.root


def _message_about_ignored(group: ParameterGroup, found: Found) -> str:
    names = [found.ignored[p] for p in group.ignored if p.requires_grad]
    return (
        f"{group.name}: ignored_params contains trainable parameters ({listed(names, 4)}). Their gradients "
        "are this rank's own, so that the ranks will drift apart unless something else reduces them. "
        "model.set_reduce_ignored_params(True) averages them at the end of each backward."
    )


def _mix_in(modules: list[nn.Module], classes: list[type]) -> None:
    """Give all modules their sharded classes, or none if one of them fails."""
    done: list[nn.Module] = []
    try:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls
            done.append(module)
    except Exception as error:
        for module in done:
            module.__class__ = original_class(module)
        failed = modules[len(done)]
        raise TypeError(
            f"fully_shard: the class {class_name(failed)} cannot be extended ({error}). Its memory "
            "layout is fixed, perhaps by __slots__; shard the module around it instead."
        ) from None


def _buffers_of(
    managed_modules: list[nn.Module], names: dict[nn.Module, str]
) -> list[tuple[str, nn.Module, str]]:
    return [
        (joined(names[module], name), module, name)
        for module in managed_modules
        for name, buffer in nn_modules.buffers(module).items()
        if buffer is not None
    ]


def _moved_buffers(
    managed_modules: list[nn.Module], device: torch.device, dtype: torch.dtype | None
) -> dict[torch.Tensor, torch.Tensor]:
    """Buffers on the device of the computation, floating-point ones in ``dtype``, for those that are not."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in managed_modules:
        for buffer in nn_modules.buffers(module).values():
            if buffer is not None and buffer not in moved:
                wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                target = buffer.device if buffer.is_meta else device
                if (buffer.device, buffer.dtype) != (target, wanted):
                    moved[buffer] = buffer.to(target, wanted)
    return moved


def _use_buffers(managed_modules: list[nn.Module], moved: dict[torch.Tensor, torch.Tensor]) -> None:
    """Register the new buffers wherever the old ones are: one may be shared."""
    for module in managed_modules:
        for name, buffer in nn_modules.buffers(module).items():
            if buffer is not None and buffer in moved:
                nn_modules.buffers(module)[name] = moved[buffer]


def _build_tree(modules: list[nn.Module], module_state: ModuleState) -> None:
    """Let the new root drive all groups inside the newly sharded modules, and name them as it sees them."""
    module_states = {id(m): m for module in modules for m in sharded_module_states(module)}
    drive(module_state.root, list(module_states.values()), module_state)
    for root in modules:
        names = {module: name for name, module in root.named_modules()}
        for inner in sharded_module_states(root):
            if inner is not module_state:
                inner.group.rename(names)
        for module, name in names.items():
            owner = owner_of(module)
            if owner is not None and owner.group is not module_state.group:
                owner.fqn = name
