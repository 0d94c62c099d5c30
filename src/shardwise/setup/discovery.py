"""The parameters of a ``fully_shard`` call: found, checked, given a mesh, a dim and dtypes each.

The places of tied parameters may be given to different calls. The first call takes the parameter. A later one
that meets it again leaves a note. The first call whose module contains all places takes it over: the lowest
common group owns it.

    fully_shard(embed)   takes the weight
    fully_shard(head)    finds it taken: a Tie
    fully_shard(model)   contains both: the weight moves here, and stands at both places
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwise.arguments import describe
from shardwise.buckets.bucket import Bucket
from shardwise.buckets.extension import ExtensionBucket, check_protocol, needs_own_bucket
from shardwise.comm.buffers import ShardStorage
from shardwise.engine.module_state import sharded_module_states
from shardwise.fsdp_module import FSDPModule
from shardwise.groups.group import ParameterGroup, Tie
from shardwise.groups.states import EMPTY, SHARDED
from shardwise.layout.fqns import clean, joined, names_in
from shardwise.layout.mesh import ShardMesh, resolve_mesh
from shardwise.layout.precision import PrecisionRule, precision_of
from shardwise.params.parameter import Param, Site, name_of_replaced
from shardwise.policies import CommPolicy, DataParallelMeshDims
from shardwise.setup.validation import class_name
from shardwise.torch_compat import dtensor, nn_modules, tensor_impl


def modules_to_manage(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules whose own parameters the call manages: all inside, except sharded ones."""
    managed_modules: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in managed_modules:
            managed_modules[module] = None
            for child in module.children():
                if not isinstance(child, FSDPModule):
                    visit(child)

    for module in modules:
        visit(module)
    return list(managed_modules)


def names_below(modules: list[nn.Module]) -> dict[nn.Module, str]:
    """The names of all modules inside ``modules``; those of a list begin with their index."""
    names: dict[nn.Module, str] = {}
    for index, root in enumerate(modules):
        own = f"[{index}]" if len(modules) > 1 else ""
        for module, name in names_in(root).items():
            names.setdefault(module, joined(own, name))
    return names


class Found:
    """The parameters of the call: to be sharded, tied to ones sharded before, and to be left alone."""

    def __init__(
        self,
        modules: list[nn.Module],
        managed_modules: list[nn.Module],
        names: dict[nn.Module, str],
        ignored: set[int],
    ) -> None:
        self.names = names
        self.params: dict[nn.Parameter, list[Site]] = {}
        self.ties: list[Tie] = []
        self.ignored: dict[nn.Parameter, str] = {}
        for module in managed_modules:
            for name, param in nn_modules.parameters(module).items():
                if param is not None:
                    self._add(param, Site(module, name, joined(names[module], name)), ignored)
        for param, sites in self.params.items():
            _check_param(param, f"{class_name(modules[0])}: {sites[0].fqn}", sites[0].module)
        _refuse_shared_memory(self.params)

    def _add(self, param: nn.Parameter, site: Site, ignored: set[int]) -> None:
        if id(param) in ignored:
            self.ignored[param] = site.fqn
        elif name_of_replaced(param) is not None:
            self.ties.append(Tie(site, param))
        else:
            self.params.setdefault(param, []).append(site)


def _refuse_shared_memory(params: Mapping[nn.Parameter, Sequence[Site]]) -> None:
    """Refuse two parameters over the same memory: each would get shards of its own."""
    found: dict[int, nn.Parameter] = {}
    for param, sites in params.items():
        content = dtensor.plain(param)
        if type(content) not in (Tensor, nn.Parameter) or not tensor_impl.has_memory(content):
            continue
        if not content.numel() or not (address := content.data_ptr()):
            continue
        first = found.setdefault(address, param)
        if first is not param and (first.requires_grad or param.requires_grad):
            raise ValueError(
                f"{params[first][0].fqn} and {sites[0].fqn} are two parameters over the same memory. Sharded "
                "they would be trained apart. Assign one parameter to both places to tie them, or clone one."
            )


def _check_param(param: nn.Parameter, where: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError(
            f"{where} is in a module that torch.jit compiled, whose code would not see the parameter that "
            "replaces this one. Shard the module that it was compiled from."
        )
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
        if nn_modules.is_managed_by_torch(module):
            raise ValueError(
                f"{where} was already sharded by torch's fully_shard. A model can be sharded by one library "
                "only: call the fully_shard of either on all of its modules."
            )
        content = dtensor.local_tensor(param)
    else:
        content = param.data
    check_protocol(content, where)
    if not needs_own_bucket(content) and content.layout is not torch.strided:
        raise NotImplementedError(
            f"{where} has layout {content.layout}; only dense parameters can be sharded. Convert it with "
            ".to_dense(), or leave its module out."
        )


class Meshes:
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
                f"{where}: shard_placement_fn returned a mesh_info that is {describe(info)}; pass a "
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


def make_param(
    meshes: Meshes,
    placement_fn: Callable[[nn.Parameter], Any] | None,
    rule: PrecisionRule,
    modules: list[nn.Module],
    param: nn.Parameter,
    sites: list[Site],
) -> Param:
    """One parameter of the call, with the mesh, dim and dtypes that it was given."""
    where = f"{class_name(modules[0])}: {sites[0].fqn}"
    choice: Any = None if placement_fn is None else placement_fn(param)
    placement, mesh = choice, meshes.default
    if hasattr(choice, "placement") and hasattr(choice, "mesh_info"):
        placement, mesh = choice.placement, meshes.resolve(choice.mesh_info, where)
    own_policy = rule.policy_for([(site.fqn, site.module) for site in sites], param)
    precision_for = partial(precision_of, policy=own_policy)
    return Param(param, sites, mesh, _shard_dim(placement, param, where), precision_for, where)


def _shard_dim(placement: Any, param: nn.Parameter, where: str) -> int:
    """The dim that a placement shards on."""
    if placement is None:
        return 0
    if type(placement) is not Shard:
        shown = repr(placement) if isinstance(placement, Placement) else describe(placement)
        raise (ValueError if isinstance(placement, Placement) else TypeError)(
            f"{where}: shard_placement_fn returned {shown}; pass Shard(dim), a "
            "shardwise.policies.ShardPlacementResult, or None for Shard(0). Parameters to be replicated need "
            "a mesh that replicates (dp_mesh_dims), or ignored_params."
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(1, param.dim()):
        raise ValueError(
            f"{where}: shard_placement_fn returned Shard({placement.dim}), but the parameter of shape "
            f"{tuple(param.shape)} has only {param.dim()} dims."
        )
    return dim


def make_buckets(
    params: list[Param], meshes: Meshes, policy: CommPolicy, storage: ShardStorage, mp_policy: Any
) -> list[Bucket]:
    """One bucket a mesh, in the order in which the meshes come up; that of the call first.

    Parameters that all-gather themselves have one each.
    """
    by_mesh: dict[ShardMesh, list[Param]] = {meshes.default: []}
    extensions: list[Param] = []
    for param in params:
        if needs_own_bucket(param.local):
            extensions.append(param)
        else:
            by_mesh.setdefault(param.mesh, []).append(param)
    return [
        *(Bucket(group, mesh, policy, storage) for mesh, group in by_mesh.items() if group),
        *(ExtensionBucket(param, param.mesh, policy, storage, mp_policy) for param in extensions),
    ]


# --- tied parameters of several calls -------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """A parameter of a group inside, tied to one of another, that moves to the group of the call."""

    param: Param
    owner: ParameterGroup
    ties: list[Tie]
    mesh: ShardMesh  # of the call
    modules: list[nn.Module]  # of the call

    @property
    def sites(self) -> list[Site]:
        """All places of the parameter."""
        return [*self.param.sites, *(tie.site for tie in self.ties)]

    def places(self, names: Mapping[nn.Module, str]) -> list[tuple[str, nn.Module]]:
        """The parameter's names in the call, whose modules have ``names``, and the modules registering it."""
        return [(joined(names[site.module], site.name), site.module) for site in self.sites]

    def check(self) -> None:
        """Refuse what cannot move."""
        names = " and ".join(_full_names(self.modules, self.sites))
        own = self.param.mesh
        if (own.mesh, own.roles) != (self.mesh.mesh, self.mesh.roles):
            raise ValueError(
                f"{names} are tied, but one was sharded over the mesh {own.mesh} ({', '.join(own.roles)}), "
                f"and this fully_shard call has {self.mesh.mesh} ({', '.join(self.mesh.roles)}). Shard both "
                "over one mesh, or untie them."
            )
        if self.owner.unsharded.state is not SHARDED or self.owner.gradients.state is not EMPTY:
            raise RuntimeError(
                f"{names} are tied, but the group '{self.owner.name}' has run already and holds unsharded "
                "parameters or gradients. Call fully_shard on all modules before the first forward."
            )

    def apply(self, group: ParameterGroup, precision_for: Any, bucket_for: Callable[[Param], Bucket]) -> None:
        """Take the parameter out of its group and into ``group``."""
        self.owner.give_up(self.param)
        self.param.take_over([tie.site for tie in self.ties], self.mesh, precision_for)
        group.take_in(self.param, bucket_for)


def resolve_ties(modules: list[nn.Module], found: Found, mesh: ShardMesh) -> list[Move]:
    """Which parameters of groups inside move to the group of this call, as the lowest that contains all
    their places."""
    inner = list(
        dict.fromkeys(
            module_state.group for module in modules for module_state in sharded_module_states(module)
        )
    )
    ties = found.ties + [tie for group in inner for tie in group.ties]
    moves: list[Move] = []
    for group in inner:
        for param in group.shards.params:
            own = [tie for tie in ties if param.was_made_from(tie.original)]
            if own:
                moves.append(Move(param, group, own, mesh, modules))
    for move in moves:
        move.check()
    return moves


def leave_ties(group: ParameterGroup, ties: list[Tie], moves: list[Move]) -> None:
    """Leave what could not be resolved to a later call, and forget what was."""
    resolved = {tie for move in moves for tie in move.ties}
    group.ties = [tie for tie in ties if tie not in resolved]
    for module in group.modules:
        for module_state in sharded_module_states(module):
            module_state.group.ties = [tie for tie in module_state.group.ties if tie not in resolved]


def _full_names(modules: list[nn.Module], sites: list[Site]) -> list[str]:
    """All names of a tied parameter, also where one module stands in two places."""
    found: dict[str, None] = {}
    for root in modules:
        for prefix, module in root.named_modules(remove_duplicate=False):
            found |= dict.fromkeys(joined(clean(prefix), s.name) for s in sites if s.module is module)
    return list(found)
