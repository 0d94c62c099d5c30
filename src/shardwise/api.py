"""``fully_shard``: check, plan the group, shard, mix in the class, install the hooks.

Everything that can fail happens before the first module is touched, so that after an error the model
is as it was.
"""

import warnings
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwise.module import (
    FSDPModule,
    original_class,
    set_member,
    sharded_class,
    sharded_members,
)
from shardwise.policy import CommPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from shardwise.runtime import compat
from shardwise.runtime.bucket import Bucket, Storage
from shardwise.runtime.extension import ExtensionBucket, check_protocol, is_extension
from shardwise.runtime.group import GradientState, Group, State, Tie
from shardwise.runtime.hooks import install_hooks
from shardwise.runtime.mesh import ShardMesh, resolve_mesh
from shardwise.runtime.outside import explain_calls
from shardwise.runtime.param import Param, Site, sharded_before
from shardwise.runtime.precision import Casts, FullPrecisionRule, cast_around, precision_of
from shardwise.runtime.schedule import Member, Schedule

_PLACE = "_shardwise_place"


@dataclass(eq=False)
class _Place:
    """Noted on every module whose parameters a group has taken: the group, and the module's name."""

    group: Group
    fqn: str

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Place | None":
        """A module that is copied without its group is free."""
        group = memo.get(id(self.group))
        return None if group is None else _Place(group, self.fqn)


M = TypeVar("M", nn.Module, list[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),  # noqa: B008 (immutable)
    offload_policy: Any = OffloadPolicy(),  # noqa: B008 (immutable)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    comm_policy: CommPolicy | None = None,
) -> M:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    Every parameter that no sharded module inside ``module`` has taken becomes an ``nn.Parameter``
    holding a ``DTensor``: sharded on dim 0 in chunks of ``ceil(rows / world)`` rows, the last ranks
    perhaps with fewer or none; a scalar is replicated. The parameters of one call form one group: they
    are gathered together before forward and before backward, freed after, and their gradients are
    averaged over the ranks and scattered together. Call it bottom-up: on the blocks first, then on the
    model.

    A parameter that is a DTensor already, of tensor or expert parallelism, becomes one on the joint mesh;
    modules see it as it was. One that is tied to a parameter of a module sharded before moves to the
    group of this call, if that module is inside ``module``.

    Args:
        module: an ``nn.Module`` with a forward, or a list of such, which then form one group.
        mesh: a ``DeviceMesh`` of one dimension, to shard over, or of two: parameters are replicated over
            the first and sharded over the second. None: all ranks of the default process group.
        reshard_after_forward: True frees the full parameters after forward and gathers them again for
            backward; False keeps them; None frees them except in the outermost sharded module,
            which backward needs at once. A number n of ranks, a divisor of the number sharded over: each n
            neighbours keep them together and gather them again among themselves (1 is as False, all of
            them as True).
        shard_placement_fn: called with each parameter; returns the ``Shard(dim)`` to use for it, a
            :class:`ShardPlacementResult` to choose its mesh as well, or None for ``Shard(0)``. Sharding on
            other dims than 0 costs a copy of the parameter at every gather and reduction.
        mp_policy: dtypes of computation and reduction; see :class:`MixedPrecisionPolicy`.
        offload_policy: :class:`CPUOffloadPolicy` keeps the shards in host memory.
        ignored_params: parameters to leave as they are. They are not moved to the device either, and their
            gradients are this rank's own, unless ``set_reduce_ignored_params(True)`` says otherwise.
        dp_mesh_dims: ``mesh`` is the mesh of all dimensions, and this says which of them to shard and to
            replicate over; parameters may be DTensors on all of it, replicated on these dimensions.
        comm_policy: how the parameters travel; see :class:`CommPolicy`.

    Returns:
        ``module`` itself. Its class is now a subclass of its former class and of
        :class:`FSDPModule`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a module cannot be sharded as asked: it has no forward, is already sharded, comes
            after its parent, or the mesh, a dtype or a placement does not fit.
        RuntimeError: there is no process group.
        NotImplementedError: a parameter is of a kind that is not supported.

    After an error nothing has changed. Costs no communication; each rank keeps 1 / world of every
    parameter. Every rank keeps its own rows: ranks must start from equal weights.

    Example::

        mesh = init_device_mesh("cuda", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    modules = _check_modules(module)
    check_precision(mp_policy)
    is_offloaded = _check_offload(offload_policy)
    ignored = _check_ignored(ignored_params)
    if comm_policy is not None and not isinstance(comm_policy, CommPolicy):
        raise TypeError(f"fully_shard: comm_policy is a {type(comm_policy).__name__}, not a CommPolicy.")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(
            f"fully_shard: shard_placement_fn is {_describe(shard_placement_fn)}; pass a function of a "
            "parameter."
        )
    meshes = _Meshes(resolve_mesh(mesh, dp_mesh_dims))
    reshards = _check_reshard(reshard_after_forward, meshes.default)
    managed = _modules_to_manage(modules)
    found = _Found(modules, managed, _names_below(modules), ignored)
    rule = FullPrecisionRule(getattr(mp_policy, "full_precision", None), managed)
    make_param = partial(_make_param, meshes, shard_placement_fn, mp_policy, rule, modules)
    params = [make_param(param, sites) for param, sites in found.params.items()]
    moves = _resolve_ties(modules, found, meshes.default)
    classes = [sharded_class(type(m)) for m in modules]
    policy = comm_policy or CommPolicy()
    storage = _storage(offload_policy if is_offloaded else None, meshes.default.device)
    buckets = _make_buckets(params, meshes, policy, storage, mp_policy)
    name = type(modules[0]).__name__
    group = Group(name, modules, managed, buckets, meshes.default, policy, Casts(mp_policy))
    group.reshard_after_forward = reshards
    group.ignored = [p for p in found.ignored if p.requires_grad]
    shards = group.plan()
    if group.ignored:  # here, since a warning may be an error
        warnings.warn(_message_about_ignored(group, found), stacklevel=2)

    _mix_in(modules, classes)
    _move_buffers(managed, meshes.default.device, getattr(mp_policy, "buffer_dtype", None))
    group.install(shards)
    for move in moves:
        is_full = any(rule.keeps(s.fqn, s.module, move.param.sharded) for s in move.sites)
        move.apply(
            group,
            partial(precision_of, policy=mp_policy, is_full=is_full),
            lambda param: _make_buckets([param], meshes, policy, storage, mp_policy)[0],
        )
        move.param.rename(found.names)
    _leave_ties(group, found.ties, moves)
    for kept in rule.outermost if mp_policy is not None and mp_policy.param_dtype else ():
        cast_around(kept)
    member = Member(group, Schedule(meshes.default.device))
    for each in modules:
        set_member(each, member)
        compat.register_api(each)
    for each in managed:
        each.__dict__[_PLACE] = _Place(group, found.names[each] or name)
        compat.mark_managed(each)
    install_hooks(member)
    explain_calls(group)
    _build_tree(modules, member)
    return module


# --- checks ---------------------------------------------------------------------------------------


def _check_modules(module: Any) -> list[nn.Module]:
    """The modules of the call as a list, each of them fit to be sharded."""
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty; there is nothing to shard.")
    is_list = isinstance(module, (list, tuple))
    for index, each in enumerate(modules):
        _check_module(each, f" at [{index}] of the list" if is_list else "")
    for index, each in enumerate(modules):
        if each in modules[:index]:
            raise ValueError(
                f"fully_shard: a {_class_name(each)} stands twice in the list, at [{modules.index(each)}] "
                f"and [{index}]. Leave one out."
            )
        inside = set(each.modules())
        for other_index, other in enumerate(modules):
            if other is not each and other in inside:
                raise ValueError(
                    f"fully_shard: in the list, {_class_name(other)} at [{other_index}] is inside "
                    f"{_class_name(each)} at [{index}]. The modules of one group must lie beside each "
                    "other; leave the inner one out."
                )
    return modules


def _check_module(module: Any, where: str) -> None:
    if not isinstance(module, nn.Module):
        hint = " (its instance is needed, not the class)" if isinstance(module, type) else ""
        raise TypeError(
            f"fully_shard: expected an nn.Module or a list of them, got {_describe(module)}{where}{hint}."
        )
    place: _Place | None = module.__dict__.get(_PLACE)
    if isinstance(module, FSDPModule):
        known_as = f" as '{place.fqn}'" if place and place.fqn != _class_name(module) else ""
        raise ValueError(
            f"fully_shard: this {_class_name(module)}{where} is already sharded{known_as}; call it once a "
            "module."
        )
    if place is not None:
        raise ValueError(
            f"fully_shard: {_class_name(module)} '{place.fqn}'{where} is inside {place.group.name}, which "
            "was sharded before and has taken its parameters. Apply fully_shard bottom-up: on the inner "
            f"modules first, then on {place.group.name}."
        )
    if others := compat.applied_apis(module):
        raise ValueError(
            f"fully_shard: torch's {others[0]} was already applied to this {_class_name(module)}{where}. A "
            "module can be managed by one of them only."
        )
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            f"fully_shard: {_class_name(module)}{where} has no forward, so nothing would tell when to gather "
            "its parameters. Call fully_shard on its children, one by one, or on the module around it."
        )


def _check_reshard(reshard_after_forward: Any, mesh: ShardMesh) -> bool | int | None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if not isinstance(reshard_after_forward, int):
        raise TypeError(
            f"fully_shard: reshard_after_forward is {reshard_after_forward!r}; pass True, False, None or a "
            "number of ranks."
        )
    world = mesh.shard.world
    if reshard_after_forward in (1, world):  # each rank keeps all, or nothing is kept
        return reshard_after_forward == world
    if reshard_after_forward < 1 or world % reshard_after_forward:
        divisors = [n for n in range(2, world) if world % n == 0]
        fitting = f"of {divisors}" if divisors else "True or False: there are no divisors between"
        raise ValueError(
            f"fully_shard: reshard_after_forward={reshard_after_forward} does not divide the {world} ranks "
            f"to shard over, so they cannot form groups of that size. Pass one {fitting}."
        )
    return reshard_after_forward


def check_precision(policy: Any) -> None:
    """Refuse what is no policy of mixed precision, and dtypes that cannot do what is asked of them."""
    if policy is None:
        return
    if isinstance(policy, type) or not hasattr(policy, "param_dtype") or not hasattr(policy, "reduce_dtype"):
        raise TypeError(f"fully_shard: mp_policy is {_describe(policy)}, not a MixedPrecisionPolicy.")
    for field in ("param_dtype", "reduce_dtype", "output_dtype", "accumulate_dtype", "buffer_dtype"):
        dtype = getattr(policy, field, None)
        if dtype is None:
            continue
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"fully_shard: mp_policy.{field} is {dtype!r}, a {type(dtype).__name__}; pass a torch.dtype."
            )
        if not dtype.is_floating_point or dtype.itemsize < 2:
            why = (
                "numbers of it cannot be added up"
                if dtype.is_floating_point
                else "it is no floating-point type"
            )
            raise ValueError(
                f"fully_shard: mp_policy.{field} is {dtype}: {why}. Pass torch.bfloat16, torch.float16, "
                "torch.float32 or torch.float64."
            )
    for field in ("cast_forward_inputs", "keep_low_precision_grads"):
        value = getattr(policy, field, True)
        if not isinstance(value, bool):
            raise TypeError(
                f"fully_shard: mp_policy.{field} is {value!r}, a {type(value).__name__}; pass True or False."
            )
    rule = getattr(policy, "full_precision", None)
    classes = rule if isinstance(rule, (tuple, list)) else (rule,)
    is_function = callable(rule) and not isinstance(rule, type)
    if not (
        rule is None or is_function or all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes)
    ):
        raise TypeError(
            f"fully_shard: mp_policy.full_precision is {rule!r}; pass a module class, a tuple of them, or a "
            "function (name, module, parameter) -> bool."
        )


def _check_offload(policy: Any) -> bool:
    """Whether shards live in host memory."""
    if policy is None:
        return False
    if isinstance(policy, type) or not type(policy).__name__.endswith("OffloadPolicy"):
        raise TypeError(f"fully_shard: offload_policy is {_describe(policy)}, not an OffloadPolicy.")
    pins = getattr(policy, "pin_memory", False)
    if not isinstance(pins, bool):
        raise TypeError(
            f"fully_shard: offload_policy.pin_memory is {pins!r}, a {type(pins).__name__}; pass True or "
            "False."
        )
    return hasattr(policy, "pin_memory")


def _check_ignored(ignored_params: Any) -> set[int]:
    """The ids of the parameters to leave alone."""
    if ignored_params is None:
        return set()
    if not isinstance(ignored_params, (Set, list, tuple)):
        raise TypeError(
            f"fully_shard: ignored_params is a {type(ignored_params).__name__}; pass a set of parameters."
        )
    for param in ignored_params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"fully_shard: ignored_params contains {_describe(param)}; pass the nn.Parameter objects, "
                "not names or modules."
            )
    return {id(param) for param in ignored_params}


def _storage(policy: Any, device: torch.device) -> Storage:
    if policy is None:
        return Storage(device)
    return Storage(torch.device("cpu"), is_pinned=bool(policy.pin_memory) and device.type != "cpu")


# --- collecting -----------------------------------------------------------------------------------


def _modules_to_manage(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules whose own parameters the call takes: all inside, but for sharded ones."""
    managed: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in managed:
            managed[module] = None
            for child in module.children():
                if not isinstance(child, FSDPModule):
                    visit(child)

    for module in modules:
        visit(module)
    return list(managed)


class _Found:
    """The parameters of the call: to be sharded, tied to ones sharded before, and to be left alone."""

    def __init__(
        self,
        modules: list[nn.Module],
        managed: list[nn.Module],
        names: dict[nn.Module, str],
        ignored: set[int],
    ) -> None:
        self.names = names
        self.params: dict[nn.Parameter, list[Site]] = {}
        self.ties: list[Tie] = []
        self.ignored: dict[nn.Parameter, str] = {}
        for module in managed:
            for name, param in module._parameters.items():
                if param is not None:
                    self._add(param, Site(module, name, _joined(names[module], name)), ignored)
        for param, sites in self.params.items():
            _check_param(param, f"{_class_name(modules[0])}: {sites[0].fqn}", sites[0].module)

    def _add(self, param: nn.Parameter, site: Site, ignored: set[int]) -> None:
        if id(param) in ignored:
            self.ignored[param] = site.fqn
        elif sharded_before(param) is not None:
            self.ties.append(Tie(site, param))
        else:
            self.params.setdefault(param, []).append(site)


class _Meshes:
    """The mesh of the call, and those that single parameters were given."""

    def __init__(self, default: ShardMesh) -> None:
        self.default = default
        self._others: dict[int, tuple[Any, ShardMesh]] = {}

    def resolve(self, info: Any, where: str) -> ShardMesh:
        """The mesh that a ShardPlacementResult names."""
        mesh = getattr(info, "mesh", info) if not isinstance(info, DeviceMesh) else info
        if mesh is None:
            return self.default
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"{where}: shard_placement_fn returned a mesh_info that is {_describe(info)}; pass a "
                "DeviceMesh, or an object with an attribute mesh."
            )
        if id(mesh) not in self._others:
            resolved = resolve_mesh(mesh, _named_dims(mesh, info))
            if resolved.device != self.default.device:
                raise ValueError(
                    f"{where}: shard_placement_fn chose a mesh of {resolved.device}, but fully_shard was "
                    f"given one of {self.default.device}; the parameters of a group are on one device."
                )
            self._others[id(mesh)] = (mesh, resolved)
        return self._others[id(mesh)][1]


def _named_dims(mesh: DeviceMesh, info: Any) -> DataParallelMeshDims | None:
    """What torch's FSDPMeshInfo says of a mesh, where it is not what its number of dims says already."""
    shard, replicate = (getattr(info, f"{role}_mesh_dim", None) for role in ("shard", "replicate"))
    usual = (None, None), ((0, None) if mesh.ndim == 1 else (1, 0))
    if (shard, replicate) in usual:
        return None
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            "fully_shard: shard_placement_fn chose dimensions of a mesh without names. Give the mesh names "
            "with init_device_mesh(..., mesh_dim_names=...)."
        )
    return DataParallelMeshDims(
        None if shard is None else names[shard], None if replicate is None else names[replicate]
    )


def _make_param(
    meshes: _Meshes,
    placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: Any,
    rule: FullPrecisionRule,
    modules: list[nn.Module],
    param: nn.Parameter,
    sites: list[Site],
) -> Param:
    where = f"{_class_name(modules[0])}: {sites[0].fqn}"
    choice: Any = None if placement_fn is None else placement_fn(param)
    placement, mesh = choice, meshes.default
    if hasattr(choice, "placement") and hasattr(choice, "mesh_info"):
        placement, mesh = choice.placement, meshes.resolve(choice.mesh_info, where)
    is_full = rule.keeps(sites[0].fqn, sites[0].module, param)
    precision_for = partial(precision_of, policy=mp_policy, is_full=is_full)
    return Param(param, sites, mesh, _shard_dim(placement, param, where), precision_for, where)


def _shard_dim(placement: Any, param: nn.Parameter, where: str) -> int:
    """The dim that a placement shards on."""
    if placement is None:
        return 0
    if type(placement) is not Shard:
        shown = repr(placement) if isinstance(placement, Placement) else _describe(placement)
        raise (ValueError if isinstance(placement, Placement) else TypeError)(
            f"{where}: shard_placement_fn returned {shown}; pass Shard(dim), a ShardPlacementResult, or "
            "None for Shard(0). Parameters to be replicated need a mesh that replicates (dp_mesh_dims), or "
            "ignored_params."
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(1, param.dim()):
        raise ValueError(
            f"{where}: shard_placement_fn returned Shard({placement.dim}), but the parameter of shape "
            f"{tuple(param.shape)} has only {param.dim()} dims."
        )
    return dim


def _make_buckets(
    params: list[Param], meshes: _Meshes, policy: CommPolicy, storage: Storage, mp_policy: Any
) -> list[Bucket]:
    """One bucket a mesh, in the order in which the meshes come up; that of the call first.

    Parameters that gather themselves have one each.
    """
    by_mesh: dict[ShardMesh, list[Param]] = {meshes.default: []}
    extensions: list[Param] = []
    for param in params:
        if is_extension(param.local):
            extensions.append(param)
        else:
            by_mesh.setdefault(param.mesh, []).append(param)
    return [
        *(Bucket(group, mesh, policy, storage) for mesh, group in by_mesh.items() if group),
        *(ExtensionBucket(param, param.mesh, policy, storage, mp_policy) for param in extensions),
    ]


# --- tied parameters ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Move:
    """A parameter of a group inside, tied to one of another, that moves to the group of the call."""

    param: Param
    owner: Group
    ties: list[Tie]
    mesh: ShardMesh  # of the call
    modules: list[nn.Module]  # of the call

    @property
    def sites(self) -> list[Site]:
        """All places of the parameter."""
        return [*self.param.sites, *(tie.site for tie in self.ties)]

    def check(self) -> None:
        """Refuse what cannot move."""
        names = " and ".join(_full_names(self.modules, self.sites))
        if self.param.mesh.mesh != self.mesh.mesh:
            raise ValueError(
                f"{names} are tied, but one was sharded over the mesh {self.param.mesh.mesh}, and this "
                f"fully_shard call has {self.mesh.mesh}. Shard both over one mesh, or untie them."
            )
        if self.owner.state is not State.SHARDED or self.owner.gradient_state is not GradientState.NONE:
            raise RuntimeError(
                f"{names} are tied, but the group '{self.owner.name}' has run already and holds gathered "
                "parameters or gradients. Call fully_shard on all modules before the first forward."
            )

    def apply(self, group: Group, precision_for: Any, bucket_for: Callable[[Param], Bucket]) -> None:
        """Take the parameter out of its group and into ``group``."""
        self.owner.give_up(self.param)
        self.param.take_over([tie.site for tie in self.ties], self.mesh, precision_for)
        group.take_in(self.param, bucket_for)


def _full_names(modules: list[nn.Module], sites: list[Site]) -> list[str]:
    """All names of a tied parameter, also where one module stands in two places."""
    found: dict[str, None] = {}
    for root in modules:
        for prefix, module in root.named_modules(remove_duplicate=False):
            found |= dict.fromkeys(_joined(prefix, s.name) for s in sites if s.module is module)
    return list(found)


def _resolve_ties(modules: list[nn.Module], found: _Found, mesh: ShardMesh) -> list[_Move]:
    """Which parameters of groups inside move to the group of this call, as the lowest that contains all
    their places."""
    inner = list(dict.fromkeys(member.group for module in modules for member in sharded_members(module)))
    ties = found.ties + [tie for group in inner for tie in group.ties]
    moves: list[_Move] = []
    for group in inner:
        for param in group.params:
            own = [tie for tie in ties if param.was_made_from(tie.original)]
            if own:
                moves.append(_Move(param, group, own, mesh, modules))
    for move in moves:
        move.check()
    return moves


def _leave_ties(group: Group, ties: list[Tie], moves: list[_Move]) -> None:
    """Leave what could not be resolved to a later call, and forget what was."""
    resolved = {tie for move in moves for tie in move.ties}
    group.ties = [tie for tie in ties if tie not in resolved]
    for module in group.modules:
        for member in sharded_members(module):
            member.group.ties = [tie for tie in member.group.ties if tie not in resolved]


def _message_about_ignored(group: Group, found: _Found) -> str:
    names = [found.ignored[p] for p in group.ignored]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"{group.name}: ignored_params contains trainable parameters ({shown}). Their gradients are this "
        "rank's own, so that the ranks will drift apart unless something else reduces them. "
        "model.set_reduce_ignored_params(True) averages them at the end of each backward."
    )


def _names_below(modules: list[nn.Module]) -> dict[nn.Module, str]:
    names: dict[nn.Module, str] = {}
    for index, root in enumerate(modules):
        own = f"[{index}]" if len(modules) > 1 else ""
        for name, module in root.named_modules():
            names.setdefault(module, _joined(own, name))
    return names


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _check_param(param: nn.Parameter, where: str, module: nn.Module) -> None:
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"{where} is not initialised: the module is lazy and does not know its shape yet. Run one "
            "forward before fully_shard."
        )
    if param.grad is not None:
        raise ValueError(
            f"{where} has a gradient already, which would be lost: the shard is a new parameter. Call "
            "zero_grad() on the model before fully_shard."
        )
    if isinstance(param, DTensor):
        if compat.is_managed_by_torch(module):
            raise ValueError(
                f"{where} was already sharded by torch's fully_shard. A model can be sharded by one library "
                "only: call the fully_shard of either on all of its modules."
            )
        content = compat.local_tensor(param)
    else:
        content = param.data
    check_protocol(content, where)
    if is_extension(content):
        return
    if type(content) is not torch.Tensor:
        raise NotImplementedError(
            f"{where} holds a {type(content).__name__}, a tensor subclass that does not say how it is "
            "gathered. Give the class fsdp_pre_all_gather and fsdp_post_all_gather, as torchao's have, "
            "convert the parameter to a plain tensor, or pass it in ignored_params."
        )
    if content.layout is not torch.strided:
        raise NotImplementedError(
            f"{where} has layout {content.layout}; only dense parameters can be sharded. Convert it with "
            ".to_dense(), or leave its module out."
        )


# --- applying -------------------------------------------------------------------------------------


def _mix_in(modules: list[nn.Module], classes: list[type]) -> None:
    """Give the modules their sharded classes, all or none."""
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
            f"fully_shard: the class {_class_name(failed)} cannot be extended ({error}). Its memory "
            "layout is fixed, perhaps by __slots__; shard the module around it instead."
        ) from None


def _move_buffers(managed: list[nn.Module], device: torch.device, dtype: torch.dtype | None) -> None:
    """Bring buffers to the device that will compute, and floating-point ones to ``dtype``."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # a buffer may be shared
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                target = buffer.device if buffer.is_meta else device
                if (buffer.device, buffer.dtype) != (target, wanted):
                    if buffer not in moved:
                        moved[buffer] = buffer.to(target, wanted)
                    module._buffers[name] = moved[buffer]


def _build_tree(modules: list[nn.Module], member: Member) -> None:
    """Put all groups inside the newly sharded modules under its schedule, and name them by it."""
    members = {id(m): m for module in modules for m in sharded_members(module)}
    member.schedule.adopt(list(members.values()), member)
    for root in modules:
        names = {module: name for name, module in root.named_modules()}
        for inner in sharded_members(root):
            if inner is not member:
                inner.group.rename(names)
        for module, name in names.items():
            place: _Place | None = module.__dict__.get(_PLACE)
            if place is not None and place.group is not member.group:
                place.fqn = name


def _class_name(module: nn.Module) -> str:
    return original_class(module).__name__


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
