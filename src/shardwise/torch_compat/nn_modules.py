"""How torch calls modules, and its record of composable APIs."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

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
