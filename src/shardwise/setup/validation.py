"""The arguments of ``fully_shard``: refused where they do not fit, before anything is touched."""

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from shardwise.arguments import check_flags, check_type, describe
from shardwise.comm.buffers import ShardStorage
from shardwise.engine.module_state import sharded_module_states, under_compile
from shardwise.fsdp_module import FSDPModule
from shardwise.groups.group import ParameterGroup
from shardwise.groups.managed_modules import owner_of
from shardwise.layout.fqns import clean, uncompiled
from shardwise.layout.mesh import ShardMesh
from shardwise.setup.sharded_class import original_class
from shardwise.torch_compat import nn_modules


def groups_in(model: nn.Module) -> list[ParameterGroup]:
    """The groups that have parameters of modules in ``model``, each once, also where they reach beyond it."""
    owners = [owner for module in model.modules() if (owner := owner_of(module)) is not None]
    return list(dict.fromkeys(owner.group for owner in owners))


def check_modules(module: Any) -> list[nn.Module]:
    """The modules of the call as a list, each of them fit to be sharded."""
    is_list = isinstance(module, (list, tuple))
    modules = list(module) if is_list else [module]
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty; there is nothing to shard.")
    for index, each in enumerate(modules):
        _check_module(each, f" at [{index}] of the list" if is_list else "")
    for index, each in enumerate(modules):
        if each in modules[:index]:
            raise ValueError(
                f"fully_shard: a {class_name(each)} appears twice in the list, at [{modules.index(each)}] "
                f"and [{index}]. Leave one out."
            )
        inside = set(each.modules())
        for other_index, other in enumerate(modules):
            if other is not each and other in inside:
                raise ValueError(
                    f"fully_shard: in the list, {class_name(other)} at [{other_index}] is inside "
                    f"{class_name(each)} at [{index}]. The modules of one group must lie beside each "
                    "other; leave the inner one out."
                )
        for module_state in sharded_module_states(each):
            if not module_state.root.ranks_run_alike:
                raise RuntimeError(
                    f"fully_shard: {module_state.group.name}, which is inside {class_name(each)}, is in "
                    "inference(). Leave that first."
                )
    return modules


def _check_module(module: Any, where: str) -> None:
    if not isinstance(module, nn.Module):
        hint = " (its instance is needed, not the class)" if isinstance(module, type) else ""
        raise TypeError(
            f"fully_shard: expected an nn.Module or a list of them, got {describe(module)}{where}{hint}."
        )
    inner = under_compile(module)
    owner = owner_of(inner)
    if isinstance(inner, FSDPModule):
        known_as = f" as '{clean(owner.fqn)}'" if owner and owner.fqn != class_name(module) else ""
        raise ValueError(
            f"fully_shard: this {class_name(module)}{where} is already sharded{known_as}; call it once a "
            "module."
        )
    if owner is not None:
        raise ValueError(
            f"fully_shard: {class_name(module)} '{clean(owner.fqn)}'{where} is inside {owner.group.name}, "
            "which was sharded before and has taken its parameters. Apply fully_shard bottom-up: on the "
            f"inner modules first, then on {owner.group.name}."
        )
    if others := nn_modules.applied_apis(module):
        raise ValueError(
            f"fully_shard: torch's {others[0]} was already applied to this {class_name(module)}{where}. A "
            "module can be managed by one of them only."
        )
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            f"fully_shard: {class_name(module)}{where} has no forward, so it is unknown when to unshard its "
            "parameters. Call fully_shard on its children, one by one, or on the module around it."
        )


def check_reshard(reshard_after_forward: Any, mesh: ShardMesh) -> bool | int | None:
    """What ``reshard_after_forward`` comes to on ``mesh``."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    wanted = "True, False, None or a number of ranks"
    check_type("fully_shard", "reshard_after_forward", reshard_after_forward, wanted, int)
    world = mesh.shard_axis.world
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
        raise TypeError(f"fully_shard: mp_policy is {describe(policy)}, not a MixedPrecisionPolicy.")
    wanted = "torch.bfloat16, torch.float16, torch.float32 or torch.float64"
    for field in ("param_dtype", "reduce_dtype", "output_dtype", "accumulate_dtype", "buffer_dtype"):
        dtype = getattr(policy, field, None)
        if dtype is not None:
            check_type("fully_shard", f"mp_policy.{field}", dtype, wanted, torch.dtype)
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise ValueError(
                    f"fully_shard: mp_policy.{field} is {dtype}, in which gradients cannot be added up. Pass "
                    f"{wanted}."
                )
    for field in ("cast_forward_inputs", "keep_low_precision_grads"):
        check_flags("fully_shard", **{f"mp_policy.{field}": getattr(policy, field, True)})
    override = getattr(policy, "param_dtype_override_fn", None)
    wanted = "a function (parameter) -> dtype or None"
    check_type("fully_shard", "mp_policy.param_dtype_override_fn", override, wanted, Callable, type(None))
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


def check_offload(policy: Any) -> bool:
    """Whether shards live in host memory."""
    if policy is None:
        return False
    if isinstance(policy, type) or not type(policy).__name__.endswith("OffloadPolicy"):
        raise TypeError(f"fully_shard: offload_policy is {describe(policy)}, not an OffloadPolicy.")
    check_flags("fully_shard", **{"offload_policy.pin_memory": getattr(policy, "pin_memory", False)})
    return hasattr(policy, "pin_memory")


def check_ignored(ignored_params: Any) -> set[int]:
    """The ids of the parameters to leave alone."""
    if ignored_params is None:
        return set()
    check_type("fully_shard", "ignored_params", ignored_params, "a set of parameters", Set, list, tuple)
    for param in ignored_params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"fully_shard: ignored_params contains {describe(param)}; pass the nn.Parameter objects, "
                "not names or modules."
            )
    return {id(param) for param in ignored_params}


def storage_of(policy: Any, device: torch.device) -> ShardStorage:
    """Where shards are kept under an offload policy, or without one."""
    if policy is None:
        return ShardStorage(device)
    return ShardStorage(torch.device("cpu"), is_pinned=bool(policy.pin_memory) and device.type != "cpu")


def class_name(module: nn.Module) -> str:
    """The name that the module's class had before it was sharded or compiled, if it was."""
    return original_class(uncompiled(module)).__name__
