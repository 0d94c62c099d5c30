"""The hooks that sharded modules have: eager, or traced while ``torch.compile`` traces them."""

from functools import partial, wraps
from typing import Any

from torch import nn

from shardwise.engine.forward import after_forward, before_forward
from shardwise.engine.module_state import ModuleState
from shardwise.groups.states import SUMMONED
from shardwise.params.initial_values import record_full_load
from shardwise.torch_compat import dynamo

_WRAPPED = "_shardwise_methods"


def install_hooks(module_state: ModuleState) -> None:
    """Drive the group of ``module_state`` by the forwards of its modules.

    Our hook before forward is the first, and the one after it the last, also among those registered later:
    the caller's own hooks see full parameters, and the outputs that they return announce backward. The one
    after it runs after an exception as well.
    """
    for module in module_state.group.modules:
        after = module.register_forward_hook(
            partial(after_forward, module_state), with_kwargs=True, always_call=True
        )
        before = partial(before_forward, module_state, after.id)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_load_state_dict_pre_hook(partial(_before_load, module_state))
        module.register_load_state_dict_post_hook(partial(_after_load, module_state))


def _before_load(
    module_state: ModuleState, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Full tensors in a state dict become shards: each rank takes its part."""
    if module_state.group.unsharded.state is SUMMONED:
        return  # full parameters are what is loaded into
    names = {inner: name for name, inner in module.named_modules(prefix=prefix.rstrip("."))}
    for param in module_state.group.shards.params:
        for site in param.sites:
            key = ".".join(part for part in (names.get(site.module), site.name) if part)
            if site.module in names and key in state:
                is_full = param.is_full_value(state[key])
                record_full_load(param, state[key] if is_full else None)
                if is_full:
                    state[key] = param.as_shard(state[key])
                    module_state.group.plan_changed()


def _after_load(module_state: ModuleState, module: nn.Module, incompatible_keys: Any) -> None:
    """Shards that ``load_state_dict(assign=True)`` put in place move into the buffer at once."""
    module_state.group.adopt_when_moved()
    if not incompatible_keys.missing_keys:
        module_state.group.partly_loaded = None


def wrap_method(module: nn.Module, name: str, module_state: ModuleState) -> None:
    """Let ``module.<name>(...)`` unshard and free as ``module(...)`` does."""
    method = getattr(module, name)

    @wraps(method)
    def unsharding_call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before_forward(module_state, None, module, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception:
            after_forward(module_state, module, args, kwargs, None)
            raise
        changed = after_forward(module_state, module, args, kwargs, output)
        return output if changed is None else changed

    # Compiled by itself, it would have one hook inside of a graph and one outside.
    dynamo.skip_frame(unsharding_call)
    setattr(module, name, unsharding_call)
    module.__dict__.setdefault(_WRAPPED, set()).add(name)


def wrapped_methods(module: nn.Module) -> set[str]:
    """Names of the methods of ``module`` that were wrapped so."""
    return module.__dict__.get(_WRAPPED, set())
