"""``fully_shard``: check, plan the group, shard, mix in the class, install the hooks.

Everything that can fail happens before the first module is touched, so that after an error the model
is as it was.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.module import (
    FSDPModule,
    original_class,
    set_member,
    sharded_class,
    sharded_members,
)
from shardwise.policy import CommPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.runtime import compat
from shardwise.runtime.collectives import make_communicator
from shardwise.runtime.group import Group
from shardwise.runtime.hooks import install_hooks
from shardwise.runtime.mesh import ShardMesh, resolve_mesh
from shardwise.runtime.param import Param, Site, sharded_before
from shardwise.runtime.schedule import Member, Schedule

_PLACE = "_shardwise_place"


@dataclass(eq=False)
class _Place:
    """Noted on every module whose parameters a group has taken: the group, and the module's name."""

    group: Group
    fqn: str


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
    comm_policy: CommPolicy | None = None,
) -> M:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    Every parameter that no sharded module inside ``module`` has taken becomes an ``nn.Parameter``
    holding a ``DTensor``: sharded on dim 0 in chunks of ``ceil(rows / world)`` rows, the last ranks
    perhaps with fewer or none; a scalar is replicated. The parameters of one call form one group: they
    are gathered together before forward and before backward, freed after, and their gradients are
    averaged over the ranks and scattered together. Call it bottom-up: on the blocks first, then on the
    model.

    Args:
        module: an ``nn.Module`` with a forward, or a list of such, which then form one group.
        mesh: a one-dimensional ``DeviceMesh``. None: all ranks of the default process group.
        reshard_after_forward: True frees the full parameters after forward and gathers them again for
            backward; False keeps them; None frees them except in the outermost sharded module,
            which backward needs at once.
        shard_placement_fn: not supported yet, like the next three.
        mp_policy: defaults only.
        offload_policy: defaults only.
        ignored_params: empty only.
        comm_policy: how the parameters travel; see :class:`CommPolicy`.

    Returns:
        ``module`` itself. Its class is now a subclass of its former class and of
        :class:`FSDPModule`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a module cannot be sharded as asked: it has no forward, is already sharded, comes
            after its parent, or the mesh does not fit.
        RuntimeError: there is no process group.
        NotImplementedError: an argument asks for what is not supported yet.

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
    _check_unsupported(shard_placement_fn, mp_policy, offload_policy, ignored_params)
    reshards = _check_reshard(reshard_after_forward)
    if comm_policy is not None and not isinstance(comm_policy, CommPolicy):
        raise TypeError(f"fully_shard: comm_policy is a {type(comm_policy).__name__}, not a CommPolicy.")
    shard_mesh = resolve_mesh(mesh)
    name = type(modules[0]).__name__
    managed = _modules_to_manage(modules)
    names = _names_below(modules)
    params = _collect_params(modules, managed, names, shard_mesh)
    classes = [sharded_class(type(m)) for m in modules]
    group = Group(name, modules, managed, params, shard_mesh, comm_policy or CommPolicy())
    group.reshard_after_forward = reshards
    shards = group.plan(make_communicator(shard_mesh.pg, shard_mesh.device))

    _move_buffers(managed, shard_mesh.device)
    _mix_in(modules, classes)
    group.install(shards)
    member = Member(group, Schedule(shard_mesh.device))
    for each in modules:
        set_member(each, member)
        compat.register_api(each)
    for each in managed:
        each.__dict__[_PLACE] = _Place(group, names[each] or name)
        compat.mark_managed(each)
    install_hooks(member)
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
                f"fully_shard: a {_class_name(each)} stands twice in the list, at "
                f"[{modules.index(each)}] and [{index}]. Leave one out."
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


def _check_reshard(reshard_after_forward: Any) -> bool | None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if isinstance(reshard_after_forward, int):
        raise NotImplementedError(
            f"fully_shard: reshard_after_forward={reshard_after_forward} (resharding to a smaller world "
            "after forward) is not supported yet. Pass True, False or None."
        )
    raise TypeError(
        f"fully_shard: reshard_after_forward is {reshard_after_forward!r}; pass True, False or None."
    )


def _check_unsupported(
    shard_placement_fn: Any, mp_policy: Any, offload_policy: Any, ignored_params: Any
) -> None:
    """Refuse what is not supported yet; nothing that was asked for is silently ignored."""
    if shard_placement_fn is not None:
        raise NotImplementedError(
            "fully_shard: shard_placement_fn (sharding on other dimensions than 0) is not supported yet. "
            "Leave it out: every parameter is sharded on dimension 0."
        )
    fields = ("param_dtype", "reduce_dtype", "output_dtype")
    asked = [f for f in fields if getattr(mp_policy, f, None) is not None]
    if asked:
        raise NotImplementedError(
            f"fully_shard: mp_policy with {', '.join(asked)} (mixed precision) is not supported yet. Use "
            "torch.autocast, or convert the model with .to(dtype)."
        )
    if isinstance(mp_policy, type) or (mp_policy is not None and not hasattr(mp_policy, "param_dtype")):
        raise TypeError(f"fully_shard: mp_policy is {_describe(mp_policy)}, not a MixedPrecisionPolicy.")
    if hasattr(offload_policy, "pin_memory"):
        raise NotImplementedError(
            "fully_shard: offload_policy=CPUOffloadPolicy (shards in host memory) is not supported yet. "
            "Leave it out: shards stay on the device of the mesh."
        )
    if offload_policy is not None and not type(offload_policy).__name__.endswith("OffloadPolicy"):
        raise TypeError(
            f"fully_shard: offload_policy is a {type(offload_policy).__name__}, not an OffloadPolicy."
        )
    if ignored_params is not None and not isinstance(ignored_params, (Set, list, tuple)):
        raise TypeError(
            f"fully_shard: ignored_params is a {type(ignored_params).__name__}; pass a set of parameters."
        )
    if ignored_params:
        raise NotImplementedError(
            f"fully_shard: ignored_params ({len(ignored_params)} given) is not supported yet. Leave it out "
            "and let those parameters be sharded, or call fully_shard on the modules beside them."
        )


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


def _collect_params(
    modules: list[nn.Module],
    managed: list[nn.Module],
    names: dict[nn.Module, str],
    mesh: ShardMesh,
) -> list[Param]:
    """The parameters of the call, tied ones once with all their places; each of them checked."""
    sites: dict[nn.Parameter, list[Site]] = {}
    for module in managed:
        for name, param in module._parameters.items():
            if param is not None:
                sites.setdefault(param, []).append(Site(module, name, _joined(names[module], name)))
    for param, places in sites.items():
        where = f"{_class_name(modules[0])}: {places[0].fqn}"
        _check_is_free(param, where, places[0].module, modules)
        _check_param(param, where)
    return [Param(param, places, mesh) for param, places in sites.items()]


def _names_below(modules: list[nn.Module]) -> dict[nn.Module, str]:
    names: dict[nn.Module, str] = {}
    for index, root in enumerate(modules):
        own = f"[{index}]" if len(modules) > 1 else ""
        for name, module in root.named_modules():
            names.setdefault(module, _joined(own, name))
    return names


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _check_is_free(param: nn.Parameter, where: str, module: nn.Module, modules: list[nn.Module]) -> None:
    """No earlier sharding, ours or torch's, may have taken the parameter."""
    if (before := sharded_before(param)) is not None:
        before = _full_name_of_shard(param, modules) or before
        raise NotImplementedError(
            f"{where} is already sharded, as '{before}': the two are tied, but belong to different groups, "
            "which is not supported yet. Shard both in one call, as the parameters of their common parent "
            "or as a list of modules, or untie them."
        )
    if isinstance(param, DTensor) and compat.is_managed_by_torch(module):
        raise ValueError(
            f"{where} was already sharded by torch's fully_shard. A model can be sharded by one library "
            "only: call the fully_shard of either on all of its modules."
        )


def _full_name_of_shard(param: nn.Parameter, modules: list[nn.Module]) -> str | None:
    """The name, seen from ``modules``, of the sharded parameter that was made from ``param``."""
    for root in modules:
        names = {module: name for name, module in root.named_modules()}
        for member in sharded_members(root):
            for candidate in member.group.params:
                site = candidate.sites[0]
                if candidate.was_made_from(param) and site.module in names:
                    return _joined(names[site.module], site.name)
    return None


def _check_param(param: nn.Parameter, where: str) -> None:
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
        raise NotImplementedError(
            f"{where} is already a DTensor, with placements {param.placements}. Sharding it further "
            "(tensor parallelism on a second mesh dimension) is not supported yet. Pass a module whose "
            "parameters are plain tensors."
        )
    if type(param.data) is not torch.Tensor:
        raise NotImplementedError(
            f"{where} holds a {type(param.data).__name__}; tensor subclasses cannot be sharded yet. Convert "
            "it to a plain tensor before fully_shard, or leave its module out."
        )
    if type(param) is not nn.Parameter:
        raise NotImplementedError(
            f"{where} is of the class {type(param).__name__}, a subclass of nn.Parameter, which would be "
            "lost: its shard is a DTensor. Wrap the value in a plain nn.Parameter; attributes set on it "
            "are kept."
        )
    if param.layout is not torch.strided:
        raise NotImplementedError(
            f"{where} has layout {param.layout}; only dense parameters can be sharded. Convert it with "
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


def _move_buffers(managed: list[nn.Module], device: torch.device) -> None:
    """Bring buffers to the device that will compute; their values stay as they are."""
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


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
